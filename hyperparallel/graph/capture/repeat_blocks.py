"""Put the repeats that were left out of a trace into its graph, forward and backward.

Input: a captured graph with units 0, a = 1, b and last of a stack (`kept_blocks.py`). First the two
middle units are compared node by node: same ops, same constants, and every argument either in the
unit itself, in the unit before (`PREV`), in the unit after (`NEXT`, backward only), or one and the
same node for both (`SAME`). Two middle units are what tells "the unit before" from "unit 0".
Nothing else may look into a middle unit. Then unit a is copied for each missing unit, forward
copies in front of the next kept unit, backward copies in reverse, and neighbours are wired to
neighbours.

Anything that does not fit raises `NotUniform`; the caller then traces the whole model.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from hyperparallel.graph.capture.kept_blocks import Reduction
from hyperparallel.graph.capture.naming import identifier

Key = tuple[int, str]
"""A node's place in its unit: (block within the unit, local name)."""


class NotUniform(Exception):
    """The repeats of a stack differ, so one cannot stand for another."""


class Place(enum.Enum):
    """Where an argument of a middle unit comes from."""

    OWN = "own"
    PREV = "prev"
    NEXT = "next"
    SAME = "same"


class Result(NamedTuple):
    """A returned value: its role, its name, its node."""

    role: str
    name: str
    node: Any


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to the backward part of a joint graph."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def stamp(
    graph: fx.Graph, reduction: Reduction, results: Sequence[Result], names: Sequence[str]
) -> list[Result]:
    """Add the missing units of `reduction`; returns all results, new ones at the end.

    `names` are all parameter and buffer names in the order their placeholders must have.
    """
    stamper = _Stamper(graph, reduction)
    stamper.compare()
    stamper.check_users(results)
    stamper.add_placeholders(names)
    stamper.add_units()
    return [*results, *stamper.new_results(results)]


