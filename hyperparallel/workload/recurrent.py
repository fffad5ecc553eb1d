"""Mixers whose cost grows linearly with the sequence: state-space layers and linear attention, as facts.

With inner size I = heads * head_dim, state N, G groups and chunk length L (per token):

    mamba    in: h -> 2 I, x: I -> dt_rank + 2 N, dt: dt_rank -> I, out: I -> h; the scan is 6 I N
    mamba2   in: h -> 2 I + 2 G N + heads, out: I -> h; in chunks (SSD): 4 I N through the state, and
             2 (G N + I) * (L + 1) / 2 inside a chunk
    delta    (gated delta rule) in: h -> 2 G N + 2 I + 2 heads, out: I -> h; 6 I N through the state, and
             2 (3 heads N + 2 I) * (L + 1) / 2 inside a chunk: k k', q k', the inverse applied to keys and
             to values, the weighted values

and a short depthwise convolution of `conv` taps before. All the chunk terms count the triangle below the
diagonal. Left out: exponentials, gates, sums, making the inverse. Sources: Mamba arXiv:2312.00752, Mamba-2
arXiv:2405.21060 section 6, Gated DeltaNet arXiv:2412.06464 section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyperparallel.workload.linear import Linear


@dataclass(frozen=True)
class StateSpace:
    """One recurrent mixer. `groups` heads share keys (B and C of Mamba-2); `heads` carry the values.

    `kind` is "ssm" or "linear" and follows from `form`, so that it reads like `Attention.kind`.

    >>> StateSpace("mamba2", heads=8, head_dim=16, groups=1, state=32).inner
    128
    """

    form: Literal["mamba", "mamba2", "delta"]
    heads: int
    head_dim: int
    state: int
    groups: int = 1
    conv: int = 4
    dt_rank: int = 0
    chunk: int = 256
    bias: bool = False
    conv_bias: bool = True

    @property
    def kind(self) -> Literal["ssm", "linear"]:
        return "linear" if self.form == "delta" else "ssm"

    @property
    def causal(self) -> bool:
        return True

    @property
    def inner(self) -> int:
        """Width of the values."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution."""
        return self.inner + (0 if self.form == "mamba" else 2 * self.groups * self.state)

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """The weight matrices, in order of use."""
        out = Linear("o", self.inner, hidden, self.bias, cut="in")
        if self.form == "mamba":
            return (
                Linear("in", hidden, 2 * self.inner, self.bias, cut="out"),
                Linear("x", self.inner, self.dt_rank + 2 * self.state, cut="in"),
                Linear("dt", self.dt_rank, self.inner, bias=True, cut="out"),
                out,
            )
        scalars = self.heads * (2 if self.form == "delta" else 1)
        width = 2 * self.inner + 2 * self.groups * self.state + scalars
        return (Linear("in", hidden, width, self.bias, cut="out"), out)

    @property
    def vector_params(self) -> int:
        """Parameters outside the matrices: convolution, decay, step sizes, skip, the norm before the end."""
        conv = self.conv_channels * (self.conv + (1 if self.conv_bias else 0))
        if self.form == "mamba":
            return conv + self.inner * (self.state + 1)
        if self.form == "mamba2":
            return conv + 3 * self.heads + self.inner
        return conv + 2 * self.heads + self.head_dim

    def params(self, hidden: int) -> int:
        """Parameters at a hidden size."""
        return sum(linear.params for linear in self.linears(hidden)) + self.vector_params

    def core_flops(self, seq: int, causal: bool = True) -> float:  # noqa: ARG002 -- as attention's
        """FLOPs forward for each token between the projections; `causal` has no effect, nothing is masked
        outside a chunk."""
        conv = 2 * self.conv_channels * self.conv
        through = self.inner * self.state
        if self.form == "mamba":
            return conv + 6 * through
        inside = (min(self.chunk, seq) + 1) / 2
        if self.form == "mamba2":
            return conv + 4 * through + 2 * (self.groups * self.state + self.inner) * inside
        keys = self.heads * self.state
        return conv + 6 * through + 2 * (3 * keys + 2 * self.inner) * inside

    @property
    def summary(self) -> int:
        """Elements that say what a piece of a sequence does to the state: what it adds, and what is left of
        the state before it (a factor of each element, of each head, or a matrix of each head).

        >>> StateSpace("delta", heads=2, head_dim=16, state=8).summary
        384
        """
        left = {
            "mamba": self.inner * self.state,
            "mamba2": self.heads,
            "delta": self.heads * self.state * self.state,
        }
        return self.inner * self.state + left[self.form]

    def words(self) -> str:
        """A few words for a report.

        >>> StateSpace("mamba2", heads=64, head_dim=64, state=128).words()
        'Mamba-2 64 heads of 64, state 128'
        """
        name = {"mamba": "Mamba", "mamba2": "Mamba-2", "delta": "gated delta rule"}[self.form]
        if self.form == "mamba":
            return f"{name} {self.inner} channels, state {self.state}"
        return f"{name} {self.heads} heads of {self.head_dim}, state {self.state}"
