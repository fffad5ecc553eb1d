"""A weight matrix as a fact: what it stores, what a token costs in it, how tensor parallelism cuts it.

Parameters and matrix products of every part of a model are sums over its `Linear`s, so the two cannot
drift apart:

    params          = copies * (inputs * outputs + outputs if biased)
    flops per token = 2 * inputs * outputs * used      (a multiply and an add; the bias is left out)

A routed expert layer is one `Linear` of many copies of which a token uses `topk`. A product done once for
each sample (the modulation of a diffusion transformer) is divided by the tokens of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """A product with a weight of shape (outputs, inputs), stored `copies` times.

    `cut` says what tensor parallelism does with it: "out" cuts the outputs (column parallel), "in" the
    inputs (row parallel, its result waits for a sum), "none" replicates it.

    >>> up = Linear("up", 8, 32, copies=4, used=2)
    >>> up.params, up.active_params, up.flops(seq=16)
    (1024, 512, 1024)
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    cut: Literal["out", "in", "none"] = "none"
    per_sample: bool = False

    @property
    def params(self) -> int:
        return self.copies * self._one

    @property
    def active_params(self) -> int:
        """Parameters that one token meets."""
        return self.used * self._one

    def flops(self, seq: int) -> float:
        """FLOPs forward for each of the `seq` tokens of a sample."""
        flops = 2 * self.inputs * self.outputs * self.used
        return flops / seq if self.per_sample else flops

    @property
    def _one(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


def total_params(linears: Iterable[Linear]) -> int:
    """Parameters of all of them."""
    return sum(linear.params for linear in linears)


def total_flops(linears: Iterable[Linear], seq: int) -> float:
    """FLOPs forward for each of the `seq` tokens of a sample, of all of them."""
    return sum(linear.flops(seq) for linear in linears)
