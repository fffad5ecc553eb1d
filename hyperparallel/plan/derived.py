"""What became of a plan: the layout of every parameter and value, and every collective of a step.

`hyperparallel.derive(model, plan, example_batch)` makes a `Derived`; everything here is plain data
without torch, so it can be saved with a run, compared with another run's, and shown on any machine
(`report.py` in words, `page.py` as a page). Bytes are what one rank receives in one step; time is
not in here, the simulator prices it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from hyperparallel.errors import PlanError, nearest
from hyperparallel.layout import Layout, Mesh
from hyperparallel.plan.wording import axes_words, bytes_words, count_words, layout_words, mesh_words

Phase = Literal["forward", "backward", "update"]

_ITEMSIZE = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class ParamLayout:
    """One parameter: how ranks store it, how they use it, and who said so.

    `stored` and `used` differ where a parameter is gathered at use (FSDP). `declared` is True where
    the plan names it; `reason` says which entry, or from what the layout follows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: Layout
    used: Layout
    declared: bool
    reason: str

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def rank_bytes(self) -> int:
        """Bytes that the fullest rank stores."""
        return math.prod(self.stored.largest_shape(self.shape)) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Communication:
    """One collective (or `count` alike ones) of a step.

    `kind` is "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute" or "send_recv";
    `num_bytes` is what one rank receives each time; `value` is what moves, `module` where it is
    needed; `dtype` that of what moves (a sum of 16-bit floats moves in float32).
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    phase: Phase
    value: str
    module: str
    reason: str
    count: int = 1
    dtype: str = "float32"

    @property
    def step_bytes(self) -> int:
        """Bytes that one rank receives in a step."""
        return self.num_bytes * self.count


@dataclass(frozen=True)
class BlockLayout:
    """The layout of one value that an op of the model makes, printed."""

    module: str
    op: str
    value: str
    shape: tuple[int, ...]
    layout: str


@dataclass(frozen=True)
class RewriteCount:
    """How often one local rewrite was made in a rank's program, and how many calls fewer a step makes.

    `exact`: it keeps every bit of the result; the others are left out by `Plan(exact=True)`.
    """

    words: str
    exact: bool
    count: int
    calls_saved: int


@dataclass(frozen=True)
class Derived:
    """Everything decided for one model, plan and batch.

    `plan` is the plan's text form; `model_hash` identifies the captured graph it was decided for.
    """

    plan: str
    params: tuple[ParamLayout, ...]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    communications: tuple[Communication, ...]
    values: tuple[BlockLayout, ...]
    num_ranks: int
    model_hash: str
    rewrites: tuple[RewriteCount, ...] = ()

    @cached_property
    def plan_hash(self) -> str:
        """Content hash of the plan's text."""
        return _hash(self.plan)

    @cached_property
    def content_hash(self) -> str:
        """Content hash of all that was decided: equal hash, equal program."""
        return _hash(self.to_json())

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the first layout; None for a model without tensors."""
        return next((layout.mesh for layout in self._layouts()), None)

    def _layouts(self) -> Iterator[Layout]:
        yield from (param.stored for param in self.params)
        yield from self.inputs.values()
        yield from self.outputs.values()

    def summary(self) -> str:
        """Two lines: the size of the model, and what a step communicates."""
        elements = sum(param.num_elements for param in self.params)
        stored = sum(param.rank_bytes for param in self.params)
        count = sum(item.count for item in self.communications)
        received = sum(item.step_bytes for item in self.communications)
        shape = mesh_words(self.mesh) if self.mesh else "no mesh"
        return (
            f"{count_words(elements)} parameters in {len(self.params)} tensors on {self.num_ranks} "
            f"ranks ({shape}): {bytes_words(stored)} stored per rank\n"
            f"{count} collectives per step, {bytes_words(received)} received per rank"
        )

    def explain(self, name: str) -> str:
        """Why a parameter, input, output or value is laid out as it is, and what it communicates.

        "rewrites" names the calls of the model that cheaper ones replace, and how often. Raises
        `PlanError` with the nearest names if there is nothing of that name.
        """
        if not isinstance(name, str):
            raise PlanError("name", name, "the name of a parameter, input, output or value")
        for param in self.params:
            if param.name == name:
                return "\n".join((*_param_lines(param), *self._communication_lines(name)))
        for what, layouts in (("input", self.inputs), ("output", self.outputs)):
            if name in layouts:
                head = f"{name}: {what}, {layout_words(layouts[name])}"
                return "\n".join((head, *self._communication_lines(name)))
        if name == "rewrites":
            return "\n".join(self.rewrite_lines())
        found = [v for v in self.values if v.value == name or (v.module == name and name)]
        if found:
            lines = [f"{v.value} {list(v.shape)}: {v.layout}, made by {v.op}" for v in found]
            return "\n".join((*lines, *self._communication_lines(name)))
        known = [param.name for param in self.params]
        known += [*self.inputs, *self.outputs, *(v.value for v in self.values), "rewrites"]
        close = nearest(name, dict.fromkeys(known))
        hint = "" if close is None else f" (nearest: {close})"
        raise PlanError("name", name, f"a parameter, input, output or value{hint}")

    def rewrite_lines(self) -> list[str]:
        """The local rewrites of a step, those that change rounding first."""
        if not self.rewrites:
            return ["local rewrites: none"]
        lines = ["local rewrites of a step (calls of the model that cheaper ones replace)"]
        for item in sorted(self.rewrites, key=lambda item: item.exact):
            kept = "every bit stays" if item.exact else "rounds otherwise; Plan(exact=True) leaves it out"
            fewer = f", {item.calls_saved} calls fewer" if item.calls_saved else ""
            lines.append(f"  {item.count:>4} x {item.words}{fewer} ({kept})")
        return lines

    def _communication_lines(self, name: str) -> list[str]:
        """What moves `name` itself or its gradient, or happens in the module that owns it."""
        owner = name.rpartition(".")[0]
        lines = []
        for item in self.communications:
            # One message may carry several values: the first stands for all where none is asked for.
            moved = item.value.split(", ")
            own = next((v for v in moved if v in (name, f"grad of {name}")), None)
            if own or (owner and item.module == owner) or item.module == name:
                times = f"{item.count} x " if item.count > 1 else ""
                what = own or moved[0]
                why = item.reason
                if len(moved) > 1:
                    what += f" and {len(moved) - 1} more"
                    why = "small results travel together"
                lines.append(
                    f"  {item.phase}: {times}{item.kind} over {axes_words(item.axes)}, "
                    f"{bytes_words(item.num_bytes)} ({item.dtype}) of {what}: {why}"
                )
        return lines or ["  no communication of its own"]

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to an equal value."""
        record = {
            "plan": self.plan,
            "model_hash": self.model_hash,
            "num_ranks": self.num_ranks,
            "params": [_record(param) for param in self.params],
            "inputs": {name: str(layout) for name, layout in self.inputs.items()},
            "outputs": {name: str(layout) for name, layout in self.outputs.items()},
            "communications": [_record(item) for item in self.communications],
            "values": [_record(value) for value in self.values],
            "rewrites": [_record(item) for item in self.rewrites],
        }
        return json.dumps(record, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Derived:
        """Read what `to_json` wrote; `PlanError` where it is something else."""
        try:
            record = json.loads(text)
            return cls(
                plan=record["plan"],
                model_hash=record["model_hash"],
                num_ranks=record["num_ranks"],
                params=tuple(_read_param(item) for item in record["params"]),
                inputs={k: Layout.parse(v) for k, v in record["inputs"].items()},
                outputs={k: Layout.parse(v) for k, v in record["outputs"].items()},
                communications=tuple(
                    Communication(**item | {"axes": tuple(item["axes"])}) for item in record["communications"]
                ),
                values=tuple(
                    BlockLayout(**item | {"shape": tuple(item["shape"])}) for item in record["values"]
                ),
                rewrites=tuple(RewriteCount(**item) for item in record["rewrites"]),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            allowed = "the JSON that `hyperparallel plan --save` wrote"
            raise PlanError("derived plan", text[:40], allowed) from error


def _record(item: ParamLayout | Communication | BlockLayout | RewriteCount) -> dict[str, Any]:
    record = {field.name: getattr(item, field.name) for field in fields(item)}
    return {k: str(v) if isinstance(v, Layout) else v for k, v in record.items()}


def _read_param(item: dict[str, Any]) -> ParamLayout:
    layouts = {key: Layout.parse(item[key]) for key in ("stored", "used")}
    return ParamLayout(**item | layouts | {"shape": tuple(item["shape"])})


def _param_lines(param: ParamLayout) -> list[str]:
    stored, used = layout_words(param.stored), layout_words(param.used)
    lines = [f"{param.name} {list(param.shape)} {param.dtype}", f"  stored: {stored}"]
    if used != stored:
        lines.append(f"  used: {used}")
    return [*lines, f"  why: {param.reason}"]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
