"""A sharding rule: how the dims of an op's inputs and outputs move together, as named factors.

`"b s h, o h -> b s o"` reads like einsum: each letter is a factor of the iteration space. Cutting a
factor that stands in an output cuts that output; cutting one that stands in no output leaves a partial
(`reduce`); a factor in square brackets cannot be cut without a gather; `(b s)` is one dim merged from
two factors, outermost first, which is how views are written; `1` is a dim of size one.

A rule is concrete: it is built for one op with known shapes (see `table.py`). It says nothing about
meshes. `axis_states.py` turns it into choices for one mesh axis, `solve_axis.py` picks among them.
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
    blocked: factors that must be whole on every rank.
    reduce: what a cut factor leaves behind on the outputs that lack it: "sum", "max", "min", "prod";
        None where such a factor is to be treated as blocked.
    linear: groups of input positions through which a pending sum passes: if every input of a group is
        a pending sum and the others are whole or cut, so is every output. mm: ((0,), (1,)); add:
        ((0, 1),); mul: ((0,), (1,)); neg: ((0,),).
    inside: factors that may be cut because the op's local form communicates by itself (softmax over a
        cut dim), each with the bytes that one rank then exchanges, as a fraction of the first output (0: it
        need not communicate). Outputs that lack such a factor come out whole, not pending.
    """

    inputs: tuple[FactorDims, ...]
    outputs: tuple[FactorDims | None, ...]
    sizes: Mapping[str, int]
    blocked: frozenset[str] = frozenset()
    reduce: str | None = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    inside: Mapping[str, float] | None = None
