"""Attention as facts: grouped-query, sliding-window and multi-head latent (MLA), and its exact counts.

With H heads, G key/value heads, query/key size d and value size v, hidden size h (all per layer):

    gqa, window   q: h -> H d, k: h -> G d, v: h -> G v, o: H v -> h
    mla           q: h -> q_rank -> H d (or h -> H d where q_rank is 0), kv: h -> kv_rank + rope_dim and
                  kv_rank -> H (d - rope_dim + v), o: H v -> h, with a norm at each rank
    core          2 H (d + v) * keys(seq) FLOPs for each token: the scores, then the sum of the values

MLA is counted as it is trained: keys and values are expanded from the latent, one matrix product each.
Left out: softmax, rotary positions and masks, which are not matrix products (they are priced by the bytes
they move). Sources: GQA arXiv:2305.13245, MLA arXiv:2405.04434 section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyperparallel.workload.linear import Linear


@dataclass(frozen=True)
class Attention:
    """One attention: `head_dim` is the whole query/key size (MLA: with its rotary part `rope_dim`).

    `value_dim` 0 means `head_dim`; `kv_heads` 0 means `heads`. `window` is the number of keys a query sees
    where kind is "window". `source_dim` is the hidden size that keys and values come from (cross attention;
    0: the layer's own) and `context` their number (0: the sequence itself). `qk_norm` is "head" where one
    norm of `head_dim` serves all heads, "all" where each head has its own. `sinks` adds a learned logit per
    head, `gated` a gate of the size of the queries.

    >>> Attention(heads=32, kv_heads=8, head_dim=128).params(hidden=4096)
    41943040
    """

    heads: int
    head_dim: int
    kv_heads: int = 0
    kind: Literal["gqa", "window", "mla"] = "gqa"
    value_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    window: int = 0
    causal: bool = True
    bias: bool = False
    out_bias: bool = False
    rank_bias: bool = False
    """A bias on MLA's products down to the ranks."""
    qk_norm: Literal["none", "head", "all"] = "none"
    norm_bias: bool = False
    sinks: bool = False
    gated: bool = False
    source_dim: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def q_width(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of keys and values of a token that a cache keeps (MLA: the latent)."""
        if self.kind == "mla":
            return self.kv_rank + self.rope_dim
        return self.kv_heads * (self.head_dim + self.value_dim)

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """The weight matrices, in order of use."""
        out = Linear("o", self.heads * self.value_dim, hidden, self.out_bias, cut="in")
        if self.kind == "mla":
            return (*self._latent(hidden), out)
        source = self.source_dim or hidden
        queries = self.q_width * (2 if self.gated else 1)
        return (
            Linear("q", hidden, queries, self.bias, cut="out"),
            Linear("k", source, self.kv_heads * self.head_dim, self.bias, cut="out"),
            Linear("v", source, self.kv_heads * self.value_dim, self.bias, cut="out"),
            out,
        )

    def _latent(self, hidden: int) -> tuple[Linear, ...]:
        kv = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        queries: tuple[Linear, ...] = (Linear("q", hidden, self.q_width, cut="out"),)
        if self.q_rank:
            queries = (
                Linear("q_down", hidden, self.q_rank, self.rank_bias),
                Linear("q_up", self.q_rank, self.q_width, cut="out"),
            )
        return (
            *queries,
            Linear("kv_down", hidden, self.kv_rank + self.rope_dim, self.rank_bias),
            Linear("kv_up", self.kv_rank, kv, cut="out"),
        )

    @property
    def vector_params(self) -> int:
        """Parameters outside the matrices: norms of queries, keys and latents, sinks."""
        norms = self.q_rank + self.kv_rank
        if self.qk_norm == "head":
            norms += 2 * self.head_dim
        elif self.qk_norm == "all":
            norms += (self.heads + self.kv_heads) * self.head_dim
        return norms * (2 if self.norm_bias else 1) + (self.heads if self.sinks else 0)

    def params(self, hidden: int) -> int:
        """Parameters at a hidden size."""
        return sum(linear.params for linear in self.linears(hidden)) + self.vector_params

    def keys(self, seq: int, causal: bool = True) -> float:
        """Mean number of keys that one of `seq` queries is multiplied with.

        `causal=True` counts only what the mask leaves: (seq + 1) / 2 for causal attention, and for a causal
        window of w < seq keys w - w (w - 1) / (2 seq). `causal=False` counts the whole square, as a
        kernel without skipping computes it and as most published MFU numbers count it.

        >>> window = Attention(heads=1, head_dim=1, kind="window", window=2)
        >>> window.keys(4), window.keys(4, causal=False)
        (1.75, 4)
        """
        if self.context:
            return self.context
        if not causal:
            return seq
        span = min(self.window, seq) if self.window else seq
        if self.causal:
            return span - span * (span - 1) / (2 * seq)
        return span

    def core_flops(self, seq: int, causal: bool = True) -> float:
        """FLOPs forward for each token between the projections: scores and weighted values."""
        return 2 * self.heads * (self.head_dim + self.value_dim) * self.keys(seq, causal)

    def words(self) -> str:
        """A few words for a report.

        >>> Attention(heads=8, kv_heads=2, head_dim=64).words()
        'GQA 8/2 heads of 64'
        """
        if self.kind == "mla":
            return f"MLA {self.heads} heads of {self.head_dim}, rank {self.kv_rank}"
        name = "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"
        count = f"{self.heads}" if self.kv_heads == self.heads else f"{self.heads}/{self.kv_heads}"
        window = f", window {self.window}" if self.window else ""
        return f"{name} {count} heads of {self.head_dim}{window}"
