"""Hugging Face safetensors in and out of a sharded model, with no converter and no gathering.

Out: every rank knows the layout of every tensor, so all compute the same file headers; rank 0
allocates the files, and each rank writes its own slices straight to their places. No tensor is ever
whole in memory, and the ranks only say "done" to each other. In: each rank reads the slices that
its layouts need. Files are published by renaming the folder when all is written.

All ranks must see the same folder. Source: the safetensors format (8 bytes of header length, a
JSON header with dtype, shape and byte range per tensor, then the bytes, row-major, little endian).
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.distributed_c10d import Store

from hyperparallel.errors import CheckpointError
from hyperparallel.layout import Layout
from hyperparallel.layout.carried import check_stored
from hyperparallel.runtime.checkpoint.folder import make_folder, sync
from hyperparallel.runtime.checkpoint.model import MODEL, module_state
from hyperparallel.runtime.checkpoint.record import CheckpointState, LocalPiece, StateValue, pieces_of
from hyperparallel.runtime.checkpoint.status import DEADLINE_SECONDS, PATIENCE_SECONDS, Exchange, guarded

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX = "model.safetensors.index.json"
_DEFAULT_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Matched:
    """Names that only one side had: missing in the files, unexpected in the files."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    name: str
    header: bytes
    total_bytes: int
    offsets: dict[str, int]


def export_module(
    module: nn.Module,
    folder: str | Path,
    *,
    rank: int = 0,
    world: int = 1,
    store: Store | None = None,
    max_file_bytes: int = _DEFAULT_FILE_BYTES,
) -> None:
    """Write a module as Hugging Face does: weights, index, and `config.json` where it has one.

    Tied weights are written once, under their first path. Raises as `export_safetensors`.
    """
    state, _ = module_state(module)
    export_safetensors(
        without_room(state), folder, rank=rank, world=world, store=store,
        max_file_bytes=max_file_bytes, extra_files=config_files(module),
    )  # fmt: skip


def without_room(state: Mapping[str, StateValue]) -> dict[str, StateValue]:
    """A module's state under the names that safetensors files give it."""
    return {name.removeprefix(MODEL): value for name, value in state.items()}


def config_files(module: nn.Module) -> dict[str, str]:
    """`config.json` of a module that has a configuration, under the class as it was written."""
    config = copy.deepcopy(getattr(module, "config", None))
    if config is None or not hasattr(config, "to_json_string"):
        return {}
    config.architectures = [getattr(type(module), "_original", type(module)).__name__]
    return {"config.json": str(config.to_json_string())}


