"""A derived plan written by hand: a small Llama on dp2 x tp2, with every kind of entry."""

from __future__ import annotations

from hyperparallel.layout import Mesh
from hyperparallel.plan.derived import BlockLayout, Communication, Derived, ParamLayout, RewriteCount

MESH = Mesh((2, 2), ("dp", "tp"))
WEIGHTS = {
    "self_attn.q_proj.weight": ((256, 256), ("tp", None)),
    "self_attn.k_proj.weight": ((128, 256), ("tp", None)),
    "self_attn.v_proj.weight": ((128, 256), ("tp", None)),
    "self_attn.o_proj.weight": ((256, 256), (None, "tp")),
    "mlp.gate_proj.weight": ((688, 256), ("tp", None)),
    "mlp.up_proj.weight": ((688, 256), ("tp", None)),
    "mlp.down_proj.weight": ((256, 688), (None, "tp")),
    "input_layernorm.weight": ((256,), (None,)),
    "post_attention_layernorm.weight": ((256,), (None,)),
}


def _param(name: str, shape: tuple[int, ...], dims: tuple[str | None, ...]) -> ParamLayout:
    layout = MESH(*dims)
    declared = name.endswith("down_proj.weight")
    reason = "declared by '*.down_proj.weight'" if declared else "derived: costs least"
    return ParamLayout(name, shape, "float32", layout, layout, declared, reason)


def llama(num_layers: int = 8) -> Derived:
    """The sample; bytes are for batch 8 x 128 in float32."""
    params = [_param("model.embed_tokens.weight", (4096, 256), ("tp", None))]
    moves = [
        Communication("all_reduce", ("tp",), 524288, "forward", "embedding", "model.embed_tokens",
                      "rows of the vocabulary are cut"),
    ]
    values = []
    for index in range(num_layers):
        block = f"model.layers.{index}"
        params += [_param(f"{block}.{name}", *rest) for name, rest in WEIGHTS.items()]
        for module in ("self_attn.o_proj", "mlp.down_proj"):
            moves.append(Communication("all_reduce", ("tp",), 524288, "forward", f"mm_{index}",
                                       f"{block}.{module}", "the contracted dim is cut"))
        moves.append(Communication("all_reduce", ("dp",), 100000, "backward", f"{block}.grads",
                                   block, "gradient of a batch that is cut", count=2))
        values.append(BlockLayout(f"{block}.mlp", "aten.mm", f"mm_{index}", (1024, 688),
                                  str(MESH("dp", "tp"))))
    params.append(_param("model.norm.weight", (256,), (None,)))
    params.append(ParamLayout("lm_head.weight", (4096, 256), "bfloat16", MESH(("tp", "dp"), None),
                              MESH("tp", None), True, "declared: cut on dp, gathered at use"))
    moves.append(Communication("all_gather", ("dp",), 1048576, "update", "lm_head.weight",
                               "lm_head", "stored cut on dp"))
    return Derived(
        plan="mesh: {dp: 2, tp: 2}\nparams:\n  '*.down_proj.weight': [null, tp]\n",
        params=tuple(params),
        inputs={"input_ids": MESH("dp", None), "labels": MESH("dp", None)},
        outputs={"loss": MESH(partial={"dp": "sum"})},
        communications=tuple(moves),
        values=tuple(values),
        num_ranks=4,
        model_hash="0123456789abcdef",
        rewrites=(
            RewriteCount("x ** 2 -> x * x", True, 2 * num_layers, 0),
            RewriteCount("a + b * c -> addcmul(a, b, c)", False, 3 * num_layers, 3 * num_layers),
        ),
    )
