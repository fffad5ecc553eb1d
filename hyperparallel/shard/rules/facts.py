"""Facts about one op that passes and prices ask for by its name; they stand with its rule.

A family of rules has a table `FACTS` beside its `RULES`; what is not said there is the default, which is
right for an op that nobody knows: it costs the memory that it touches, and may share it with its operands.
Facts that only torch can tell (an op's schema, whether it is pointwise) stay with the pass that asks torch.
How a kernel is called that can't stand a piece is a local form (`graph/local/fragile.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpFacts:
    """What is known of an op beside its factors.

    flops: operations per point of its iteration space; 0: only the memory it touches counts.
    view: its result is another look at the operand's memory, which costs nothing. same_elements: and has
        every element of it once.
    orderless: its local form is one call whichever elements of a factor it gets, so that a factor may be
        cut inside.
    random: it draws random numbers, so that leaving it out would shift those drawn later.
    exchanges: how often its local form exchanges over the ranks that share a cut factor (`Rule.inside`); 2 as
        of a maximum and a sum.
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
    view: bool = False
    same_elements: bool = False
    orderless: bool = False
    random: bool = False
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


UNKNOWN = OpFacts()
