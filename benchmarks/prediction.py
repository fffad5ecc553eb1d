"""Predicted against measured steps on this machine: the demo, other meshes, other sizes.

Each setting is predicted first, from the machine's description (`hyperparallel doctor --calibrate`) and the
program alone, then trained for a few steps, of which the trace keeps the median of five; every command is one
that a user can type. Rounds go over all settings; a step's measured time is the median over rounds of the
traced step, and beside it stands the median of the later, untraced steps. Run as
`python -m benchmarks.prediction [--rounds N] [--only NAME] [--note TEXT] [--no-record]`; exit status 1 if
the demo's step is off by more than `WITHIN`. No number of the model was fitted to these runs; which kernels
are timed was chosen with the demo's profile in view.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import Report, Spread, Table
from hyperparallel.cluster.load import load_cluster
from hyperparallel.simulate import Comparison, Timeline, compare, read_trace

WITHIN = 0.15
STEPS = 16
WARM = 10
"""Steps before those whose time counts; the last five of them are the traced ones."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One run: a mesh and fields of the recipe's config."""

    name: str
    mesh: str
    fields: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return ["llama_demo", *self.fields, "--mesh", self.mesh]


SETTINGS = (
    Setting("demo", "dp=2,tp=2"),
    Setting("data parallel", "dp=4"),
    Setting("tensor parallel", "tp=4"),
    Setting("sharded states", "fsdp=4"),
    Setting("long sequences", "dp=2,tp=2", ("seq_len=512", "batch_size=4")),
    Setting("small batch", "dp=2,tp=2", ("seq_len=64", "batch_size=4")),
    Setting("two ranks", "tp=2"),
)


@dataclasses.dataclass(frozen=True)
class Round:
    """What one run measured: the traced step's timeline, and the seconds of later steps."""

    traced: Timeline
    untraced_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="names of settings")
    parser.add_argument("--note", action="append", default=[], help="about the machine, for the result file")
    parser.add_argument("--no-record", action="store_true", help="print, write no result file")
    given = parser.parse_args(arguments)
    settings = [one for one in SETTINGS if not given.only or one.name in given.only]
    with tempfile.TemporaryDirectory(prefix="prediction-") as name:
        folder = Path(name)
        predicted = {one.name: predict(one, folder) for one in settings}
        rounds: dict[str, list[Round]] = {one.name: [] for one in settings}
        for number in range(given.rounds):
            for one in settings:
                rounds[one.name].append(run(one, folder, number))
                last = rounds[one.name][-1]
                told = f"traced {last.traced.step_seconds * 1e3:.0f} ms, later {last.untraced_s * 1e3:.0f} ms"
                print(f"round {number + 1} of {given.rounds}, {one.name}: {told}", file=sys.stderr)
        found = {one.name: compared(predicted[one.name], rounds[one.name]) for one in settings}
    tables = [steps_table(settings, found, rounds), *(kinds_table(one, found[one.name]) for one in settings)]
    print("\n".join(table.markdown() for table in tables))
    if not given.no_record:
        report(tables, rounds, given.note).write()
    demo = found.get(SETTINGS[0].name)
    return 0 if demo is None or abs(demo.step_error) <= WITHIN else 1


def predict(one: Setting, folder: Path) -> Timeline:
    path = folder / "predicted.json"
    _command("plan", *one.words, "--trace", str(path))
    return read_trace(path)


def run(one: Setting, folder: Path, number: int) -> Round:
    path, run_folder = folder / "measured.json", folder / f"{one.name}-{number}".replace(" ", "-")
    _command(
        "train", *one.words, "--steps", str(STEPS), "--trace", str(path), "--run-folder", str(run_folder)
    )
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return Round(read_trace(path), statistics.median(row["step_seconds"] for row in rows[WARM:]))


def _command(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hyperparallel", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"hyperparallel {' '.join(words)} failed:\n{done.stderr[-2000:]}")


def compared(predicted: Timeline, rounds: Sequence[Round]) -> Comparison:
    """The comparison with the round whose traced step is the median (the lower one of two)."""
    ordered = sorted(rounds, key=lambda one: one.traced.step_seconds)
    return compare(predicted, ordered[(len(ordered) - 1) // 2].traced)


def steps_table(
    settings: Sequence[Setting], found: dict[str, Comparison], rounds: dict[str, list[Round]]
) -> Table:
    rows = []
    for one in settings:
        step, traced = found[one.name].summary[0], [r.traced.step_seconds for r in rounds[one.name]]
        untraced = statistics.median(r.untraced_s for r in rounds[one.name])
        fields = " ".join([one.mesh, *one.fields])
        rows.append((one.name, fields, f"{step.predicted * 1e3:.0f}", Spread.of(traced).text(1e3, 0),
                     f"{step.error:+.1%}", f"{untraced * 1e3:.0f}", f"{step.predicted / untraced - 1:+.1%}",
                     found[one.name].disorder or "same"))  # fmt: skip
    columns = ("setting", "mesh and fields", "predicted, ms", "traced step, ms (quartiles)", "error",
               "untraced steps, ms", "error", "order of actions")  # fmt: skip
    return Table("One step", columns, tuple(rows))


def kinds_table(one: Setting, found: Comparison) -> Table:
    rows = [
        (row.name, f"{row.predicted * 1e3:.2f}", f"{row.measured * 1e3:.2f}", f"{row.error:+.0%}")
        for row in found.kinds
        if max(row.predicted, row.measured) >= 1e-4
    ]
    notes = (
        "mean over ranks, by each rank's clock: time off the core counts in the kind that was interrupted, "
        "so kinds are less certain than the step",
    )
    return Table(f"Seconds by kind: {one.name}", ("kind", "predicted, ms", "measured, ms", "error"),
                 tuple(rows), notes)  # fmt: skip


def report(tables: Sequence[Table], rounds: dict[str, list[Round]], said: Sequence[str]) -> Report:
    threads = load_cluster("laptop").device.threads
    notes = [f"description: {threads.source if threads else 'not calibrated'}", *said]
    raw = {name: [(r.traced.step_seconds, r.untraced_s) for r in found] for name, found in rounds.items()}
    title = "Predicted against measured training steps on this machine"
    return Report(
        "prediction", title, tuple(tables), tuple(notes), ("torch", "transformers"), {"rounds": raw}
    )


if __name__ == "__main__":
    sys.exit(main())
