"""Virtual ranks: the programs of all ranks, run in lockstep in one process.

All programs have the same nodes in the same order; arguments may differ by rank. Each node runs for
every rank in turn before the next node does, so a collective sees all its members' inputs at once
and is plain tensor arithmetic (`CollectiveKind.compute`). Reductions go in group order, with 16-bit
floats summed in float32, as the shared-memory transport does it. A random node starts from the same
generator state on every rank.

Collectives are known by identity: the functions of `collectives.py`, whose last argument is a
`Group` without a process group, and the words of `graph.communication`, whose last argument is mesh
axes that `bind` turns into ranks. Values are dropped after their last use.

Leaves out time: nothing here tells how long real ranks take.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from hyperparallel.errors import RunError, UserError
from hyperparallel.graph import communication
from hyperparallel.graph.collective import CollectiveKind, ManyCollective
from hyperparallel.graph.collective_table import COLLECTIVES
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.group import Group


class Program(Protocol):
    """What holds a rank's graph: a `RankProgram`, or an `fx.GraphModule`."""

    graph: fx.Graph


BindMembers = Callable[[int, tuple[str, ...]], Sequence[int]]
"""From a rank and the mesh axes of a collective to the ordered ranks of its group."""


def run_virtual(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[Any]],
    bind: BindMembers | None = None,
) -> list[Any]:
    """Run program i on inputs i as rank i, all in lockstep; return each rank's output.

    Raises `UserError` when the programs are not the same nodes, `RunError` when the members of a
    group do not agree on who is in it.
    """
    return Lockstep(programs, bind).run(inputs)


