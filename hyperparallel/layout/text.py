"""Layouts as text, written the way a person writes them in Python, and read back.

`Mesh((2, 2), ("dp", "tp"), ranks=(0, 2, 1, 3))("dp", None, partial={"tp": "sum"}, tier="host")`:
what is the default (ranks in order, nothing partial, tier "device") is left out. Reading accepts
every spelling that building accepts (`Layout(...)` as the mesh, the paper's three arguments),
literals only: nothing is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from hyperparallel.errors import LayoutError
from hyperparallel.layout.entries import Dims, Partial
from hyperparallel.layout.grid import Grid

_Found = TypeVar("_Found")
_FORM = 'text like Mesh((2, 2), ("dp", "tp"))("dp", None)'


class WrittenLayout(NamedTuple):
    """The arguments that a text gives: those of the mesh, then those that the mesh is called with."""

    mesh: tuple[Any, ...]
    dims: tuple[Any, ...]
    options: dict[str, Any]


def write_layout(grid: Grid, dims: Dims, partial: Partial, tier: str) -> str:
    """The text of a layout: its mesh, called."""
    parts = [write_dim(axes) for axes in dims]
    if partial:
        pending = ", ".join(f'"{axis}": "{op}"' for axis, op in partial)
        parts.append(f"partial={{{pending}}}")
    if tier != "device":
        parts.append(f'tier="{tier}"')
    return f"{grid!r}({', '.join(parts)})"


def write_dim(axes: tuple[str, ...]) -> str:
    """One dim: None, an axis, or a tuple of axes.

    >>> write_dim(()), write_dim(("dp",)), write_dim(("dp", "tp"))
    ('None', '"dp"', '("dp", "tp")')
    """
    if len(axes) < 2:
        return f'"{axes[0]}"' if axes else "None"
    return "(" + ", ".join(f'"{axis}"' for axis in axes) + ")"


def read_layout(text: str) -> WrittenLayout:
    """The arguments in a text, not yet checked against each other; LayoutError for other text.

    >>> read_layout('Layout((2,), ("dp",))("dp", tier="host")')
    WrittenLayout(mesh=((2,), ('dp',), None), dims=('dp',), options={'tier': 'host'})
    """
    try:
        return _read_call(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        raise LayoutError("layout", text, _FORM) from None


def _read_call(tree: ast.expr) -> WrittenLayout:
    """The arguments of a called mesh or of the paper's form; ValueError or TypeError if it is neither."""
    match tree:
        case ast.Call(func=ast.Call(func=ast.Name(id="Mesh")) as mesh):
            return WrittenLayout(_apply(_mesh, mesh), *_apply(_mesh_call, tree))
        case ast.Call(func=ast.Call(func=ast.Name(id="Layout")) as mesh):
            return WrittenLayout(_apply(_paper_mesh, mesh), *_apply(_mesh_call, tree))
        case ast.Call(func=ast.Name(id="Layout")):
            return _apply(_paper_layout, tree)
    raise ValueError("not a layout")


# The signatures that a text may call, as `Mesh` and `Layout` have them; binding finds what does not fit.


def _mesh(shape: Any, names: Any, ranks: Any = None) -> tuple[Any, ...]:
    return shape, names, ranks


def _paper_mesh(device_matrix: Any, alias_name: Any, *, ranks: Any = None) -> tuple[Any, ...]:
    return device_matrix, alias_name, ranks


def _mesh_call(*dims: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return dims, _checked(options)


def _paper_layout(
    device_matrix: Any, alias_name: Any, tensor_map: Any, *, ranks: Any = None, **options: Any
) -> WrittenLayout:
    return WrittenLayout((device_matrix, alias_name, ranks), tuple(tensor_map), _checked(options))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    if not options.keys() <= {"partial", "tier"}:
        raise TypeError("unknown option")
    return options


def _apply(signature: Callable[..., _Found], call: ast.Call) -> _Found:
    """`signature` with the literals of a call."""
    options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return signature(*map(ast.literal_eval, call.args), **options)
