"""Layouts as text, written the way a person writes them in Python, and read back.

`Layout((2, 2), ("dp", "tp"), ranks=(0, 2, 1, 3))("dp", None, partial={"tp": "sum"}, tier="host")`:
what is the default (ranks in order, nothing partial, tier "device") is left out. Reading accepts
every spelling that building accepts, literals only: nothing is evaluated.
"""

from __future__ import annotations

import ast
from typing import Any

from hyperparallel.errors import LayoutError
from hyperparallel.layout.layout import Layout
from hyperparallel.layout.mesh import Mesh

_FORM = 'text like Layout((2, 2), ("dp", "tp"))("dp", None)'


def write(layout: Layout) -> str:
    """The text of a layout; `read(write(x)) == x`."""
    parts = [write_dim(axes) for axes in layout.dims]
    if layout.partial:
        pending = ", ".join(f'"{axis}": "{op}"' for axis, op in layout.partial)
        parts.append(f"partial={{{pending}}}")
    if layout.tier != "device":
        parts.append(f'tier="{layout.tier}"')
    return f"{layout.mesh!r}({', '.join(parts)})"


def write_dim(axes: tuple[str, ...]) -> str:
    """One dim: None, an axis, or a tuple of axes.

    >>> write_dim(()), write_dim(("dp",)), write_dim(("dp", "tp"))
    ('None', '"dp"', '("dp", "tp")')
    """
    if len(axes) < 2:
        return f'"{axes[0]}"' if axes else "None"
    return "(" + ", ".join(f'"{axis}"' for axis in axes) + ")"


def read(text: str) -> Layout:
    """The layout of a text; LayoutError if it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise LayoutError("layout", text, _FORM) from None
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Call):
        dims, options = _literals(tree, text, ("partial", "tier"))
        return _read_mesh(tree.func, text)(*dims, **options)
    args, options = _literals(tree, text, ("tensor_map", "ranks", "partial", "tier"))
    found = Layout(*args, **options) if 2 <= len(args) <= 3 else None
    if not isinstance(found, Layout):
        raise LayoutError("layout", text, _FORM)
    return found


def _read_mesh(tree: ast.expr, text: str) -> Mesh:
    args, options = _literals(tree, text, ("ranks",))
    if not 2 <= len(args) <= 3:
        raise LayoutError("layout", text, _FORM)
    return Mesh(*args, **options)


def _literals(tree: ast.expr, text: str, allowed: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    if (
        not isinstance(tree, ast.Call)
        or (not isinstance(tree.func, ast.Name) and not isinstance(tree.func, ast.Call))
        or (isinstance(tree.func, ast.Name) and tree.func.id not in ("Layout", "Mesh"))
        or any(keyword.arg not in allowed for keyword in tree.keywords)
    ):
        raise LayoutError("layout", text, _FORM)
    try:
        args = [ast.literal_eval(arg) for arg in tree.args]
        options = {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}
    except ValueError:
        raise LayoutError("layout", text, _FORM) from None
    return args, options
