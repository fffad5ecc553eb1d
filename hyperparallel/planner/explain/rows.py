"""A planning as rows, sentences and JSON: the terminal's table and the page print the same.

MFU counts what the model needs (three forwards, the whole square of attention, nothing twice) against the
peak of the job's number format. All that is told of a plan is of one step: the simulated one, with layers
refined where they were, or the closed form's, which the table marks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hyperparallel.plan.wording import bytes_words, seconds_words
from hyperparallel.planner.planning import PlannedStrategy, Planning
from hyperparallel.planner.search.table import Prediction

PLAN_COLUMNS = ("plan", "step", "tokens/s/device", "MFU", "memory", "exposed", "bubble", "runs today")
UNSIMULATED = " (closed form)"
FLOPS_WORDS = "MFU: 3 x forward FLOPs, whole attention square, no recomputation, of the {dtype} peak"


def tokens_s_device(planning: Planning, choice: PlannedStrategy) -> float:
    """Tokens a second and device."""
    return planning.job.tokens / (choice.seconds * planning.job.devices)


def rows(planning: Planning) -> list[tuple[str, ...]]:
    """One row of words for each plan, in the order of `PLAN_COLUMNS`."""
    found: list[tuple[str, ...]] = []
    for choice in planning.choices:
        p = choice.expected
        found.append(
            (
                choice.words,
                seconds_words(choice.seconds) + ("" if choice.simulated else UNSIMULATED),
                f"{tokens_s_device(planning, choice):,.0f}",
                f"{planning.job.mfu(choice.seconds):.1%}",
                bytes_words(p.peak_bytes),
                f"{p.exposed_share:.1%}",
                f"{max(p.bubble_share, 0.0):.1%}",
                "no" if choice.missing else "yes",
            )
        )
    return found


def memory_words(prediction: Prediction) -> str:
    """What the peak is made of, the largest first."""
    parts = sorted(prediction.memory.items(), key=lambda item: -item[1])
    said = ", ".join(f"{name} {bytes_words(value)}" for name, value in parts if value >= 0.05e9)
    away = f"; {bytes_words(prediction.host_bytes)} in host memory" if prediction.host_bytes else ""
    return f"{bytes_words(prediction.peak_bytes)} a device: {said}{away}"


def time_words(prediction: Prediction) -> str:
    """What the step is made of, the largest first."""
    parts = sorted(prediction.parts.items(), key=lambda item: -item[1])
    said = [
        f"{name.replace('_', ' ')} {value / prediction.seconds:.1%}"
        for name, value in parts
        if value >= 0.0005 * prediction.seconds
    ]
    return ", ".join(said)


def masked_share(prediction: Prediction) -> float:
    """Share of the seconds of messages that computation hides; 1 where there are none."""
    p = prediction
    seen = p.exposed - p.parts.get("exposed_host", 0.0)
    return max(1.0 - seen / p.communication, 0.0) if p.communication else 1.0


def lines(planning: Planning) -> Iterator[str]:
    """Sentences below the table."""
    job, best = planning.job, planning.best
    p = best.expected
    yield f"step   {time_words(p)}"
    yield f"memory {memory_words(p)}"
    if planning.uneven:
        yield f"stages {planning.uneven}"
    if best.simulated:
        closed = f"closed form {seconds_words(best.prediction.seconds)}"
        closed += " before its layers were refined" if best.split else ""
        yield (
            f"simulated {seconds_words(best.seconds)}, {closed}; "
            f"{masked_share(p):.0%} of communication is hidden"
        )
    for link in planning.links:
        if link.load(best.seconds) >= 0.005:
            axes = ", ".join(f"{axis}{size}" for axis, size in link.members.items())
            yield f"link   {link.name}: {link.load(best.seconds):.0%} used ({axes})"
    for reason in planning.reasons:
        yield f"why    {reason.words}"
    if planning.against:
        yield f"second {planning.against}"
    for devices, seconds in planning.scaled:
        rate = job.tokens / (seconds * devices)
        yield f"size   {devices:,} devices: {seconds_words(seconds)} a step, {rate:,.0f} tokens/s/device"
    absent = best.missing
    if absent:
        yield f"runs   not yet: the executor has no {', '.join(absent)} (--runnable searches what it has)"
    for warning in planning.warnings:
        yield f"note   {warning}"
    yield FLOPS_WORDS.format(dtype=job.dtype)
    yield f"searched {planning.considered:,} strategies, {planning.fitting:,} fit in memory"


def title(planning: Planning) -> str:
    """The first line: what was planned."""
    job = planning.job
    amount = job.model_flops / 1e15
    flops = f"{amount:,.0f} PFLOP" if amount >= 100 else f"{amount:.3g} PFLOP"
    return f"{job.words()}, {job.dtype}, {flops} of the model"


def to_record(planning: Planning) -> dict[str, Any]:
    """Everything as plain data, in seconds and bytes."""
    job = planning.job
    return {
        "model": job.model.name,
        "cluster": job.cluster.name,
        "devices": job.devices,
        "seq": job.seq,
        "global_batch": job.global_batch,
        "dtype": job.dtype,
        "objective": planning.objective,
        "considered": planning.considered,
        "fitting": planning.fitting,
        "model_flops": job.model_flops,
        "plans": [_plan_record(planning, choice) for choice in planning.choices],
        "reasons": [r.words for r in planning.reasons],
        "second": planning.against,
        "warnings": list(planning.warnings),
        "uneven": planning.uneven,
        "sizes": [{"devices": n, "step_seconds": s} for n, s in planning.scaled],
        "links": [{**link._asdict(), "load": link.load(planning.best.seconds)} for link in planning.links],
    }


def _plan_record(planning: Planning, choice: PlannedStrategy) -> dict[str, Any]:
    p = choice.expected
    return {
        "words": choice.words,
        "strategy": asdict(p.strategy),
        "step_seconds": choice.seconds,
        "closed_form_seconds": choice.prediction.seconds,
        "simulated": choice.simulated is not None,
        "tokens_per_second_per_device": tokens_s_device(planning, choice),
        "mfu": planning.job.mfu(choice.seconds),
        "time_seconds": dict(p.parts),
        "exposed_seconds": p.exposed,
        "communication_seconds": p.communication,
        "memory_bytes": dict(p.memory),
        "peak_bytes": p.peak_bytes,
        "host_bytes": p.host_bytes,
        "stages": list(choice.split.counts()) if choice.split else None,
        "layers": choice.split.actions() if choice.split else None,
        "missing_in_executor": choice.missing,
    }


def to_json(planning: Planning) -> str:
    """`to_record` as text."""
    return json.dumps(to_record(planning), indent=1)
