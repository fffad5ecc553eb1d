"""The work of a layer against the model's own counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperparallel.cluster.presets import preset
from hyperparallel.planner.cost.build import rows_of
from hyperparallel.planner.cost.layer import layer_work
from hyperparallel.planner.strategy import Candidates, Strategy
from hyperparallel.workload.presets import load_model, model_names

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", [name for name in model_names() if not load_model(name).mtp])
def test_one_rank_holds_every_parameter_of_the_model(name: str) -> None:
    """Modulation of diffusion transformers and norms without weights among them."""
    model = load_model(name)
    row = rows_of(model, preset("h100", 8), 256, 1, Candidates.of([Strategy()])).row
    assert float(row["params"][0] + row["expert_params"][0]) == pytest.approx(model.params(), rel=1e-6)


def test_parts_that_read_one_input_are_summed_once() -> None:
    """GPT-NeoX: attention and feed-forward part run side by side, so that tensor parallelism has one sum."""
    model = load_model("llama3.1-8b")
    (layer, _), *_ = model.kinds
    both = Candidates.of([Strategy(tp=2)])
    sums = [
        len([m for m in layer_work(one, model, 4096, both).forward.messages if m.kind == "all_reduce"])
        for one in (layer, replace(layer, parallel=True))
    ]
    assert sums == [2, 1]
