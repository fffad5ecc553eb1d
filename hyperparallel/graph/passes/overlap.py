"""Order a rank's program: start movement as early as dependencies and memory allow, wait just before its use.

The program holds pairs of a start and a wait, each on a stream: collectives (`comm.dp`), copies between
memory tiers (`copy.host.in`). A wait goes right before the first use of its result. When a start goes
depends on what it does to memory, not on its stream:

- A fetch takes something that stays where it is (a parameter, a tensor in another tier): each byte that is
  fetched ahead is a byte more. Fetches start in the order of their first use, while those under way hold
  at most `in_flight_bytes`, and at the latest right before their wait.
- A store is only handed on: a gradient to be reduced, an activation on its way to another tier. It starts
  when its operand is made, and the operand dies with its wait. Where stores under way would hold more than
  `in_flight_bytes`, the oldest are waited for first.
- Everything else (activations that the next op needs) starts when its operand is made and is not counted:
  the operand is there, and the wait comes by itself.

What would be fetched again while an equal fetch still has readers ahead (the last block at the turn to the
backward, the head) is kept and not fetched again; what is kept counts as fetched ahead. Compute keeps its
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.pairs import is_fetch, is_handed_out, origin, parts_of, results_of, starts_of
from hyperparallel.graph.program import RankProgram

STORES = 2
"""Stores under way where no budget is given, of the largest: one moves while the next is made ready."""


def overlap(program: RankProgram) -> RankProgram:
    """Reorder the program's nodes in place; every rank gets the same order of starts."""
    order = _Order(program).run()
    last = [n for n in program.graph.nodes if n.op == "placeholder"]
    previous = last[-1] if last else program.graph._root
    for node in order:
        previous.append(node)
        previous = node
    return program


