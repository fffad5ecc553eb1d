"""An op of your own with a sharding rule and a local form, certified.

`demo::ramp` scales row s of `total` by (start + s + 1) / total. Any dim may be cut and a pending sum passes
through, which the rule says in one string. A rank that holds rows from an offset on must start there, which
the local form says. Run with

    python examples/own_op.py
"""

import torch
from torch import Tensor, nn

import hyperparallel as hp


@torch.library.custom_op("demo::ramp", mutates_args=())
def ramp(x: Tensor, start: int, total: int) -> Tensor:
    weights = torch.arange(start + 1, start + x.shape[1] + 1, dtype=x.dtype) / total
    return x * weights[:, None]


@ramp.register_fake
def _(x: Tensor, start: int, total: int) -> Tensor:
    return torch.empty_like(x)


ramp.register_autograd(
    lambda ctx, grad: (torch.ops.demo.ramp(grad, *ctx.bounds), None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "bounds", inputs[1:]),
)

hp.register_rule("demo.ramp.default", "b s d -> b s d", linear=((0,),))
hp.register_local_form(
    "demo.ramp.default",
    lambda local: local.call(local.with_argument(1, local.argument(1) + local.offset("s"))),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (torch.ops.demo.ramp(x * self.scale, 0, x.shape[1])).square().mean()}


def main() -> None:
    torch.manual_seed(0)
    mesh = hp.Layout((2, 2), ("dp", "sp"))
    # Data is cut over both axes, samples by one and rows by the other, so ranks have different offsets.
    plan = hp.Plan(mesh, inputs={"x": mesh("dp", "sp", None)}, batch=("dp", "sp"))
    batch = {"x": torch.randn(4, 6, 8)}
    program = hp.derive(Model(), plan, batch)
    assert not any(one.kind == "all_gather" for one in program.communications), "nothing is gathered for it"
    certificate = hp.certify(Model(), plan, batch)
    print(certificate)
    assert certificate.holds()


if __name__ == "__main__":
    main()
