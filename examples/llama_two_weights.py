"""Two declared weights of a Hugging Face Llama, trained by an ordinary loop.

`hp.parallelize` returns the same module: any optimizer and any loop go on with it. All other layouts and all
collectives follow from the two. Run with

    torchrun --nproc-per-node 4 examples/llama_two_weights.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hyperparallel as hp


def main() -> None:
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights and batch on every rank
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=256)
    )  # fmt: skip
    tokens = torch.randint(256, (8, 32))
    batch = {"input_ids": tokens, "labels": tokens}

    mesh = hp.Layout((2, dist.get_world_size() // 2), ("dp", "tp"))
    plan = hp.Plan(mesh, params={
        "*.self_attn.q_proj.weight": mesh("tp", None),
        "*.mlp.up_proj.weight": mesh("tp", None),
    })  # fmt: skip
    model = hp.parallelize(model, plan, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    down = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    if dist.get_rank() == 0:
        print(f"down_proj was not declared, and is {down.placements} over {down.device_mesh.mesh_dim_names}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
