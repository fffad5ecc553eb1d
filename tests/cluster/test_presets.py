"""Presets: every number has a source, published totals come out, and naming one is quick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyperparallel.cluster.files import cluster_yaml
from hyperparallel.cluster.load import load_cluster
from hyperparallel.cluster.presets import PRESETS, preset
from hyperparallel.cluster.presets.laptop import calibrated_path, guessed
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure
NAMES = [name for name in PRESETS if name != "laptop"]


@pytest.mark.parametrize("name", NAMES)
def test_every_part_says_where_its_numbers_come_from(name: str) -> None:
    cluster = preset(name)
    assert all(part.source for part in (cluster.device, *cluster.memory, *cluster.fabric))
    assert cluster.name == name and cluster.memory[0].name == "device"


@pytest.mark.parametrize("name", NAMES)
def test_outer_links_are_never_faster_than_inner_ones(name: str) -> None:
    rates = [tier.bytes_s for tier in preset(name).fabric]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("name", "quantity", "published", "within"),
    [
        # Totals that vendors publish for the whole machine, against the sum over its devices.
        ("gb200-nvl72", lambda c: c.num_devices * c.device.peak("bf16"), 180e15, 0.01),
        ("gb300-nvl72", lambda c: c.num_devices * c.device.peak("nvfp4"), 1080e15, 0.01),
        ("gb300-nvl72", lambda c: c.num_devices * c.device.memory_bytes_s, 576e12, 0.01),
        ("gb300-nvl72", lambda c: 2 * c.num_devices * c.link("nvlink").bytes_s, 130e12, 0.01),
        ("cloudmatrix384", lambda c: c.num_devices * c.device.peak("bf16"), 300e15, 0.1),
        ("cloudmatrix384", lambda c: c.num_devices * c.device.memory_bytes_s, 1229e12, 0.01),
        # A cabinet of 64 as it is sold; vector units count too, at twice their fp32 in any format.
        ("atlas950-8192", lambda c: 64 * (c.device.peak("bf16") + 2 * c.device.peak("fp32")), 31.1e15, 0.01),
        ("atlas950-8192", lambda c: 64 * (c.device.peak("fp8") + 2 * c.device.peak("fp32")), 58.8e15, 0.01),
        ("atlas950-8192", lambda c: c.num_devices * c.capacity_bytes, 1152e12, 0.03),
        ("atlas950-8192", lambda c: 2 * c.num_devices * sum(t.bytes_s for t in c.fabric), 16.3e15, 0.02),
        ("atlas960-15488", lambda c: c.num_devices * c.device.peak("fp8"), 30e18, 0.04),
        ("atlas960-15488", lambda c: 2 * c.num_devices * sum(t.bytes_s for t in c.fabric), 34e15, 0.02),
        ("ub-mesh-8192", lambda c: c.link("rack").dim_bytes_s(0) / 7, 4 * 112e9 / 8, 1e-9),
        ("ub-mesh-8192", lambda c: sum(t.bytes_s for t in c.fabric), 72 * 112e9 / 8, 1e-9),
        ("tpu-v5p", lambda c: c.link("ici").dim_bytes_s(0) / 2, 100e9, 1e-9),
        ("ascend-910b", lambda c: c.link("hccs").bytes_s / 7, 28e9, 1e-9),
    ],
)  # fmt: skip
def test_published_totals_come_out(name: str, quantity: object, published: float, within: float) -> None:
    assert quantity(preset(name)) == pytest.approx(published, rel=within)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "devices"),
    [("a100", 8), ("gb200-nvl72", 72), ("cloudmatrix384", 768), ("ub-mesh-1024", 1024),
     ("ub-mesh-8192", 8192), ("atlas950-8192", 8192), ("atlas960-15488", 15_488), ("tpu-v5p", 8960)],
)  # fmt: skip
def test_machines_have_as_many_devices_as_their_name_says(name: str, devices: int) -> None:
    assert preset(name).num_devices == devices


@pytest.mark.parametrize(
    ("given", "near"), [("h10", "h100"), ("GB200", "gb200-nvl72"), ("atlas950", "atlas950-8192")]
)
def test_an_unknown_name_is_answered_with_near_ones(given: str, near: str) -> None:
    with pytest.raises(ClusterError) as caught:
        preset(given)
    assert near in (caught.value.instead or "") and "cloudmatrix384" in caught.value.allowed


@pytest.mark.parametrize(
    ("given", "name"), [("H100", "h100"), ("GB200 NVL72", "gb200-nvl72"), ("UB_Mesh_1024", "ub-mesh-1024")]
)
def test_case_and_dashes_of_a_name_do_not_matter(given: str, name: str) -> None:
    assert preset(given).name == load_cluster(given).name == name


@pytest.mark.parametrize("given", ["", "xyzzy"])
def test_a_name_like_no_other_is_answered_with_all(given: str) -> None:
    with pytest.raises(ClusterError) as caught:
        preset(given)
    assert caught.value.instead is None and "gb200-nvl72" in str(caught.value)


def test_the_laptop_is_read_from_the_cache_once_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert preset("laptop") == guessed() and "Not measured" in preset("laptop").notes[0]
    calibrated_path().parent.mkdir(parents=True)
    calibrated_path().write_text(cluster_yaml(guessed(ranks=2)), encoding="utf-8")
    assert preset("laptop").num_devices == 2
    calibrated_path().write_text("name: broken", encoding="utf-8")
    with pytest.raises(ClusterError):
        preset("laptop")


def test_naming_a_machine_loads_neither_torch_nor_pydantic() -> None:
    """`plan` answers in under a second: what is slow to import must not be needed for a preset."""
    program = (
        "import sys; from hyperparallel.cluster.presets import preset; preset('h100', 98304); "
        "print([m for m in ('torch', 'pydantic', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