class _Order:
    """The order as it is made; `place` puts a node behind all it needs."""

    def __init__(self, program: RankProgram) -> None:
        self.joint = program.joint
        self.nodes = [n for n in program.graph.nodes if n.op == "call_function"]
        position = {node: i for i, node in enumerate(self.nodes)}
        starts = starts_of(program.graph)
        self.waits = {w for start in starts for w in (*start.users, *results_of(start))}
        # Setup runs once and before all else: its gathers have nothing to overlap with.
        fetches = [s for s in starts if is_fetch(s) and not s.meta["constant"]]
        # Behind everything: the use of what is only returned.
        last = len(position)
        self.first_use = {s: min((position.get(r, last) for r in _readers(s)), default=last) for s in fetches}
        self.upcoming = deque(sorted(fetches, key=self.first_use.__getitem__))
        self.stores = {s for s in starts if s not in self.first_use and is_handed_out(s)}
        self.followers = _followers([s for s in starts if s not in self.first_use])
        self.fetched: dict[fx.Node, None] = {}
        self.stored: dict[fx.Node, None] = {}
        """Fetches and stores under way, oldest first."""
        self.kept: dict[fx.Node, set[fx.Node]] = {}
        """Fetches whose results are kept for readers ahead that have no fetch of their own any more."""
        budget = program.in_flight_bytes
        # Without a budget, as much may be under way as the largest fetch holds: that much is needed anyway.
        self.fetch_budget = max(map(_held, fetches), default=0) if budget is None else budget
        self.store_budget = STORES * max(map(_held, self.stores), default=0) if budget is None else budget
        self.latest: dict[Any, fx.Node] = {}  # what was fetched last -> its result
        self.order: list[fx.Node] = []
        self.placed: set[fx.Node] = set()
        self.erased: set[fx.Node] = set()

    def run(self) -> list[fx.Node]:
        for node in self.nodes:
            if node not in self.waits and node not in self.erased and node not in self.first_use:
                self._fetch_for(node)
                self.place(node)
        for node in self.nodes:
            if node not in self.erased:
                self.place(node)
        return self.order

    def place(self, node: fx.Node) -> None:
        """Append a node, what it needs before it, and the starts that can go behind it."""
        if node in self.placed or node.op != "call_function":
            return
        for missing in self._missing(node):
            self.place(missing)
        if node in self.stores:
            self._make_room(node)
        if node in self.placed:  # it went behind the last of what it needs
            return
        self.placed.add(node)
        self.order.append(node)
        for used in node.all_input_nodes:
            if node.target is communication.wait:
                self.fetched.pop(used, None)
                self.stored.pop(used, None)
        if node in self.stores:
            self.stored[node] = None
            # Nothing fits beside it, so nothing is gained by leaving it under way.
            if _held(node) > self.store_budget:
                self._finish(node)
        # What was kept is in use again at its first late reader, and no longer held ahead of need.
        self.kept = {start: wanted for start, wanted in self.kept.items() if node not in wanted}
        for start in self.followers.get(node, ()):
            # A start of many has many operands: it goes behind the last, with the casts between.
            if all(self._is_there(origin(used)) for used in start.all_input_nodes):
                self.place(start)

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        """What a node needs and has not got, directly or not, each behind what it needs itself."""
        found: dict[fx.Node, None] = {}
        todo = [(used, False) for used in node.all_input_nodes]
        while todo:
            used, ready = todo.pop()
            if ready:
                found.setdefault(used)
            elif used.op == "call_function" and used not in self.placed and used not in found:
                # Popped again when all it needs is listed: depth first, without Python's recursion limit.
                todo.append((used, True))
                todo.extend((before, False) for before in used.all_input_nodes)
        return list(found)

    def _is_there(self, node: fx.Node) -> bool:
        return node.op == "placeholder" or node in self.placed

    def _make_room(self, store: fx.Node) -> None:
        while self.stored and sum(map(_held, self.stored)) + _held(store) > self.store_budget:
            self._finish(next(iter(self.stored)))

    def _finish(self, start: fx.Node) -> None:
        """Wait for what was started."""
        for result in results_of(start):
            self.place(result)

    def _fetch_for(self, node: fx.Node) -> None:
        """Start what `node` needs now, and what may be under way ahead of it."""
        while self.upcoming:
            start = self.upcoming[0]
            if start not in self.placed:
                ahead = sum(map(_held, {*self.fetched, *self.kept})) + _held(start)
                needed, fits = node in _readers(start), ahead <= self.fetch_budget
                if self._take_what_is_there(start, node, needed or fits):
                    self.upcoming.popleft()
                    continue
                # Not a later one instead, though it may fit: fetches start in the order of their first use.
                if not needed and not (fits and self._is_ready(start)):
                    return
                self.place(start)
                self.fetched[start] = None
                self.latest.update(zip(parts_of(start), results_of(start), strict=True))
            self.upcoming.popleft()

    def _is_ready(self, start: fx.Node) -> bool:
        """Whether nothing has to be computed for it first."""
        todo = list(start.all_input_nodes)
        while todo:
            node = todo.pop()
            if node.target is communication.wait and node.args[0] not in self.placed:
                return False
            # A cast or a view of a parameter is done on the way; a wait for something not started is not.
            todo += node.all_input_nodes if node not in self.placed else []
        return True

    def _take_what_is_there(self, start: fx.Node, node: fx.Node, may_keep: bool) -> bool:
        """Let the readers of a fetch take an equal one's results, if those have readers ahead.

        may_keep: whether results may be kept that are in use already. Those under way are counted as it is,
        and those that `node` reads last would be fetched again next.
        """
        there = [self.latest.get(part) for part in parts_of(start)]
        others = {_start_of(x) for x in there if x is not None}
        # With no reader ahead the earlier result is dead by now; to keep it would cost its bytes in between.
        ahead = [_readers(other) - self.placed for other in others]
        if not self.joint or None in there or not all(ahead):
            return False
        if not (may_keep or others.issubset(self.fetched) or all(left <= {node} for left in ahead)):
            return False
        # Noted before its readers move over: those are the ones that it is kept for.
        self.kept.update(dict.fromkeys(others, _readers(start)))
        results = results_of(start)
        for mine, other in zip(results, there, strict=True):
            assert other is not None
            mine.replace_all_uses_with(other)
        for gone in dict.fromkeys((*results, *start.users, start)):
            gone.graph.erase_node(gone)
            self.erased.add(gone)
        return True


def _readers(start: fx.Node) -> set[fx.Node]:
    """The users of what a start makes."""
    return {user for result in results_of(start) for user in result.users}


def _start_of(result: fx.Node) -> fx.Node:
    wait = result if result.target is communication.wait else result.all_input_nodes[0]
    return wait.all_input_nodes[0]


def _held(start: fx.Node) -> int:
    """Bytes that exist because a start is under way."""
    held: int = start.meta["transfer"].held_bytes
    return held


def _followers(starts: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the starts whose operand it is, or is cast to."""
    followers: dict[fx.Node, list[fx.Node]] = {}
    for start in starts:
        for used in map(origin, start.all_input_nodes):
            followers.setdefault(used, []).append(start)
    return {node: sorted(found) for node, found in followers.items()}
