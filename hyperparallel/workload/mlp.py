"""Feed-forward layers as facts: dense and mixture of experts, with exact counts.

    dense, gated   gate and up: h -> width, down: width -> h
    dense, plain   up: h -> width, down: width -> h
    experts        a router h -> experts, then `topk` of the experts, each a dense layer of `width`; shared
                   experts run for every token and are one dense layer of `shared_width`

A latent mixture (`latent` > 0) goes down to `latent` before the experts and up after them, so that the
experts work at that size (Nemotron 3). Left out: activation functions, the permutation of tokens.
Sources: DeepSeekMoE arXiv:2401.06066, Qwen2-MoE for the gate of the shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyperparallel.workload.linear import Linear


@dataclass(frozen=True)
class Mlp:
    """A dense feed-forward layer.

    >>> Mlp(14336).params(hidden=4096)
    176160768
    """

    width: int
    gated: bool = True
    bias: bool = False

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """The weight matrices, in order of use."""
        return _dense(hidden, self.width, self.gated, self.bias)

    def params(self, hidden: int) -> int:
        """Parameters at a hidden size."""
        return sum(linear.params for linear in self.linears(hidden))

    def words(self) -> str:
        """
        >>> Mlp(14336).words()
        'gated MLP 14,336'
        """
        return f"{'gated ' if self.gated else ''}MLP {self.width:,}"


@dataclass(frozen=True)
class Moe:
    """A mixture of `experts` of which each token takes `topk`; shared experts as one layer.

    `shared_gate` is a learned scalar gate h -> 1 on the shared expert; `router_bias` a trained bias of the
    router (balancing offsets that no gradient trains are no parameters). `clamped`: both halves of the gated
    product are held within limits (gpt-oss).

    >>> moe = Moe(experts=8, topk=2, width=14336)
    >>> moe.params(hidden=4096), moe.active_params(hidden=4096)
    (1409318912, 352354304)
    """

    experts: int
    topk: int
    width: int
    shared_width: int = 0
    gated: bool = True
    bias: bool = False
    shared_bias: bool = False
    router_bias: bool = False
    clamped: bool = False
    shared_gate: bool = False
    latent: int = 0

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """The weight matrices, in order of use: router, shared, routed."""
        return (*self.router(hidden), *self.shared(hidden), *self.routed(hidden))

    def router(self, hidden: int) -> tuple[Linear, ...]:
        """The matrix that scores the experts."""
        return (Linear("router", hidden, self.experts, self.router_bias),)

    def shared(self, hidden: int) -> tuple[Linear, ...]:
        """What every token runs: the shared experts, their gate, the way to the latent size and back."""
        found: tuple[Linear, ...] = ()
        if self.shared_width:
            found = _dense(hidden, self.shared_width, self.gated, self.shared_bias, "shared_")
        if self.shared_gate:
            found = (*found, Linear("shared_scale", hidden, 1))
        if self.latent:
            down = Linear("latent_down", hidden, self.latent, self.bias)
            found = (*found, down, Linear("latent_up", self.latent, hidden, self.bias))
        return found

    def routed(self, hidden: int) -> tuple[Linear, ...]:
        """The experts: each matrix is stored `experts` times and used `topk` times a token."""
        size = self.latent or hidden
        return _dense(size, self.width, self.gated, self.bias, "expert_", self.experts, self.topk)

    def params(self, hidden: int) -> int:
        """Parameters at a hidden size."""
        return sum(linear.params for linear in self.linears(hidden))

    def active_params(self, hidden: int) -> int:
        """Parameters that one token meets."""
        return sum(linear.active_params for linear in self.linears(hidden))

    def words(self) -> str:
        """
        >>> Moe(256, 8, 2048, shared_width=2048).words()
        '256 experts top 8 of 2,048, shared 2,048'
        """
        shared = f", shared {self.shared_width:,}" if self.shared_width else ""
        return f"{self.experts} experts top {self.topk} of {self.width:,}{shared}"


def _dense(
    hidden: int, width: int, gated: bool, bias: bool, prefix: str = "", copies: int = 1, used: int = 1
) -> tuple[Linear, ...]:
    names = ("gate", "up") if gated else ("up",)
    into = tuple(Linear(prefix + name, hidden, width, bias, copies, used, "out") for name in names)
    return (*into, Linear(prefix + "down", width, hidden, bias, copies, used, "in"))
