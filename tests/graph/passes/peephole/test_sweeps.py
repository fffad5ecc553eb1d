"""Local rewrites: whole models keep their results, each rewrite does what it says, ranks stay alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hyperparallel as hp
from benchmarks.shard.block import SMALL, make_block, make_input
from hyperparallel.graph.build import build
from hyperparallel.graph.passes.bucket import bucket
from hyperparallel.graph.passes.overlap import overlap
from hyperparallel.graph.passes.peephole.sweeps import peephole
from hyperparallel.runtime.module.certify import certify_built
from tests.graph.capture.families import seeded

pytestmark = pytest.mark.fake

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


def _case(name: str) -> tuple[Any, hp.Plan, dict[str, Any]]:
    if name == "block":
        model = make_block(SMALL).double()
        return model, _block_plan(), {"x_BSD": make_input(SMALL).double().detach()}
    model, batch = seeded(name, 1, **({"attn_implementation": "eager"} if name == "llama" else {}))
    params = {key: MESH(*dims) for key, dims in FAMILY_PLANS[name].items()}
    inputs = {key: MESH("dp", None) for key in batch}
    return model.double(), hp.Plan(MESH, params=params, inputs=inputs), batch


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
