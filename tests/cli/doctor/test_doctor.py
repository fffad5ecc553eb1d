"""doctor reads this machine without failing, and its verdict follows from what it read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyperparallel.cli.doctor import diagnosis, machine
from hyperparallel.cli.doctor.machine import Finding
from hyperparallel.cluster.calibration import Timings
from hyperparallel.cluster.presets import preset
from hyperparallel.errors import UserError
from tests.cluster.test_calibration import timings

GOOD = [Finding("cores", "2"), Finding("NCCL", "no", None), Finding("C++ compiler", "/bin/g++")]


@pytest.mark.fake
def test_this_machine_is_read() -> None:
    found = {item.name: item for item in machine.findings()}
    assert {"python", "cores", "memory", "disk", "torch", "gloo", "C++ compiler"} <= found.keys()
    assert found["torch"].good and found["gloo"].good and found["python"].good
    assert int(found["cores"].found) >= 1


@pytest.mark.pure
def test_a_setting_that_no_job_would_start_with_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", "messages")
    assert Finding("HYPERPARALLEL_TRANSPORT", "messages") in machine.findings()
    monkeypatch.setenv("HYPERPARALLEL_TRANSPORT", "MESSAGES")
    lacks = diagnosis.lacking(machine.findings())
    assert lacks == ["environment"] and "not work: environment" in diagnosis.verdicts(machine.findings())[0]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ([], "compile=True would work"),
        ([Finding("C++ compiler", "none", None)], "compile=True would not work"),
        ([Finding("CUDA device 0", "A"), Finding("NCCL", "2.28")], "on 1 CUDA devices over NCCL"),
        ([Finding("CUDA device 0", "A")], "NCCL is not"),
        ([Finding("gloo", "no", False), Finding("torch", "old", False)], "not work: gloo, torch"),
    ],
)
def test_verdicts_follow_from_the_findings(extra: list[Finding], said: str) -> None:
    assert said in "\n".join(diagnosis.verdicts([*GOOD, *extra]))


@pytest.mark.pure
def test_a_cores_limit_of_the_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 64)
    for quota, cores in (("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1)):
        monkeypatch.setattr(machine, "_cgroup", lambda name, quota=quota: quota.split())
        assert machine.num_cores() == cores


@pytest.mark.pure
def test_a_memory_limit_of_the_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": ["3000000000"], "memory.current": ["1000000000"]}
    host = {"MemTotal": 64 * 10**9, "MemAvailable": 10**10}
    monkeypatch.setattr(machine, "_meminfo", lambda: host)
    monkeypatch.setattr(machine, "_cgroup", lambda name: files.get(name, []))
    found = machine._memory()
    assert found.found == "3 GB, 2 GB available" and found.good is None


@pytest.mark.fake
def test_calibrating_writes_what_the_laptop_preset_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measured(ranks: int, cores: int, memory: float, folder: Path) -> Timings:
        asked.append(ranks)
        return timings(ranks=ranks)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hyperparallel.runtime.calibrate.calibrate.measure", measured)
    said = "\n".join(diagnosis.calibrated(2))
    assert asked == [2] and preset("laptop").num_devices == 2
    assert "40 GFLOP/s fp32" in said and str(tmp_path) in said
    assert [path.name for path in (tmp_path / "hyperparallel").iterdir()] == ["laptop.yaml"]


@pytest.mark.fake
def test_a_cache_folder_that_cannot_be_written_is_said_before_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hyperparallel").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="cache folder"):
        diagnosis.calibrated(2)


@pytest.mark.fake
@pytest.mark.parametrize("broken", [False, True])
def test_exit_status_says_whether_training_would_work(broken: bool) -> None:
    # A module that cannot be imported stands in for a broken install.
    program = "import sys; from hyperparallel.cli.__main__ import main; "
    program += "sys.modules['torch'] = None; " if broken else ""
    done = subprocess.run(
        [sys.executable, "-c", f"{program} sys.argv[1:] = ['doctor']; main()"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if broken else 0), done.stdout + done.stderr
    assert ("Training would not work: torch" in done.stdout) == broken
