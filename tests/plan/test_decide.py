"""What is derived from a plan: where parameters are kept, split axes, and why, asked of the plan itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hyperparallel.errors import LayoutError, PlanError
from hyperparallel.graph.build import Built, build
from hyperparallel.graph.derive import derive
from hyperparallel.layout import Layout
from hyperparallel.plan import Plan
from hyperparallel.runtime.module.certify import certify
from tests.graph.capture import families
from tests.runtime.module import small
from tests.runtime.module.small import integers, made, numbers

pytestmark = pytest.mark.fake
MESH = Layout((2, 2), ("dp", "tp"))
MLP = {"model.layers.*.gate_proj.weight": MESH("tp", None)}


@cache
def built(plan: str) -> Built:
    model, batch = families.seeded("llama", 2)
    return build(model, PLANS[plan], (), batch, rank_passes=())  # nothing is joined: each can be looked at


PLANS = {
    "tp": Plan(MESH, MLP),
    "fsdp": Plan(MESH, MLP, fsdp="dp"),
    "zero 2": Plan(MESH, MLP, fsdp="dp", zero=2),
    "sequence": Plan(MESH, MLP, activations={"model.layers.*": MESH("dp", "tp", None)}),
}


def dims(specs: Any, name: str) -> tuple[tuple[str, ...], ...]:
    found: tuple[tuple[str, ...], ...] = specs[f"model.layers.0.{name}.weight"].layout().dims
    return found


def test_neighbours_of_a_declared_weight_follow() -> None:
    """Column cut in, row cut out: Megatron's layout from one declared matrix."""
    used = built("tp").decisions.used
    assert dims(used, "mlp.gate_proj") == dims(used, "mlp.up_proj") == (("tp",), ())
    assert dims(used, "mlp.down_proj") == ((), ("tp",))
    assert dims(used, "input_layernorm") == ((),)
    assert built("tp").decisions.stored == used


def test_batches_are_cut_by_the_batch_axes() -> None:
    decisions, workload = built("tp").decisions, built("tp").workload
    for path in ("input_ids", "labels"):
        assert decisions.sources[workload.inputs[path]].layout().dims == (("dp",), ())


def test_fsdp_keeps_parameters_cut_once_more() -> None:
    decisions = built("fsdp").decisions
    assert dims(decisions.used, "mlp.gate_proj") == (("tp",), ())
    assert dims(decisions.stored, "mlp.gate_proj") == (("tp",), ("dp",))
    assert dims(decisions.stored, "input_layernorm") == (("dp",),)
    for name, spec in decisions.stored.items():
        assert spec.axes, f"{name} is kept whole"
        assert "kept cut by dp between uses (fsdp, zero=3)" in decisions.reasons[name]


def test_zero_2_gathers_once_and_zero_3_again() -> None:
    def gathers(plan: str) -> tuple[int, int]:
        weights = set(built(plan).workload.params.values())
        moves = built(plan).rank_program(0).transfers()
        found = [t for t in moves if t.kind == "all_gather" and t.value in weights]
        return sum(not t.backward for t in found), sum(t.backward for t in found)

    forward, backward = gathers("zero 2")
    assert forward == len(built("zero 2").workload.params) and backward == 0
    again = gathers("fsdp")
    assert again[0] == forward and again[1] >= 14  # the matrices that a backward needs


def test_declared_activations_cut_the_sequence() -> None:
    """Norms between blocks work on their part of the sequence, so their gradients are summed over tp."""
    found = built("sequence")
    norms = [op for op in found.workload.ops if op.module == "model.layers.1" and not op.backward]
    last = [found.decisions.operands[op.name][1][0] for op in norms if op.target.startswith("aten.add")]
    assert last[-1] is not None and last[-1].layout().dims == (("dp",), ("tp",), ())
    kinds = {t.kind for t in found.rank_program(0).transfers()}
    assert {"all_gather", "reduce_scatter"} <= kinds


@pytest.mark.parametrize("vocab", [320, 1_000, 32_000])
def test_no_rank_gathers_the_logits(vocab: int) -> None:
    """A head cut by vocabulary: what crosses ranks for the loss is a few numbers a token."""
    import transformers as hf

    mesh = Layout((4,), ("tp",))
    hidden = 256
    config = hf.LlamaConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=1, num_attention_heads=4)
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    ids = integers(vocab, 2, 256)
    plan = Plan(mesh, {"lm_head.weight": mesh("tp", None)})
    found = build(model, plan, (), {"input_ids": ids, "labels": ids}, loss="loss")
    cut = found.decisions.used["lm_head.weight"].layout()
    assert cut.local_shape((vocab, hidden), 0) == (vocab // 4, hidden)
    params = found.workload.params.values()
    wide = {v.name for v in found.workload.values.values() if vocab in v.shape and v.name not in params}
    moves = found.rank_program(0).transfers()
    softmax = [move for move in moves if move.value in wide]
    assert len(softmax) == 3, "maximum and sum forward, one sum backward"
    for move in softmax:
        assert move.kind == "all_reduce" and move.num_bytes == 2 * 3 * ids.numel() * 4 // 4
    assert all(move.num_bytes <= 2 * ids.numel() * hidden * 4 for move in moves)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "sizes"),
    [(8, 2, 4, (2, 2)), (8, 2, 8, (2, 4)), (8, 4, 4, None), (4, 1, 2, None), (6, 3, 2, None)],
)
def test_an_axis_is_split_where_it_has_more_ranks_than_key_heads(
    heads: int, kv_heads: int, ranks: int, sizes: tuple[int, int] | None
) -> None:
    """Keys are cut by the outer part and held by the inner one; queries are cut by both."""
    mesh = Layout((ranks,), ("tp",))
    model, x = made(small.Grouped, heads, kv_heads), numbers(2, 5, heads * 4)
    decisions = build(model, Plan(mesh, {"q.weight": mesh("tp", None)}), (x,)).decisions
    if sizes is None:
        assert decisions.mesh == mesh
        return
    assert decisions.mesh.shape == sizes and decisions.mesh.names == ("tp_0", "tp_1")
    assert decisions.used["q.weight"].layout().dims[0] == ("tp_0", "tp_1")
    assert decisions.used["k.weight"].layout().dims[0] == ("tp_0",)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.parametrize("rows", [2, 4])