class _Stamper:
    def __init__(self, graph: fx.Graph, reduction: Reduction) -> None:
        self.graph, self.reduction = graph, reduction
        self.period = reduction.stack.period
        self.first, self.a, self.b, self.last = reduction.kept
        self.at: dict[int, dict[Key, fx.Node]] = {u: {} for u in range(reduction.num_units)}
        self.where: dict[fx.Node, tuple[int, Key]] = {}
        self.place: dict[fx.Node, Place] = {}
        for node in graph.nodes:
            found = self._locate(node)
            if found is not None:
                self.where[node] = found
                self.at[found[0]][found[1]] = node

    def _unit_key(self, index: int, local: str) -> tuple[int, Key]:
        unit = self.reduction.unit(index)
        return unit, (index - unit * self.period, local)

    def _locate(self, node: fx.Node) -> tuple[int, Key] | None:
        stack = self.reduction.stack
        if "block" in node.meta:
            kind, index, local = node.meta["block"]
            return self._unit_key(index, local) if kind == stack.kind(index) else None
        role, name = node.meta.get("role", ("", ""))
        return self._locate_name(name) if role in ("param", "buffer") else None

    def _locate_name(self, name: str) -> tuple[int, Key] | None:
        stack = self.reduction.stack
        prefix = f"{stack.name}." if stack.name else ""
        key, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or key not in stack.keys:
            return None
        # "=" cannot begin the local name of an op: parameters and ops of a unit share one table.
        return self._unit_key(stack.keys.index(key), f"={rest}")

    def _name(self, unit: int, key: Key) -> str:
        """The qualified name of a parameter or buffer of another unit, from its key."""
        stack = self.reduction.stack
        block = stack.keys[unit * self.period + key[0]]
        return ".".join(piece for piece in (stack.name, block, key[1][1:]) if piece)

    def compare(self) -> None:
        """Check that unit b is unit a shifted, and note where each argument of a comes from."""
        mine, other = self.at[self.a], self.at[self.b]
        # Order matters too: a copy is written in the order of unit a.
        if list(mine) != list(other):
            raise NotUniform("the middle units do not have the same nodes in the same order")
        for key, x in mine.items():
            y = other[key]
            if x.op == "placeholder":
                continue
            if x.target != y.target or _form(x) != _form(y):
                raise NotUniform(f"{x.name} and {y.name} differ")
            self._relate(x.args, y.args)
            self._relate(x.kwargs, y.kwargs)

    def _relate(self, x: Any, y: Any) -> None:
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            place = self._place_of(x, y)
            # A node has one place, or a copy could not tell which of two it should take.
            if self.place.setdefault(x, place) is not place:
                raise NotUniform(f"{x.name} is used in two ways")
        elif type(x) is not type(y):
            raise NotUniform(f"arguments {x} and {y} differ")
        elif isinstance(x, dict):
            if list(x) != list(y):
                raise NotUniform(f"arguments {x} and {y} differ")
            self._relate(list(x.values()), list(y.values()))
        elif isinstance(x, (list, tuple)):
            if len(x) != len(y):
                raise NotUniform(f"arguments {x} and {y} differ")
            for one, two in zip(x, y, strict=True):
                self._relate(one, two)
        # NaN is the one constant that differs from itself.
        elif x != y and not (x != x and y != y):
            raise NotUniform(f"constants {x} and {y} differ")

    def _place_of(self, x: fx.Node, y: fx.Node) -> Place:
        if x is y:
            # A copy would have to ask whether it means the original's or its own.
            if self.where.get(x, (-1,))[0] in (self.a, self.b):
                raise NotUniform(f"two middle units use {x.name} of one of them")
            return Place.SAME
        (unit_x, key_x), (unit_y, key_y) = (self.where.get(n, (-1, (0, n.name))) for n in (x, y))
        steps = {
            (self.a, self.b): Place.OWN,
            (self.first, self.a): Place.PREV,
            (self.b, self.last): Place.NEXT,
        }
        if key_x != key_y or (unit_x, unit_y) not in steps:
            raise NotUniform(f"{x.name} and {y.name} stand in different places")
        return steps[unit_x, unit_y]

    def check_users(self, results: Iterable[Result]) -> None:
        """Nothing but neighbours, and gradients of own parameters, may look into a middle unit."""
        allowed = {
            self.a: {self.first, self.a, self.b},
            self.b: {self.a, self.b, self.last},
        }
        for unit, units in allowed.items():
            for node in self.at[unit].values():
                for user in node.users:
                    if user.op != "output" and self.where.get(user, (-1,))[0] not in units:
                        raise NotUniform(f"{user.name} uses {node.name} inside a repeated block")
        for role, name, node in results:
            unit = self.where.get(node, (-1,))[0]
            owner = self._locate_name(name) if role in ("grad", "mutation") else None
            expected = owner[0] if owner is not None else -1
            # A gradient summed outside of its unit would have to be summed anew for each copy.
            if unit != expected and (unit in allowed or expected in allowed):
                raise NotUniform(f"{role} {name} is made elsewhere than where it belongs")

    def add_placeholders(self, names: Sequence[str]) -> None:
        """Placeholders of the missing units, so that all stand in the order of `names`."""
        known = {
            node.meta["role"][1]: node
            for node in self.graph.find_nodes(op="placeholder")
            if node.meta["role"][0] in ("param", "buffer")
        }
        cursor = next(
            n
            for n in self.graph.nodes
            if n.op != "placeholder" or n.meta["role"][0] not in ("param", "buffer")
        )
        # From the last to the first, each in front of the one that follows it.
        for name in reversed(names):
            if name not in known:
                found = self._locate_name(name)
                if found is None or found[1] not in self.at[self.a]:
                    continue  # of another stack
                like = self.at[self.a][found[1]]
                called = identifier(like.meta["role"][0], name)
                with self.graph.inserting_before(cursor):
                    node = self.graph.create_node("placeholder", called, name=called)
                node.meta = {**like.meta, "role": (like.meta["role"][0], name)}
                self.at[found[0]][found[1]] = known[name] = node
            cursor = known[name]

    def add_units(self) -> None:
        """Copy unit a for each missing unit and wire all neighbours."""
        nodes = [n for n in self.at[self.a].values() if n.op != "placeholder"]
        forward = [n for n in nodes if not is_backward(n)]
        backward = [n for n in nodes if is_backward(n)]
        gaps = (range(self.a + 1, self.b), range(self.b + 1, self.last))
        after = {self.a: self._opening(self.a, True), self.b: self._opening(self.b, True)}
        for gap, end in zip(gaps, (self.b, self.last), strict=True):
            place = self._opening(end, False)
            for unit in gap:
                self._copy(forward, unit, place)
        # The backward runs from the last unit to the first: copies stand in front of that of the unit below.
        for gap, start in zip(reversed(gaps), (self.b, self.a), strict=True):
            for unit in reversed(gap):
                self._copy(backward, unit, after[start])
        self._rewire(self.a, {self.b: self.a + 1})
        # b stood behind a, now it stands behind the last copy between them; likewise towards `last`.
        self._rewire(self.b, {self.a: self.b - 1, self.last: self.b + 1})
        self._rewire(self.last, {self.b: self.last - 1})

    def _opening(self, unit: int, backward: bool) -> fx.Node | None:
        nodes = (n for n in self.graph.nodes if n.op != "placeholder")
        inside = (n for n in nodes if self.where.get(n, (-1,))[0] == unit)
        return next((n for n in inside if is_backward(n) == backward), None)

    def _copy(self, template: list[fx.Node], unit: int, before: fx.Node | None) -> None:
        if not template:
            return
        if before is None:
            raise NotUniform("a repeated block has no node to stand in front of")
        here = {Place.OWN: self.at[unit]}
        here[Place.PREV], here[Place.NEXT] = self.at[unit - 1], self.at[unit + 1]

        def moved(x: fx.Node) -> fx.Node:
            place = self.place[x]
            return x if place is Place.SAME else here[place][self.where[x][1]]

        with self.graph.inserting_before(before):
            for node in template:
                try:
                    args, kwargs = map_arg(node.args, moved), map_arg(node.kwargs, moved)
                except KeyError as missing:
                    raise NotUniform(f"a neighbour has no {missing}") from None
                # created bare: create_node walks all arguments in Python, setting them does not
                copy = self.graph.create_node("call_function", node.target, name=node.name)
                copy.args, copy.kwargs = args, kwargs
                copy.meta = self._moved_meta(node, unit)
                key = self.where[node][1]
                self.at[unit][key] = copy
                self.where[copy] = (unit, key)

    def _moved_meta(self, node: fx.Node, unit: int) -> dict[str, Any]:
        stack = self.reduction.stack
        kind, index, local = node.meta["block"]
        moved = index + (unit - self.a) * self.period
        meta = {**node.meta, "block": (kind, moved, local)}
        module = (node.meta.get("custom") or {}).get("module", "")
        prefix = f"{stack.name}." if stack.name else ""
        if module.startswith(f"{prefix}{stack.keys[index]}"):
            rest = module.removeprefix(f"{prefix}{stack.keys[index]}")
            meta["custom"] = {"module": f"{prefix}{stack.keys[moved]}{rest}"}
        return meta

    def _rewire(self, unit: int, moves: dict[int, int]) -> None:
        """Turn the arguments of a kept unit that lie in units `moves` to the units they map to."""
        moves = {old: new for old, new in moves.items() if old != new}

        def moved(x: fx.Node) -> fx.Node:
            place = self.where.get(x)
            if place is None or place[0] not in moves:
                return x
            return self.at[moves[place[0]]][place[1]]

        for node in list(self.at[unit].values()) if moves else ():
            if node.op == "placeholder":
                continue
            try:
                node.args, node.kwargs = map_arg(node.args, moved), map_arg(node.kwargs, moved)
            except KeyError as missing:
                raise NotUniform(f"a neighbour has no {missing}") from None

    def new_results(self, results: Iterable[Result]) -> list[Result]:
        """Gradients and buffer updates of the missing units."""
        found = []
        for role, name, node in results:
            owner = self._locate_name(name) if role in ("grad", "mutation") else None
            if owner is None or owner[0] != self.a:
                continue
            for unit in self._missing():
                twin = self.at[unit].get(self.where[node][1])
                if twin is None:
                    raise NotUniform(f"{role} {name} has no counterpart")
                found.append(Result(role, self._name(unit, owner[1]), twin))
        return found

    def _missing(self) -> list[int]:
        return [u for u in range(self.reduction.num_units) if u not in self.reduction.kept]


def _form(node: fx.Node) -> Any:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return val.shape, val.stride(), val.dtype, val.device
    if isinstance(val, (list, tuple)):
        return [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in val]
    return val


def check_order(graph: fx.Graph) -> None:
    """Raise `NotUniform` if a node stands before one of its arguments."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if any(x not in seen for x in node.all_input_nodes):
            raise NotUniform(f"{node.name} would run before its arguments")
        seen.add(node)
