"""Local rewrites: whole models keep their results, each rewrite does what it says, ranks stay alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hyperparallel as hp
from benchmarks.shard.block import SMALL, make_block, make_input
from hyperparallel.graph.build import Built, RankPass, build
from hyperparallel.graph.derive import derived
from hyperparallel.graph.passes.bucket import bucket
from hyperparallel.graph.passes.overlap import overlap
from hyperparallel.graph.passes.peephole.sweeps import peephole
from hyperparallel.plan.report import text_report
from hyperparallel.runtime.module.certify import certify_built
from tests.graph.capture.families import seeded
from tests.graph.passes.peephole.unrewritten import results, same_bits, with_passes

pytestmark = pytest.mark.fake

aten = torch.ops.aten
MESH = hp.Layout((2, 2), ("dp", "tp"))
TOLERANCE = 1e-10
"""float64; relative to the largest element, so room for sums in another order and nothing else."""


def _block_plan() -> hp.Plan:
    cut = {name: MESH(None, "tp") for name in ("*.o.weight", "*.down.weight")}
    return hp.Plan(MESH, params=cut, inputs={"x_BSD": MESH("dp", None, None)})


FAMILY_PLANS = {
    "llama": {"*.o_proj.weight": (None, "tp"), "*.down_proj.weight": (None, "tp")},
    "gpt2": {"*.mlp.c_proj.weight": ("tp", None), "*.attn.c_proj.weight": ("tp", None)},
    "bert": {"*.output.dense.weight": (None, "tp")},
}


def _case(name: str, kind: torch.dtype = torch.float64) -> tuple[Any, hp.Plan, dict[str, Any]]:
    if name == "block":
        model = make_block(SMALL).to(kind)
        return model, _block_plan(), {"x_BSD": make_input(SMALL).to(kind).detach()}
    model, batch = seeded(name, 1, **({"attn_implementation": "eager"} if name == "llama" else {}))
    params = {key: MESH(*dims) for key, dims in FAMILY_PLANS[name].items()}
    inputs = {key: MESH("dp", None) for key in batch}
    return model.to(kind), hp.Plan(MESH, params=params, inputs=inputs), batch


def _norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Llama's norm without its cast to float32, whose rounding would hide the rewrites'."""
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return self.weight * (x * torch.rsqrt(mean_square + self.variance_epsilon))


@pytest.mark.parametrize("name", ["block", *FAMILY_PLANS])
def test_models_keep_their_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", _norm)
    model, plan, batch = _case(name)
    built = build(model, plan, (), batch)
    for passes in ((bucket, overlap), (peephole, bucket, overlap)):
        built = dataclasses.replace(built, rank_passes=passes)
        certificate = certify_built(model, built, (), batch)
        errors = dict(certificate.errors)
        if name != "block":  # these models cast logits to float32 for the loss
            assert errors.pop("loss") <= 1e-6
        assert certificate.replicas_agree and certificate.random_state_equal
        assert max(errors.values()) <= TOLERANCE, (len(passes), str(certificate))


@pytest.mark.parametrize("name", ["block", *FAMILY_PLANS])
def test_an_exact_plan_keeps_every_bit(name: str) -> None:
    """In float32; what is left out there does round otherwise in the two models with norms of squares."""
    model, plan, batch = _case(name, torch.float32)
    exact = build(model, dataclasses.replace(plan, exact=True), (), batch)
    plain = results(model, with_passes(exact, ()), batch)
    assert same_bits(results(model, exact, batch), plain)

    free = build(model, plan, (), batch)
    rounded = results(model, free, batch)
    if name in ("block", "llama"):
        assert not same_bits(rounded, plain)
    for mine, true in zip(rounded, plain, strict=True):
        for a, b in zip(mine, true, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def _count(built: Built, rewrites: Sequence[RankPass], target: Any) -> int:
    nodes = with_passes(built, rewrites).rank_program(0).graph.nodes
    return sum(n.op == "call_function" and n.target is target and not n.meta["constant"] for n in nodes)


@pytest.mark.parametrize("exact", [False, True])
def test_explain_counts_what_was_replaced(exact: bool) -> None:
    """Counts are those of calls that came and went, counted in the graphs with and without rewrites."""
    model, plan, batch = _case("block", torch.float32)
    built = build(model, dataclasses.replace(plan, exact=exact), (), batch)
    record = derived(built)
    lines = record.explain("rewrites").splitlines()[1:]
    assert len(lines) == len(record.rewrites) and record.explain("rewrites") in text_report(record)
    counts = {item.words: item.count for item in record.rewrites}

    def made(target: Any) -> int:
        return _count(built, (peephole,), target) - _count(built, (), target)

    def counted(becomes: str) -> int:
        return sum(count for words, count in counts.items() if f"-> {becomes}" in words)

    assert counted("roll") == made(aten.roll.default) == 4
    assert counted("their concatenation") > 0
    assert counted("x * x") == -made(aten.pow.Tensor_Scalar) > 0
    assert counted("addcmul") == made(aten.addcmul.default)
    assert counted("addmm") == made(aten.addmm.default)
    if exact:
        assert not any("rounds otherwise" in line for line in lines)
        assert all(item.exact for item in record.rewrites) and not counted("addcmul")
    else:
        assert sum("rounds otherwise" in line for line in lines) == 3 and counted("addcmul") > 0
    saved = _calls(built, ()) - _calls(built, (peephole,))
    assert sum(item.calls_saved for item in record.rewrites) == saved > 0


def _calls(built: Built, rewrites: Sequence[RankPass]) -> int:
    """Calls of a step, those of setup left out."""
    nodes = with_passes(built, rewrites).rank_program(0).graph.nodes
    return sum(n.op == "call_function" and not n.meta["constant"] for n in nodes)
