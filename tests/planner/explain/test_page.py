"""The page: well-formed, self-contained, and alive in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hyperparallel.plan.wording import bytes_words
from hyperparallel.planner.explain.drawings import (
    MOST_POINTS,
    followed_ranks,
    shown_ranks,
    thinned,
    timeline_data,
)
from hyperparallel.planner.explain.page import planning_page
from hyperparallel.planner.planning import Planning, plan_job
from hyperparallel.planner.search.space import Limits
from hyperparallel.simulate import Sample
from tests.plan.test_page import Outline
from tests.planner.sample import job, tight

pytestmark = pytest.mark.pure
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")


@pytest.fixture(scope="module")
def planning() -> Planning:
    return plan_job(job("qwen3-30b-a3b", devices=64, batch=256, seq=4096))


def test_is_well_formed_and_loads_nothing(planning: Planning) -> None:
    page = planning_page(planning)
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    assert not re.search(r"https?://", page)
    assert "default-src 'none'" in page
    assert len(outline.ids) == len(set(outline.ids))


def numbers(page: str) -> dict[str, str]:
    return dict(re.findall(r'<div class="fact">(.*?)<b>(.*?)</b>', page))


def test_card_table_and_curve_of_a_refined_plan_are_of_one_plan() -> None:
    planning = plan_job(tight(layers=24, capacity=16e9))
    best, page = planning.best, planning_page(planning)
    assert best.split is not None and best.simulated is not None
    peak = best.simulated.timeline.peak_bytes()
    assert numbers(page)["memory"] == f"{peak / 1e9:.1f} of 16.0 GB"
    assert numbers(page)["plan"] == best.words
    assert f"peak {bytes_words(peak)}" in page and f"{bytes_words(peak)} a device" in page
    assert "The curve peaks" not in page


def test_a_curve_that_peaks_elsewhere_than_the_card_says_why() -> None:
    limits = Limits(fixed=(("pp", 16), ("tp", 4), ("virtual", 6), ("recompute", "light"), ("offload", 0.0)))
    planning = plan_job(job("gpt3-175b", devices=64, seq=2048, batch=64), limits=limits, top=1)
    best, page = planning.best, planning_page(planning)
    assert best.simulated is not None and best.simulated.skipped
    curve, told = best.simulated.timeline.peak_bytes(), best.expected.peak_bytes
    assert curve < 0.995 * told
    assert f"The curve peaks at {bytes_words(curve)}" in page and f"needs {bytes_words(told)}" in page


def test_stages_that_are_not_drawn_are_counted() -> None:
    limits = Limits(fixed=(("pp", 32), ("schedule", "1f1b"), ("virtual", 1)))
    planning = plan_job(job("llama3.1-405b", devices=512, batch=256, seq=4096), limits=limits, top=1)
    page = planning_page(planning)
    assert planning.best.simulated is not None
    drawn = len(shown_ranks(planning.best.simulated.timeline))
    assert drawn < 32 and f"{drawn} of 32 stages are drawn, from the first to the last" in page
    chosen = followed_ranks(planning.best.simulated.timeline)
    assert f"{len(chosen)} of 32 stages are drawn: {', '.join(map(str, chosen))}" in page
    assert len(re.findall(r"stage \d+: peak", page)) == len(chosen)


def test_memory_rises_and_falls_by_layer_without_a_pipeline() -> None:
    limits = Limits(fixed=(("tp", 1), ("cp", 1), ("pp", 1)))
    planning = plan_job(job("llama3.1-8b", devices=8, batch=256, seq=4096), limits=limits, top=1)
    assert planning.best.simulated is not None
    paths = re.findall(r'<path d="(M[^"]+)" fill="none"', planning_page(planning))
    heights = [float(y) for y in re.findall(r"V([\d.]+)", paths[0])]
    turns = len(set(heights))
    assert len(paths) == 1 and turns > 12  # one flat step up and down would be three heights


def test_says_what_the_report_says(planning: Planning) -> None:
    from html import unescape

    text = unescape(planning_page(planning))
    for choice in planning.choices:
        assert choice.words in text
    for reason in planning.reasons:
        assert reason.words in text
    for link in planning.links:
        assert link.name in text
    assert "experts in" in text or planning.best.prediction.strategy.ep == 1


def test_every_span_is_drawn_once(planning: Planning) -> None:
    assert planning.best.simulated is not None
    timeline = planning.best.simulated.timeline
    data = timeline_data(timeline)
    assert max(span[3] for span in data["spans"]) <= data["seconds"] * (1 + 1e-6)
    busy = sum(s.end - s.begin for s in timeline.spans if s.stream == "compute" and s.kind != "wait")
    lanes = [lane["compute"] for lane in data["lanes"]]
    drawn = sum(end - begin for lane, _, begin, end, _ in data["spans"] if lanes[int(lane)])
    assert drawn == pytest.approx(busy, rel=1e-3)


def test_thinning_keeps_peaks() -> None:
    samples = [Sample(float(i), float((i * 7919) % 1000)) for i in range(20 * MOST_POINTS)]
    samples[1234] = Sample(1234.0, 5000.0)
    kept = thinned(samples)
    assert len(kept) <= MOST_POINTS + 2
    assert max(s.num_bytes for s in kept) == 5000.0
    assert [s.seconds for s in kept] == sorted(s.seconds for s in kept)


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_draws_in_a_browser(planning: Planning, tmp_path: Path) -> None:
    page, shot = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(planning_page(planning), encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    base = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", profile, "--window-size=1280,2400"]
    dumped = subprocess.run(
        [*base, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=100
    ).stdout
    drawn = re.search(r'data-spans="(\d+)"', dumped)
    assert drawn and int(drawn[1]) > 50
    assert "data-error" not in dumped
    subprocess.run([*base, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=100)
    assert shot.stat().st_size > 30_000  # an empty page is a few kB
