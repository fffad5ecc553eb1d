"""Nothing declared: `plan="auto"` takes the cheapest mesh of the job's ranks, `hp.TrainStep` owns the step.

Forward, backward, accumulation over micro-batches, clipping and the optimizer are one program. Run with

    python examples/auto_step.py

which starts two local ranks by `hp.launch`; under torchrun call `rank_main` after `init_process_group`.
"""

import torch
from torch import nn

import hyperparallel as hp


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), target)}


def rank_main(session) -> list[float]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 32), "target": torch.randn(16, 32)}
    step = hp.TrainStep(
        Scorer(),
        lambda named: torch.optim.AdamW(named, lr=1e-2),
        "auto",
        batch,
        accumulate=2,
        clip=1.0,
    )
    if session.rank == 0:
        print(f"chosen: {step.program.built.decisions.mesh}")
    return [step.step(batch).loss for _ in range(5)]


def main() -> None:
    losses, others = hp.launch(rank_main, 2)
    assert losses == others, "every rank reports the loss of the whole batch"
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
