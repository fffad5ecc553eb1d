"""One layer of a model as a fact: a mixer, a feed-forward part, its norms, and exact counts.

A layer is [mixer] [cross attention] [feed-forward], each optional (a hybrid model stacks layers that hold
only one of them), with `norms` normalisations of the hidden size around them. `adaln` is the number of
modulation vectors of a diffusion transformer's layer (shift, scale and gate of both halves: 6), made from
one conditioning vector for each sample by a matrix h -> adaln * h (arXiv:2212.09748, adaLN-Zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyperparallel.workload.attention import Attention
from hyperparallel.workload.linear import Linear, total_flops, total_params
from hyperparallel.workload.mlp import Mlp, Moe
from hyperparallel.workload.recurrent import StateSpace

Norm = Literal["rms", "layer", "layer_no_bias", "bare"]
"""A norm's parameters: weight; weight and bias; weight of a centred norm; none."""

NORM_VECTORS: dict[str, int] = {"rms": 1, "layer": 2, "layer_no_bias": 1, "bare": 0}


@dataclass(frozen=True)
class LayerParams:
    """Parameters of a layer by what cuts them: tensor parallelism (attention, mlp), experts, nothing.

    `attention` holds any mixer and the cross attention, `mlp` a dense feed-forward part or the shared
    experts, `experts` the routed ones, `modulation` the adaLN matrix.
    """

    attention: int = 0
    mlp: int = 0
    experts: int = 0
    router: int = 0
    norms: int = 0
    modulation: int = 0

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.experts + self.router + self.norms + self.modulation


@dataclass(frozen=True)
class Layer:
    """One layer. `parallel` says that mixer and feed-forward part read the same input (GPT-NeoX, Falcon):
    tensor parallelism then sums their results at once.

    >>> layer = Layer(Attention(heads=32, kv_heads=8, head_dim=128), Mlp(14336))
    >>> layer.params(hidden=4096).total
    218112000
    """

    attention: Attention | StateSpace | None = None
    mlp: Mlp | Moe | None = None
    cross: Attention | None = None
    norms: int = 2
    adaln: int = 0
    parallel: bool = False

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """Every weight matrix of the layer, in order of use."""
        parts = (self.attention, self.cross, self.mlp)
        found = tuple(linear for part in parts if part is not None for linear in part.linears(hidden))
        return (*self.modulation(hidden), *found)

    def params(self, hidden: int, norm: Norm = "rms") -> LayerParams:
        """Parameters at a hidden size, split by kind."""
        mixers = (part.params(hidden) for part in (self.attention, self.cross) if part is not None)
        mlp = experts = router = 0
        if isinstance(self.mlp, Moe):
            mlp = total_params(self.mlp.shared(hidden))
            experts = total_params(self.mlp.routed(hidden))
            router = total_params(self.mlp.router(hidden))
        elif self.mlp is not None:
            mlp = self.mlp.params(hidden)
        norms = self.norms * NORM_VECTORS[norm] * hidden
        return LayerParams(sum(mixers), mlp, experts, router, norms, total_params(self.modulation(hidden)))

    def active_params(self, hidden: int, norm: Norm = "rms") -> int:
        """Parameters that one token meets: routed experts count topk / experts."""
        params = self.params(hidden, norm)
        if not isinstance(self.mlp, Moe):
            return params.total
        used = sum(linear.active_params for linear in self.mlp.routed(hidden))
        return params.total - params.experts + used

    def flops_per_token(self, hidden: int, seq: int, causal: bool = True) -> float:
        """FLOPs forward for each token of a sample of `seq`: its matrices, and the cores of its mixers.

        The keys and values of a cross attention are made once for each of its `context` vectors, so
        their two matrices count context / seq of a token's share.
        """
        flops = total_flops(self.linears(hidden), seq)
        for part in (self.attention, self.cross):
            if part is not None:
                flops += part.core_flops(seq, causal)
        if self.cross is not None and self.cross.context:
            outside = [one for one in self.cross.linears(hidden) if one.name in ("k", "v")]
            flops += total_flops(outside, seq) * (self.cross.context / seq - 1)
        return flops

    def words(self) -> str:
        """A few words for a report.

        >>> Layer(Attention(heads=32, kv_heads=8, head_dim=128), Mlp(14336)).words()
        'GQA 32/8 heads of 128 + gated MLP 14,336'
        """
        parts = (self.attention, self.cross, self.mlp)
        return " + ".join(part.words() for part in parts if part is not None)

    def modulation(self, hidden: int) -> tuple[Linear, ...]:
        """The matrix that makes the modulation vectors of a sample, where there are any."""
        if not self.adaln:
            return ()
        width = self.adaln * hidden
        return (Linear("modulation", hidden, width, bias=True, cut="out", per_sample=True),)
