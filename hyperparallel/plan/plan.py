"""What a user declares: a mesh, a few layouts, and how parameters are kept on the batch axes.

Everything that is not declared is derived (`decide.py`). A plan matches names by shell-style patterns
("model.layers.*.mlp.up_proj.weight"); the first pattern that matches a name wins, and a pattern that
matches nothing is an error. A plan is a value: it prints as a YAML file and reads back equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperparallel.errors import NOTHING, PlanError, Words, nearest
from hyperparallel.foreign_errors import asked_for, load_yaml, no_yaml, shown
from hyperparallel.layout import Layout, Mesh
from hyperparallel.layout.carried import check_stored

BATCH_NAMES = ("dp", "ddp", "fsdp", "data", "batch", "replica")
COMPUTE_DTYPES = (None, "bfloat16")
REDUCE_DTYPES = ("float32", "bfloat16")
DimText = str | list[str] | None
_LAYOUTS = ("params", "inputs", "activations")


@dataclass(frozen=True)
class Plan:
    """A declaration of parallelism.

    mesh: the axes and ranks.
    params: pattern over parameter names -> Layout. What is not matched is derived.
    inputs: pattern over paths in the batch ("input_ids") -> Layout. Not matched: dim 0 is cut by the
        batch axes.
    activations: pattern over module names (a star is one part of the name) -> Layout of what the module
        returns, for instance `{"model.layers.*": mesh("dp", "tp", None)}` for sequence-sharded norms.
    fsdp: a batch axis over which parameters, gradients and optimizer states are kept cut.
    zero: 3 gathers a parameter for the forward and again for the backward; 2 keeps it gathered for the
        backward; 1 also keeps gradients whole while `TrainStep` accumulates them. Without anything that is
        kept cut over a batch axis only 3 is taken.
    batch: the batch axes, in any order; left out, `fsdp` and the axes called dp, ddp, fsdp, data, batch or
        replica, with a number behind or not.
    compute: "bfloat16" runs the model as `torch.autocast` does: products and what follows them in 16
        bits, norms, softmax and loss in float32, parameters and their gradients in their own dtype. None:
        in the dtypes that the model and the batch have.
    reduce: the dtype in which sums of 16-bit floats over ranks are carried and added, "float32" or, at
        half the bytes and with more rounding, "bfloat16" (which leaves them in their own dtype).
    exact: True leaves out the rewrites that round otherwise than the model's own ops, such as a + b * c in
        one rounding; `derive(...).explain("rewrites")` names and counts them. Sums over ranks, and those
        of a matrix that is cut, are still made piece by piece.
    in_flight_bytes: what parameters that are gathered before they are needed may hold on a rank while they
        are under way, and likewise gradients on their way out. More hides slower links and takes more memory;
        0 gathers each at its use. None: the largest gather (a block) ahead, the two largest reductions.

    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> Plan(mesh, params={"*.up_proj.weight": mesh("tp", None)}).batch_axes
    ('dp',)
    """

    mesh: Mesh
    params: Mapping[str, Layout] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    activations: Mapping[str, Layout] = field(default_factory=dict)
    fsdp: str | None = None
    zero: int = 3
    batch: tuple[str, ...] | None = None
    compute: str | None = None
    reduce: str = "float32"
    exact: bool = False
    in_flight_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise PlanError("mesh", self.mesh, "a Mesh", 'Layout((2, 2), ("dp", "tp"))')
        # torch.bfloat16 goes by its name
        for what, allowed in (("compute", COMPUTE_DTYPES), ("reduce", REDUCE_DTYPES)):
            object.__setattr__(self, what, _dtype_name(what, getattr(self, what), allowed))
        if not isinstance(self.exact, bool):
            raise PlanError("exact", self.exact, "True or False")
        budget = self.in_flight_bytes
        if budget is not None and (type(budget) is not int or budget < 0):
            wanted = "a whole number of bytes, 0 or more, or None"
            raise PlanError("in_flight_bytes", budget, wanted, "in_flight_bytes=64 << 20")
        for what in _LAYOUTS:
            object.__setattr__(self, what, self._checked(what, getattr(self, what)))
        self._check_axes()
        self._check_zero()

    def _checked(self, what: str, layouts: object) -> dict[str, Layout]:
        if not isinstance(layouts, Mapping):
            raise PlanError(what, layouts, "a mapping from patterns to layouts", _EXAMPLES[what])
        for pattern, layout in layouts.items():
            where = f"{what}[{pattern!r}]"
            if not isinstance(pattern, str):
                raise PlanError(where, pattern, "a pattern over names, as text")
            if not isinstance(layout, Layout):
                raise PlanError(where, layout, "a Layout", f"mesh({', '.join(map(repr, self.mesh.names))})")
            if layout.mesh != self.mesh:
                raise PlanError(where, str(layout), f"a layout on the plan's mesh {self.mesh}")
            check_stored(layout, where, PlanError)
        return dict(layouts)

    def _check_axes(self) -> None:
        names, axes = self.mesh.names, ", ".join(self.mesh.names)
        if isinstance(self.batch, str):
            raise PlanError("batch", self.batch, "a tuple of axes", f"batch=({self.batch!r},)")
        if self.batch is not None:
            if not isinstance(self.batch, (tuple, list)):
                raise PlanError("batch", self.batch, "a tuple of axes, or None")
            # A list, from a file; frozen like the rest.
            object.__setattr__(self, "batch", tuple(self.batch))
        kept = () if self.fsdp is None else (("fsdp", self.fsdp),)
        for what, axis in (*kept, *(("batch", axis) for axis in self.batch or ())):
            if axis not in names:
                raise PlanError(what, axis, f"one of {axes}", nearest(str(axis), names))
        if self.batch is not None and len(set(self.batch)) != len(self.batch):
            raise PlanError("batch", self.batch, "each axis once")
        if self.batch is not None:  # a set of axes: written in any order it is the same plan
            object.__setattr__(self, "batch", tuple(axis for axis in names if axis in self.batch))
        if self.fsdp is not None and self.fsdp not in self.batch_axes:
            allowed = f"one of the batch axes {self.batch}, which parameters can be kept cut over"
            raise PlanError("fsdp", self.fsdp, allowed, f"batch={(*self.batch_axes, self.fsdp)}")

    def _check_zero(self) -> None:
        if type(self.zero) is not int or self.zero not in (1, 2, 3):
            raise PlanError("zero", self.zero, "1, 2 or 3")
        batch = set(self.batch_axes)
        declared = any(batch & set(layout.cut_axes) for layout in self.params.values())
        if self.zero != 3 and self.fsdp is None and not declared:
            allowed = "3, as nothing is kept cut over a batch axis: fsdp is not given"
            axis = next((axis for axis in self.mesh.names if axis in batch), None)
            raise PlanError("zero", self.zero, allowed, axis and f"fsdp={axis!r} beside it")

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that cut the batch, in mesh order."""
        if self.batch is not None:
            return self.batch
        # A split axis keeps its meaning: dp_0 and dp_1 are dp.
        stems = {name: name.rstrip("0123456789_") for name in self.mesh.names}
        return tuple(n for n in self.mesh.names if stems[n] in BATCH_NAMES or n == self.fsdp)

    def to_yaml(self) -> str:
        """The plan as the text of a plan file."""
        record: dict[str, Any] = {"mesh": dict(zip(self.mesh.names, self.mesh.shape, strict=True))}
        if self.mesh.ranks != tuple(range(self.mesh.size)):
            record["ranks"] = list(self.mesh.ranks)
        for what in _LAYOUTS:
            layouts = {p: [_axes_entry(d) for d in v.dims] for p, v in getattr(self, what).items()}
            if layouts:
                record[what] = layouts
        if self.fsdp is not None:
            record["fsdp"] = self.fsdp
        if self.fsdp is not None or self.zero != 3:
            record["zero"] = self.zero
        if self.batch is not None:
            record["batch"] = list(self.batch)
        if self.compute is not None:
            record["compute"] = self.compute
        if self.reduce != "float32":
            record["reduce"] = self.reduce
        if self.exact:
            record["exact"] = True
        if self.in_flight_bytes is not None:
            record["in_flight_bytes"] = self.in_flight_bytes
        return yaml.safe_dump(record, sort_keys=False, default_flow_style=None)

    @classmethod
    def from_yaml(cls, text: str, where: str = "") -> Plan:
        """Read the text of a plan file; `PlanError` names the field that is wrong. where: the file's name."""
        if not isinstance(text, str):
            raise PlanError("plan file", type(text).__name__, "the text of a plan file", "Plan.load(path)")
        try:
            data = load_yaml(text)
        except yaml.YAMLError as error:
            raise PlanError("plan file", *no_yaml(error, where)) from None
        if not isinstance(data, Mapping):
            given = Words(f"{where}: {shown(data)}") if where else shown(data)
            raise PlanError("plan file", given, "a mapping with mesh and what to cut", "mesh: {dp: 2}")
        try:
            written = PlanFile.model_validate(data)
        except ValidationError as error:
            raise _unfit(error.errors()[0]) from None
        return written.plan()

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file from disk."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not text"
            raise PlanError("plan", str(path), f"a readable plan file ({why})") from None
        return cls.from_yaml(text, str(path))

    def save(self, path: str | Path) -> None:
        """Write the plan as a file that `load` reads back equal."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")


class PlanFile(BaseModel):
    """The file form of a plan; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mesh: dict[str, int]
    ranks: list[int] | None = None
    params: dict[str, list[DimText]] = Field(default_factory=dict)
    inputs: dict[str, list[DimText]] = Field(default_factory=dict)
    activations: dict[str, list[DimText]] = Field(default_factory=dict)
    fsdp: str | None = None
    zero: int = 3
    batch: list[str] | None = None
    compute: str | None = None
    reduce: str = "float32"
    exact: bool = False
    in_flight_bytes: int | None = None

    def plan(self) -> Plan:
        """The plan that the file describes."""
        ranks = None if self.ranks is None else tuple(self.ranks)
        mesh = Mesh(tuple(self.mesh.values()), tuple(self.mesh), ranks)

        def layouts(entries: Mapping[str, list[DimText]]) -> dict[str, Layout]:
            return {
                pattern: mesh(*(tuple(d) if isinstance(d, list) else d for d in dims))
                for pattern, dims in entries.items()
            }

        return Plan(
            mesh,
            layouts(self.params),
            layouts(self.inputs),
            layouts(self.activations),
            self.fsdp,
            self.zero,
            None if self.batch is None else tuple(self.batch),
            self.compute,
            self.reduce,
            self.exact,
            self.in_flight_bytes,
        )


