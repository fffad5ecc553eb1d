"""Checkpoints: values are those of the save, whole or not at all, for every layout."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.errors import CheckpointError
from hyperparallel.layout import Layout, Mesh
from hyperparallel.runtime.checkpoint import folder as folders
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.checkpoint.record import Local
from hyperparallel.runtime.checkpoint.storage import CheckpointReader, CheckpointWriter
from tests.runtime.checkpoint.checkpoint_ranks import (
    WHOLE,
    experts,
    layouts_1d,
    load_whole,
    on_ranks,
    save_whole,
)

pytestmark = pytest.mark.fake


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_saved_on_four_ranks_loads_on_any_number(tmp_path: Path, world: int) -> None:
    save_whole(tmp_path, 4, layouts_1d(4))
    load_whole(tmp_path, world, layouts_1d(world))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (4,), (1, 3)]))
    names = ("a", "b")[: len(shape)]
    count = len(list(range(shape[0] * (shape[1] if len(shape) > 1 else 1))))
    return Mesh(shape, names, draw(st.permutations(range(count))))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh) -> dict[str, Layout | None]:
    found: dict[str, Layout | None] = {}
    for name, tensor in WHOLE.items():
        dims: list[list[str]] = [[] for _ in range(tensor.ndim)]
        for axis in draw(st.permutations(mesh.names)):
            choice = draw(st.integers(-1, tensor.ndim - 1))
            if choice >= 0:
                dims[choice].append(axis)
        found[name] = mesh(*(tuple(axes) for axes in dims))
    return found


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_layout_to_any_layout(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("run")
    source, target = data.draw(meshes()), data.draw(meshes())
    save_whole(folder, source.size, data.draw(layouts(source)))
    load_whole(folder, target.size, data.draw(layouts(target)))


def test_each_piece_is_written_once_and_spread_over_the_replicas(tmp_path: Path) -> None:
    names = [f"model/{i}" for i in range(40)]

    def fn(keeper: Checkpointer, rank: int) -> None:
        keeper.save(1, {name: torch.ones(8) for name in names})

    on_ranks(4, tmp_path, fn)
    index = Checkpointer(tmp_path).read_index()
    assert all(len(entry.chunks) == 1 for entry in index.tensors.values())
    by_file = [entry.chunks[0].file for entry in index.tensors.values()]
    assert len(set(by_file)) == 4 and max(map(by_file.count, by_file)) < 20


class SlowWriter:
    """Holds every write until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        real = CheckpointWriter.write_data

        def write_data(writer: CheckpointWriter, *args: Any) -> Any:
            assert self.go.wait(20)
            return real(writer, *args)

        monkeypatch.setattr(CheckpointWriter, "write_data", write_data)


def test_later_values_never_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowWriter(monkeypatch)
    w, step, facts = torch.ones(4), torch.tensor(1), {"position": [1]}
    view = torch.arange(12.0).view(3, 4).t()[1:3]
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {"w": w, "step": step, "view": view}, facts)
        w.fill_(7)
        step.fill_(2)
        view.zero_()
        facts["position"][0] = 2
        threading.Timer(0.2, slow.go.set).start()
        loaded = keeper.load({"w": w, "step": step, "view": view})  # waits for the save
    assert slow.go.is_set()
    assert (w.tolist(), int(step), loaded.meta) == ([1.0] * 4, 1, {"position": [1]})
    assert torch.equal(view, torch.arange(12.0).view(3, 4).t()[1:3])


def test_host_buffers_are_reused_without_mixing_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, keep=0) as keeper:
        w = torch.zeros(1000)
        for step in range(4):
            w.fill_(step)
            keeper.save(step, {"w": w})
        for step in range(4):
            keeper.load({"w": w}, step=step)
            assert set(w.tolist()) == {float(step)}


def test_strictness_lists_names(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {"w": torch.ones(4), "b": torch.ones(2)})
        state = {"w": torch.zeros(4), "c": torch.zeros(2)}
        with pytest.raises(CheckpointError, match=r"missing in the file: c; unexpected.*: b"):
            keeper.load(state)
        assert state["w"].sum() == 0  # nothing was touched
        loaded = keeper.load(state, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("c",), ("b",))
    assert state["w"].tolist() == [1.0] * 4 and state["c"].tolist() == [0.0] * 2


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1,), ()])
@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_always_an_error(
    tmp_path: Path, shape: tuple[int, ...], strict: bool
) -> None:
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {"w": torch.ones(4)})
        with pytest.raises(CheckpointError, match=r"w is \[4\] in the file"):
            keeper.load({"w": torch.zeros(shape)}, strict=strict)


def test_a_dtype_changes_only_when_asked(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {"w": torch.full((2,), 1.5)})
        w = torch.zeros(2, dtype=torch.bfloat16)
        with pytest.raises(CheckpointError, match="float32 in the file, bfloat16 here"):
            keeper.load({"w": w})
        keeper.load({"w": w}, cast=True)
    assert w.tolist() == [1.5, 1.5]


