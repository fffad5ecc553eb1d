"""A sharding rule: how the dims of an op's inputs and outputs move together, as named factors.

`"b s h, o h -> b s o"` reads like einsum: each letter is a factor of the iteration space. Cutting a
factor that stands in an output cuts that output; cutting one that stands in no output leaves a partial
(`reduce`); a factor in square brackets cannot be cut without a gather; `(b s)` is one dim merged from
two factors, outermost first, which is how views are written; `1` is a dim of size one.

A rule is concrete: it is built for one op with known shapes (see `table.py`). It says nothing about
meshes. `axis_states.py` turns it into choices for one mesh axis, `solve_axis.py` picks among them.

`OpFacts` are what passes and prices ask for by an op's name. A family of rules has a table `FACTS` beside
its `RULES`; what is not said there is the default, which is right for an op that nobody knows: it costs the
memory that it touches, and may share it with its operands. Facts that only torch can tell (an op's schema,
whether it is pointwise) stay with the pass that asks torch. How a kernel is called that can't stand a piece
is a local form (`graph/local/fragile.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FactorDims = tuple[tuple[str, ...], ...]
"""Per tensor dim, the factors it is made of, outermost first; () is a dim of size one."""


@dataclass(frozen=True)
class Rule:
    """Factors of one op.

    inputs, outputs: one `FactorDims` per tensor operand (in `Op.inputs` order) and per result (in
        `Op.outputs` order; None for a result that is not a tensor).
    sizes: global size of every factor.
    blocked: factors that no axis may cut.
    reduce: what a cut factor leaves behind on the outputs that lack it: "sum", "max", "min", "prod";
        None where such a factor is to be treated as blocked.
    linear: groups of input positions through which a pending sum passes: if every input of a group is
        a pending sum and the others are whole or cut, so is every output. mm: ((0,), (1,)); add:
        ((0, 1),); mul: ((0,), (1,)); neg: ((0,),).
    inside: factors that may be cut because the op's local form communicates by itself (softmax over a
        cut dim), each with the bytes that one rank then receives in all of its exchanges, as a fraction of
        the first output (0: it need not communicate). Outputs that lack such a factor come out whole, not
        pending.
    """

    inputs: tuple[FactorDims, ...]
    outputs: tuple[FactorDims | None, ...]
    sizes: Mapping[str, int]
    blocked: frozenset[str] = frozenset()
    reduce: str | None = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    inside: Mapping[str, float] | None = None


@dataclass(frozen=True)
class OpFacts:
    """What is known of an op beside its factors.

    flops: operations per point of its iteration space; 0: only the memory it touches counts. not_looped:
        factors that stand beside that space: a loop over another one meets each of their points just once.
    view: its result is another look at the operand's memory, which costs nothing. same_elements: and has
        every element of it once.
    orderless: its local form is one call whichever elements of a factor it gets, so that a factor may be
        cut inside.
    random: it draws random numbers, so that leaving it out would shift those drawn later. draws_by_value: how
        many depends on the values of its operands.
    exchanges: how often its local form exchanges over the ranks that share a cut factor (2 as of a maximum
        and a sum); `Rule.inside` has the bytes of all of them together.
    scored: of a loss over classes, whose four exchanges are priced with the latency of one together:
        gathering the scores could save the others' on a small model, and is what a long batch has no memory
        for.
    averages: its result is a mean. reduction_at: where it has an argument `reduction`; weight_at: and one of
        weights of classes, whose labels it counts. scales: its numbers multiply or divide the operand.
    fresh: its result never shares memory with an operand. in_place: positions of operands whose memory its
        result may take, which may change places with the first: it has a twin, "name_", that writes there.
    looks_up: of its first operand it reads as many elements as it makes.
    group: what a timeline counts it under.
    """

    flops: float = 0.0
    not_looped: tuple[str, ...] = ()
    view: bool = False
    same_elements: bool = False
    orderless: bool = False
    random: bool = False
    draws_by_value: bool = False
    exchanges: int = 2
    scored: bool = False
    averages: bool = False
    reduction_at: int | None = None
    weight_at: int | None = None
    scales: bool = False
    fresh: bool = False
    in_place: tuple[int, ...] = ()
    looks_up: bool = False
    group: str = ""


UNKNOWN_OP = OpFacts()
