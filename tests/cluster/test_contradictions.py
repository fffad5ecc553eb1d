"""Tiers that contradict one another are refused, and counts beyond all machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperparallel.cluster import Fabric
from hyperparallel.cluster.presets import preset
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure


def test_the_own_memory_is_needed() -> None:
    h100 = preset("h100")
    with pytest.raises(ClusterError, match=r"got \['host', 'disk'\]; allowed: a tier named device") as caught:
        replace(h100, memory=h100.memory[1:])
    assert "capacity_bytes: 80e9" in (caught.value.instead or "")


@pytest.mark.parametrize("devices", [10**7 + 8, 10**15, 10**20])
@pytest.mark.parametrize("name", ["h100", "tpu-v5p", "ub-mesh-8192"])
def test_counts_beyond_all_machines_are_refused_at_once(name: str, devices: int) -> None:
    with pytest.raises(ClusterError, match="at most 10,000,000 devices"):
        preset(name, devices)


def test_more_devices_than_a_machine_without_links_has() -> None:
    alone = replace(preset("h100"), fabric=())
    with pytest.raises(ClusterError, match=r"no fabric tier connects devices.*name: nvlink"):
        alone.resized(8)


def test_a_fabric_may_not_hold_more_either() -> None:
    with pytest.raises(ClusterError, match="at most 10,000,000 devices"):
        replace(preset("h100"), fabric=(Fabric("net", "switch", (10**8,), 5e10, 1e-6),))
