"""Check that imports go one way through the packages, and that torch stays right of its line.

The order stands in docs/architecture.md. Every import counts, wherever it stands in a file (inside
a function or under TYPE_CHECKING too), because a late import is still a dependency. torch, and what
imports torch (transformers, safetensors.torch), may be imported right of the torch line only; in
`recipes/`, `cli/` and the top package only inside functions, so that help and plans answer at once.
Run as `python -m checks.imports`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
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

HEAVY = {"torch", "transformers", "safetensors.torch", "tensorboard"}


def violations(root: Path) -> list[str]:
    """Every import below `root` (the folder of the package) that breaks the order, a line each."""
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        here = _room(path.relative_to(root))
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        package = (PACKAGE, *path.relative_to(root).parts[:-1])
        for line, module, at_module_level in _imports(tree, package):
            problem = _problem(here, module, at_module_level)
            if problem:
                found.append(f"{path}:{line}: {problem}")
    return found


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
