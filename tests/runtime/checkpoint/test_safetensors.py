"""Safetensors folders: equal to what the library itself writes and reads, for any layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from hyperparallel.errors import CheckpointError, RunError
from hyperparallel.layout import Mesh
from hyperparallel.runtime.checkpoint.safetensors import (
    export_module,
    export_safetensors,
    fill_state,
    read_safetensors,
)
from tests.runtime.checkpoint.checkpoint_ranks import WHOLE, cut, empty, layouts_1d

pytestmark = pytest.mark.fake


def on_ranks(world: int, fn: Callable[[int, dict[str, Any]], Any]) -> list[Any]:
    store = dist.HashStore()
    where = [{"rank": rank, "world": world, "store": store} for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(fn, range(world), where))


def export(folder: Path, world: int, **options: Any) -> None:
    layouts = layouts_1d(world)

    def fn(rank: int, where: dict[str, Any]) -> None:
        state = {name: cut(tensor, layouts[name], rank) for name, tensor in WHOLE.items()}
        export_safetensors(state, folder, **where, **options)

    on_ranks(world, fn)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("max_file_bytes", [10**9, 100])
def test_the_library_reads_what_ranks_wrote(
    tmp_path: Path, world: int, max_file_bytes: int
) -> None:
    folder = tmp_path / "out"
    export(folder, world, max_file_bytes=max_file_bytes)
    found = read_all(folder)
    assert found.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    if max_file_bytes == 100:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == WHOLE.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in WHOLE.values())
        assert len(set(index["weight_map"].values())) > 2
    else:
        assert os.listdir(folder) == ["model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_read_their_slices_of_what_the_library_wrote(tmp_path: Path, world: int) -> None:
    save_file(WHOLE, tmp_path / "model.safetensors")
    layouts = layouts_1d(world)
    for rank in range(world):
        state = {name: empty(tensor, layouts[name], rank) for name, tensor in WHOLE.items()}
        fill_state(tmp_path, state, rank=rank, world=world)
        pieces = read_safetensors(tmp_path, layouts, rank)
        for name, tensor in WHOLE.items():
            expected = cut(tensor, layouts[name], rank).tensor
            assert torch.equal(state[name].tensor, expected), name
            assert torch.equal(pieces[name], expected), name


def test_columns_and_two_axes(tmp_path: Path) -> None:
    w = torch.arange(35.0).view(5, 7)
    mesh = Mesh((2, 2), ("a", "b"), (3, 1, 0, 2))
    layout = mesh("b", "a")

    def fn(rank: int, where: dict[str, Any]) -> torch.Tensor:
        export_safetensors({"w": cut(w, layout, rank)}, tmp_path / "out", **where)
        return read_safetensors(tmp_path / "out", {"w": mesh(None, ("b", "a"))}, rank)["w"]

    pieces = on_ranks(4, fn)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], w)
    for rank, piece in enumerate(pieces):
        assert torch.equal(piece, cut(w, mesh(None, ("b", "a")), rank).tensor)


def test_strictness_and_ties(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4), "b": torch.ones(2)}, tmp_path / "a.safetensors")
    state = {"w": torch.zeros(4), "c": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"missing: \['c'\], unexpected: \['b'\]"):
        fill_state(tmp_path, state)
    matched = fill_state(tmp_path, state, strict=False)
    assert (matched.missing, matched.unexpected) == (("c",), ("b",))
    assert state["w"].tolist() == [1.0] * 4
    with pytest.raises(CheckpointError, match=r"a\.safetensors: w"):
        fill_state(tmp_path, {"w": torch.zeros(2, 2), "b": torch.zeros(2)})
    half = {"w": torch.zeros(4).half(), "b": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="cast=True"):
        fill_state(tmp_path, half)
    fill_state(tmp_path, half, cast=True)
    assert half["w"].tolist() == [1.0] * 4
    tied = {"w": torch.zeros(4), "head": torch.zeros(2)}
    fill_state(tmp_path, tied, aliases={"b": "head"})
    assert tied["head"].tolist() == [1.0] * 2
    with pytest.raises(CheckpointError, match="without"):
        read_safetensors(tmp_path, {"nope": None})


@pytest.mark.parametrize(("field", "value"), [("tier", "host"), ("partial", {"d": "sum"})])
def test_what_a_read_does_not_carry_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    layout = Mesh((2,), ("d",))(None, **{field: value})
    with pytest.raises(CheckpointError, match=rf"^w\.layout\.{field}: got "):
        read_safetensors(tmp_path, {"w": layout})


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a folder with"):
        fill_state(tmp_path, {})
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="undamaged"):
        fill_state(tmp_path, {"w": torch.ones(4)})
    weight_map = {"w": "../model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="without folders"):
        fill_state(tmp_path, {"w": torch.ones(4)})


def test_a_failing_rank_ends_the_export_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")

    def fn(rank: int, where: dict[str, Any]) -> BaseException:
        with pytest.raises((CheckpointError, RunError)) as caught:
            export_safetensors({"w": torch.ones(2)}, tmp_path / "out", **where)
        return caught.value

    assert all("new or empty" in str(error) for error in on_ranks(2, fn))
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["mine"]


def test_a_full_disk_shows_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=r"model\.safetensors: \d+ bytes needed, \d+ free"):
        export_safetensors({"w": torch.ones(2)}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_hugging_face_model_round_trips(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    export_module(model, tmp_path / "out")
    again, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


def test_a_plain_module_has_no_config(tmp_path: Path) -> None:
    export_module(nn.Linear(2, 2), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
