"""The index of a checkpoint: which file holds which piece of which tensor, in JSON.

Each rank writes its pieces with a part of the index; rank 0 merges the parts and checks that they
make sense together: one dtype and global shape per name, pieces that tile the tensor exactly, and
equal bytes wherever several ranks hold the same piece. (Experts that every rank numbers from zero
fail here, at save, instead of losing all but one rank's weights.) The index carries a SHA-256 of
itself, the size of each file and a CRC-32 of each piece, so damage is found before it is loaded.

JSON on purpose: torch's own `.metadata` file is a pickle, which runs code when read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from hyperparallel.errors import CheckpointError

INDEX_NAME = "index.json"


class Chunk(BaseModel):
    """A piece of a tensor: its place in the whole, its file (None: held, written elsewhere)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int
    file: str | None = None


class TensorEntry(BaseModel):
    """A tensor: element type, global shape, pieces."""

    model_config = ConfigDict(extra="forbid")
    dtype: str
    shape: tuple[int, ...]
    private: bool = False
    chunks: list[Chunk] = []


class Index(BaseModel):
    """Everything in a checkpoint besides the bytes of its tensors."""

    model_config = ConfigDict(extra="forbid")
    format: int = 1
    step: int
    world: int
    meta: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    tensors: dict[str, TensorEntry] = {}
    file_bytes: dict[str, int] = {}

    @field_validator("file_bytes")
    @classmethod
    def _plain_names(cls, value: dict[str, int]) -> dict[str, int]:
        """Files stand in the folder itself: an index cannot point elsewhere."""
        if any(Path(name).name != name for name in value):
            raise ValueError("file names without folders")
        return value

    def dump(self) -> str:
        """The text of the index file: a checksum of the body, then the body."""
        body = self.model_dump(mode="json")
        return json.dumps({"sha256": _digest(body), "body": body})


def read_index(folder: Path) -> Index:
    """Read a checkpoint's index and compare the sizes of its files.

    Raises `CheckpointError` when the index is missing or damaged, or a file has another size.
    """
    path = folder / INDEX_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["sha256"] != _digest(record["body"]):
            raise CheckpointError("checkpoint", f"{path} (checksum differs)", "an undamaged index")
        index = Index.model_validate(record["body"])
    except FileNotFoundError as error:
        raise CheckpointError("checkpoint", str(folder), f"a folder with {INDEX_NAME}") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:  # pydantic's and json's included
        raise CheckpointError("checkpoint", f"{path} ({error})", "an undamaged index") from error
    for name, expected in index.file_bytes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else "no such file"
        if found != expected:
            raise CheckpointError("checkpoint", f"{file}: {found}", f"{expected} bytes")
    return index


def merge(parts: Iterable[Index]) -> Index:
    """One index out of the ranks' parts; `CheckpointError` names a tensor that conflicts."""
    ordered = list(parts)
    whole = ordered[0].model_copy(update={"tensors": {}, "file_bytes": {}})
    held: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Chunk]]]] = {}
    for rank, part in enumerate(ordered):
        whole.file_bytes.update(part.file_bytes)
        for name, entry in part.tensors.items():
            known = whole.tensors.setdefault(name, entry.model_copy(update={"chunks": []}))
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                given = f"{entry.dtype} {list(entry.shape)} on rank {rank}"
                allowed = f"{known.dtype} {list(known.shape)} as on other ranks"
                raise CheckpointError(name, given, allowed)
            for chunk in entry.chunks:
                places = held.setdefault(name, {})
                places.setdefault((chunk.offset, chunk.shape), []).append((rank, chunk))
    # After all parts: only together can they tile a tensor.
    for name, entry in whole.tensors.items():
        entry.chunks = [_one_chunk(name, copies) for copies in held.get(name, {}).values()]
        _check_tiles(name, entry)
    return whole


def _one_chunk(name: str, copies: list[tuple[int, Chunk]]) -> Chunk:
    first_rank, first = copies[0]
    for rank, chunk in copies[1:]:
        if chunk.crc32 != first.crc32:
            given = (
                f"different values on ranks {first_rank} and {rank} at offset {list(first.offset)}"
            )
            allowed = "equal copies on all ranks that hold the piece"
            raise CheckpointError(name, given, allowed, "a Layout or a name per rank")
    for _, chunk in copies:
        if chunk.file is not None:
            return chunk
    ranks = [rank for rank, _ in copies]
    raise CheckpointError(name, f"held by ranks {ranks} only", "a Layout whose mesh is those ranks")


def _check_tiles(name: str, entry: TensorEntry) -> None:
    """The pieces must fill the tensor without a hole and without overlap."""
    filled = sum(math.prod(chunk.shape) for chunk in entry.chunks)
    total = math.prod(entry.shape)
    inside = all(
        start >= 0 and start + size <= whole
        for chunk in entry.chunks
        for start, size, whole in zip(chunk.offset, chunk.shape, entry.shape, strict=True)
    )
    if filled != total or not inside or _overlap(entry):
        given = f"{filled} elements in pieces"
        raise CheckpointError(name, given, f"pieces that tile all {total} of {list(entry.shape)}")


def _overlap(entry: TensorEntry) -> bool:
    if not entry.shape:
        return len(entry.chunks) > 1
    # Along the longest dim few pieces are open at once: not every pair is compared.
    sweep = max(range(len(entry.shape)), key=lambda dim: entry.shape[dim])
    active: list[Chunk] = []
    for chunk in sorted(entry.chunks, key=lambda chunk: chunk.offset[sweep]):
        start = chunk.offset[sweep]
        active = [one for one in active if one.offset[sweep] + one.shape[sweep] > start]
        if any(_boxes_meet(one, chunk) for one in active):
            return True
        active.append(chunk)
    return False


def _boxes_meet(a: Chunk, b: Chunk) -> bool:
    return all(
        p < q + m and q < p + n
        for p, n, q, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