class Lockstep:
    """Programs made ready to run together, any number of times."""

    def __init__(self, programs: Sequence[Program], bind: BindMembers | None = None) -> None:
        self.num_ranks = len(programs)
        self._bind = bind
        rows = [list(program.graph.nodes) for program in programs]
        if len({len(row) for row in rows}) != 1:
            raise UserError("programs", [len(row) for row in rows], "equal numbers of nodes")
        self._steps: list[Callable[[list[list[Any]]], None]] = []
        self._output: list[Any] = []
        numbers = [{node: i for i, node in enumerate(row)} for row in rows]
        self._num_nodes, self._inputs = len(rows[0]), []
        last_use: dict[int, int] = {}
        for i, node in enumerate(rows[0]):
            last_use.update((numbers[0][used], i) for used in node.all_input_nodes)
        dead: dict[int, list[int]] = {}
        for value, user in last_use.items():
            dead.setdefault(user, []).append(value)
        for i, nodes in enumerate(zip(*rows, strict=True)):
            # Names of placeholders may differ by rank, functions may not.
            if len({(n.op, n.target if n.op == "call_function" else "") for n in nodes}) > 1:
                raise UserError("programs", [n.format_node() for n in nodes], "the same node")
            if nodes[0].op == "placeholder":
                self._inputs.append(i)
            elif nodes[0].op == "output":
                pairs = zip(nodes, numbers, strict=True)
                self._output = [_template(node.args[0], known) for node, known in pairs]
            else:
                unused = [] if i in last_use else [i]
                self._steps.append(
                    self._step(i, nodes, programs, numbers, [*dead.get(i, []), *unused])
                )

    def run(self, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """One run of all ranks; `inputs` holds each rank's placeholders in order."""
        if [len(row) for row in inputs] != [len(self._inputs)] * self.num_ranks:
            raise UserError(
                "inputs",
                [len(row) for row in inputs],
                f"{len(self._inputs)} values for each of {self.num_ranks} ranks",
            )
        # Values by number of the node: nodes of different ranks are different objects.
        values: list[list[Any]] = [[None] * self._num_nodes for _ in inputs]
        for mine, row in zip(values, inputs, strict=True):
            for slot, value in zip(self._inputs, row, strict=True):
                mine[slot] = value
        for step in self._steps:
            step(values)
        return [_fill(out, mine) for out, mine in zip(self._output, values, strict=True)]

    def _step(
        self,
        slot: int,
        nodes: Sequence[fx.Node],
        programs: Sequence[Program],
        numbers: Sequence[dict[fx.Node, int]],
        dead: Sequence[int],
    ) -> Callable[[list[list[Any]]], None]:
        """One node of all ranks as a function of all values."""
        calls = [
            (
                _callee(node, program),
                _template(() if node.op == "get_attr" else node.args, known),
                _template(dict(node.kwargs), known),
            )
            for node, program, known in zip(nodes, programs, numbers, strict=True)
        ]
        which = _RECORDS.get(nodes[0].target) if nodes[0].op == "call_function" else None
        random = which is None and _may_be_random(nodes[0])

        def local(values: list[list[Any]]) -> None:
            state = _random_state() if random else None
            after = state
            for rank, (mine, (callee, args, kwargs)) in enumerate(zip(values, calls, strict=True)):
                # Each rank draws from the state that the node began with, as real ranks do from theirs.
                if state is not None and rank:
                    _set_random_state(state)
                mine[slot] = callee(*_fill(args, mine), **_fill(kwargs, mine))
                if state is not None and rank == 0:
                    after = _random_state()
                for value in dead:
                    mine[value] = None
            if after is not None:
                _set_random_state(after)

        def together(values: list[list[Any]]) -> None:
            assert which is not None
            rows = [
                _positional(callee, _fill(args, mine), _fill(kwargs, mine))
                for mine, (callee, args, kwargs) in zip(values, calls, strict=True)
            ]
            for mine, result in zip(values, self._communicate(which, rows), strict=True):
                mine[slot] = result
                for value in dead:
                    mine[value] = None

        return local if which is None else together

    def _communicate(
        self, which: CollectiveKind | ManyCollective, rows: list[tuple[Any, ...]]
    ) -> list[Any]:
        ranks = [self._ranks(rank, row[-1]) for rank, row in enumerate(rows)]
        results: list[Any] = [None] * len(rows)
        for rank, members in enumerate(ranks):
            # Once for each group, when its first member comes up.
            if results[rank] is None:
                if rank not in members or any(ranks[member] != members for member in members):
                    raise RunError(
                        f"rank {rank}: members of group {members} disagree on it: {ranks}"
                    )
                made = which.compute([rows[member][:-1] for member in members])
                for member, result in zip(members, made, strict=True):
                    results[member] = result
        return results

    def _ranks(self, rank: int, where: Any) -> tuple[int, ...]:
        if isinstance(where, Group):
            return where.ranks
        if self._bind is None:
            raise UserError("bind", None, "a function, since the programs name mesh axes")
        return tuple(self._bind(rank, where))


class _Slot:
    """A place in a rank's list of values, inside an argument template."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _template(arg: Any, numbers: dict[fx.Node, int]) -> Any:
    """`arg` with every node replaced by its slot."""
    if isinstance(arg, fx.Node):
        return _Slot(numbers[arg])
    if isinstance(arg, (list, tuple)):
        filled = [_template(item, numbers) for item in arg]
        return filled if isinstance(arg, list) else tuple(filled)
    if isinstance(arg, dict):
        return {key: _template(item, numbers) for key, item in arg.items()}
    if isinstance(arg, slice):
        return slice(*(_template(part, numbers) for part in (arg.start, arg.stop, arg.step)))
    return arg


def _fill(arg: Any, values: list[Any]) -> Any:
    """A template with every slot replaced by its value."""
    kind = type(arg)
    if kind is _Slot:
        return values[arg.number]
    if kind is tuple:
        return tuple([_fill(item, values) for item in arg])
    if kind is list:
        return [_fill(item, values) for item in arg]
    if kind is dict:
        return {key: _fill(item, values) for key, item in arg.items()} if arg else arg
    if kind is slice:
        return slice(*(_fill(part, values) for part in (arg.start, arg.stop, arg.step)))
    return arg


def _callee(node: fx.Node, program: Program) -> Callable[..., Any]:
    """What runs for this node; simulated starts hand over the result, so a wait passes it on."""
    if node.op == "call_function":
        return _same if node.target in _WAITS else node.target  # type: ignore[return-value]
    name = str(node.target)
    if node.op == "call_method":
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    value: Any = operator.attrgetter(name)(program)
    return value if node.op == "call_module" else lambda: value


def _same(value: Any) -> Any:
    return value


def _positional(callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of a collective with those given by name put in their places."""
    if not kwargs:
        return args
    names = callee.__code__.co_varnames[len(args) : callee.__code__.co_argcount]
    return (*args, *(kwargs[name] for name in names))


def _may_be_random(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    # Any other function may draw numbers: nobody can tell, so its state is handled as if it did.
    known = target is operator.getitem or target in _WAITS
    return node.op != "get_attr" and not known


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


_RECORDS: Mapping[Any, CollectiveKind | ManyCollective] = {
    **communication.STARTS,
    **{collectives.starter(name): which for name, which in COLLECTIVES.items()},
}
_WAITS = (collectives.wait, communication.wait)