_EXAMPLES = {
    "mesh": "mesh: {dp: 2, tp: 2}",
    "ranks": "ranks: [0, 1]",
    "params": 'params: {"*.q_proj.weight": [tp, null]}',
    "inputs": "inputs: {input_ids: [dp, null]}",
    "activations": "activations: {model.norm: [dp, null, tp]}",
    "fsdp": "fsdp: dp",
    "zero": "zero: 3",
    "batch": "batch: [dp]",
    "compute": "compute: bfloat16",
    "reduce": "reduce: float32",
    "exact": "exact: true",
    "in_flight_bytes": "in_flight_bytes: 67108864",
}
"""What may stand in a field of a plan file."""


def _unfit(error: Mapping[str, Any]) -> PlanError:
    """One of pydantic's complaints about a plan file as an error of ours."""
    location, known = error["loc"], PlanFile.model_fields
    where, entry = ".".join(map(str, location)), str(location[0])
    if error["type"] == "extra_forbidden":
        return PlanError("plan file", entry, ", ".join(known), nearest(entry, known, 1))
    if error["type"] == "missing":
        return PlanError(where, NOTHING, f"a value; {entry} is required", _EXAMPLES[entry])
    in_layout = entry in _LAYOUTS and len(location) > 1
    allowed = "axis names or null, a list for each dimension" if in_layout else asked_for(error)
    return PlanError(where, shown(error["input"]), allowed, _EXAMPLES[entry])


