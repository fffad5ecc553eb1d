"""Collectives against their closed forms, and laws that any network obeys."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.presets import preset
from hyperparallel.planner.cost.collectives import (
    HOPS,
    PRICED_KINDS,
    PROTOCOLS,
    GroupArrays,
    collective_seconds,
    groups_of,
)
from hyperparallel.planner.cost.constants import Constants

pytestmark = pytest.mark.pure
WHOLE = Constants(link=1.0, network=1.0)


def seconds(kind: str, num_bytes: float, groups: GroupArrays, copies: float = 1.0) -> float:
    number = np.array([float(PRICED_KINDS.index(kind))])
    return float(collective_seconds(number, np.array([num_bytes]), groups, WHOLE, np.array([copies]))[0])


def groups(inside: int, outside: int = 1, name: str = "h100") -> GroupArrays:
    return groups_of(preset(name, max(8, inside * outside)), np.array([[float(inside), float(outside)]]))


def test_ring_in_a_node() -> None:
    rate, hop = 450e9, PROTOCOLS[-1].base_s
    assert seconds("all_gather", 1e9, groups(8)) == pytest.approx(7 / 8 * 1e9 / rate + hop)
    assert seconds("all_reduce", 1e9, groups(8)) == pytest.approx(
        2 * seconds("reduce_scatter", 1e9, groups(8))
    )


def test_nodes_are_entered_through_all_their_links() -> None:
    one, eight = (seconds("all_gather", 1e9, groups(g, 4)) for g in (1, 8))
    assert one == pytest.approx(3 / 4 * 1e9 / 50e9 + PROTOCOLS[-1].base_s + PROTOCOLS[-1].far * 8e-6 * 3)
    assert eight == pytest.approx(31 / 32 * 1e9 / 400e9 + PROTOCOLS[-1].base_s + PROTOCOLS[-1].far * 8e-6 * 3)


def test_only_sums_have_a_tree() -> None:
    """A gather of few bytes over n nodes waits for n - 1 hops, a sum for log2 n there and back."""
    gather, total = (
        [seconds(kind, 64.0, groups(1, nodes)) for nodes in (64, 1024)]
        for kind in ("all_gather", "all_reduce")
    )
    hop = PROTOCOLS[0].far * 8e-6
    assert gather[1] - gather[0] == pytest.approx((1023 - 63) * hop, rel=1e-3)
    assert total[1] - total[0] == pytest.approx(2 * (10 - 6) * hop, rel=1e-3)


def test_part_of_a_node_with_shared_ports_uses_one() -> None:
    cluster = preset("a100", 32)
    inner, outer = cluster.fabric
    shared = replace(cluster, fabric=(inner, replace(outer, oversubscription=2.0)))
    one, two, eight = (
        seconds("all_reduce", 1e10, groups_of(shared, np.array([[float(inside), 4.0]])))
        for inside in (1, 2, 8)
    )
    assert eight < 0.2 * one < two
    assert seconds("all_reduce", 1e10, groups(2, 4, "a100")) < 0.3 * two


def test_exchange_sends_copies_to_a_node_once() -> None:
    all_apart = seconds("all_to_all", 1e9, groups(8, 4))
    assert all_apart == pytest.approx(24 / 32 * 1e9 / 50e9 + HOPS * (2e-6 * 7 + 8e-6 * 2))
    assert seconds("all_to_all", 1e9, groups(8, 4), copies=8.0) < 0.5 * all_apart


@pytest.mark.parametrize(("num_bytes", "chosen"), [(1e3, 0), (1e6, 1), (1e9, 2)])
def test_the_fastest_protocol_is_taken(num_bytes: float, chosen: int) -> None:
    times = [
        one.base_s + one.near * 2e-6 * 14 + one.far * 8e-6 + 15 / 16 * num_bytes / (50e9 * 8 * one.share)
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
    assert all(seconds(kind, 1e9, groups(1)) == 0 for kind in PRICED_KINDS)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(PRICED_KINDS),
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


def mixed_orders(members: list[int], rates: list[float]) -> float:
    """The best rate of an all-gather whose pieces take the dimensions in any order: a linear program."""
    import highspy

    orders = list(permutations(range(len(members))))
    program = highspy.Highs()
    program.setOptionValue("output_flag", False)
    program.setOptionValue("threads", 1)  # as everywhere: the first solver of a process decides
    share = [program.addVariable(lb=0.0) for _ in orders]
    seconds = program.addVariable(lb=0.0)
    program.addConstr(sum(share) == 1.0)
    total = math.prod(members)
    for dim, rate in enumerate(rates):
        load = 0.0
        for part, order in zip(share, orders, strict=True):
            before = math.prod(members[d] for d in order[: order.index(dim)])
            load = load + part * (before * (members[dim] - 1) / total)
        program.addConstr(load <= seconds * (rate / 1e11))
    program.minimize(seconds)
    return (total - 1) / total / program.getObjectiveValue() * 1e11


@pytest.mark.parametrize("kind", ["mesh", "torus"])
@pytest.mark.parametrize("size", [(8, 8), (4, 16), (2, 3, 5), (4, 4, 4)])
def test_dimensions_carry_what_the_best_mix_of_orders_does(kind: str, size: tuple[int, ...]) -> None:
    fabric = Fabric("rack", kind, size, 600e9, 1e-6)
    cluster = replace(preset("h100", 8), fabric=(fabric,))
    for members in product(*([d for d in (2, 3, 4, 5, 8, 16) if n % d == 0] for n in size)):
        rates = []
        for g, n in zip(members, size, strict=True):
            links = 600e9 / sum(min(2, m - 1) if kind == "torus" else m - 1 for m in size)
            # A row of a full mesh has g - 1 links; a ring that is not closed carries half as much.
            rates.append(links * (g - 1 if kind == "mesh" else min(2, n - 1) * (1.0 if g == n else 0.5)))
        found = groups_of(cluster, np.array([members], float)).bytes_s[0, 0]
        assert found == pytest.approx(mixed_orders(list(members), rates), rel=1e-6)


def all_to_all_links(size: tuple[int, ...], kind: str) -> float:
    """Bytes through the busiest link when every device sends one byte to each one (itself too), dimension by
    dimension, the shorter way round."""
    load: dict[tuple[object, ...], float] = {}
    devices = list(product(*(range(n) for n in size)))
    for start, end in product(devices, devices):
        here = list(start)
        for dim, n in enumerate(size):
            gap = (end[dim] - here[dim]) % n
            if kind == "mesh":
                if gap:
                    key = (*here, dim, end[dim])
                    load[key] = load.get(key, 0.0) + 1.0
            elif gap:
                ways = (
                    [(1, gap)] if 2 * gap < n else [(-1, n - gap)] if 2 * gap > n else [(1, gap), (-1, gap)]
                )
                for way, hops in ways:
                    for hop in range(hops):
                        place = list(here)
                        place[dim] = (here[dim] + way * hop) % n
                        key = (*place, dim, way)
                        load[key] = load.get(key, 0.0) + 1.0 / len(ways)
            here[dim] = end[dim]
    return max(load.values())


@pytest.mark.parametrize("kind", ["mesh", "torus"])
@pytest.mark.parametrize("size", [(4,), (8,), (4, 4), (8, 4), (3, 5)])
def test_exchange_is_as_slow_as_its_busiest_link(kind: str, size: tuple[int, ...]) -> None:
    links = sum(min(2, n - 1) if kind == "torus" else n - 1 for n in size)
    cluster = replace(preset("h100", 8), fabric=(Fabric("rack", kind, size, links * 1e9, 1e-9),))
    ranks = math.prod(size)
    found = seconds("all_to_all", 1e9 * ranks, groups_of(cluster, np.array([size], float)))
    assert found == pytest.approx(all_to_all_links(size, kind), rel=1e-6)


def test_rings_on_the_same_links_share_them() -> None:
    """Four groups of four on a ring of 16: with neighbours 4 apart, each link serves all four groups."""
    cluster = replace(preset("h100", 8), fabric=(Fabric("ring", "ring", (16,), 200e9, 1e-6),))
    for stride, rate in (
        (1.0, 100e9),
        (2.0, 50e9),
        (4.0, 50e9),
    ):  # an open line, two lines, four closed rings
        found = groups_of(cluster, np.array([[4.0]]), np.array([[stride]])).bytes_s[0, 0]
        assert found == pytest.approx(rate)


def test_a_mesh_sends_at_once_in_each_dimension() -> None:
    """One small step for each dimension crossed, however many members."""
    rack = preset("ub-mesh-1024", 64)
    one, both = (groups_of(rack, np.array([[*m, 1.0, 1.0, 1.0]])) for m in ((8.0, 1.0), (8.0, 8.0)))
    assert seconds("all_gather", 1.0, one) == pytest.approx(HOPS * 0.7e-6, rel=1e-3)
    assert seconds("all_gather", 1.0, both) == pytest.approx(2 * HOPS * 0.7e-6, rel=1e-3)
