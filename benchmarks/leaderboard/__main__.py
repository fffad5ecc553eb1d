"""Scores the cost model on folders of published runs.

    python -m benchmarks.leaderboard --fit DIR --score DIR [--json OUT] [--markdown OUT] [--quick]

--fit: the folder whose rows the constants and factors are fitted to; without it (or without rows in it) the
committed ones are used.
--score: the folder that is scored (default: that of --fit). Any folder with files of the tables' names and
columns, whole or in part. Cross-validation and leaving sources out are done on the rows of --fit, unless
--quick. Needs no torch. `make leaderboard` scores ../shared/tables and writes benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.leaderboard import anchors, report
from benchmarks.leaderboard.case import Case, priced, seconds_of
from benchmarks.leaderboard.fit import calibration, fit
from benchmarks.leaderboard.planner import choice
from benchmarks.leaderboard.score import Score, by_source, calibrated, families, folds, held_out
from benchmarks.leaderboard.speed import configurations_per_second
from benchmarks.leaderboard.tables import READERS, read_tables
from hyperparallel.planner.cost.constants import PRIORS, Constants


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leaderboard", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--fit", type=Path, help="folder of tables to fit constants to")
    parser.add_argument("--score", type=Path, help="folder of tables to score")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--markdown", type=Path, help="file to write the page to")
    parser.add_argument("--quick", action="store_true", help="no cross-validation, no sources left out")
    chosen = parser.parse_args(arguments)
    folder = chosen.score or chosen.fit
    if folder is None:
        parser.error("give --score DIR, --fit DIR or both")
    for path in (chosen.fit, folder):
        if path is not None and not path.is_dir():
            names = ", ".join(f"{name}.csv" for name in READERS)
            said = f"no tables of published runs (*.csv) in {path}: name a folder that has some of {names}"
            print(said, file=sys.stderr)
            return 2
    result = leaderboard(chosen.fit, folder, not chosen.quick)
    text = report.markdown(result)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    if chosen.markdown:
        chosen.markdown.write_text(text)
    print(text)
    return 0


def leaderboard(fit_folder: Path | None, score_folder: Path, validate: bool = True) -> dict[str, Any]:
    """Everything that the page shows."""
    fitted, constants, factors = _fitted(fit_folder)
    cases, skipped = read_tables(score_folder)
    timings, bad = anchors.collectives(score_folder, constants)
    same = fit_folder is not None and fit_folder.resolve() == score_folder.resolve()
    step_time: dict[str, Any] = {"raw": {}}
    planner: dict[str, Any] = {}
    memory: dict[str, Any] = {"measured peaks": {"count": 0}, "called out of memory": []}
    if cases:
        score = Score.of(cases, constants, factors)
        step_time = {"raw": by_source(cases, score.predicted), "calibrated": by_source(cases, score.fixed)}
        if validate and same and len(cases) > 20:
            step_time |= _validated(cases, score, constants)
        for name, grouped in (("same model and devices", False), ("same batch too", True)):
            found = choice(cases, score.predicted, grouped)
            if found is not None:
                planner[name] = asdict(found)
        memory["measured peaks"] = report.anchors_json(anchors.peaks(cases, score.rows))
        memory["called out of memory"] = anchors.called_out_of_memory(cases, score.rows)
    memory["activations of a layer (Korthikanti et al.)"] = report.anchors_json(anchors.activation_anchors())
    memory["weights, gradients and optimizer (Megatron-Core)"] = report.anchors_json(anchors.state_anchors())
    return {
        "rows": len(cases),
        "constants_from": f"fitted to {len(fitted)} rows" if fitted else "the committed ones",
        "constants": {
            name: {"value": getattr(constants, name), "prior": one.value, "sigma": one.sigma}
            for name, one in PRIORS.items()
        },
        "factors": {source: round(factor, 5) for source, factor in factors.items()},
        "step_time": {
            name: {source: errors.plain() for source, errors in table.items()}
            for name, table in step_time.items()
        },
        "planner": planner,
        "memory": memory,
        "collectives": report.collectives_json(timings),
        "speed": configurations_per_second(),
        "skipped": report.skipped_json(skipped + bad),
        "predictions": _predictions(cases, score) if cases else [],
    }


def _fitted(folder: Path | None) -> tuple[list[Case], Constants, dict[str, float]]:
    """(rows, constants, factors); without rows the committed ones."""
    cases = read_tables(folder)[0] if folder is not None else []
    if not cases:
        return [], Constants(), _committed_factors()
    rows = priced(cases)
    constants = fit(cases, rows)
    return cases, constants, dict(calibration(cases, seconds_of(cases) / rows.seconds(constants)))


def _committed_factors() -> dict[str, float]:
    """Those that the last `make leaderboard` found."""
    path = Path(__file__).parents[1] / "results" / "leaderboard.json"
    return dict(json.loads(path.read_text())["factors"]) if path.exists() else {}


def _validated(cases: Sequence[Case], score: Score, constants: Constants) -> dict[str, Any]:
    """Tables of the rows held out."""
    result = {}
    for name, masks in (("cross_validated", folds(cases)), ("left_out", families(cases))):
        raw, fixed = held_out(cases, score.rows, masks, constants)
        result[f"{name}_raw"], result[name] = by_source(cases, raw), by_source(cases, fixed)
    return result


def _predictions(cases: Sequence[Case], score: Score) -> list[dict[str, Any]]:
    """Every row."""
    fixed = calibrated(cases, score.predicted, score.factors)
    return [
        {
            "source": case.source,
            "name": case.name,
            "measured_seconds": round(case.seconds, 6),
            "predicted_seconds": round(float(raw), 6),
            "calibrated_seconds": None if after != after else round(float(after), 6),
        }
        for case, raw, after in zip(cases, score.predicted, fixed, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
