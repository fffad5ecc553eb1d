"""How every benchmark here measures and writes: interleaved rounds, medians, one result file.

A benchmark runs all its rows in one process (or one set of ranks), round robin, so that a busy
moment of the machine hits every row alike. A sample is the mean of a few steps; a row's number is
the median of its samples with the quartiles as spread. Wall time is a clock on the wall; CPU time
is what all threads of the process used (`time.process_time`), the steadier number on a shared
machine. `Report` writes the same tables as JSON (for programs) and Markdown (for people).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measured stretch, per step."""

    wall_seconds: float
    cpu_seconds: float


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median and its quartiles.

    >>> Spread.of([3.0, 1.0, 2.0, 5.0, 4.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation; raises ValueError without values."""
        if not values:
            raise ValueError("a spread needs at least one value")
        ordered = sorted(values)

        def quantile(share: float) -> float:
            place = share * (len(ordered) - 1)
            below = int(place)
            above = min(below + 1, len(ordered) - 1)
            return ordered[below] + (place - below) * (ordered[above] - ordered[below])

        return cls(quantile(0.5), quantile(0.25), quantile(0.75))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """As in "3.32 (3.10-3.60)"; `scale` 1e3 turns seconds into ms."""
        median, low, high = (
            f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high)
        )
        return f"{median} ({low}-{high})"


def measure(step: Callable[[], object], steps: int) -> Sample:
    """Mean wall and CPU seconds of `steps` calls in a row."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall / steps, cpu / steps)


def interleave(
    rows: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[Sample]]:
    """Measure every row once per round, in order; `before` (a barrier) is not measured."""
    samples: dict[str, list[Sample]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, step in rows.items():
            before()
            samples[name].append(measure(step, steps))
    return samples


def across_ranks(by_rank: Sequence[Mapping[str, Sequence[Sample]]]) -> dict[str, list[Sample]]:
    """Merge the ranks' samples: the slowest rank's wall time, the mean rank's CPU time."""
    return {
        name: [
            Sample(
                max(sample.wall_seconds for sample in together),
                sum(sample.cpu_seconds for sample in together) / len(together),
            )
            for together in zip(*(samples[name] for samples in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under named columns; cells are printed as given."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        lines += ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(cell_text(cell) for cell in row) + " |" for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"

    def json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


def cell_text(cell: Any) -> str:
    """A Markdown cell: no bars or line breaks, short floats."""
    if cell is None:
        return ""
    text = f"{cell:.3g}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "/").replace("\n", " ")


@dataclasses.dataclass(frozen=True)
class Report:
    """What one benchmark command measured, where, and how."""

    name: str
    title: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("torch",)
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path = RESULTS) -> Path:
        """Write NAME.json and NAME.md into `folder`; returns the Markdown path."""
        folder.mkdir(parents=True, exist_ok=True)
        about = {"command": command(), "machine": machine(), "versions": versions(self.packages)}
        content = {
            "title": self.title,
            **about,
            "notes": list(self.notes),
            "tables": [table.json() for table in self.tables],
            "raw": self.raw,
        }
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
        head = [f"# {self.title}", ""]
        head += [f"- {key}: {flat(value)}" for key, value in about.items()]
        head += [f"- {note}" for note in self.notes]
        text = "\n".join([*head, ""]) + "\n" + "\n".join(t.markdown() for t in self.tables)
        path = folder / f"{self.name}.md"
        path.write_text(text)
        return path


def flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return f"`{value}`"


def command() -> str:
    """The command line that is running, as `python -m ...`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name
    return " ".join(["python", "-m", module, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Processor, cores and how busy they were at the time; no names of machines."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu pressure (10 s / 60 s, %)": pressure(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def pressure() -> str:
    """Share of time in which some task waited for a core; "unknown" where not told."""
    try:
        fields = Path("/proc/pressure/cpu").read_text().split()
    except OSError:
        return "unknown"
    known = dict(field.split("=") for field in fields[1:5])
    return f"{known['avg10']} / {known['avg60']}"


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's version and that of each installed package named."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
