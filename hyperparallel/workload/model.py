"""A model as facts: hidden size, vocabulary, runs of equal layers, encoders. Counts only, no weights.

    params  = embedding + sum over layers of Layer.params + final norm + head + encoders
              embedding = vocab h + positions h (+ a norm) + stem; head = vocab h unless tied (+ bias)
    FLOPs   = per token forward: sum over layers of Layer.flops_per_token, 2 h vocab for the head
              (tied or not; the embedding is a lookup), stem; a training step costs 3 times that

Extra predictions (`mtp`, DeepSeek-V3 section 2.2) are counted only on request, as in published sizes: each
is a block of layers (one more last layer unless `mtp_block` says otherwise), three norms and a matrix
2 h -> h; embedding and head are the model's own, and `mtp_shared` blocks are stored once. What layers are
made of stands in layer.py, attention.py, recurrent.py and mlp.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from hyperparallel.workload.attention import Attention
from hyperparallel.workload.layer import NORM_VECTORS, Layer, LayerParams, Norm
from hyperparallel.workload.linear import Linear, total_flops, total_params
from hyperparallel.workload.mlp import Mlp, Moe
from hyperparallel.workload.recurrent import StateSpace

__all__ = [
    "Attention", "EncoderPart", "Layer", "LayerParams", "Linear", "Mlp", "Model", "Moe", "StateSpace", "runs",
]  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What a network computes. `layers` are runs (layer, how many in a row), first to last.

    `vocab` 0 means no token embedding and no head (a vision encoder, a diffusion transformer): `stem` then
    makes the hidden vectors of a token from its input, and `outputs` reads them at the end. `positions` is
    the length of a learned position table (0: rotary or none). `vectors` counts trained vectors of the
    hidden size outside layers (a class token, a table of class labels).

    >>> layer = Layer(Attention(heads=32, kv_heads=8, head_dim=128), Mlp(14336))
    >>> model = Model("llama", hidden=4096, vocab=128256, layers=((layer, 32),))
    >>> model.params(), model.num_layers
    (8030261248, 32)
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[tuple[Layer, int], ...]
    tied: bool = False
    positions: int = 0
    max_seq: int = 0
    dropout: float = 0.0
    norm: Norm = "rms"
    embedding_norm: bool = False
    final_norms: int = 1
    head_bias: bool = False
    stem: tuple[Linear, ...] = ()
    outputs: tuple[Linear, ...] = ()
    vectors: int = 0
    encoders: tuple[EncoderPart, ...] = ()
    mtp: int = 0
    mtp_block: tuple[Layer, ...] = ()
    mtp_shared: bool = False
    source: str = ""

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    def layer_at(self, index: int) -> Layer:
        """The layer at a position, 0 first."""
        return tuple(self.each_layer())[index]

    def each_layer(self) -> Iterator[Layer]:
        """The layers one by one, first to last."""
        for layer, count in self.layers:
            for _ in range(count):
                yield layer

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers and how often each occurs, in order of first appearance.

        >>> local, full = Layer(norms=1), Layer(norms=2)
        >>> [n for _, n in Model("m", 8, 8, ((local, 3), (full, 1), (local, 3))).kinds]
        [6, 1]
        """
        counts: dict[Layer, int] = {}
        for layer, count in self.layers:
            counts[layer] = counts.get(layer, 0) + count
        return tuple(counts.items())

    @property
    def embedding_params(self) -> int:
        """Parameters before the first layer: token and position tables, their norm, stem, vectors."""
        vectors = self.vocab + self.positions + self.vectors
        norm = NORM_VECTORS[self.norm] if self.embedding_norm else 0
        return (vectors + norm) * self.hidden + total_params(self.stem)

    @property
    def head_params(self) -> int:
        """Parameters after the last layer: final norm, head (0 where tied to the embedding), its bias."""
        norms = self.final_norms * NORM_VECTORS[self.norm] * self.hidden
        head = 0 if self.tied else self.vocab * self.hidden
        bias = self.vocab if self.head_bias else 0
        return norms + head + bias + total_params(self.outputs)

    @property
    def mtp_layers(self) -> tuple[Layer, ...]:
        """The layers of one extra prediction."""
        return self.mtp_block or (self.layer_at(-1),)

    @property
    def mtp_params(self) -> int:
        """Parameters of the extra predictions."""
        if not self.mtp:
            return 0
        norms = 3 * NORM_VECTORS[self.norm] * self.hidden
        block = sum(self.layer_params(layer).total for layer in self.mtp_layers)
        stored = 1 if self.mtp_shared else self.mtp
        return stored * (block + norms + 2 * self.hidden * self.hidden)

    def layer_params(self, layer: Layer) -> LayerParams:
        """A layer's parameters in this model."""
        return layer.params(self.hidden, self.norm)

    def params(self, mtp: bool = False) -> int:
        """All parameters, encoders included; with those of extra predictions if asked."""
        layers = sum(self.layer_params(layer).total * count for layer, count in self.kinds)
        encoders = sum(part.params for part in self.encoders)
        extra = self.mtp_params if mtp else 0
        return self.embedding_params + layers + self.head_params + encoders + extra

    def active_params(self) -> int:
        """Parameters that one token meets: of routed experts topk / experts, all of everything else."""
        kinds = self.kinds
        layers = sum(self.layer_params(layer).total * count for layer, count in kinds)
        active = sum(layer.active_params(self.hidden, self.norm) * count for layer, count in kinds)
        return self.params() - layers + active

    def head_flops(self, seq: int = 1) -> float:
        """FLOPs forward for each token after the last layer: the product with the vocabulary."""
        return 2 * self.hidden * self.vocab + total_flops(self.outputs, seq)

    def flops_per_token(self, seq: int, causal: bool = True, mtp: bool = False) -> float:
        """FLOPs forward for each token of a sample of `seq` tokens, head included, encoders left out.

        `causal=True` counts what masks leave of attention, `causal=False` the whole square. Encoders work
        on tokens of their own: add `EncoderPart.flops` for each image of a sample.
        """
        flops = sum(layer.flops_per_token(self.hidden, seq, causal) * count for layer, count in self.kinds)
        if mtp and self.mtp:
            block = sum(layer.flops_per_token(self.hidden, seq, causal) for layer in self.mtp_layers)
            flops += self.mtp * (block + 4 * self.hidden * self.hidden + self.head_flops(seq))
        return flops + total_flops(self.stem, seq) + self.head_flops(seq)

    def train_flops_per_token(self, seq: int, causal: bool = True, mtp: bool = False) -> float:
        """FLOPs of forward and backward for each token: three times the forward, no recompute."""
        return 3 * self.flops_per_token(seq, causal, mtp)

    def words(self) -> str:
        """One line for a report.

        >>> layer = Layer(Attention(heads=32, kv_heads=8, head_dim=128), Mlp(14336))
        >>> Model("llama", 4096, 128256, ((layer, 32),)).words()
        '32 layers, hidden 4096, GQA 32/8 heads of 128, gated MLP 14,336, 8.03 B parameters'
        """
        mixers: dict[str, int] = {}
        widths: dict[str, int] = {}
        for layer, count in self.kinds:
            for part, table in ((layer.attention, mixers), (layer.cross, mixers), (layer.mlp, widths)):
                if part is not None:
                    table[part.words()] = table.get(part.words(), 0) + count
        text = [f"{self.num_layers} layers", f"hidden {self.hidden}"]
        for table in (mixers, widths):
            only = len(table) == 1
            text += [name if only else f"{count} x {name}" for name, count in table.items()]
        text += [f"encoder {part.model.name}" for part in self.encoders]
        if self.mtp:
            text.append(f"{self.mtp} extra prediction{'s' if self.mtp > 1 else ''}")
        total, active = self.params(), self.active_params()
        text.append(f"{_count(total)} parameters")
        if active != total:
            text.append(f"{_count(active)} active")
        return ", ".join(text)