def test_only_the_kinds_asked_for_are_compared(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {"model/w": torch.ones(2), "optimizer/m/w": torch.ones(2)})
        assert keeper.load({"model/w": torch.zeros(2)}).unexpected == ()


@pytest.mark.parametrize(("saved", "wanted"), [("a", "b"), ("b", "a"), ("a", "a")])
def test_a_tied_tensor_loads_under_either_name(tmp_path: Path, saved: str, wanted: str) -> None:
    other = {"a": "b", "b": "a"}
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {saved: torch.ones(3)}, aliases={other[saved]: saved})
        w = torch.zeros(3)
        keeper.load({wanted: w}, aliases={other[wanted]: wanted})
        assert w.tolist() == [1.0] * 3
        both = {"a": torch.zeros(3), "b": torch.zeros(3)}  # a model that does not tie them
        keeper.load(both)
        assert both["a"].tolist() == both["b"].tolist() == [1.0] * 3
    assert list(keeper.read_index().tensors) == [saved]


def test_an_untied_file_loads_into_a_tied_model(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {"embed": torch.ones(3), "head": torch.ones(3)})
        w = torch.zeros(3)
        assert keeper.load({"embed": w}, aliases={"head": "embed"}).unexpected == ()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_ranks_experts_reach_the_file(tmp_path: Path, world: int) -> None:
    def own(rank: int, of: int) -> dict[str, Local]:
        named = experts(rank, of, local_names=False).items()
        return {name: Local.of_rank(tensor, rank) for name, tensor in named}

    on_ranks(2, tmp_path, lambda keeper, rank: keeper.save(1, own(rank, 2)))

    def load(keeper: Checkpointer, rank: int) -> None:
        state = own(rank, world)
        for local in state.values():
            local.tensor.zero_()
        keeper.load(state)
        for name, local in state.items():
            assert local.tensor.tolist() == [float(name[-1])] * 3

    assert on_ranks(world, tmp_path, load) == [None] * world


def test_torchs_own_planner_and_reader_agree(tmp_path: Path) -> None:
    """The storage works under stock `dcp.load`, and stock safetensors storage reads the files."""
    save_whole(tmp_path, 3, layouts_1d(3))
    folder = tmp_path / "step_000001"
    names = [name for name in WHOLE if WHOLE[name].numel()]
    for reader in (CheckpointReader(folder), dcp.HuggingFaceStorageReader(str(folder))):
        state = {name: torch.zeros_like(WHOLE[name]) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled": it is
            dcp.load(state, storage_reader=reader)
        assert all(torch.equal(state[name], WHOLE[name]) for name in names)


def test_keep_latest_and_leftovers(tmp_path: Path) -> None:
    (tmp_path / "step_000009.tmp").mkdir()
    (tmp_path / "step_000009.tmp" / "rank_00000.safetensors").write_bytes(b"half")
    with Checkpointer(tmp_path, keep=2) as keeper:
        assert keeper.newest() is None
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            keeper.load({"w": torch.ones(1)})
        for step in (1, 2, 3):
            keeper.save(step, {"w": torch.tensor([float(step)])})
        keeper.wait()
        assert sorted(os.listdir(tmp_path)) == ["latest", "step_000002", "step_000003"]
        with pytest.raises(CheckpointError, match="one of step_000002, step_000003"):
            keeper.load({"w": torch.ones(1)}, step=1)
        # A run that went back to step 2 and saves 2 again: replaced, newest, and not pruned.
        keeper.save(2, {"w": torch.tensor([20.0])})
        w = torch.zeros(1)
        assert keeper.load({"w": w}).step == 2 and w.tolist() == [20.0]
        keeper.save(1, {"w": torch.tensor([10.0])})
        assert keeper.newest() == 1
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001", "step_000002"]


@pytest.mark.parametrize("keep", range(7))
def test_as_many_stay_as_are_kept(tmp_path: Path, keep: int) -> None:
    with Checkpointer(tmp_path, keep=keep) as keeper:
        for step in range(1, 7):
            keeper.save(step, {"w": torch.ones(1)})
            keeper.wait()
            count = min(step, keep) if keep else step
            assert [folders.step_of(path) for path in folders.complete(tmp_path)] == list(
                range(step - count + 1, step + 1)
            )


def test_the_newest_is_the_first_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may see the folder as it was before, over a network file system."""
    real = folders.newest

    def newest(root: Path) -> Path | None:
        return real(root) if threading.current_thread().name == "rank 0" else None

    def fn(keeper: Checkpointer, rank: int) -> list[int | None]:
        threading.current_thread().name = f"rank {rank}"
        before = keeper.newest()
        keeper.save(5, {"w": torch.ones(2)})
        return [before, keeper.newest()]

    monkeypatch.setattr(folders, "newest", newest)
    assert on_ranks(3, tmp_path, fn) == [[None, 5]] * 3


def test_a_kill_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, {"w": torch.ones(1)})
        keeper.wait()
        os.rename(tmp_path / "step_000001", tmp_path / "step_000001.replaced")
        keeper.save(2, {"w": torch.ones(1)})
        assert keeper.load({"w": torch.ones(1)}, step=1).step == 1
