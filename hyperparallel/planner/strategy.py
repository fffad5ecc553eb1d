"""How a training step is spread over devices: one strategy, and many at once as arrays.

A strategy is what the planner searches over and what a `Plan` is made from. The number of devices is
tp * cp * dp * pp; experts are spread over `ep` of the tp * cp * dp ranks of a pipeline stage (each expert
cut over `etp` ranks), as Megatron-Core folds them (arXiv:2504.14960).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hyperparallel.cluster.axis_links import FILLS, Fill
from hyperparallel.errors import UserError, nearest
from hyperparallel.mpmd import SCHEDULES, PipelineSchedule
from hyperparallel.plan.plan import REDUCE_DTYPES

Array = npt.NDArray[Any]
RECOMPUTE = ("none", "selective", "alternate", "full", "light")
SCHEDULE_NAMES = tuple(SCHEDULES)
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp", "tp-pp-cp-dp", "cp-tp-dp-pp", "cp-tp-pp-dp")
"""Of the axes over the devices, innermost first. Gradients are reduced over cp and dp together, so cp, which
also has messages in every layer, lies inside dp; a stage boundary is crossed once where tp sums in every
layer, so tp lies inside pp. What dp sends can wait and tp's sums cannot, so tp lies inside dp."""

DTYPES = ("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
ATTENTIONS = ("open", "vendor", "vendor-8bit")
EXPERTS = ("loop", "fused")
DISPATCHERS = ("exchange", "once")
PARTS = ("norms", "activations", "latent", "experts")
"""Of a layer, that may be computed again by themselves: its norms; the activation functions between products;
products from a latent vector to queries, keys and values; the whole mixture of experts with its messages. All
but the last are "light" recomputation."""



@dataclass(frozen=True)
class Strategy:
    """One way to spread a training step.

    tp, cp, pp, dp, ep, etp: sizes of the tensor, context, pipeline, data, expert and expert-tensor axes.
    virtual: model chunks on each pipeline rank, as many as the schedule can have. microbatch: samples that
    one data-parallel rank works on at once. zero: 0 keeps all states whole, 1 cuts optimizer states over dp *
    cp, 2 gradients too, 3 parameters too. sp: norms and residuals are cut over tp along the sequence.
    recompute: what is computed again in the backward ("light": norms, activation functions and products from
    latent vectors, which cost little; "selective": the attention core; "alternate": every other weight
    product). schedule: of the pipeline, a name of `mpmd.SCHEDULES`. dtype: of the matrix products; the
    parameters' own copy is 16-bit and the optimizer's 32-bit. reduce: in which gradients are summed over the
    data axis ("bfloat16": in the parameters' 16 bits). offload: the share of optimizer states kept in host
    memory. flash: fused kernels, so that attention keeps no scores. overlap: gradients and parameters of the
    data axis travel while other layers compute, and tensor-parallel messages beside matrix products. graph:
    kernels are started from a recorded program, not one by one from Python. attention: whose fused kernel
    computes it: an open one, the device vendor's, or that in 8 bits. experts: their products are a kernel for
    each expert, started by the host once it knows how many tokens each got; or fused over experts, with
    activation and number format, and recorded. dispatcher: tokens are sorted, sent to every expert, and
    sorted again; or one kernel sends each to a rank once and lays it out there (DeepEP, HybridEP).
    overlap_experts: tokens travel to experts beside the compute of another microbatch.
    order: of the axes over the devices, innermost first; fill: how they share the dimensions of a mesh or
    torus. fused_loss: the cross entropy reads its logits once and overwrites them with their gradient. parts:
    of `PARTS`, what is computed again besides `recompute` (Megatron-Core's selective recomputation by
    module). reentrant: full recomputation runs the whole forward again, as Megatron-LM's checkpoints do; else
    it ends with the last value that the backward reads, before the layer's last product (torch's
    non-reentrant checkpoints, compiled programs).

    >>> Strategy(tp=2, dp=4).devices
    8
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    virtual: int = 1
    microbatch: int = 1
    zero: int = 1
    sp: bool = False
    recompute: Literal["none", "selective", "alternate", "full", "light"] = "none"
    schedule: str = "1f1b"
    dtype: str = "bf16"
    reduce: Literal["float32", "bfloat16"] = "float32"
    offload: float = 0.0
    flash: bool = True
    overlap: bool = True
    graph: bool = True
    attention: Literal["open", "vendor", "vendor-8bit"] = "vendor"
    experts: Literal["loop", "fused"] = "loop"
    dispatcher: Literal["exchange", "once"] = "once"
    overlap_experts: bool = True
    order: str = "tp-cp-dp-pp"
    fill: Fill = "packed"
    fused_loss: bool = True
    parts: tuple[str, ...] = ()
    reentrant: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "dp", "ep", "etp", "virtual", "microbatch"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise UserError(name, value, "a whole number of at least 1")
        for name, allowed in _NAMES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(name, value, " or ".join(allowed), nearest(str(value), allowed))
        object.__setattr__(self, "parts", tuple(self.parts))  # a list, from a file
        for part in self.parts:
            if part not in PARTS:
                raise UserError("parts", part, " or ".join(PARTS), nearest(str(part), PARTS))
        if self.zero not in (0, 1, 2, 3):
            raise UserError("zero", self.zero, "0, 1, 2 or 3")
        if not 0 <= self.offload <= 1:
            raise UserError("offload", self.offload, "a share from 0 to 1")
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            allowed_ep = f"ep * etp must divide tp * cp * dp = {self.tp * self.cp * self.dp}"
            raise UserError("ep * etp", self.ep * self.etp, allowed_ep)
        if not self.pipeline.chunks(self.virtual):
            usual = self.pipeline.usual_chunks[0]
            allowed_v = f"{usual} with schedule {self.schedule}"
            raise UserError("virtual", self.virtual, allowed_v, f"virtual={usual}")

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def pipeline(self) -> PipelineSchedule:
        """The record of its schedule."""
        return SCHEDULES[self.schedule]

    @property
    def homes(self) -> tuple[int, ...]:
        """The pipeline rank of every stage.

        >>> Strategy(pp=2, virtual=2).homes, Strategy(pp=2, virtual=2, schedule="zb-v").homes
        ((0, 1, 0, 1), (0, 1, 1, 0))
        """
        return self.pipeline.homes(self.pp, self.virtual)

    def words(self) -> str:
        """As a report writes it.

        >>> Strategy(tp=8, pp=4, dp=2, virtual=2, sp=True, recompute="selective").words()
        'tp8 pp4x2 dp2 mb1 zero1 sp selective'
        """
        parts = [f"{axis}{getattr(self, axis)}" for axis in ("tp", "cp") if getattr(self, axis) > 1]
        if self.pp > 1:
            parts.append(f"pp{self.pp}" + (f"x{self.virtual}" if self.virtual > 1 else ""))
        parts += [f"{axis}{getattr(self, axis)}" for axis in ("dp", "ep", "etp") if getattr(self, axis) > 1]
        parts += [f"mb{self.microbatch}", f"zero{self.zero}"]
        parts += ["sp"] if self.sp else []
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [f"again {' '.join(self.parts)}"] if self.parts else []
        parts += [self.schedule] if self.pp > 1 and self.schedule != "1f1b" else []
        parts += [f"offload {self.offload:.0%}"] if self.offload else []
        parts += self.placement_words()
        return " ".join(parts)

    def placement_words(self) -> list[str]:
        """How the placement differs from the usual one.

        >>> Strategy(tp=2, pp=2, dp=2, order="tp-pp-cp-dp", fill="apart").placement_words()
        ['order tp pp dp', 'axes apart']
        """
        axes = [axis for axis in self.order.split("-") if getattr(self, axis) > 1]
        usual = [axis for axis in ORDERS[0].split("-") if axis in axes]
        words = [f"order {' '.join(axes)}"] if axes != usual else []
        return words + {"packed": [], "apart": ["axes apart"], "square": ["axes square"]}[self.fill]


class Candidates:
    """Many strategies as one array per field; those with named values as positions
    in `RECOMPUTE`, `SCHEDULE_NAMES`, `DTYPES`, `ORDERS`, `FILLS`, `ATTENTIONS`, `EXPERTS`,
    `DISPATCHERS` and `REDUCE_DTYPES`; `parts` as a sum of powers of two, in the order of `PARTS`."""

    tp: Array
    cp: Array
    pp: Array
    dp: Array
    ep: Array
    etp: Array
    virtual: Array
    microbatch: Array
    zero: Array
    sp: Array
    recompute: Array
    schedule: Array
    dtype: Array
    reduce: Array
    offload: Array
    flash: Array
    overlap: Array
    graph: Array
    attention: Array
    experts: Array
    dispatcher: Array
    overlap_experts: Array
    order: Array
    fill: Array
    fused_loss: Array
    parts: Array
    reentrant: Array

    def __init__(self, **columns: Any) -> None:
        defaults = asdict(Strategy())
        given = {name: np.asarray(_code(name, columns.get(name, defaults[name])), float) for name in defaults}
        length = max((column.size for column in given.values()), default=1)
        for name, column in given.items():
            setattr(self, name, np.broadcast_to(column, (length,)) if column.size == 1 else column)
        self.length = length

    @classmethod
    def of(cls, strategies: Iterable[Strategy]) -> Candidates:
        """The same strategies, as arrays in the same order."""
        rows = list(strategies)
        return cls(**{f.name: [_code(f.name, getattr(r, f.name)) for r in rows] for f in fields(Strategy)})

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Strategy:
        values: dict[str, Any] = {}
        for field in fields(Strategy):
            value = getattr(self, field.name)[index]
            names = _NAMES.get(field.name)
            if names is not None:
                values[field.name] = names[int(value)]
            elif field.name == "parts":
                values["parts"] = tuple(part for i, part in enumerate(PARTS) if int(value) >> i & 1)
            elif isinstance(field.default, bool):
                values[field.name] = bool(value)
            else:
                values[field.name] = float(value) if field.name == "offload" else int(value)
        return Strategy(**values)

    def take(self, chosen: npt.NDArray[Any]) -> Candidates:
        """Those at the given positions, or where a mask is true."""
        return Candidates(**{f.name: getattr(self, f.name)[chosen] for f in fields(Strategy)})

    def computes_again(self, part: str) -> Array:
        """1 where that one of `PARTS` is computed again by itself."""
        alone = np.asarray(self.parts, int) >> PARTS.index(part) & 1
        if part != "experts":
            alone = alone | (self.recompute == RECOMPUTE.index("light"))
        return np.where(self.recompute == RECOMPUTE.index("full"), 0, alone)

    @property
    def devices(self) -> Array:
        return self.tp * self.cp * self.dp * self.pp


_NAMES: dict[str, Sequence[str]] = {
    "recompute": RECOMPUTE,
    "schedule": SCHEDULE_NAMES,
    "dtype": DTYPES,
    "order": ORDERS,
    "attention": ATTENTIONS,
    "experts": EXPERTS,
    "dispatcher": DISPATCHERS,
    "reduce": REDUCE_DTYPES,
    "fill": FILLS,
}


def of_schedules(codes: Array, value: Callable[[PipelineSchedule], Any]) -> Array:
    """For many rows at once, what each one's schedule says; codes: positions in `SCHEDULE_NAMES`.

    value: of one schedule, for all rows.

    >>> of_schedules(np.array([0.0, 2.0]), lambda record: 2.0 if record.splits else 1.0).tolist()
    [1.0, 2.0]
    """
    found = np.zeros(np.shape(codes))
    for code in np.unique(codes):
        found = np.where(codes == code, value(SCHEDULES[SCHEDULE_NAMES[int(code)]]), found)
    return found


def runs_beside_others(pp: Array, virtual: Array, schedule: Array) -> Array:
    """Whether one microbatch can compute while another's tokens travel to experts: no pipeline whose order
    stands in the way, or one that runs a forward beside a backward."""
    paired = of_schedules(schedule, lambda record: record.pairs(virtual)) > 0
    return np.asarray((pp == 1) | paired)


def head_rank(pp: Array, virtual: Array, schedule: Array) -> Array:
    """The pipeline rank of the last stage."""
    return of_schedules(schedule, lambda record: record.last_rank(pp, virtual))


def _code(name: str, value: Any) -> Any:
    """Names become positions, parts their sum; numbers and arrays stay."""
    if name == "parts" and isinstance(value, tuple):
        return sum(2 ** PARTS.index(part) for part in set(value))
    names = _NAMES.get(name)
    if names is None:
        return value
    if isinstance(value, str):
        return names.index(value)
    if isinstance(value, (list, tuple)):
        return [_code(name, v) for v in value]
    return value
