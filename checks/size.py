"""Print lines per package and name the files that have grown past 400 lines.

A file past 400 lines usually says two things; the report asks for the second sentence, it does not
fail. Run as `python -m checks.size`.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

LIMIT = 400
ROOTS = ("hyperparallel", "tests", "examples", "benchmarks", "checks")


def lines_per_file(root: Path) -> dict[Path, int]:
    """Lines of every Python and C++ file below `root`."""
    paths = [path for pattern in ("*.py", "*.cpp", "*.html") for path in root.rglob(pattern)]
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(paths)}


def report(project: Path) -> str:
    """The table that `make size` prints."""
    rows: list[tuple[str, dict[Path, int]]] = []
    for name in ROOTS:
        files = lines_per_file(project / name)
        if name == "hyperparallel":
            for package in sorted({path.relative_to(project / name).parts[0] for path in files}):
                inside = {
                    path: count
                    for path, count in files.items()
                    if path.relative_to(project / name).parts[0] == package
                }
                rows.append((f"{name}/{package}", inside))
        if files:
            rows.append((name, files))
    text = [f"{'':<28}{'files':>6}{'lines':>8}{'median':>8}{'longest':>9}"]
    for name, files in rows:
        counts = [count for count in files.values() if count]
        median = int(statistics.median(counts)) if counts else 0
        text.append(
            f"{name:<28}{len(files):>6}{sum(counts):>8}{median:>8}{max(counts, default=0):>9}"
        )
    long = {p: n for _, files in rows for p, n in files.items() if n > LIMIT}
    for path, count in sorted(long.items(), key=lambda item: -item[1]):
        text.append(f"over {LIMIT} lines: {path.relative_to(project)} ({count})")
    return "\n".join(text)


if __name__ == "__main__":
    print(report(Path(__file__).resolve().parent.parent))
    sys.exit(0)