@dataclass(frozen=True)
class EncoderPart:
    """An encoder in front of a model: `tokens` go in for each image or clip, `tokens // merge` come out.

    `projector` maps `merge` encoder vectors to one vector of the model; its matrices run once for each
    merged token; `norm_params` are those of a norm before it.
    """

    model: Model
    tokens: int
    merge: int = 1
    projector: tuple[Linear, ...] = ()
    norm_params: int = 0

    @property
    def params(self) -> int:
        return self.model.params() + total_params(self.projector) + self.norm_params

    @property
    def tokens_out(self) -> int:
        """Tokens of the main model's sequence that one image takes."""
        return self.tokens // self.merge

    def flops(self, images: int = 1, causal: bool = True) -> float:
        """FLOPs forward for so many images; `causal` as in `Model.flops_per_token`."""
        inside = self.tokens * self.model.flops_per_token(self.tokens, causal)
        return images * (inside + self.tokens_out * total_flops(self.projector, self.tokens_out))


def _count(number: int) -> str:
    """Three digits and a unit."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def runs(layers: Iterable[Layer]) -> tuple[tuple[Layer, int], ...]:
    """Layers one by one, joined to runs of equal neighbours.

    >>> [count for _, count in runs([Layer(norms=1), Layer(norms=1), Layer(norms=2)])]
    [2, 1]
    """
    return tuple((layer, len(tuple(run))) for layer, run in groupby(layers))
