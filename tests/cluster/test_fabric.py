"""Fabric tiers: speed per dimension, parts of a tier, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.cluster import Fabric
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure
BOX = st.lists(st.integers(2, 12), min_size=1, max_size=4).map(tuple)


@settings(deadline=None)
@given(size=BOX, kind=st.sampled_from(["mesh", "torus"]))
def test_dimensions_share_all_links_of_a_device(size: tuple[int, ...], kind: str) -> None:
    tier = Fabric("t", kind, size, 1e11, 1e-6)
    assert sum(tier.dim_bytes_s(dim) for dim in range(len(size))) == pytest.approx(1e11)


@settings(deadline=None)
@given(size=BOX, data=st.data())
def test_links_of_a_part_of_a_mesh_are_as_fast_as_before(size: tuple[int, ...], data: st.DataObject) -> None:
    whole = Fabric("t", "mesh", size, 1e11, 1e-6)
    part = whole.narrowed(tuple(data.draw(st.integers(2, full)) for full in size))
    for dim in range(len(size)):
        links = [tier.dim_bytes_s(dim) / (tier.size[dim] - 1) for tier in (whole, part)]
        assert links[0] == pytest.approx(links[1])


def test_a_part_of_a_switch_is_as_fast() -> None:
    assert Fabric("t", "switch", (8,), 1e11, 1e-6).narrowed((4,)).bytes_s == 1e11


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"kind": "mech"}, "fabric.rack.kind", "write mesh"),
        ({"kind": "switch"}, "fabric.rack.size", "one number"),
        ({"size": ()}, "fabric.rack.size", "one per dimension"),
        ({"size": (8, 0)}, "fabric.rack.size", "at least 1"),
        ({"bytes_s": 7.2e12}, "fabric.rack.bytes_s", "in bits"),
        ({"bytes_s": 50}, "fabric.rack.bytes_s", "50e9"),
        ({"latency_s": 5.0}, "fabric.rack.latency_s", "5e-6"),
        ({"latency_s": -1e-6}, "fabric.rack.latency_s", "not negative"),
        ({"oversubscription": 0.5}, "fabric.rack.oversubscription", "1.0"),
    ],
)
def test_impossible_fabrics_are_refused(change: dict[str, object], field: str, hint: str) -> None:
    fields = {"name": "rack", "kind": "mesh", "size": (8, 8), "bytes_s": 7e11, "latency_s": 1e-6}
    with pytest.raises(ClusterError) as caught:
        Fabric(**{**fields, **change})  # type: ignore[arg-type]
    assert caught.value.field == field and hint in str(caught.value)
