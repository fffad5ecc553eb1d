"""Exact local rewrites of a rank's program: the same values from fewer and cheaper calls.

Sweeps over the nodes, each with its table of small rewrite functions. Large patterns go first, while
they are as the autograd of the model wrote them; numbers become constants last, since rewrites look at
numbers. Values stay equal up to the rounding of sums and products in another order.

Whether a rewrite applies depends on what is equal on every rank, so all ranks keep the same nodes
(`rewrite.py`). Left out: anything that needs the order of nodes (`inplace.py`), and fusion that a
compiler does (`runtime/exec/inductor.py`).
"""

from __future__ import annotations

from hyperparallel.graph.passes.peephole.attention import ATTENTION, SCALED_PRODUCTS
from hyperparallel.graph.passes.peephole.norm import NORMS
from hyperparallel.graph.passes.peephole.rewrite import Rewriter, RewriteTable
from hyperparallel.graph.passes.peephole.rotary import ROTARY
from hyperparallel.graph.passes.peephole.scalars import CONSTANT_NUMBERS, NUMBERS
from hyperparallel.graph.passes.peephole.sums import FUSED_SUMS, SUMS
from hyperparallel.graph.passes.peephole.views import VIEWS
from hyperparallel.graph.program import RankProgram

SWEEPS: tuple[RewriteTable, ...] = (
    NORMS,
    VIEWS,
    SUMS,
    ROTARY,
    ATTENTION,
    SCALED_PRODUCTS,
    VIEWS,
    NUMBERS,
    FUSED_SUMS,
    CONSTANT_NUMBERS,
)


def peephole(program: RankProgram, sweeps: tuple[RewriteTable, ...] = SWEEPS) -> RankProgram:
    """Rewrite the program in place; every rank ends with the same nodes."""
    rewriter = Rewriter(program)
    for table in sweeps:
        rewriter.sweep(table)
    return program
