"""Timings of this machine are plausible, and their description can be planned with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperparallel.cluster.calibration import describe
from hyperparallel.runtime.calibrate import calibrate


def work(**sizes: object) -> calibrate.TimingSizes:
    few: dict[str, object] = {"shapes": ((64, 64, 64), (64, 64, 256)), "messages": (240, 24_000)}
    few |= {"counts": (2048,), "kernel_s": 0.0005, **sizes}
    return calibrate.TimingSizes(stretch_s=0.002, repeats=2, disk_bytes=1 << 20, **few)  # type: ignore[arg-type]


@pytest.mark.procs
@pytest.mark.parametrize("ranks", [1, 3])
def test_this_machine_is_timed(ranks: int, tmp_path: Path) -> None:
    timings = calibrate.measure(ranks, 2, 8e9, tmp_path, work(), threads=1)
    assert not list(tmp_path.iterdir())
    assert (timings.ranks, timings.threads) == (ranks, 1)
    sizes = sorted({row.group for row in timings.collectives})
    assert sizes == ([] if ranks == 1 else [2, 3])
    assert all(row.seconds > 0 for row in timings.collectives)
    cluster = describe(timings, "in a test")  # whose bounds are a test of plausibility
    assert cluster.num_devices == ranks
    assert 1e-7 < cluster.device.launch_s < 1e-2 and cluster.device.peak("fp32") > 1e8


@pytest.mark.procs
def test_wire_bytes_count_what_a_member_receives(tmp_path: Path) -> None:
    """1,200 numbers of 4 bytes between two: a gather brings half of them, a reduction half twice."""
    rows = calibrate.measure(2, 2, 8e9, tmp_path, work(messages=(1200,)), threads=1).collectives
    wire = {row.kind: row.wire_bytes for row in rows}
    assert wire == {"all_reduce": 4800.0, "all_gather": 2400.0, "reduce_scatter": 2400.0}


@pytest.mark.fake
def test_ranks_that_take_turns_are_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of one thread on two cores get half a core each, whatever their own clocks say."""
    keys = [(name, 64, 64, 64) for name in calibrate.TIMED_DTYPES]
    keys += [("memory", count) for count in calibrate.MEMORY_ELEMENTS] + [("launch",), ("call",), ("copy",)]
    keys += [("reuse", float(size)) for size in calibrate.REUSE_BYTES]
    one = calibrate.RankTimings(1, {key: [1e-3, 1e-3, 4e-3] for key in keys}, [])
    monkeypatch.setattr(calibrate, "launch", lambda *args, **options: [one] * 4)
    for cores, seconds in ((2, 2e-3), (4, 1e-3), (64, 1e-3)):
        timings = calibrate.measure(4, cores, 8e9, tmp_path, work(shapes=((64, 64, 64),)))
        assert timings.matmuls["fp32"][0].seconds == timings.launch_s == seconds


@pytest.mark.fake
def test_the_middle_stretch_is_one_that_all_ranks_spent_together() -> None:
    """A rank that was lucky while another waited for a core proves nothing."""
    assert calibrate._middle([[1.0, 3.0, 2.5], [4.0, 2.2, 2.1]]) == pytest.approx(2.5)


@pytest.mark.fake
def test_the_disk_is_timed_in_a_file_that_goes_away(tmp_path: Path) -> None:
    read, write = calibrate.disk_rates(tmp_path, 1 << 20)
    assert read > 1e6 and write > 1e4 and not list(tmp_path.iterdir())
