"""Ranks as threads: enough for checkpoints, whose ranks only share a folder and a store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperparallel.layout import Layout, Mesh
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.checkpoint.record import Local


def on_ranks(
    world: int, folder: Path, fn: Callable[[Checkpointer, int], Any], **options: Any
) -> list[Any]:
    """`fn(checkpointer, rank)` on every rank at once; an exception is returned, not raised."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        try:
            with Checkpointer(folder, rank=rank, world=world, store=store, **options) as keeper:
                result = fn(keeper, rank)
            return result
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def cut(whole: torch.Tensor, layout: Layout | None, rank: int) -> Local:
    """A rank's piece of a whole tensor."""
    piece = whole if layout is None else whole[layout.slices(tuple(whole.shape), rank)]
    return Local(piece.clone(), layout, tuple(whole.shape))


def empty(like: torch.Tensor, layout: Layout | None, rank: int) -> Local:
    """The same piece without its values: NaN where the dtype has it."""
    local = cut(like, layout, rank)
    local.tensor.fill_(float("nan") if like.is_floating_point() or like.is_complex() else 0)
    return local


def line(world: int) -> Mesh:
    """All ranks along one axis "d"."""
    return Mesh((world,), ("d",))


WHOLE = {
    "model/w": torch.arange(21.0).view(7, 3),
    "model/b": torch.arange(5.0) - 9,
    "model/one": torch.tensor([3.5]),
    "model/scale": torch.tensor(2.0, dtype=torch.float64),
    "model/none": torch.empty(0, 3),
    "model/half": torch.arange(30.0).view(2, 5, 3).bfloat16(),
    "model/turn": torch.arange(4).view(2, 2) * (1 + 2j),
    "model/mask": torch.tensor([True, False, True]),
}


def layouts_1d(world: int) -> dict[str, Layout | None]:
    """Cut on dim 0 where there is one, else whole."""
    mesh = line(world)
    return {n: mesh("d", *([None] * (t.ndim - 1))) if t.ndim else mesh() for n, t in WHOLE.items()}


def save_whole(folder: Path, world: int, layouts: dict[str, Layout | None], step: int = 1) -> None:
    def fn(keeper: Checkpointer, rank: int) -> None:
        state = {n: cut(t, layouts[n], rank) for n, t in WHOLE.items()}
        keeper.save(step, state, {"position": 7})

    assert on_ranks(world, folder, fn) == [None] * world


def load_whole(folder: Path, world: int, layouts: dict[str, Layout | None]) -> None:
    def fn(keeper: Checkpointer, rank: int) -> None:
        state = {n: empty(t, layouts[n], rank) for n, t in WHOLE.items()}
        loaded = keeper.load(state)
        assert (loaded.step, loaded.meta) == (1, {"position": 7})
        for name, whole in WHOLE.items():
            assert torch.equal(state[name].tensor, cut(whole, layouts[name], rank).tensor), name

    assert on_ranks(world, folder, fn) == [None] * world


def experts(rank: int, world: int, local_names: bool) -> dict[str, torch.Tensor]:
    mine = range(rank * 4 // world, (rank + 1) * 4 // world)
    return {f"expert.{i - mine[0] if local_names else i}": torch.full((3,), float(i)) for i in mine}
