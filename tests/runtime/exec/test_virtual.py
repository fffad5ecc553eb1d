"""All ranks in one process give what real ranks give, for programs of every collective."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from hyperparallel.errors import RunError, UserError
from hyperparallel.graph.collective_table import reduce_in_order
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.groups import Groups
from hyperparallel.runtime.exec.virtual import Lockstep, run_virtual
from tests.ranks import run_ranks

SIZES = {2: [3, 2], 3: [3, 0, 2]}
aten = torch.ops.aten


def program(groups: Groups) -> fx.GraphModule:
    """One rank's program: every collective, uneven, over the world and a reversed sub-group."""
    rank, n = groups.rank, groups.world_size
    sizes, world, pair = SIZES[n], groups.world, groups.get((1, 0))
    graph = fx.Graph()
    x = graph.placeholder("x")  # (5, 4), a different one on each rank

    def collective(start: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(collectives.wait, (graph.call_function(start, args, kwargs),))

    total = collective(collectives.all_reduce_start, x, "sum", world)
    piece = collective(collectives.reduce_scatter_start, x, 0, sizes, "avg", group=world)
    whole = collective(collectives.all_gather_start, piece, 0, sizes, world)
    own = graph.call_function(aten.slice.Tensor, (x, 1, 0, sizes[rank]))
    swapped = collective(
        collectives.all_to_all_start, own, 0, sizes, 1, [min(s, 4) for s in sizes], world
    )
    ring = [(i, (i + 1) % n) for i in range(n)]
    turned = collective(collectives.permute_start, total, ring, (4, 5), world)
    shown = collective(collectives.broadcast_start, piece, n - 1, (sizes[n - 1], 4), world)
    back = collective(collectives.all_gather_start, total, 1, [4, 4], pair) if n == 2 else total
    graph.output((total, {"piece": piece, "whole": [whole]}, swapped, turned, shown, back))
    return fx.GraphModule(torch.nn.Module(), graph)


def inputs(rank: int) -> Tensor:
    return torch.arange(20.0).view(5, 4) * (rank + 1) + rank


def run_alone(module: fx.GraphModule, *args: Tensor) -> Any:
    return fx.Interpreter(module).run(*args)


def real(rank: int) -> Any:
    groups = Groups.of_default()
    groups.ensure([(1, 0)])
    return run_alone(program(groups), inputs(rank))


@pytest.mark.procs
@pytest.mark.parametrize("n", [2, 3])
def test_virtual_ranks_equal_real_ranks(n: int) -> None:
    virtual = run_virtual(
        [program(Groups(rank, n)) for rank in range(n)], [(inputs(rank),) for rank in range(n)]
    )
    for mine, theirs in zip(virtual, run_ranks(n, real), strict=True):
        torch.testing.assert_close(mine, theirs)


def chain(*targets: Any) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.fake
def test_random_nodes_start_from_one_state_and_advance_it_once() -> None:
    torch.manual_seed(7)
    module = chain(aten.rand_like.default, aten.bernoulli.default)
    rows = run_virtual([module] * 3, [(torch.ones(6),)] * 3)
    after = torch.rand(3)
    torch.manual_seed(7)
    alone = run_alone(module, torch.ones(6))
    assert torch.equal(after, torch.rand(3))
    for row in rows:
        assert torch.equal(row[0], alone[0])


@pytest.mark.fake
def test_values_go_after_their_last_use() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        out = x + 1
        seen.append(weakref.ref(out))
        return out

    def look(x: Tensor) -> Tensor:
        assert [ref() is not None for ref in seen[:2]] == [False, False]
        return x

    run_virtual([chain(make, aten.neg.default, look)] * 2, [(torch.ones(2),)] * 2)
    assert len(seen) == 2


@pytest.mark.fake
def test_words_of_the_graph_are_bound_to_mesh_axes() -> None:
    from hyperparallel.graph import communication

    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(communication.all_reduce_start, (x, "sum", ("tp",)))
    graph.output(graph.call_function(communication.wait, (start,)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    rows = [(torch.tensor([float(rank)]),) for rank in range(4)]
    pairs = Lockstep([module] * 4, lambda rank, axes: (rank // 2 * 2, rank // 2 * 2 + 1))
    assert [out.item() for out in pairs.run(rows)] == [1, 1, 5, 5]
    with pytest.raises(UserError, match="bind"):
        run_virtual([module] * 4, rows)
    with pytest.raises(RunError, match="disagree"):
        run_virtual([module] * 4, rows, lambda rank, axes: (rank, (rank + 1) % 4))


@pytest.mark.fake
def test_members_own_their_results() -> None:
    """A rank that writes into its reduced gradient must not change its peer's."""
    group = [Groups(rank, 2).world for rank in range(2)]
    modules = []
    for mine in group:
        graph = fx.Graph()
        start = graph.call_function(
            collectives.all_reduce_start, (graph.placeholder("x"), "sum", mine)
        )
        graph.output(graph.call_function(collectives.wait, (start,)))
        modules.append(fx.GraphModule(torch.nn.Module(), graph))
    first, second = run_virtual(modules, [(torch.ones(2),)] * 2)
    first.zero_()
    assert second.tolist() == [2, 2]


@pytest.mark.fake
def test_programs_and_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="equal numbers"):
        run_virtual([chain(torch.neg), chain(torch.neg, torch.neg)], [(), ()])
    with pytest.raises(UserError, match="same node"):
        run_virtual([chain(torch.neg), chain(torch.abs)], [(), ()])
    with pytest.raises(UserError, match="1 values for each of 2"):
        run_virtual([chain(torch.neg)] * 2, [(torch.ones(1),), ()])


@pytest.mark.fake
def test_sixteen_bit_sums_are_rounded_once() -> None:
    terms = [torch.tensor([value]).bfloat16() for value in (256.0, 1.0, 1.0)]
    assert reduce_in_order(terms, "sum").item() == 258  # rounding each step would stay at 256