def export_safetensors(
    state: CheckpointState,
    folder: str | Path,
    *,
    rank: int = 0,
    world: int = 1,
    store: Store | None = None,
    max_file_bytes: int = _DEFAULT_FILE_BYTES,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors of `state`, whole, to safetensors files in the new folder `folder`.

    Every rank calls it and lists every name (a rank outside a tensor's mesh gives any tensor of
    its dtype). Raises `CheckpointError` when the folder has something in it, `OSError` when the
    disk is full (before anything is written), `RunError` when another rank failed.
    """
    target = Path(folder)
    temporary = target.with_name(target.name + ".tmp")
    exchange = Exchange(store, rank, world, PATIENCE_SECONDS, DEADLINE_SECONDS)
    exchange.begin(f"the export to {target}")

    def work() -> None:
        pieces = pieces_of(state, rank, world)
        files = _plan_files(pieces, max_file_bytes)
        if rank == 0:
            _make_folder(target, temporary, files)
            exchange.arrive("ready")
        exchange.wait_first("ready")
        for file in files:
            _write_slices(temporary / file.name, file, pieces)
        exchange.arrive("written")
        if rank == 0:
            exchange.wait_all("written")
            _finish(target, temporary, files, extra_files or {})
            exchange.arrive("published")
        exchange.wait_first("published")

    try:
        guarded(exchange, work)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        exchange.close()


def fill_state(
    folder: str | Path,
    state: Mapping[str, StateValue],
    *,
    rank: int = 0,
    world: int = 1,
    strict: bool = True,
    cast: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> Matched:
    """Fill the tensors of `state` in place with the slices that this rank holds.

    strict: names that only one side has are an error; else they are returned. aliases: other name
    -> name of a tied tensor, of which the files may have either. Raises `CheckpointError` also for
    another global shape, another dtype unless `cast`, and damaged files.
    """
    where, others = _find_tensors(Path(folder)), dict(aliases or {})
    pieces = pieces_of(state, rank, world)
    names = {name: name for name in pieces}
    for alias, name in others.items():
        if name in pieces and name not in where and alias in where:
            names[name] = alias
    missing = tuple(name for name in pieces if names[name] not in where)
    known = set(names.values()) | set(others) | set(pieces)
    matched = Matched(missing, tuple(sorted(set(where) - known)))
    if strict and (matched.missing or matched.unexpected):
        lists = f"missing: {list(matched.missing)}, unexpected: {list(matched.unexpected)}"
        given = f"{folder} ({lists})"
        instead = "strict=False to load what matches,"
        raise CheckpointError("safetensors", given, "tensors of this model", instead)
    by_file: dict[Path, list[str]] = {}
    for name in pieces:
        if name not in missing and pieces[name].is_held:
            by_file.setdefault(where[names[name]], []).append(name)
    for path, wanted in by_file.items():
        with _opened(path) as file:
            for name in wanted:
                _read_into(file, path, names[name], pieces[name], cast)
    return matched


def read_safetensors(
    folder: str | Path, layouts: Mapping[str, Layout | None], rank: int = 0
) -> dict[str, torch.Tensor]:
    """This rank's pieces of the named tensors (layout None: whole), in the files' dtype.

    A rank outside a layout's mesh gets no tensor of that name. Raises `CheckpointError` for names
    that the files lack.
    """
    where = _find_tensors(Path(folder))
    lacking = [name for name in layouts if name not in where]
    if lacking:
        raise CheckpointError("safetensors", f"{folder} without {lacking}", "all asked-for tensors")
    result = {}
    for name, layout in layouts.items():
        if layout is not None:
            check_stored(layout, f"{name}.layout", CheckpointError)
        if layout is not None and rank not in layout.mesh.ranks:
            continue
        with _opened(where[name]) as file:
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            whole = tuple(slice(0, size) for size in shape)
            result[name] = _cut(file, name, whole if layout is None else layout.slices(shape, rank))
    return result


def _plan_files(pieces: Mapping[str, LocalPiece], max_file_bytes: int) -> list[_File]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, piece in pieces.items():
        size = math.prod(piece.shape) * piece.tensor.element_size()
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    count = len(groups)
    return [
        _plan_file(
            "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors",
            {name: pieces[name] for name in group},
        )
        for i, group in enumerate(groups, start=1)
    ]


def _plan_file(file_name: str, pieces: Mapping[str, LocalPiece]) -> _File:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    # Large elements first, so that each tensor begins at a multiple of its element size.
    for name in sorted(pieces, key=lambda name: -pieces[name].tensor.element_size()):
        piece = pieces[name]
        code = _CODES.get(piece.tensor.dtype)
        if code is None:
            raise CheckpointError(name, str(piece.tensor.dtype), "a dtype that safetensors has")
        size = math.prod(piece.shape) * piece.tensor.element_size()
        data = [end, end + size]
        entries[name] = {"dtype": code, "shape": list(piece.shape), "data_offsets": data}
        offsets[name], end = end, end + size
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The bytes begin at a multiple of 8, as readers that map the file want.
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return _File(
        file_name, header, len(header) + end, {n: len(header) + at for n, at in offsets.items()}
    )


def _make_folder(target: Path, temporary: Path, files: list[_File]) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError("folder", str(target), "a folder that is new or empty")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    for file in files:
        path = temporary / file.name
        with path.open("wb") as out:
            try:
                # A full disk must show here: later it would be a bus error in a mapped write.
                os.posix_fallocate(out.fileno(), 0, file.total_bytes)
            except OSError as error:
                status = os.statvfs(temporary)
                free = status.f_bavail * status.f_frsize
                message = f"cannot write {path}: {file.total_bytes} bytes needed, {free} free"
                raise OSError(error.errno, f"{message} ({error.strerror})") from error
            out.write(file.header)


def _write_slices(path: Path, file: _File, pieces: Mapping[str, LocalPiece]) -> None:
    for name, at in file.offsets.items():
        piece = pieces[name]
        if not piece.is_writer or not piece.tensor.numel():
            continue
        host = piece.tensor.detach().to("cpu").contiguous()
        raw = host.reshape(host.shape or (1,)).view(_RAW[host.element_size()]).numpy()
        # Mapped: a slice along a later dim lies in many runs of bytes.
        whole = np.memmap(path, dtype=raw.dtype, mode="r+", offset=at, shape=piece.shape or (1,))
        bounds = zip(piece.offset or (0,), raw.shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in bounds)] = raw
        whole.flush()


def _finish(
    target: Path, temporary: Path, files: list[_File], extra_files: Mapping[str, str]
) -> None:
    if len(files) > 1:
        total = sum(file.total_bytes - len(file.header) for file in files)
        weight_map = {name: file.name for file in files for name in file.offsets}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (temporary / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for name, text in extra_files.items():
        (temporary / name).write_text(text, encoding="utf-8")
    for path in temporary.iterdir():
        sync(path)
    sync(temporary)
    if target.exists():  # empty: another one was refused before anything was written
        target.rmdir()
    os.rename(temporary, target)
    sync(target.parent)


def _find_tensors(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor, by the index where there is one."""
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError("safetensors", f"{index} ({error})", "an index file") from error
        if any(Path(file).name != file for file in weight_map.values()):
            raise CheckpointError("safetensors", str(index), "file names without folders")
        return {name: folder / file for name, file in weight_map.items()}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError("safetensors", str(folder), "a folder with .safetensors files")
    found = {}
    for path in paths:
        with _opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        given = f"{path} ({error})"
        raise CheckpointError("safetensors", given, "an undamaged safetensors file") from error


def _read_into(file: Any, path: Path, name: str, piece: LocalPiece, cast: bool) -> None:
    shape = tuple(file.get_slice(name).get_shape())
    if shape != piece.shape:
        raise CheckpointError(f"{path}: {name}", list(shape), f"shape {list(piece.shape)}")
    size = piece.tensor.shape
    bounds = tuple(slice(at, at + n) for at, n in zip(piece.offset, size, strict=True))
    found = _cut(file, name, bounds)
    if not cast and found.dtype != piece.tensor.dtype:
        allowed = f"{piece.tensor.dtype}, or another with cast=True"
        raise CheckpointError(f"{path}: {name}", str(found.dtype), allowed)
    with torch.no_grad():
        piece.tensor.detach().copy_(found)


def _cut(file: Any, name: str, bounds: tuple[slice, ...]) -> torch.Tensor:
    """The slice of a tensor in an open file; whole and empty ones have ways of their own."""
    shape = tuple(file.get_slice(name).get_shape())
    sizes = tuple(bound.stop - bound.start for bound in bounds)
    tensor: torch.Tensor
    if sizes == shape:
        tensor = file.get_tensor(name)
    elif 0 in sizes:
        empty = tuple(slice(0, 1) for _ in shape)
        tensor = file.get_slice(name)[empty].new_empty(sizes)
    else:
        tensor = file.get_slice(name)[bounds]
    return tensor
