"""Exact local rewrites of a rank's program: the same values from fewer and cheaper calls.

Sweeps over the nodes, each with its table of small rewrite functions. Large patterns go first, while
they are as the autograd of the model wrote them; numbers become constants last, since rewrites look at
numbers. Values stay equal up to the rounding of sums and products in another order.

Whether a rewrite applies depends on what is equal on every rank, so all ranks keep the same nodes
(`rewrite.py`). Left out: anything that needs the order of nodes (`inplace.py`), and fusion that a
compiler does (`runtime/regions.py`).
"""

from __future__ import annotations

from hyperparallel.graph.passes.peephole_attention import ATTENTION, SCALED_PRODUCTS
from hyperparallel.graph.passes.peephole_norm import NORMS
from hyperparallel.graph.passes.peephole_rotary import ROTARY
from hyperparallel.graph.passes.peephole_scalars import CONSTANT_NUMBERS, NUMBERS
from hyperparallel.graph.passes.peephole_sums import FUSED_SUMS, SUMS
from hyperparallel.graph.passes.peephole_views import VIEWS
from hyperparallel.graph.passes.rewrite import Rewriter, Table
from hyperparallel.graph.program import RankProgram

SWEEPS: tuple[Table, ...] = (
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


def peephole(program: RankProgram, sweeps: tuple[Table, ...] = SWEEPS) -> RankProgram:
    """Rewrite the program in place; every rank ends with the same nodes."""
    rewriter = Rewriter(program)
    for table in sweeps:
        rewriter.sweep(table)
    return program
