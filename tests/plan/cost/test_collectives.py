"""Collectives against their closed forms, and laws that any network obeys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.cluster.presets import preset
from hyperparallel.plan.cost.collectives import HOPS, KINDS, PROTOCOLS, Groups, collective_seconds, groups_of
from hyperparallel.plan.cost.constants import Constants

pytestmark = pytest.mark.pure
WHOLE = Constants(link=1.0, network=1.0)


def seconds(kind: str, num_bytes: float, groups: Groups, copies: float = 1.0) -> float:
    return float(
        collective_seconds(
            np.array([float(KINDS.index(kind))]), np.array([num_bytes]), groups, WHOLE, np.array([copies])
        )[0]
    )


def groups(inside: int, outside: int = 1, name: str = "h100") -> Groups:
    return groups_of(preset(name, max(8, inside * outside)), np.array([[float(inside), float(outside)]]))


def test_ring_in_a_node() -> None:
    rate, hop = 450e9, PROTOCOLS[-1].base_s
    assert seconds("all_gather", 1e9, groups(8)) == pytest.approx(7 / 8 * 1e9 / rate + hop)
    assert seconds("all_reduce", 1e9, groups(8)) == pytest.approx(
        2 * seconds("reduce_scatter", 1e9, groups(8))
    )


def test_nodes_are_entered_through_all_their_links() -> None:
    one, eight = (seconds("all_gather", 1e9, groups(g, 4)) for g in (1, 8))
    assert one == pytest.approx(3 / 4 * 1e9 / 50e9 + PROTOCOLS[-1].base_s + PROTOCOLS[-1].far * 8e-6 * 2)
    assert eight == pytest.approx(31 / 32 * 1e9 / 400e9 + PROTOCOLS[-1].base_s + PROTOCOLS[-1].far * 8e-6 * 2)


def test_exchange_sends_copies_to_a_node_once() -> None:
    all_apart = seconds("all_to_all", 1e9, groups(8, 4))
    assert all_apart == pytest.approx(24 / 32 * 1e9 / 50e9 + HOPS * (2e-6 * 7 + 8e-6 * 2))
    assert seconds("all_to_all", 1e9, groups(8, 4), copies=8.0) < 0.5 * all_apart


@pytest.mark.parametrize(("num_bytes", "chosen"), [(1e3, 0), (1e6, 1), (1e9, 2)])
def test_the_fastest_protocol_is_taken(num_bytes: float, chosen: int) -> None:
    times = [
        one.base_s + one.near * 2e-6 * 7 + one.far * 8e-6 + 15 / 16 * num_bytes / (50e9 * 8 * one.share)
        for one in PROTOCOLS
    ]
    assert times.index(min(times)) == chosen
    assert seconds("all_gather", num_bytes, groups(8, 2)) == pytest.approx(min(times))


def test_threads_of_one_machine_have_no_protocols() -> None:
    plain = replace(groups(8), protocols=np.zeros(1))
    assert seconds("all_gather", 1e3, plain) == pytest.approx(7 / 8 * 1e3 / 450e9 + HOPS * 2e-6 * 7)


def test_exchange_reaches_a_rank_once() -> None:
    assert seconds("all_to_all", 1e9, groups(8), copies=8.0) < 0.7 * seconds("all_to_all", 1e9, groups(8))


def test_a_group_of_one_sends_nothing() -> None:
    assert all(seconds(kind, 1e9, groups(1)) == 0 for kind in KINDS)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    num_bytes=st.floats(1.0, 1e10),
    inside=st.sampled_from([1, 2, 4, 8]),
    outside=st.sampled_from([1, 2, 16]),
    faster=st.floats(1.0, 10.0),
    copies=st.sampled_from([1.0, 8.0]),
)
def test_more_bandwidth_or_fewer_bytes_are_never_slower(
    kind: str, num_bytes: float, inside: int, outside: int, faster: float, copies: float
) -> None:
    slow = groups(inside, outside)
    fast = replace(slow, bytes_s=slow.bytes_s * faster)
    before = seconds(kind, num_bytes, slow, copies)
    assert seconds(kind, num_bytes, fast, copies) <= before * (1 + 1e-12)
    assert seconds(kind, num_bytes / faster, slow, copies) <= before * (1 + 1e-12)
