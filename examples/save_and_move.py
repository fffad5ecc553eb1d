"""Train on dp2 x tp2, save, go on with another mesh, and hand the weights to Hugging Face.

A checkpoint says what the tensors are, not which rank had them, so any mesh loads it, optimizer included;
safetensors are written by all ranks, with nothing gathered on any of them. Run with

    python examples/save_and_move.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hyperparallel as hp

CONFIG = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=128)  # fmt: skip


def make_step(mesh: hp.Mesh, seed: int) -> tuple[hp.TrainStep, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(CONFIG)
    tokens = torch.arange(64).reshape(4, 16) % 128
    batch = {"input_ids": tokens, "labels": tokens}
    plan = hp.Plan(mesh, params={"*.q_proj.weight": mesh("tp", None), "*.up_proj.weight": mesh("tp", None)})
    return hp.TrainStep(model, lambda named: torch.optim.AdamW(named, lr=1e-2), plan, batch), batch


def begin(session, folder: Path) -> float:
    """Four ranks: three steps, a checkpoint, and one step more."""
    step, batch = make_step(hp.Layout((2, 2), ("dp", "tp")), seed=0)
    for _ in range(3):
        step.step(batch)
    hp.save_checkpoint(folder / "run", 3, step)
    return step.step(batch).loss


def go_on(session, folder: Path) -> float:
    """Two ranks: load what four saved, do the step that followed, export."""
    step, batch = make_step(hp.Layout((2,), ("tp",)), seed=1)
    hp.load_checkpoint(folder / "run", step)
    loss = step.step(batch).loss
    hp.save_safetensors(folder / "llama", step)
    return loss


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    before = hp.launch(begin, 4, args=(folder,), threads=1)[0]
    after = hp.launch(go_on, 2, args=(folder,), threads=1)[0]
    print(f"fourth step: loss {before:.6f} on dp2 x tp2, {after:.6f} on tp2")
    assert abs(before - after) < 1e-5 * before
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    print(f"transformers reads {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    main()