def _dtype_name(what: str, given: object, allowed: tuple[str | None, ...]) -> str | None:
    """The name of a dtype that is given by name or as torch's; `PlanError` for one that is not allowed."""
    name = None if given is None else str(given).removeprefix("torch.")
    if name not in allowed:
        instead = f'{what}="bfloat16"' if name in ("bf16", "float16", "fp16", "half") else None
        raise PlanError(what, given, " or ".join(map(repr, allowed)), instead)
    return name


def _axes_entry(axes: tuple[str, ...]) -> DimText:
    return None if not axes else axes[0] if len(axes) == 1 else list(axes)


def match(
    patterns: Mapping[str, Layout],
    names: Iterable[str],
    what: str,
    *,
    by_part: bool = False,
    lenient: bool = False,
) -> dict[str, tuple[str, Layout]]:
    """name -> (pattern, layout) for the first pattern that matches each name.

    by_part: a star stands for one part of a dotted name, not for several.
    Raises `PlanError` with the nearest names for a pattern that matches nothing, unless `lenient`.
    """
    known = list(names)
    found: dict[str, tuple[str, Layout]] = {}
    for pattern, layout in patterns.items():
        hits = [name for name in known if _fits(name, pattern, by_part)]
        if not hits and not lenient:
            close = nearest(pattern, known)
            hint = "" if close is None else f" (nearest: {close})"
            raise PlanError(what, pattern, f"a pattern that matches one of the names{hint}")
        for name in hits:
            # The first pattern wins, so that special ones stand before general ones.
            found.setdefault(name, (pattern, layout))
    return found


def _fits(name: str, pattern: str, by_part: bool) -> bool:
    if not by_part:
        return fnmatchcase(name, pattern)
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
