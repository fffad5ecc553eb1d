"""Each collective of the table stands in every place that lists collectives, and its record is true.

`PLACES` are those places; a collective that one of them lacks is reported with the place's name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import hyperparallel as hp
from hyperparallel.graph import communication
from hyperparallel.graph.collective import GroupMember
from hyperparallel.graph.collective_table import COLLECTIVES, KINDS, collective
from hyperparallel.graph.passes.write_region import _emit_steps
from hyperparallel.graph.predict.instructions import unsized_instructions
from hyperparallel.graph.region import user_calls
from hyperparallel.graph.region.emulation import _Real
from hyperparallel.graph.region.ops import COLLECTIVE_OPS, call_op
from hyperparallel.graph.region.seat import Meeting, MetSeat, meet, seat
from hyperparallel.graph.region.segments import RegionStart
from hyperparallel.layout import AllGather, AllReduce, AllToAll, Mesh, ReduceScatter
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.debug import CheckedTransport
from hyperparallel.runtime.comm.process_group import ProcessGroupTransport
from hyperparallel.runtime.comm.shm import SharedMemoryTransport
from hyperparallel.runtime.exec import codegen, virtual

pytestmark = pytest.mark.fake
USER_NAMES = {"permute": "ppermute"}
"""Where users call a collective by another name than a program does."""


def words() -> dict[str, Any]:
    return {which.name: word for word, which in communication.STARTS.items()}


def instruction_kind(name: str) -> bool:
    graph = fx.Graph()
    node = graph.call_function(words()[name], (graph.placeholder("x"), ("tp",)))
    (one,) = unsized_instructions([node])
    return (one.role, one.kind, one.axes) == ("start", COLLECTIVES[name].single.name, ("tp",))


EVERYWHERE: Mapping[str, Callable[[str], bool]] = {
    "graph/communication.py": lambda name: name in words(),
    "graph/predict/instructions.py": lambda name: name in words() and instruction_kind(name),
    "runtime/comm/collectives.py: NAME_start": lambda name: hasattr(collectives, f"{name}_start"),
    "runtime/comm/collectives.py: Transport": lambda name: hasattr(collectives.Transport, name),
    "runtime/comm/process_group.py": lambda name: hasattr(ProcessGroupTransport, name),
    "runtime/comm/shm.py": lambda name: hasattr(SharedMemoryTransport, name),
    "runtime/comm/debug.py": lambda name: hasattr(CheckedTransport, name),
    "runtime/exec/codegen.py": lambda name: words().get(name) in codegen.FUNCTIONS,
    "runtime/exec/virtual.py": lambda name: (
        words().get(name) in virtual._RECORDS
        and getattr(collectives, f"{name}_start", None) in virtual._RECORDS
    ),
}
IN_REGIONS: Mapping[str, Callable[[str], bool]] = {
    "graph/region/ops.py": lambda name: name in [kind.name for kind in COLLECTIVE_OPS.values()],
    "graph/region/user_calls.py": lambda name: hasattr(user_calls, USER_NAMES.get(name, name)),
    "hyperparallel/__init__.py": lambda name: USER_NAMES.get(name, name) in hp.__all__,
}
"""Of one tensor: users call no collective of many."""
PLACES = {**EVERYWHERE, **IN_REGIONS}


def lacking(name: str) -> list[str]:
    places = EVERYWHERE if name in COLLECTIVES.keys() - KINDS.keys() else PLACES
    return [place for place, has in places.items() if not has(name)]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_place_has_every_collective(name: str) -> None:
    assert lacking(name) == []


def test_a_collective_that_is_nowhere_is_missed_everywhere() -> None:
    assert lacking("gossip") == list(PLACES)


def test_no_place_has_a_collective_that_the_table_lacks() -> None:
    methods = {name for name in vars(collectives.Transport) if not name.startswith("_")}
    assert methods == {*COLLECTIVES}
    starts = {n.removesuffix("_start") for n in vars(collectives) if n.endswith("_start")}
    assert starts == {*COLLECTIVES}
    assert {which.name for which in communication.STARTS.values()} == {*COLLECTIVES}


def test_an_unknown_name_is_refused_where_names_are_looked_up() -> None:
    """Nothing falls through to another collective."""
    mesh, x = Mesh((2,), ("tp",)), torch.ones(2)
    step = RegionStart("gossip", (), ("tp",), 0, 8, "float32")

    def emit(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    def made(rank: int, meeting: Meeting) -> MetSeat:
        return _Real("code", mesh, rank, meeting)

    graph = fx.Graph()
    state: Any = graph.placeholder("state")
    lookups: list[Callable[[], object]] = [
        lambda: collective("gossip"),
        lambda: communication.start_of("gossip"),
        lambda: collectives.starter("gossip"),
        lambda: call_op("gossip", x, (), GroupMember(0, 2), ("tp",), 1),
        lambda: _emit_steps((step,), state, (), emit, lambda *_: None),
        lambda: meet(mesh, made, lambda rank: seat().run("gossip", x, ("tp",))),
    ]
    for lookup in lookups:
        with pytest.raises(AssertionError, match="gossip"):
            lookup()


Calls = list[tuple[Any, ...]]
"""A call of every member: operand, arguments."""


def cut(draw: random.Random, total: int, count: int) -> list[int]:
    """Sizes that sum to a total, some of them often 0."""
    marks = sorted(draw.randint(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]


def number(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def all_reduce(draw: random.Random, n: int) -> Calls:
    shape = [draw.randint(0, 4) for _ in range(draw.randint(0, 3))]
    op = draw.choice(["sum", "avg"])
    return [(number(*shape), op) for _ in range(n)]


def all_gather(draw: random.Random, n: int) -> Calls:
    dim, sizes = draw.randint(0, 1), cut(draw, 5, n)
    return [(number(*((size, 3) if dim == 0 else (3, size))), dim, sizes) for size in sizes]


def reduce_scatter(draw: random.Random, n: int) -> Calls:
    dim, sizes, op = draw.randint(0, 1), cut(draw, 5, n), draw.choice(["sum", "avg"])
    return [(number(*((5, 3) if dim == 0 else (3, 5))), dim, sizes, op) for _ in range(n)]


def all_to_all(draw: random.Random, n: int) -> Calls:
    split, concat = draw.sample([0, 1], 2)
    sizes, joins = cut(draw, 6, n), cut(draw, 5, n)
    shapes = [(6, own) if split == 0 else (own, 6) for own in joins]
    return [(number(*shape), split, sizes, concat, joins) for shape in shapes]


def permute(draw: random.Random, n: int) -> Calls:
    targets = draw.sample(range(n), draw.randint(0, n))
    sends = list(zip(draw.sample(range(n), len(targets)), targets, strict=True))
    source = {target: source for source, target in sends}
    xs = [number(draw.randint(0, 3), 2) for _ in range(n)]
    return [(x, sends, list(xs[source.get(i, i)].shape)) for i, x in enumerate(xs)]


def broadcast(draw: random.Random, n: int) -> Calls:
    root, xs = draw.randrange(n), [number(draw.randint(0, 3), 2) for _ in range(n)]
    return [(x, root, list(xs[root].shape)) for x in xs]


EXAMPLES = {
    f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast)
}
CASES = [(name, seed) for name in KINDS for seed in range(6)]


def example(name: str, seed: int) -> Calls:
    torch.manual_seed(seed)
    draw = random.Random(f"{name} {seed}")
    return EXAMPLES[name](draw, draw.randint(1, 4))


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_results_have_the_shapes_of_the_record_and_memory_of_their_own(name: str, seed: int) -> None:
    calls, kind = example(name, seed), KINDS[name]
    before = [x.clone() for x, *_ in calls]
    results = kind.compute(calls)
    for i, ((x, *args), made) in enumerate(zip(calls, results, strict=True)):
        assert tuple(made.shape) == kind.returns(tuple(x.shape), GroupMember(i, len(calls)), *args)
        assert made.is_contiguous()
    for i, made in enumerate(results):
        made.fill_(i)
    assert all(bool((made == i).all()) for i, made in enumerate(results))
    assert all(torch.equal(x, old) for (x, *_), old in zip(calls, before, strict=True))
    for _, *args in calls:
        assert kind.parsed(kind.flat(args)) == tuple(args)
    assert kind.misfit([tuple(x.shape) for x, *_ in calls], [tuple(args) for _, *args in calls]) == ""


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_the_gradient_is_what_autograd_makes_of_the_meaning(name: str, seed: int) -> None:
    calls, kind = example(name, seed), KINDS[name]
    xs = [x.requires_grad_() for x, *_ in calls]
    results = kind.compute(calls)
    grads = [number(*made.shape) for made in results]
    total = sum((made * grad).sum() for made, grad in zip(results, grads, strict=True))
    total = total + sum((0 * x).sum() for x in xs)  # where nothing arrives, a result depends on nothing
    want = torch.autograd.grad(total, xs)
    mesh = Mesh((len(calls),), ("tp",))

    def transposed(rank: int) -> Tensor:
        def communicate(other: str, x: Tensor, *args: Any) -> Tensor:
            return seat().run(other, x, ("tp",), *args)

        x, *args = calls[rank]
        member = GroupMember(rank, len(calls))
        return kind.gradient(communicate, grads[rank], tuple(x.shape), member, *args)

    with torch.no_grad():
        got = meet(mesh, lambda rank, meeting: _Real("code", mesh, rank, meeting), transposed)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_record_prices_as_the_steps_of_a_redistribution_do() -> None:
    """What the fullest member receives, uneven and empty pieces included."""
    mesh = Mesh((4,), ("tp",))
    for rows in (1, 5, 8):
        shape = (rows, 6)
        sizes = {dim: [mesh(*(("tp", None), (None, "tp"))[dim]).local_shape(shape, r)[dim] for r in range(4)]
                 for dim in (0, 1)}  # fmt: skip
        whole, cut_0, cut_1 = mesh(None, None), mesh("tp", None), mesh(None, "tp")
        pending = mesh(None, None, partial={"tp": "sum"})
        steps: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
            "all_gather": (AllGather(("tp",), cut_0, whole, 0), (0, sizes[0])),
            "reduce_scatter": (ReduceScatter(("tp",), pending, cut_1, 1, "sum"), (1, sizes[1], "sum")),
            "all_reduce": (AllReduce(("tp",), pending, whole, "sum"), ("sum",)),
            "all_to_all": (AllToAll(("tp",), cut_1, cut_0, 1, 0), (0, sizes[0], 1, sizes[1])),
        }
        for name, (step, args) in steps.items():
            received = [
                KINDS[name].received(step.src.local_shape(shape, rank), GroupMember(rank, 4), *args)
                for rank in range(4)
            ]
            assert max(received) == step.num_elements(shape), (name, rows)


def test_a_permute_receives_what_others_send() -> None:
    """Zeros for a member where no pair ends are its own, and so is what it sends itself."""
    sends = [(0, 1), (1, 3), (2, 2)]
    received = [KINDS["permute"].received((2, 3), GroupMember(i, 4), sends, (2, 3)) for i in range(4)]
    assert received == [0, 6, 0, 6]
