"""A whole planning: known truths, reasons that are true, advice for what does not fit, honest warnings."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hyperparallel.cluster.presets import preset
from hyperparallel.errors import PlanError
from hyperparallel.mpmd import in_flight, schedule
from hyperparallel.plan.wording import bytes_words
from hyperparallel.planner.cost.constants import Constants
from hyperparallel.planner.explain.rows import PLAN_COLUMNS, lines, rows, to_json
from hyperparallel.planner.job import PlanningJob, default_batch, default_seq
from hyperparallel.planner.planning import Planning, apart, plan_job
from hyperparallel.planner.runnable import missing, to_plan
from hyperparallel.planner.search.axis_order import place_words
from hyperparallel.planner.search.reasons import LEAST_LOSS, neighbours, reasons
from hyperparallel.planner.search.search import search
from hyperparallel.planner.search.space import Limits
from hyperparallel.planner.search.table import predict
from hyperparallel.planner.search.validity import TIGHT, VALIDATED_DEVICES
from hyperparallel.planner.step.layer_costs import LayerPrices
from hyperparallel.planner.step.link_load import tier_names
from hyperparallel.planner.strategy import Strategy
from hyperparallel.workload.presets import gpt, load_model, model_names
from tests.planner.sample import job, tight

pytestmark = pytest.mark.pure


def best_with(one: PlanningJob, **fixed: object):  # type: ignore[no-untyped-def]
    return search(one, limits=Limits(fixed=tuple(fixed.items()))).best[0]


def test_tp16_with_fewer_stages_wins_on_the_mesh_plane() -> None:
    one = PlanningJob(load_model("llama3.1-405b"), preset("ub-mesh-8192"), 8192, 1024)
    paper = {"zero": 1, "cp": 1}  # UB-Mesh's tables (arXiv 2503.20377): neither ZeRO-3 nor cp
    wide, narrow = best_with(one, tp=16, **paper), best_with(one, tp=8, **paper)
    assert wide.seconds < narrow.seconds
    assert wide.strategy.pp < narrow.strategy.pp
    assert best_with(one, **paper).strategy.tp == 16


def test_without_a_pipeline_narrow_tensor_parallelism_is_enough_on_the_mesh_plane() -> None:
    """What the truth above rests on: TP16 saves bubble. ZeRO-3 leaves none, and cp of few key/value heads
    sends less than twice the tensor parallelism, by the bytes of a layer and microbatch."""
    one = PlanningJob(load_model("llama3.1-405b"), preset("ub-mesh-8192"), 8192, 1024)
    free = best_with(one)
    assert free.strategy.tp == 8 and free.parts["bubble"] == pytest.approx(0, abs=1e-9)
    attention = one.model.kinds[0][0].attention
    tokens, hidden = 8192 * 1, one.model.hidden
    wider = 4 * 2 * tokens * hidden  # gathers and scatters of a whole sample around two sums, forward
    kv_bytes = 2 * tokens * attention.kv_width / 8
    halved = 4 * 2 * (tokens / 2) * hidden + kv_bytes
    assert halved < 0.6 * wider


@pytest.mark.parametrize("cluster", ["ascend-910b", "h100"])
def test_tp8_with_a_pipeline_wins_on_machines_of_eight(cluster: str) -> None:
    one = PlanningJob(load_model("gpt3-175b"), preset(cluster, 8192), 8192, 2048)
    eight, sixteen = best_with(one, tp=8), best_with(one, tp=16)
    assert eight.seconds < sixteen.seconds
    assert eight.strategy.pp > 1
    assert best_with(one).strategy.tp < 16 and best_with(one).strategy.pp > 1


def test_a_strategy_alone_doubles_mfu_of_a_large_mixture() -> None:
    """Experts cut like everything else (tensor parallel, recomputed) against what the search finds."""
    one = PlanningJob(load_model("moe-1.6t"), preset("cloudmatrix384"), 4096, 1536)
    usual = {"tp": 16, "etp": 16, "cp": 1, "zero": 1, "recompute": "full", "schedule": "1f1b", "offload": 0.0}
    before = search(one, limits=Limits(fixed=tuple(usual.items()))).best[0]
    after = search(one).best[0]
    assert one.mfu(after.seconds) > 2 * one.mfu(before.seconds)


@pytest.mark.parametrize(
    "model",
    ["llama3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma2-27b", "gpt-oss-20b", "dit-xl-2", "vit-l-16",
     "qwen2-vl-7b", "nemotron-3-nano", "qwen3-next-80b-a3b", "mamba2-2.7b", "mpt-7b"],
)  # fmt: skip
def test_every_family_plans(model: str) -> None:
    facts = load_model(model)
    one = PlanningJob(facts, preset("h100", 64), min(default_seq(facts), 2048), 64)
    planning = plan_job(one, top=1)
    assert planning.best.prediction.peak_bytes <= one.cluster.capacity_bytes
    assert 0 < one.mfu(planning.best.seconds) < 1
    assert planning.best.seconds == pytest.approx(planning.best.prediction.seconds, rel=0.15)
    assert bool(facts.encoders) == any("encoders" in text for text in planning.warnings)


def test_every_preset_fits_somewhere() -> None:
    limits = Limits(fixed=(("sp", True), ("order", "tp-cp-dp-pp"), ("cp", 1), ("etp", 1), ("microbatch", 1)))
    for name in model_names():
        facts = load_model(name)
        devices = 1024 if facts.params() > 2e11 else 64
        one = PlanningJob(facts, preset("h100", devices), min(default_seq(facts), 2048), devices)
        assert search(one, limits=limits, keep=1).best, name


def test_long_samples_are_cut_along_the_sequence() -> None:
    one = job("llama3.1-8b", devices=64, seq=131072, batch=16)
    assert plan_job(one).best.prediction.strategy.cp > 1


@pytest.mark.parametrize("model", ["deepseek-v3", "llama3.1-405b"])
def test_a_hundred_thousand_cards_take_seconds(model: str) -> None:
    facts = load_model(model)
    one = PlanningJob(facts, preset("h100", 98304), 4096, default_batch(4096, 98304))
    begin = time.process_time()
    planning = plan_job(one)
    assert time.process_time() - begin < 20  # 10 s on a core of its own
    assert "consistency-checked, not validated" in planning.warnings[0]


@pytest.mark.parametrize(("model", "devices", "batch"), [("llama3.1-8b", 8, 64), ("qwen3-30b-a3b", 16, 64)])
def test_reasons_name_the_best_of_all_other_choices(model: str, devices: int, batch: int) -> None:
    """Against searches that are held to one other value of the choice."""
    one = job(model, devices=devices, batch=batch, seq=4096)
    found = search(one)
    best = found.best[0]
    told = {r.choice: r for r in reasons(one, best, found=found.evaluated, most=99)}
    assert all(f"{r.loss:.1%} slower" in r.words for r in told.values() if r.loss != float("inf"))
    for axis in ("tp", "cp", "pp", "ep", "microbatch"):
        losses = []
        for value in (1, 2, 3, 4, 6, 8, 12, 16):
            try:
                others = search(one, limits=Limits(fixed=((axis, value),)), keep=1).best
            except PlanError:
                continue
            if value != getattr(best.strategy, axis):
                losses += [p.seconds / best.seconds - 1 for p in others]
        mine = [r.loss for choice, r in told.items() if re.match(rf"{axis}\d|{axis}es of", choice)]
        if mine:
            assert mine[0] == pytest.approx(min(losses), abs=1e-6)
        else:
            assert not losses or min(losses) < LEAST_LOSS
    for field, values, said in (
        ("zero", (1, 3), r"zero\d"),
        ("recompute", ("none", "light", "alternate", "full"), "activations kept|.* recomputation"),
        ("offload", (0.0, 1.0), "optimizer states"),
    ):
        # All that was evaluated, and the next best with this one field changed.
        changed = [replace(p.strategy, **{field: v}) for p in found.best[1:6] for v in values]
        others = [*found.evaluated, *predict(one, changed, Constants())]
        room = one.cluster.capacity_bytes
        fitting = [p for p in others if p.peak_bytes <= room]
        losses = [
            p.seconds / best.seconds - 1
            for p in fitting
            if getattr(p.strategy, field) != getattr(best.strategy, field)
        ]
        mine = [r.loss for choice, r in told.items() if re.match(said, choice)]
        assert mine[0] <= min(losses) + 1e-9 if mine else min(losses) < LEAST_LOSS


def test_what_differs_in_one_choice_uses_all_devices() -> None:
    best = search(job("llama3.1-70b", devices=64, batch=128, seq=4096)).best[0]
    assert all(s.devices == 64 for _, s in neighbours(best.strategy))


def test_no_plan_of_the_table_is_better_than_the_alternative_that_is_told() -> None:
    planning = plan_job(job("llama3.1-8b", devices=8, batch=1024, seq=4096))
    best = planning.best
    for choice in planning.choices[1:]:
        for axis in ("tp", "cp", "pp", "microbatch"):
            mine, other = (getattr(c.prediction.strategy, axis) for c in (best, choice))
            said = [r.loss for r in planning.reasons if re.match(rf"{axis}\d|{axis}es of", r.choice)]
            if mine != other and said:
                assert said[0] <= choice.seconds / best.seconds - 1 + 1e-9


REFINED = {
    "layers recomputed one by one": lambda: tight(layers=24, capacity=16e9),
    "all layers offloaded": lambda: job("llama3.1-405b", devices=512, batch=512, seq=4096),
}


@pytest.fixture(scope="module", params=REFINED, ids=str)
def refined(request: pytest.FixtureRequest) -> Planning:
    planning = plan_job(REFINED[request.param]())
    assert planning.best.split is not None
    return planning


def test_a_refined_plan_is_told_with_its_own_memory(refined: Planning) -> None:
    best = refined.best
    peak = best.simulated.timeline.peak_bytes()
    capacity = refined.job.cluster.capacity_bytes
    assert best.expected.peak_bytes == pytest.approx(peak, rel=1e-6) and peak <= capacity
    assert abs(best.prediction.peak_bytes / peak - 1) > 0.05  # what it was before
    record = json.loads(to_json(refined))["plans"][0]
    assert sum(record["memory_bytes"].values()) == pytest.approx(record["peak_bytes"]) == pytest.approx(peak)
    assert rows(refined)[0][PLAN_COLUMNS.index("memory")] == bytes_words(peak)
    memory = next(line for line in lines(refined) if line.startswith("memory"))
    assert memory.startswith(f"memory {bytes_words(peak)} a device")
    assert any("% full" in text for text in refined.warnings) == (peak > TIGHT * capacity)
    away = best.split.actions().get("offload", 0)
    assert bool(record["host_bytes"]) == bool(away) == ("host memory" in memory)
    if away:
        prices = LayerPrices(refined.job, best.prediction.strategy, Constants())
        strategy = best.prediction.strategy
        order = schedule(strategy.schedule, strategy.pp, 4 * strategy.pp, strategy.virtual)
        most = max(best.split.counts()) * max(in_flight(order))  # chunks, each of so many layers
        assert record["host_bytes"] == pytest.approx(most * prices.saved_bytes("none"))


def test_a_refined_plan_has_a_name_of_its_own(refined: Planning) -> None:
    best = refined.best
    strategy = best.prediction.strategy
    counts = best.split.actions()
    assert best.words != strategy.words() and sum(counts.values()) == sum(best.split.counts())
    assert strategy.recompute not in best.words or strategy.recompute in counts
    assert all(str(count) in best.words for count in counts.values())
    assert ("offload" in best.missing) == ("offload" in counts)


@pytest.mark.parametrize(
    ("model", "devices", "batch"),
    [("llama3.1-8b", 16, 64), ("qwen3-30b-a3b", 16, 64), ("gpt3-175b", 256, 512), ("llama3.1-70b", 64, 64)],
)
def test_what_is_told_of_a_plan_adds_up_to_the_step_that_is_shown(
    model: str, devices: int, batch: int
) -> None:
    planning = plan_job(job(model, devices=devices, batch=batch, seq=2048))
    record = json.loads(to_json(planning))["plans"]
    for plan, row in zip(record, rows(planning), strict=True):
        parts, step = plan["time_seconds"], plan["step_seconds"]
        assert sum(parts.values()) == pytest.approx(step)
        exposed = sum(value for name, value in parts.items() if name.startswith("exposed"))
        assert row[PLAN_COLUMNS.index("exposed")] == f"{exposed / step:.1%}"
        assert row[PLAN_COLUMNS.index("bubble")] == f"{max(parts['bubble'], 0) / step:.1%}"
        assert plan["simulated"] != row[PLAN_COLUMNS.index("step")].endswith("(closed form)")
        assert sum(plan["memory_bytes"].values()) == pytest.approx(plan["peak_bytes"])
    seconds = [plan["step_seconds"] for plan in record]
    assert seconds == sorted(seconds)
    told = float(re.search(r": ([+-][\d.]+)% time simulated", planning.against)[1])  # type: ignore[index]
    assert told == pytest.approx(100 * (seconds[1] / seconds[0] - 1), abs=0.051) and told >= 0
    assert record[0]["simulated"] and record[1]["simulated"]


def test_equal_plans_have_equal_numbers_under_every_objective() -> None:
    fixed = {"recompute": "none", "zero": 1, "sp": True, "offload": 0.0, "pp": 1}
    limits = Limits(fixed=tuple(fixed.items()))
    one = job("llama3.1-8b", devices=8, batch=64, seq=4096)
    fast, small = (plan_job(one, objective, limits, top=99) for objective in ("time", "memory"))
    by_words = {choice.words: row for choice, row in zip(fast.choices, rows(fast), strict=True)}
    both = [row for row in rows(small) if row[0] in by_words]
    assert len(both) > 5 and all(row == by_words[row[0]] for row in both)


def test_where_simulation_and_closed_form_are_far_apart_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choices = plan_job(job("llama3.1-8b", devices=64, batch=64)).choices
    differences = {
        choice.words: abs(choice.even_seconds / choice.prediction.seconds - 1)
        for choice in choices
        if choice.simulated
    }
    least, most = min(differences.values()), max(differences.values())
    monkeypatch.setattr("hyperparallel.planner.planning.FAR_APART", (least + most) / 2)
    notes = list(apart(choices))
    for words, difference in differences.items():
        noted = [text for text in notes if text.startswith(f"{words}: simulated")]
        assert len(noted) == (difference > (least + most) / 2)
        assert all("from the closed form" in text for text in noted)
    assert 0 < len(notes) < len(differences)


def test_the_largest_run_that_was_fitted_is_one_number() -> None:
    root = Path(__file__).parents[2]
    board = json.loads((root / "benchmarks/results/leaderboard.json").read_text(encoding="utf-8"))
    sizes = [int(m[1]) for p in board["predictions"] if (m := re.search(r" on (\d+)( |$)", p["name"]))]
    assert max(sizes) == VALIDATED_DEVICES
    assert f"{VALIDATED_DEVICES:,}" in (root / "docs/simulator.md").read_text(encoding="utf-8").split("##")[0]


def test_places_name_the_tier_that_an_axis_crosses() -> None:
    one = job("llama3.1-8b", "cloudmatrix384", 768)
    assert place_words(one, Strategy(tp=2, dp=384), "tp") == " (inside package)"
    assert place_words(one, Strategy(tp=16, dp=48), "tp") == " (inside node)"
    assert place_words(one, Strategy(tp=32, dp=24), "tp") == " (across supernode)"
    assert tier_names(one.cluster) == ["package", "node", "supernode", "roce"]


def test_the_runner_up_and_its_losses_are_told() -> None:
    planning = plan_job(job("llama3.1-8b", devices=16, batch=64, seq=4096))
    second = planning.choices[1]
    assert planning.against.startswith(second.words)
    told = float(re.search(r": ([+-][\d.]+)% time", planning.against)[1])  # type: ignore[index]
    assert told == pytest.approx(100 * (second.seconds / planning.best.seconds - 1), abs=0.06)


def test_choices_are_in_order_of_the_objective() -> None:
    one = job("llama3.1-8b", devices=16, batch=64, seq=4096)
    fast, small = plan_job(one), plan_job(one, "memory")
    seconds = [choice.seconds for choice in fast.choices]
    assert seconds == sorted(seconds)
    peaks = [choice.prediction.peak_bytes for choice in small.choices]
    assert peaks == sorted(peaks) and peaks[0] < fast.best.prediction.peak_bytes
    assert fast.best.seconds < small.best.seconds


def test_the_cheapest_size_needs_the_fewest_device_seconds() -> None:
    one = job("llama3.1-8b", devices=64, batch=64, seq=4096)
    planning = plan_job(one, "cost")
    costs = {devices: devices * seconds for devices, seconds in planning.scaled}
    assert planning.job.devices == min(costs, key=costs.__getitem__) < 64
    assert max(costs) == 64


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (
            lambda: job("deepseek-v3", devices=8, batch=64, seq=4096),
            r"more than its 85.5 GB .*lie on disk .*--devices",
        ),
        (lambda: tight(layers=24, capacity=3e9, devices=1, batch=1), r"still .* too much.*--devices"),
    ],
)
def test_a_model_that_fits_nowhere_says_by_how_much_and_what_would_help(one, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=said) as caught:
        plan_job(one())
    text = str(caught.value)
    need, over, room = (
        float(x.replace(",", ""))
        for x in re.search(
            r"needs ([\d,.]+) GB a device, ([\d,.]+) GB more than its ([\d,.]+) GB", text
        ).groups()
    )  # type: ignore[union-attr]
    assert need - room == pytest.approx(over, abs=0.11)
    devices = int(re.search(r"--devices (\d+)", text)[1])  # type: ignore[index]
    larger = replace(one(), cluster=one().cluster.resized(devices))
    larger = replace(larger, global_batch=max(larger.global_batch, default_batch(larger.seq, devices)))
    assert search(larger).best  # what is advised fits


def test_what_only_the_executor_lacks_is_said() -> None:
    one = tight(layers=24, capacity=14e9, devices=1, batch=4)
    with pytest.raises(PlanError, match=r"without --runnable .* fits in") as caught:
        plan_job(one, limits=Limits(runnable=True))
    assert "in host memory" not in str(caught.value) and "none recomputation" not in str(caught.value)
    assert plan_job(one).best.prediction.strategy.devices == 1


def test_what_keeps_activations_is_said_properly() -> None:
    one = tight(layers=24, capacity=3e9, devices=1, batch=1)
    with pytest.raises(PlanError, match="with all activations kept and optimizer states") as caught:
        plan_job(one, limits=Limits(fixed=(("recompute", "none"),)))
    assert "none recomputation" not in str(caught.value)


def test_warnings_name_what_was_never_fitted() -> None:
    said = " ".join(plan_job(job("qwen3-0.6b", "tpu-v5p", 16)).warnings)
    assert "tpu-v5p: no published run" in said
    one = PlanningJob(gpt(512, 4, 8), preset("h100", 8), 2048, 8)
    assert "hidden size 512 lies outside" in " ".join(plan_job(one).warnings)
    assert plan_job(job("llama3.1-8b", devices=64, batch=256)).warnings == ()


def test_runnable_plans_become_plan_files() -> None:
    from hyperparallel.plan.plan import Plan

    planning = plan_job(job("llama3.1-8b", devices=8, batch=64), limits=Limits(runnable=True))
    strategy = planning.best.prediction.strategy
    assert missing(strategy) == []
    plan = to_plan(planning.job.model, strategy)
    assert plan.mesh.size == 8 and Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.compute == "bfloat16"
    cut = to_plan(planning.job.model, Strategy(tp=4, dp=2, sp=True, zero=3))
    assert dict(zip(cut.mesh.names, cut.mesh.shape, strict=True)) == {"fsdp": 2, "tp": 4}
    assert "*.q_proj.weight" in cut.params and "model.layers.*" in cut.activations
    with pytest.raises(PlanError, match=r"pipeline parallelism.*--runnable"):
        to_plan(planning.job.model, Strategy(pp=2))
    with pytest.raises(PlanError, match="names of Llama"):
        to_plan(load_model("deepseek-v3"), Strategy(tp=2))


def test_report_and_json_say_the_same() -> None:
    planning = plan_job(job("qwen3-30b-a3b", devices=16, batch=64, seq=4096))
    record = json.loads(to_json(planning))
    table = rows(planning)
    assert len(table) == len(record["plans"]) and all(len(row) == len(PLAN_COLUMNS) for row in table)
    assert [row[0] for row in table] == [plan["words"] for plan in record["plans"]]
    first = record["plans"][0]
    assert first["peak_bytes"] == pytest.approx(sum(first["memory_bytes"].values()))
    assert Strategy(**first["strategy"]) == planning.best.prediction.strategy
    text = "\n".join(lines(planning))
    for reason in record["reasons"]:
        assert reason in text
    assert "MFU: 3 x forward" in text
    for link in planning.links:
        assert 0 < link.load(planning.best.seconds) < 1
