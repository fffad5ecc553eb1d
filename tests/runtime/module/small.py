"""Small modules, one for each thing that users do and that sharding can get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    """Embedding and head are one parameter; 7 rows divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(ids))
        return y.pow(2).mean()


class Scalar(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).pow(2).sum()


class Lora(nn.Module):
    """Four frozen layers with trained adapters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.a = nn.ModuleList(nn.Linear(8, 2, bias=False) for _ in range(4))
        self.b = nn.ModuleList(nn.Linear(2, 8, bias=False) for _ in range(4))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, a, b in zip(self.base, self.a, self.b, strict=True):
            x = torch.tanh(base(x) + b(a(x)))
        return x.pow(2).sum()


class TokenLoss(nn.Module):
    """A mean over valid tokens, which are not the same number in every row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 11)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Rows(nn.Module):
    """Two linear layers with biases; the second one's input is cut when the first one's output is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y.pow(2).sum()


class Padded(nn.Module):
    """An embedding with a padding row, whose output is read twice."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3, padding_idx=padding)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.embed(ids)
        weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)
        return (y * weights).sum() + y.pow(2).sum()


class Classes(nn.Module):
    """Cross-entropy over 7 classes, with all its options."""

    def __init__(self, reduction: str = "mean", weighted: bool = False, smoothing: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7)
        self.reduction, self.smoothing = reduction, smoothing
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 7) if weighted else None)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(
            self.head(x),
            target,
            weight=self.weights,
            reduction=self.reduction,
            label_smoothing=self.smoothing,
        )
        return loss.sum() if self.reduction == "none" else loss


class Grouped(nn.Module):
    """Attention with fewer key/value heads than query heads."""

    def __init__(self, heads: int = 8, kv_heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        width = heads * size
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * size, bias=False)
        self.v = nn.Linear(width, kv_heads * size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.heads, self.size).transpose(1, 2)
        k, v = (m(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2) for m in (self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.o(y.transpose(1, 2).reshape(rows, length, -1))
        return z.pow(2).sum()


class Constants(nn.Module):
    """A mask, positions and numbers made in the forward, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.plain = torch.linspace(0.0, 1.0, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        places = torch.arange(length, dtype=x.dtype)[None, :, None]
        q = self.q(x + places) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=x.dtype)
        scores = q @ self.k(x * self.plain).transpose(1, 2) * 0.3 + mask
        return (scores.softmax(-1) @ x)[..., torch.tensor([0, 2, 5])].pow(2).mean()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x).pow(2) * torch.arange(1.0, 5.0, dtype=x.dtype)).sum()


class Batch(nn.Module):
    """Statistics over the whole batch, kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y.pow(3).mean()


class Statistics(nn.Module):
    """Means, variances, extremes and products over dims that are cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        largest = y.max() + y.amin(1).sum() + y.norm()
        return y.mean() + y.var() + y.std(0).sum() + largest + y.flatten(0, 1).sum(0).prod()


class Nested(nn.Module):
    """Takes a nested batch, returns several results, one of them not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        hidden = torch.tanh(self.inner(batch["x"]["y"]))
        return {"hidden": hidden, "out": (self.outer(hidden), hidden.sum()), "n": 3}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)
        self.first, self.second = nn.Dropout(0.3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.second(self.inner(self.first(x))))
        return y.pow(2).sum()


class Shared(nn.Module):
    """Parameters whose gradients are one tensor, an expanded tensor, and the loss's own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.b = nn.Parameter(torch.ones(3, 4))
        self.c = nn.Parameter(torch.ones(4))
        self.d = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * x.mean() + (self.a + self.b).pow(2).sum() + self.c.sum() + self.d


class TwoHeads(nn.Module):
    """Which head runs, and whether there is a loss, depends on the call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None, head: str = "a") -> dict[str, Tensor]:
        logits = (self.a if head == "a" else self.b)(torch.tanh(self.body(x)))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


class NextToken(nn.Module):
    """The loss of the next token, as mean over valid labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(ids)))[:, :-1]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def made(cls: type[nn.Module], *args: Any) -> nn.Module:
    """The module in float64, the same at every call."""
    torch.manual_seed(0)
    return cls(*args).double()


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 3) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))
