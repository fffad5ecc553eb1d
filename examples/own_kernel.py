"""A kernel of your own inside a sharded program: `hp.local_region`.

The region says how its tensors are cut, and its code gets this rank's pieces: a feed-forward block whose
hidden units are cut over `tp`, with activation and product fused by hand and a backward of its own. What it
returns is pending a sum over `tp`; the program around places the reduction. A certificate compares the whole
with one device, on virtual ranks in this process. Run with

    python examples/own_kernel.py
"""

import torch
from torch import Tensor, nn

import hyperparallel as hp


class GatedProduct(torch.autograd.Function):
    """sigmoid(a) * b, which keeps only its operands and makes both gradients in one pass."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.sigmoid(a) * b

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return grad * b * s * (1 - s), grad * s


@hp.local_region(
    in_layouts=[("dp", None), ("tp", None), ("tp", None), (None, "tp")],
    out_layouts=("dp", None, {"tp": "sum"}),
)
def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return GatedProduct.apply(x @ gate.T, x @ up.T) @ down.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Parameter(torch.randn(64, 16) / 4)
        self.up = nn.Parameter(torch.randn(64, 16) / 4)
        self.down = nn.Parameter(torch.randn(16, 64) / 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x + feed_forward(self.norm(x), self.gate, self.up, self.down)
        return {"loss": y.square().mean()}


def main() -> None:
    torch.manual_seed(0)
    mesh = hp.Layout((2, 2), ("dp", "tp"))
    certificate = hp.certify(Block(), hp.Plan(mesh), {"x": torch.randn(8, 16)})
    print(certificate)
    assert certificate.holds()


if __name__ == "__main__":
    main()
