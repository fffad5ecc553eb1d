"""Print the size of the source: lines per package, files per folder, the longest names, files over 400 lines.

A folder of more than 16 files says two nouns: that is an error, and the exit status is 1. A file past 400
lines usually says two sentences; it is named, not refused. A long name that many files import costs more
than a long name that one file imports, so names stand with the number of files that import them.
Run as `python -m checks.size`.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MOST_LINES = 400
MOST_FILES = 16
NUM_NAMES = 12
ROOTS = ("hyperparallel", "tests", "examples", "benchmarks", "checks")


def lines_per_file(root: Path) -> dict[Path, int]:
    """Lines of every Python, C++ and HTML file below `root`."""
    paths = [path for pattern in ("*.py", "*.cpp", "*.html") for path in root.rglob(pattern)]
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(paths)}


def files_per_folder(root: Path) -> dict[Path, int]:
    """Files that stand in `root` and in each folder below it, the folders' own not counted."""
    paths = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return dict(sorted(Counter(path.parent for path in paths).items()))


def crowded(project: Path) -> list[str]:
    """The folders of more than `MOST_FILES` files, a line each.

    Every file counts, whatever its kind, those of subfolders not.
    """
    folders = {folder: count for name in ROOTS for folder, count in files_per_folder(project / name).items()}
    return [
        f"over {MOST_FILES} files: {folder.relative_to(project)} ({count}); give its second noun a folder"
        for folder, count in folders.items()
        if count > MOST_FILES
    ]


def names_of(package: Path) -> Iterator[str]:
    """Every public class, function and constant at module level below `package`."""
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            named: list[str] = []
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                named = [node.name]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in named if not name.startswith("_"))


def fan_in(project: Path) -> Counter[str]:
    """Public name of the package -> the number of files that import it by name."""
    names = dict.fromkeys(names_of(project / "hyperparallel"), 0)
    importers = Counter(names)
    for path in (path for name in ROOTS for path in (project / name).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        importers.update({alias.name for node in imports for alias in node.names} & names.keys())
    return importers


def line_rows(project: Path) -> list[str]:
    """Files, lines, median and longest file of every package and root."""
    rows: list[tuple[str, list[int]]] = []
    for name in ROOTS:
        files = lines_per_file(project / name)
        if name == "hyperparallel":
            packages: dict[str, list[int]] = {}
            for path, count in files.items():
                packages.setdefault(path.relative_to(project / name).parts[0], []).append(count)
            rows += [(f"{name}/{package}", counts) for package, counts in packages.items()]
        if files:
            rows.append((name, list(files.values())))
    text = [f"{'':<40}{'files':>6}{'lines':>8}{'median':>8}{'longest':>9}"]
    for name, counts in rows:
        median = int(statistics.median([count for count in counts if count] or [0]))
        text.append(f"{name:<40}{len(counts):>6}{sum(counts):>8}{median:>8}{max(counts):>9}")
    return text


def folder_rows(project: Path) -> list[str]:
    """Files of each folder, those that hold only folders left out."""
    text = [f"{'folder':<40}{'files':>6}"]
    for name in ROOTS:
        for folder, count in files_per_folder(project / name).items():
            mark = f"  over {MOST_FILES}" if count > MOST_FILES else ""
            text.append(f"{folder.relative_to(project)!s:<40}{count:>6}{mark}")
    return text


def name_rows(project: Path) -> list[str]:
    """The longest public names, and how many files import each."""
    longest = sorted(fan_in(project).items(), key=lambda item: (-len(item[0]), item[0]))[:NUM_NAMES]
    head = f"{'longest public names':<40}{'imported by files':>18}"
    return [head, *(f"{name:<40}{count:>18}" for name, count in longest)]


def report(project: Path) -> str:
    """What `make size` prints."""
    files = {path: count for name in ROOTS for path, count in lines_per_file(project / name).items()}
    long = sorted(((count, path) for path, count in files.items() if count > MOST_LINES), reverse=True)
    grown = [f"over {MOST_LINES} lines: {path.relative_to(project)} ({count})" for count, path in long]
    parts = [line_rows(project), folder_rows(project), name_rows(project), [*grown, *crowded(project)]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def main() -> int:
    """Print the report; the exit status is 1 if a folder holds too many files."""
    project = Path(__file__).resolve().parent.parent
    print(report(project))
    return 1 if crowded(project) else 0


if __name__ == "__main__":
    sys.exit(main())
