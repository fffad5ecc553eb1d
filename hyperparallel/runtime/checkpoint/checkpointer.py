"""Save and load the state of a run: in the background, whole or not at all, for any layout.

`save` copies this rank's pieces to host memory and returns; a thread writes them through the
planners and storage of `torch.distributed.checkpoint` (`storage.py`), so values changed
later never reach the file. Rank 0 merges the index (`index.py`), and renames the folder
only after all ranks wrote (`folder.py`). Ranks agree through a store, not through
collectives (`status.py`): a failure on one rank is raised on every rank. `load` reads
what this rank's layouts need, whatever layout and rank count saved it.

All ranks must see the same folder. Leaves out object stores and incremental checkpoints.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from hyperparallel.errors import CheckpointError, UserError, Words
from hyperparallel.runtime.checkpoint import folder as folders
from hyperparallel.runtime.checkpoint.index import (
    INDEX_NAME,
    Chunk,
    Index,
    TensorEntry,
    merge,
    read_index,
)
from hyperparallel.runtime.checkpoint.record import CheckpointState, LocalPiece, checksum, pieces_of
from hyperparallel.runtime.checkpoint.status import DEADLINE_SECONDS, PATIENCE_SECONDS, Exchange, guarded
from hyperparallel.runtime.checkpoint.storage import (
    CheckpointReader,
    CheckpointWriter,
    PieceLoadPlanner,
    PieceSavePlanner,
    dtype_name,
)


@dataclass(frozen=True)
class Loaded:
    """What a load found: the step, the saved facts, and the names that did not match."""

    step: int
    world: int
    meta: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Checkpointer:
    """Saves and loads checkpoints in `folder`; every rank makes one and calls it in step.

    store: how ranks agree (None: the default process group's). keep: how many stay (0: all).
    check_replicas: compare the copies that several ranks hold, which costs a host copy of each.
    patience: seconds of silence after which a rank counts as dead; deadline: longest wait.

    >>> import tempfile, torch, hyperparallel as hp
    >>> with hp.Checkpointer(tempfile.mkdtemp()) as keeper:
    ...     keeper.save(1, {"w": torch.ones(2)})  # goes on in the background
    ...     found = {"w": torch.zeros(2)}
    ...     print(keeper.load(found).step, found["w"])
    1 tensor([1., 1.])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int = 0,
        world: int = 1,
        store: Store | None = None,
        keep: int = 3,
        check_replicas: bool = True,
        patience: float = PATIENCE_SECONDS,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        if keep < 0:
            raise UserError("keep", keep, "0 (all) or more")
        self.folder = Path(folder)
        self.rank, self.world, self.keep = rank, world, keep
        self.check_replicas = check_replicas
        self._exchange = Exchange(store, rank, world, patience, deadline)
        self._host: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        step: int,
        state: CheckpointState,
        meta: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Copy `state` and write it in the background; first waits for the save before this one.

        meta: facts that JSON can hold. aliases: other names of tied tensors -> the saved name.
        Raises what the save before this one failed with, and `CheckpointError` for a bad state.
        """
        if type(step) is not int or step < 0:
            raise UserError("step", step, "a whole number of 0 or more")
        self.wait()
        self._exchange.begin(f"the save of step {step}")
        try:
            # Now: what JSON cannot hold is an error here, and later changes do not reach the file.
            facts = _as_json(meta or {})
            part = Index(step=step, world=self.world, meta=facts, aliases=dict(aliases or {}))
            pieces = self._staged(pieces_of(state, self.rank, self.world))
        except BaseException as error:
            self._exchange.fail(error)
            raise
        self._thread = threading.Thread(
            target=self._save_in_background, args=(step, pieces, part), name="checkpoint-save"
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the last save is published; raises what it failed with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint, or None; the same on all ranks, which call it together.

        Waits for a running save. Rank 0 looks, and the others take its answer: over a network file system
        they may see the folder as it was a moment ago, and a rank that finds nothing would begin a run anew
        that the others go on with.
        """
        self.wait()
        self._exchange.begin("the look for the newest checkpoint")
        answer = [""]

        def work() -> None:
            if self.rank == 0:
                found = folders.newest(self.folder)
                answer[0] = "" if found is None else str(folders.step_of(found))
                self._exchange.arrive("newest", answer[0])
            else:
                answer[0] = self._exchange.wait_first("newest")

        guarded(self._exchange, work)
        return int(answer[0]) if answer[0] else None

    def load(
        self,
        state: CheckpointState,
        *,
        step: int | None = None,
        strict: bool = True,
        cast: bool = False,
        aliases: Mapping[str, str] | None = None,
    ) -> Loaded:
        """Fill the tensors of `state` in place from the checkpoint of `step` (None: the newest).

        strict: names that only one side has are an error; else they are returned. Only names with
        a first part ("model/", "optimizer/") that `state` has are compared. Another global shape
        is always an error, another dtype unless `cast`. Raises `CheckpointError` for these and for
        damage, and `RunError` when another rank failed.
        """
        self.wait()
        self._exchange.begin("the load")
        result: list[Loaded] = []

        def work() -> None:
            result.append(self._load(state, step, strict, cast, dict(aliases or {})))
            self._exchange.arrive("loaded")
            self._exchange.wait_all("loaded")

        guarded(self._exchange, work)
        return result[0]

    def read_index(self, step: int | None = None) -> Index:
        """The index of a checkpoint: names, shapes and saved facts, no tensors."""
        self.wait()
        return read_index(folders.find_checkpoint(self.folder, step))

    def close(self) -> None:
        """Wait for the last save, and stop."""
        try:
            self.wait()
        finally:
            self._exchange.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _staged(self, pieces: dict[str, LocalPiece]) -> dict[str, LocalPiece]:
        """Copies in host memory of what will be written or compared; buffers are reused."""
        staged, host = {}, {}
        for name, piece in pieces.items():
            source = piece.tensor
            wanted = piece.is_held and (piece.is_writer or self.check_replicas)
            if not wanted:
                # Named all the same: the merge compares dtype and shape of every name on every rank.
                empty = source.new_empty(0, device="cpu")
                staged[name] = _replaced(piece, empty, is_held=False)
                continue
            if source.is_meta:
                raise CheckpointError(name, Words("a tensor on the meta device"), "tensors that have memory")
            buffer = self._host.get(name)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(
                    # Pinned: a device copies to other memory in two steps. Kept: pinning is slow.
                    source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda"
                )
            # Blocking: the thread that writes the buffer does not look at streams.
            buffer.copy_(source)
            host[name] = buffer
            staged[name] = _replaced(piece, buffer, is_held=True)
        self._host = host
        return staged

    def _save_in_background(self, step: int, pieces: dict[str, LocalPiece], part: Index) -> None:
        try:
            guarded(self._exchange, lambda: self._save(step, pieces, part))
        except BaseException as error:
            # For the next call from outside: raised in this thread, nobody would see it.
            self._failure = error
            if self.rank == 0:
                folders.abandon(self.folder, step)

    def _save(self, step: int, pieces: dict[str, LocalPiece], part: Index) -> None:
        exchange, root = self._exchange, self.folder
        if self.rank == 0:
            folders.start(root, step)
            exchange.arrive("ready")
        # Rank 0 has cleared away what killed saves left; before, a file could go with it.
        exchange.wait_first("ready")
        self._write_part(folders.temporary(root, step), pieces, part)
        exchange.arrive("written")
        if self.rank == 0:
            # Before the rename: what has its name is whole.
            exchange.wait_all("written")
            self._merge_parts(folders.temporary(root, step))
            folders.publish_checkpoint(root, step, self.keep)
            exchange.arrive("published")
        # No rank's `wait` returns before the checkpoint counts.
        exchange.wait_first("published")

    def _write_part(self, folder: Path, pieces: dict[str, LocalPiece], part: Index) -> None:
        file_name = f"rank_{self.rank:05d}.safetensors"
        writer = CheckpointWriter(folder, file_name)
        planner = PieceSavePlanner(pieces)
        written = writer.write_data(planner.create_local_plan(), planner)
        names = {result.index.fqn for result in written.value()}
        for name, piece in pieces.items():
            entry = TensorEntry(
                dtype=dtype_name(piece.tensor.dtype), shape=piece.shape, private=piece.is_private
            )
            if piece.is_held and piece.tensor.numel():
                # Of every copy, written here or not: the merge compares them.
                crc = checksum(piece.tensor)
                file = file_name if name in names else None
                shape = tuple(piece.tensor.shape)
                entry.chunks.append(Chunk(offset=piece.offset, shape=shape, crc32=crc, file=file))
            part.tensors[name] = entry
        if names:
            part.file_bytes[file_name] = (folder / file_name).stat().st_size
        (folder / _part_name(self.rank)).write_text(part.dump(), encoding="utf-8")

    def _merge_parts(self, folder: Path) -> None:
        paths = [folder / _part_name(rank) for rank in range(self.world)]
        parts = [Index.model_validate(json.loads(path.read_text())["body"]) for path in paths]
        index = folder / INDEX_NAME
        with index.open("w", encoding="utf-8") as out:
            out.write(merge(parts).dump())
            out.flush()
        # On disk before the rename that publishes it.
        folders.sync(index)
        for path in paths:
            path.unlink()

    def _load(
        self, state: CheckpointState, step: int | None, strict: bool, cast: bool, aliases: dict[str, str]
    ) -> Loaded:
        folder = self._agreed_folder(step)
        reader = CheckpointReader(folder)
        index = reader.index
        pieces = pieces_of(state, self.rank, self.world)
        names = _names_in_file(pieces, index, aliases)
        missing = tuple(name for name in pieces if names[name] not in index.tensors)
        used = {names[name] for name in pieces} | set(aliases) | set(state)
        # Only kinds that are asked for: weights load from a file that has moments too.
        rooms = {_room(name) for name in pieces}
        unexpected = tuple(
            name
            for name, entry in index.tensors.items()
            if name not in used and _room(name) in rooms and not entry.private
        )
        problems = _mismatches(pieces, names, index, cast)
        if strict:
            problems += [f"missing in the file: {', '.join(missing)}"] if missing else []
            problems += [f"unexpected in the file: {', '.join(unexpected)}"] if unexpected else []
        if problems:
            given = f"{folder} ({'; '.join(problems)})"
            instead = "strict=False to load what matches," if strict else None
            raise CheckpointError("checkpoint", given, "a checkpoint of this model", instead)
        there = {name: piece for name, piece in pieces.items() if name not in missing}
        planner = PieceLoadPlanner(there, reader.read_metadata(), names)
        with torch.no_grad():
            reader.read_data(planner.create_local_plan(), planner).wait()
        return Loaded(index.step, index.world, index.meta, missing, unexpected)

    def _agreed_folder(self, step: int | None) -> Path:
        """Rank 0 looks; the others take its answer, so that all load the same step."""
        if self.world == 1:
            return folders.find_checkpoint(self.folder, step)
        if self.rank == 0:
            self._exchange.arrive("folder", folders.find_checkpoint(self.folder, step).name)
        return self.folder / self._exchange.wait_first("folder")


def _replaced(piece: LocalPiece, tensor: torch.Tensor, is_held: bool) -> LocalPiece:
    writes = piece.is_writer and is_held
    return LocalPiece(tensor, piece.shape, piece.offset, is_held, writes, piece.is_private)


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as a file gives them back."""
    try:
        return dict(json.loads(json.dumps(dict(facts))))
    except (TypeError, ValueError) as error:
        raise CheckpointError("meta", Words(str(error)), "numbers, texts, lists and mappings") from None


def _part_name(rank: int) -> str:
    return f"part_{rank:05d}.json"


def _room(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""


def _names_in_file(
    pieces: Mapping[str, LocalPiece], index: Index, aliases: Mapping[str, str]
) -> dict[str, str]:
    """The name under which the file has each wanted tensor; tied tensors go by any of theirs."""
    found = {}
    for name in pieces:
        candidates = [name, index.aliases.get(name, name)]
        for alias, canonical in aliases.items():
            if canonical == name:
                candidates += [alias, index.aliases.get(alias, alias)]
        found[name] = next((one for one in candidates if one in index.tensors), name)
    return found


def _mismatches(
    pieces: Mapping[str, LocalPiece], names: Mapping[str, str], index: Index, cast: bool
) -> list[str]:
    problems = []
    for name, piece in pieces.items():
        entry = index.tensors.get(names[name])
        if entry is None:
            continue
        if entry.shape != piece.shape:
            problems.append(f"{name} is {list(entry.shape)} in the file, {list(piece.shape)} here")
        elif piece.is_held and not cast and entry.dtype != dtype_name(piece.tensor.dtype):
            here = dtype_name(piece.tensor.dtype)
            problems.append(f"{name} is {entry.dtype} in the file, {here} here (see cast=True)")
    return problems
