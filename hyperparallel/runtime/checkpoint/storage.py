"""Storage for `torch.distributed.checkpoint`: safetensors files and a JSON index, no pickle.

`CheckpointWriter` and `CheckpointReader` are a `StorageWriter` and a `StorageReader`, and the two
planners say which pieces move, so the resharding is torch's: it reads only the stored pieces that
overlap the wanted ones, each whole for its checksum, for any pair of layouts and rank counts. torch's
file-system storage was not taken as it is because its `.metadata` is unpickled on load, and its own way
of agreeing sends pickles over collectives, which would mix with those of a training step. Here a rank
plans and writes alone, and the index says the rest.

The files also carry torch's own sharding note, so its stock `HuggingFaceStorageReader` reads them
(checked on torch 2.13). A piece is verified against its CRC-32 when it is first touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hyperparallel.errors import CheckpointError
from hyperparallel.runtime.checkpoint.index import Chunk, Index, TensorEntry, read_index
from hyperparallel.runtime.checkpoint.record import LocalPiece, checksum

_SHARDING_NOTE = "DCP_SHARDING_INFO"  # key and field below: torch 2.13 checkpoint/_hf_utils.py
_OFFSETS = "saved_offsets"


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the pieces that this rank writes; nothing is asked of other ranks."""

    def __init__(self, pieces: Mapping[str, LocalPiece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = dict(pieces)

    def create_local_plan(self) -> SavePlan:
        written = {name: piece for name, piece in self.state_dict.items() if piece.is_writer}
        self.plan = SavePlan([_write_item(n, p) for n, p in written.items() if p.tensor.numel()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill this rank's pieces; `names` maps a wanted name to the file's."""

    def __init__(
        self, pieces: Mapping[str, LocalPiece], metadata: Metadata, names: Mapping[str, str]
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = dict(pieces)
        self.metadata = metadata
        self.names = names

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self.state_dict.items():
            if not piece.is_held or not piece.tensor.numel():
                continue
            entry = self.metadata.state_dict_metadata[self.names.get(name, name)]
            assert isinstance(entry, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.shape)
            for item in create_read_items_for_chunk_list(name, entry, [chunk]):
                offset = item.storage_index.offset
                stored = MetadataIndex(self.names.get(name, name), offset)
                items.append(_with_source(item, stored))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


class CheckpointWriter(StorageWriter):
    """Writes one rank's pieces to one safetensors file in `folder`, and flushes it to disk."""

    def __init__(self, folder: Path, file_name: str) -> None:
        self.folder, self.file_name = folder, file_name

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.folder = self.folder if checkpoint_id is None else Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and flush; raises `OSError` naming the path and sizes when the disk is full."""
        tensors, note, results = {}, {}, []
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            assert item.tensor_data is not None
            tensors[item.index.fqn] = data
            note[item.index.fqn] = {_OFFSETS: list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, data.nbytes, self.file_name))
        path = self.folder / self.file_name
        if tensors:
            write_safetensors(path, tensors, {_SHARDING_NOTE: json.dumps(note)})
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the index is merged from the ranks' parts by the caller."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class CheckpointReader(StorageReader):
    """Reads a checkpoint folder: the index, then only the pieces that a plan asks for."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index = index or read_index(folder)
        self._verified: set[tuple[str, torch.Size]] = set()
        self._chunks: dict[MetadataIndex, Chunk] = {
            MetadataIndex(name, chunk.offset): chunk
            for name, entry in self.index.tensors.items()
            for chunk in entry.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._verified.clear()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(entry) for name, entry in self.index.tensors.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the index was read when this was made."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planned tensors; raises `CheckpointError` naming a damaged file and tensor."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            file = self._chunks[_plain(item.storage_index)].file
            if file not in self.index.file_bytes:
                raise CheckpointError("checkpoint", file, "a file that the index lists")
            assert file is not None
            by_file.setdefault(file, []).append(item)
        for file, items in by_file.items():
            try:
                with safe_open(str(self.folder / file), framework="pt") as opened:
                    for item in items:
                        self._read(opened, file, item, planner)
            except SafetensorError as error:
                given = f"{self.folder / file} ({error})"
                raise CheckpointError("checkpoint", given, "an undamaged file") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, opened: Any, file: str, item: ReadItem, planner: LoadPlanner) -> None:
        name, key = item.storage_index.fqn, _plain(item.storage_index)
        chunk = self._chunks[key]
        stored = opened.get_tensor(name)
        entry = self.index.tensors[name]
        if tuple(stored.shape) != chunk.shape or dtype_name(stored.dtype) != entry.dtype:
            given = f"{self.folder / file}: {name} is {stored.dtype} {list(stored.shape)}"
            raise CheckpointError("checkpoint", given, f"{entry.dtype} {list(chunk.shape)}")
        assert key.offset is not None
        if (name, key.offset) not in self._verified:
            if checksum(stored) != chunk.crc32:
                given = f"{self.folder / file}: the bytes of {name} differ from their checksum"
                raise CheckpointError("checkpoint", given, "an undamaged file")
            # Once for each piece: several reads may overlap it.
            self._verified.add((name, key.offset))
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(stored)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def write_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], note: dict[str, str] | None = None
) -> None:
    """Write a safetensors file and flush it; raises `OSError` naming path and sizes."""
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    try:
        save_file(tensors, str(path), metadata=note)
        with path.open("rb") as written:
            # `save_file` leaves the bytes to the system's cache.
            os.fsync(written.fileno())
    except (OSError, SafetensorError) as error:
        found = path.stat().st_size if path.exists() else 0
        status = os.statvfs(path.parent) if path.parent.exists() else None
        free = "unknown" if status is None else str(status.f_bavail * status.f_frsize)
        message = f"cannot write {path}: {error}; {found} of {wanted} bytes written, {free} free"
        raise OSError(getattr(error, "errno", None) or 0, message) from error


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a `dtype_name`; raises `CheckpointError` for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError("dtype", name, "a torch dtype such as float32")
    return dtype


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
        for chunk in entry.chunks
    ]
    properties = TensorProperties(dtype=dtype_of(entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _write_item(name: str, piece: LocalPiece) -> WriteItem:
    offset = torch.Size(piece.offset)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offset, piece.tensor.shape),
        properties=TensorProperties.create_from_tensor(piece.tensor),
        size=torch.Size(piece.shape),
    )
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)


def _with_source(item: ReadItem, source: MetadataIndex) -> ReadItem:
    return ReadItem(
        type=item.type,
        dest_index=item.dest_index,
        dest_offsets=item.dest_offsets,
        storage_index=source,
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


def _plain(index: MetadataIndex) -> MetadataIndex:
    return MetadataIndex(index.fqn, index.offset)