def test_rows_and_positions_seen_as_one_dim_split_no_axis(family: str, rows: int) -> None:
    """2 rows x 12 positions on 4 ranks that cut 4 heads: nothing is to be cut in 2, so nothing is split."""
    mesh = Layout((4,), ("tp",))
    out = {
        "gpt2": ("*.attn.c_proj.weight", ("tp", None)),
        "bert": ("*.attention.output.dense.weight", (None, "tp")),
    }
    pattern, axes = out[family]
    model, batch = families.seeded(family, 1)
    batch = {name: x.repeat(rows // 2, 1) for name, x in batch.items()}
    found = build(model, Plan(mesh, {pattern: mesh(*axes)}), (), batch, loss="loss")
    assert found.decisions.mesh == mesh
    assert [t.kind for t in found.rank_program(0).transfers() if not t.backward] == ["all_reduce"]


def test_a_cut_bias_is_not_cut_by_fsdp_in_an_order_that_dtensor_lacks() -> None:
    for names, kept in ((("dp", "tp"), ("tp",)), (("tp", "dp"), ("tp", "dp"))):
        mesh = Layout((2, 2), names)
        plan = Plan(mesh, {"up.weight": mesh("tp", None)}, fsdp="dp")
        decisions = build(made(small.Rows), plan, (numbers(4, 4),)).decisions
        assert decisions.used["up.bias"].layout().dims == (("tp",),)
        assert decisions.stored["up.bias"].layout().dims == (kept,)


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (Plan(MESH, {"up.weigt": MESH("tp", None)}), PlanError, "nearest: up.weight"),
        (Plan(MESH, {"up.bias": MESH("tp", None)}), LayoutError, "1 entries for the shape [6]"),
        (Plan(MESH, {"up.weight": MESH("tp")}), LayoutError, "layout of up.weight"),
        (Plan(MESH, inputs={"y": MESH("dp")}), PlanError, "inputs: got 'y'"),
        (Plan(MESH, inputs={"x": MESH("dp")}), LayoutError, "2 entries"),
        (Plan(MESH, activations={"upp": MESH("dp", None)}), PlanError, "nearest: up"),
        (Plan(MESH, activations={"up": MESH("dp")}), LayoutError, "what up returns"),
    ],
)
def test_a_plan_that_does_not_fit_the_model(plan: Plan, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        derive(made(small.Rows), plan, numbers(4, 4))
    assert words in str(caught.value), str(caught.value)


def test_a_scalar_first_input_does_not_hide_the_batch() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return (y * scale).sum()

    found = derive(Scaled(), Plan(Layout((2,), ("dp",))), (torch.tensor(2.0), torch.ones(4, 4)))
    assert found.inputs["x"].dims == (("dp",), ())
    assert found.inputs["scale"].dims == ()


def test_a_plan_derives_explains_and_certifies() -> None:
    model, batch = families.seeded("llama", 1)
    found = derive(model, PLANS["tp"], batch)
    told = found.explain("model.layers.0.mlp.down_proj.weight")
    assert "stored: dim 1 in 2 by tp" in told and "why: derived: cut by tp" in told
    assert "all_reduce over dp" in told and "grad of model.layers.0.mlp.down_proj.weight" in told
    told = found.explain("model.layers.0.mlp.gate_proj.weight")
    assert "declared by 'model.layers.*.gate_proj.weight'" in told
    with pytest.raises(PlanError, match=r"nearest: model\.layers\.0\.mlp\.down_proj\.weight"):
        found.explain("model.layers.0.mlp.down_proj.weigt")
    certificate = certify(model, PLANS["tp"], batch)
    assert certificate.holds(1e-4) and certificate.num_ranks == 4  # float32


def test_a_meta_model_derives_like_a_real_one() -> None:
    model, batch = families.seeded("llama", 1)
    with torch.device("meta"):
        empty = families.llama(1).train()
    assert derive(empty, PLANS["fsdp"], batch) == derive(model, PLANS["fsdp"], batch)


@pytest.mark.parametrize("ranks", [2, 4])  # of 4 and more it is asked whether the axis must be split
def test_ties_are_declared_by_any_of_their_names(ranks: int) -> None:
    mesh = Layout((ranks,), ("tp",))
    for name in ("embed.weight", "head.weight"):
        found = derive(made(small.Tied), Plan(mesh, {name: mesh("tp", None)}), integers(7, 4, 5))
        assert [p.name for p in found.params] == ["embed.weight"]
        assert found.params[0].stored.dims == (("tp",), ()) and found.params[0].declared
