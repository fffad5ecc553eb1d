"""Check that imports go one way through the packages, and that torch stays right of its line.

The order stands in docs/architecture.md. Every import counts, wherever it stands in a file (inside
a function or under TYPE_CHECKING too), because a late import is still a dependency. torch, and what
imports torch (transformers, safetensors.torch), may be imported right of the torch line only; in
`recipes/`, `cli/` and the top package only inside functions, so that help and plans answer at once.

A module of this package is never named by a string, which no check and no reader would follow; only
`__init__.py` does so, in its table of public names. Inside every folder imports go one way too: its
files and subfolders never import each other in a ring. A shared value moves down instead, or the
method that reaches up becomes a function.
Run as `python -m checks.imports`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "hyperparallel"

# Lowest first; packages in one row are siblings and never import each other.
LEFT_OF_TORCH = (
    ("errors",),
    ("foreign_errors", "integer_program"),
    ("layout",),
    ("cluster", "workload"),
    ("shard", "offload", "mpmd"),
    ("simulate",),
    ("plan",),
    ("planner",),
)
RIGHT_OF_TORCH = (
    ("graph",),
    ("runtime",),
    ("models",),
    ("train", "serve"),
    ("rl",),
    ("recipes",),
    ("cli",),
)
LEVEL = {
    name: level for level, row in enumerate(LEFT_OF_TORCH + RIGHT_OF_TORCH) for name in row
}
LAZY = {"recipes", "cli", "__init__", "__main__"}
"""Packages right of the line that must still start without torch."""

NAMED = re.compile(rf"{PACKAGE}\.({'|'.join(LEVEL)})(\.\w+)*")
"""A string that can only be the name of a module of this package."""

HEAVY = {"torch", "transformers", "safetensors.torch", "tensorboard"}


def violations(root: Path) -> list[str]:
    """Every import below `root` (the folder of the package) that breaks the order, a line each."""
    found: list[str] = []
    imported: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        here = _room(relative)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        imported[relative] = []
        for line, module, at_module_level in _imports(tree, (PACKAGE, *relative.parts[:-1])):
            problem = _problem(here, module, at_module_level)
            if problem:
                found.append(f"{path}:{line}: {problem}")
            there = _file(root, module)
            if there is not None and there != relative:
                imported[relative].append(there)
        if here != "__init__":
            named = _named(tree)
            found += (f"{path}:{line}: {name!r} is named by a string; import it" for line, name in named)
    return found + [f"{root / folder}: {ring}" for folder, ring in _rings(imported)]


def _named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that names a module of this package, or is loaded as a module here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = _start(node.args[0])
            loads = name in ("import_module", "__import__") and not NAMED.fullmatch(text)
            if loads and text.startswith((".", f"{PACKAGE}.")):
                yield node.lineno, text


def _start(node: ast.expr) -> str:
    """The constant text that a string begins with, "" where it has none."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _file(root: Path, module: str) -> Path | None:
    """The file below `root` that holds a module or a name in one, as `_imports` gives it."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return None
    for inner in filter(None, (parts[1:], parts[1:-1])):
        for path in (Path(*inner).with_suffix(".py"), Path(*inner, "__init__.py")):
            if (root / path).is_file():
                return path
    return None


def _rings(imported: Mapping[Path, list[Path]]) -> Iterator[tuple[Path, str]]:
    """(folder, ring) where files and subfolders of a folder import each other, the shortest ring of each."""
    edges: dict[Path, dict[str, dict[str, str]]] = {}
    for path, others in imported.items():
        for other in others:
            pairs = enumerate(zip(path.parts, other.parts, strict=False))
            depth = next(i for i, (a, b) in pairs if a != b)
            if depth:  # between packages the order above holds
                mine, theirs = path.parts[depth], other.parts[depth]
                inside = edges.setdefault(Path(*path.parts[:depth]), {})
                inside.setdefault(mine, {}).setdefault(theirs, f"{path} imports {other}")
    for folder, graph in sorted(edges.items()):
        seen: set[str] = set()
        for start in sorted(graph):
            ring = () if start in seen else _shortest_ring(graph, start)
            seen.update(ring)
            if ring:
                steps = [graph[a][b] for a, b in zip(ring, (*ring[1:], start), strict=True)]
                yield folder, f"{' -> '.join((*ring, start))} is a ring: {'; '.join(steps)}"


def _shortest_ring(graph: Mapping[str, Mapping[str, str]], start: str) -> tuple[str, ...]:
    """The entries of the shortest way from `start` back to it, empty if there is none."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    for way in ways:  # grows while it is read: breadth first
        for there in graph.get(way[-1], ()):
            if there == start:
                return way
            if there not in seen:
                seen.add(there)
                ways.append((*way, there))
    return ()


def _room(relative: Path) -> str:
    """The package below the root that a file belongs to; a file of the root is a room by itself."""
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _problem(here: str, module: str, at_module_level: bool) -> str | None:
    heavy = any(module == name or module.startswith(name + ".") for name in HEAVY)
    if heavy and LEVEL.get(here, len(LEFT_OF_TORCH)) < len(LEFT_OF_TORCH):
        return f"{here} stands left of the torch line and imports {module}"
    if heavy and at_module_level and here in LAZY:
        return f"{here} must start without torch; import {module} inside the function that needs it"
    parts = module.split(".")
    if parts[0] != PACKAGE or len(parts) == 1 or here in ("__init__", "__main__"):
        return None
    there = parts[1]
    if there == here:
        return None
    if here not in LEVEL:
        return f"{here} has no place in the import order (checks/imports.py)"
    if there not in LEVEL:
        return None  # a public name of the top package
    if LEVEL[there] > LEVEL[here]:
        return f"{here} imports {there}, which stands to its right"
    if LEVEL[there] == LEVEL[here]:
        return f"{here} imports its sibling {there}"
    return None


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module name, stands at module level and runs) of every import in a file."""
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, runs_at_import = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, runs_at_import
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else ())))
            # `from hyperparallel import layout` names its package in the imported name.
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}", runs_at_import
        inside = runs_at_import and not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        )
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend((child, False) for child in node.body)
            pending.extend((child, inside) for child in node.orelse)
        else:
            pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def main() -> int:
    """Print every violation; the exit status is 1 if there is one."""
    root = Path(__file__).resolve().parent.parent / PACKAGE
    found = violations(root)
    print("\n".join(found) if found else "imports go one way")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
