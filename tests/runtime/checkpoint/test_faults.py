"""Faults around a checkpoint: damage, a full disk, failing and silent ranks, conflicting pieces."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperparallel.errors import CheckpointError, RunError
from hyperparallel.layout import Mesh
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.checkpoint.record import Local
from hyperparallel.runtime.checkpoint.storage import CheckpointWriter
from tests.runtime.checkpoint.checkpoint_ranks import (
    WHOLE,
    empty,
    experts,
    layouts_1d,
    line,
    on_ranks,
    save_whole,
)

pytestmark = pytest.mark.fake


def test_experts_numbered_from_zero_on_every_rank_fail_at_save(tmp_path: Path) -> None:
    def fn(keeper: Checkpointer, rank: int) -> None:
        keeper.save(1, experts(rank, 2, local_names=True))
        keeper.wait()

    first, second = on_ranks(2, tmp_path, fn)
    assert isinstance(first, CheckpointError) and "expert.0" in str(first)
    assert "different values on ranks 0 and 1" in str(first)
    assert isinstance(second, RunError) and "expert.0" in str(second)
    assert not list(tmp_path.glob("step_*"))


def test_a_hole_and_a_wrong_piece_are_errors(tmp_path: Path) -> None:
    mesh = line(2)

    def hole(keeper: Checkpointer, rank: int) -> None:
        state = {"w": Local(torch.ones(2), mesh("d"), (4,))} if rank == 0 else {}
        keeper.save(1, state)
        keeper.wait()

    first, second = on_ranks(2, tmp_path, hole)
    assert "tile all 4" in str(first) and "tile all 4" in str(second)

    def wrong(keeper: Checkpointer, rank: int) -> None:
        keeper.save(1, {"w": Local(torch.ones(2 + rank), mesh("d"), (4,))})
        keeper.wait()

    first, second = on_ranks(2, tmp_path, wrong)
    assert isinstance(second, CheckpointError) and "rank 1's piece of [4]" in str(second)
    assert isinstance(first, RunError) and "rank 1 failed during the save of step 1" in str(first)


@pytest.mark.parametrize("field", ["partial", "tier"])
def test_what_a_checkpoint_does_not_carry_is_refused_on_every_rank(tmp_path: Path, field: str) -> None:
    mesh = Mesh((2,), ("d",), (1, 2))  # of three ranks, one outside
    layout = mesh(None, partial={"d": "sum"}) if field == "partial" else mesh("d", tier="host")

    def fn(keeper: Checkpointer, rank: int) -> None:
        keeper.save(1, {"w": Local(torch.ones(2), layout, (2,))})

    assert all(str(e).startswith(f"w.layout.{field}: got ") for e in on_ranks(3, tmp_path, fn))


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_an_error_on_one_rank_reaches_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guilty: int
) -> None:
    real = CheckpointWriter.write_data

    def write_data(writer: CheckpointWriter, *args: Any) -> Any:
        if writer.file_name == f"rank_{guilty:05d}.safetensors" and "000002" in str(writer.folder):
            raise OSError("no space left, says the test")
        return real(writer, *args)

    monkeypatch.setattr(CheckpointWriter, "write_data", write_data)

    def fn(keeper: Checkpointer, rank: int) -> tuple[str, float, int | None]:
        keeper.save(1, {"w": torch.ones(4)})
        keeper.save(2, {"w": torch.ones(4) * 2})
        began = time.monotonic()
        with pytest.raises((OSError, RunError)) as caught:
            keeper.wait()
        seconds = time.monotonic() - began
        keeper.save(3, {"w": torch.ones(4) * 3})  # a failed save is no end of the run
        return str(caught.value), seconds, keeper.newest()

    for rank, (message, seconds, newest) in enumerate(on_ranks(3, tmp_path, fn)):
        assert "no space left, says the test" in message and seconds < 5 and newest == 3
        assert rank == guilty or f"rank {guilty} failed during the save of step 2" in message
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001", "step_000003"]


@pytest.mark.alone
@pytest.mark.parametrize("dead", [0, 1])
def test_a_silent_rank_is_noticed(tmp_path: Path, dead: int) -> None:
    def fn(keeper: Checkpointer, rank: int) -> float:
        if rank == dead:
            keeper.close()  # no beat from here on, as if killed
            time.sleep(3)
            return 0.0
        began = time.monotonic()
        keeper.save(1, {"w": torch.ones(2)})
        with pytest.raises(RunError, match=rf"rank {dead} gave no sign of life for 1 s"):
            keeper.wait()
        return time.monotonic() - began

    assert max(on_ranks(3, tmp_path, fn, patience=1.0)) < 3


def test_damage_is_found_or_harmless(tmp_path: Path) -> None:
    save_whole(tmp_path, 2, layouts_1d(2))
    rng = random.Random(0)
    for path in sorted((tmp_path / "step_000001").iterdir()):
        whole = path.read_bytes()
        for cut_at in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut_at])
            with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
                load_alone(tmp_path)
        for _ in range(60):
            at = rng.randrange(len(whole))
            path.write_bytes(
                whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
            )
            try:
                state = load_alone(tmp_path)
            except CheckpointError:
                continue
            assert all(torch.equal(state[name], whole_t) for name, whole_t in WHOLE.items())
        path.write_bytes(whole)
    load_alone(tmp_path)


def load_alone(folder: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    Checkpointer(folder).load(state)
    return state


def test_a_flipped_data_bit_is_found_and_told_to_all_ranks(tmp_path: Path) -> None:
    save_whole(tmp_path, 1, layouts_1d(1))
    path = tmp_path / "step_000001" / "rank_00000.safetensors"
    raw = bytearray(path.read_bytes())
    at = raw.rfind(torch.arange(21.0).numpy().tobytes()) + 21 * 4 - 1  # in the last row of w
    raw[at] ^= 1
    path.write_bytes(raw)
    layout = line(3)("d", None)

    def fn(keeper: Checkpointer, rank: int) -> None:
        keeper.load({"model/w": empty(WHOLE["model/w"], layout, rank)}, strict=False)

    found = on_ranks(3, tmp_path, fn)
    assert all("bytes of model/w differ from their checksum" in str(error) for error in found)


def test_an_index_cannot_point_out_of_its_folder_or_name_a_function(tmp_path: Path) -> None:
    save_whole(tmp_path, 1, layouts_1d(1))
    path = tmp_path / "step_000001" / "index.json"
    body = json.loads(path.read_text())["body"]
    strange = {"x": {"dtype": "load", "shape": []}}
    for change, message in [
        ({"file_bytes": {"../secret": 6}}, "without folders"),
        ({"tensors": body["tensors"] | strange}, "a torch dtype"),
    ]:
        text = json.dumps(body | change, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"sha256": digest, "body": body | change}))
        with pytest.raises(CheckpointError, match=message):
            load_alone(tmp_path)


def test_full_disk_names_path_and_sizes_and_keeps_the_last_save(tmp_path: Path) -> None:
    script = (
        "import resource, sys, torch\n"
        "from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer\n"
        "with Checkpointer(sys.argv[1]) as keeper:\n"
        "    keeper.save(1, {'w': torch.ones(10)})\n"
        "    keeper.wait()\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "    keeper.save(2, {'w': torch.ones(10_000)})\n"
        "    try:\n"
        "        keeper.wait()\n"
        "    except OSError as error:\n"
        "        print(error)\n"
        "    print(keeper.newest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}, check=False,
    )  # fmt: skip
    assert "rank_00000.safetensors" in done.stdout and "of 40000 bytes written" in done.stdout, done
    assert done.stdout.endswith("\n1\n")
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001"]
