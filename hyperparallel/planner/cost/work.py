"""What one microbatch asks of one device in one layer: kernels, messages and bytes kept, over candidates.

Everything is an array over candidates (or a number that holds for all), so a layer is described once for a
thousand strategies. Nothing here knows a device: `price.py` and `collectives.py` price it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

Array = npt.NDArray[Any]
Amount = Array | float


class Product(NamedTuple):
    """`copies` matrix products m x n x k, each reading and writing 2-byte elements.

    low: runs in the strategy's own number format (the weight products); otherwise in 16 bits. scaled: its
    first operand is brought into that format for this product (weights are once a step, and the weight
    gradient's operands for the products before). scaled_back: the same of the product that makes the gradient
    of its input. grouped: of experts, over groups of rows of unequal length. attention: 1 of fused attention,
    2 of a scan, priced with those kernels' efficiency. slower: on the
    seconds of its arithmetic (rows not aligned in memory)."""

    m: Amount
    n: Amount
    k: Amount
    copies: Amount = 1.0
    low: bool = True
    attention: int = 0
    scaled: Amount = True
    scaled_back: Amount = True
    grouped: bool = False
    slower: Amount = 1.0


class LayerCollective(NamedTuple):
    """One collective over a parallel axis. num_bytes: of the whole tensor that is gathered, reduced or, for
    an all-to-all or a send, of what one rank sends. hidden: may travel beside compute; 2 where any software
    lets it (the sum of input gradients, beside the product that makes the weight gradient). copies: of an
    all-to-all, how many of the bytes are copies of one another: a bundle of ranks behind one link is sent
    them once."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    axis: Literal["tp", "cp", "ep", "etp", "dp", "pp"]
    num_bytes: Amount
    times: Amount = 1.0
    hidden: int = 0
    copies: Amount = 1.0


@dataclass
class PassWork:
    """Kernels and messages of one pass over a layer.

    products: matrix products. stream_bytes: read and written by other kernels. launches: kernels that the
    host starts. expert_launches: those that it starts for experts. permuted_bytes: of tokens copied, sorted
    and summed around experts. messages: collectives.
    """

    products: list[Product] = field(default_factory=list)
    stream_bytes: Amount = 0.0
    launches: Amount = 0.0
    expert_launches: Amount = 0.0
    permuted_bytes: Amount = 0.0
    messages: list[LayerCollective] = field(default_factory=list)

    def product(self, m: Amount, n: Amount, k: Amount, **more: bool | Amount) -> None:
        self.products.append(Product(m, n, k, **more))  # type: ignore[arg-type]
        self.launches = self.launches + 1.0

    def stream(self, num_bytes: Amount, launches: Amount = 1.0) -> None:
        self.stream_bytes = self.stream_bytes + num_bytes
        self.launches = self.launches + launches

    def scaled(self, factor: Amount) -> PassWork:
        """`factor` times as much of everything (0 or 1 for each candidate, say)."""
        return PassWork(
            [p._replace(copies=p.copies * factor) for p in self.products],
            self.stream_bytes * factor,
            self.launches * factor,
            self.expert_launches * factor,
            self.permuted_bytes * factor,
            [m._replace(times=m.times * factor) for m in self.messages],
        )

    def flops(self) -> Amount:
        """Of the matrix products."""
        return sum((2.0 * p.m * p.n * p.k * p.copies for p in self.products), start=0.0)


@dataclass
class LayerWork:
    """One layer of one microbatch: forward, backward without recomputation, and what is computed again.

    saved_bytes: kept from forward to backward. whole_bytes: what would be kept without recomputation, alive
    while this one layer runs backward. params: elements held by this rank outside the experts, and
    expert_params inside them (both after tp, ep and etp; before ZeRO).
    """

    forward: PassWork
    backward: PassWork
    again: PassWork
    saved_bytes: Amount
    whole_bytes: Amount
    params: Amount
    expert_params: Amount = 0.0
