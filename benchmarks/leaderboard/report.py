"""The leaderboard as JSON (for programs) and Markdown (for people)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.leaderboard.anchors import Anchor, Collective
from benchmarks.leaderboard.case import Skipped
from benchmarks.leaderboard.score import Errors

TABLES = {
    "raw": "Raw: constants alone",
    "calibrated": "Calibrated: times one factor per source",
    "cross_validated_raw": "Cross-validated, raw",
    "cross_validated": "Cross-validated, calibrated",
    "left_out_raw": "Left out with its family of sources, raw",
    "left_out": "Left out with its family of sources, calibrated by half of its first row",
}
"""What is scored, in the order of columns."""


def anchors_json(anchors: list[Anchor]) -> dict[str, Any]:
    """Each with its error, and their mean and largest."""
    if not anchors:
        return {"count": 0}
    errors = np.abs([a.error for a in anchors])
    rows = [{"name": a.name, "predicted": a.predicted, "published": a.published, "error": round(a.error, 5)}
            for a in anchors]  # fmt: skip
    return {"count": len(anchors), "mape": float(errors.mean()), "worst": float(errors.max()), "rows": rows}


def collectives_json(rows: list[Collective]) -> dict[str, Any]:
    """Errors by size: under 1 MiB latency rules, over 16 MiB bandwidth."""
    result: dict[str, Any] = {}
    for name, low, high in (("under 1 MiB", 0, 2**20), ("1 to 16 MiB", 2**20, 2**24),
                            ("16 MiB and over", 2**24, np.inf)):  # fmt: skip
        chosen = [row for row in rows if low <= row.num_bytes < high]
        found = Errors.of(np.array([r.predicted for r in chosen]), np.array([r.measured for r in chosen]))
        if found is not None:
            result[name] = found.plain()
    return result


def skipped_json(skipped: list[Skipped]) -> list[dict[str, str]]:
    """All of them."""
    return [asdict(one) for one in skipped]


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    lines = ["# Leaderboard of the cost model", ""]
    lines += [
        "Errors of predicted seconds per step against published runs (`make leaderboard`), in percent: "
        "mean / median / 90th percentile of the absolute error. Calibrated means one factor per source, "
        "taken from one of its rows. Cross-validated: five folds. Left out: constants fitted without the "
        "whole family of sources. docs/simulator.md has the equations.",
        "",
        f"{result['rows']} rows read, {len(result['skipped'])} not expressed (listed below). "
        f"Constants: {result['constants_from']}.",
        "",
        "## Step time",
        "",
    ]
    names = [name for name in TABLES if name in result["step_time"]]
    lines.append("| source | rows | " + " | ".join(TABLES[name] for name in names) + " |")
    lines.append("| --- | ---: |" + " --- |" * len(names))
    for source in result["step_time"]["raw"]:
        cells = [_cell(result["step_time"][name].get(source)) for name in names]
        count = result["step_time"]["raw"][source]["count"]
        lines.append(f"| {source} | {count} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Constants",
        "",
        "| constant | fitted | prior | spread of the prior |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, one in result["constants"].items():
        lines.append(f"| {name} | {one['value']:.4g} | {one['prior']:.4g} | {one['sigma']:.2g} |")
    lines += ["", "## Choice among measured runs (vTrain)", ""]
    for name, one in result["planner"].items():
        lines.append(
            f"- {name}: {one['groups']} groups; regret of the first choice {_percent(one['regret'])} "
            f"(worst {_percent(one['worst'])}); Kendall tau {one['tau']:.3f} "
            f"({one['pooled_tau']:.3f} over all pairs)"
        )
    lines += ["", "## Memory", ""]
    for name, one in result["memory"].items():
        if isinstance(one, Mapping) and one["count"]:
            lines.append(
                f"- {name}: {one['count']} totals, mean error {_percent(one['mape'])}, "
                f"worst {_percent(one['worst'])}"
            )
    for row in result["memory"]["measured peaks"].get("rows", []):
        lines.append(
            f"  - {row['name']}: {row['predicted'] / 2**30:.1f} GiB for {row['published'] / 2**30:.1f} "
            f"({row['error']:+.1%})"
        )
    refused = result["memory"]["called out of memory"]
    lines.append(f"- runs that the model would have refused: {len(refused)}")
    lines += [f"  - {name}" for name in refused]
    lines += ["", "## NCCL's all-reduce on A100 (protocol numbers were read off these rows)", ""]
    lines += ["| size | rows | mean / median / 90th |", "| --- | ---: | --- |"]
    lines += [f"| {name} | {one['count']} | {_cell(one)} |" for name, one in result["collectives"].items()]
    lines += ["", "## Speed on one core", ""]
    lines += [f"- {name}: {value:,.0f} configurations/s" for name, value in result["speed"].items()]
    lines += ["", "## Rows that are not expressed", ""]
    for (table, reason), count in Counter((s["table"], s["reason"]) for s in result["skipped"]).items():
        named = [s["name"] for s in result["skipped"] if (s["table"], s["reason"]) == (table, reason)]
        lines.append(f"- {table}, {count}: {reason}: " + "; ".join(named))
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _cell(errors: Mapping[str, float] | None) -> str:
    if errors is None:
        return ""
    return " / ".join(f"{100 * errors[key]:.1f}" for key in ("mape", "median", "p90"))
