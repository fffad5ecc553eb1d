"""The block diagram of a model as HTML: modules in order, each tensor drawn as it is cut.

A repeated block is drawn once. A tensor's glyph shows the pieces of its last two dims, the piece of
the mesh's first rank filled, so that the filled share is the memory share. Beside each module stand
the collectives that it causes. Modules are known by the names of their parameters; what has none
(activations, rotary tables) is not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from hyperparallel.layout import Layout
from hyperparallel.plan.derived import Derived
from hyperparallel.plan.report import CommunicationRow, ParameterRow
from hyperparallel.plan.wording import axes_words, bytes_words, fold

WIDTH, HEIGHT = 34, 20
MOST_LINES = 16
ARROWS = {"forward": "&darr;", "backward": "&uarr;", "update": "&#8635;"}


@dataclass
class BlockPart:
    """A child of a block (`self_attn`), with its tensors and the collectives it causes."""

    path: str
    label: str
    rows: list[ParameterRow] = field(default_factory=list)
    moves: list[CommunicationRow] = field(default_factory=list)


@dataclass
class DiagramBlock:
    """A top-level module, or one drawn for all repeats of a block."""

    path: str
    repeats: int
    parts: dict[str, BlockPart] = field(default_factory=dict)
    moves: list[CommunicationRow] = field(default_factory=list)


def blocks(
    parameters: list[ParameterRow], communications: list[CommunicationRow]
) -> tuple[list[DiagramBlock], list[CommunicationRow]]:
    """Blocks in order of their parameters, and the collectives that belong to none of them."""
    found: dict[str, DiagramBlock] = {}
    for row in parameters:
        name = fold(row.names[0])
        module = name.rpartition(".")[0] or name
        head, star, tail = name.partition(".*.")
        path = f"{head}.*" if star else module
        label = tail.split(".")[0] if star and "." in tail else ""
        block = found.setdefault(path, DiagramBlock(path, 1))
        block.repeats = max(block.repeats, len(row.names))
        part_path = f"{path}.{label}" if label else path
        block.parts.setdefault(part_path, BlockPart(part_path, label)).rows.append(row)
    elsewhere: list[CommunicationRow] = []
    for move in communications:
        owner = _owner(found, move)
        (owner.moves if owner else elsewhere).append(move)
    return list(found.values()), elsewhere


def _owner(found: Mapping[str, DiagramBlock], move: CommunicationRow) -> BlockPart | DiagramBlock | None:
    """The part or block whose path is the longest prefix of where the collective happens."""
    owners: list[BlockPart | DiagramBlock] = [p for block in found.values() for p in block.parts.values()]
    owners += found.values()
    for place in (move.module, *move.values):
        fitting = [owner for owner in owners if f"{place}.".startswith(f"{owner.path}.")]
        if fitting:
            return max(fitting, key=lambda owner: len(owner.path))
    return None


def draw(
    derived: Derived,
    parameters: list[ParameterRow],
    communications: list[CommunicationRow],
    colours: Mapping[str, str],
) -> str:
    """The diagram as HTML; `colours` maps a layout in words to its CSS class."""
    layouts = {param.name: param.stored for param in derived.params}
    found, elsewhere = blocks(parameters, communications)
    drawn = [_block(block, layouts, colours) for block in found]
    if elsewhere:
        header = "<header>no single module</header>"
        drawn.append(f'<div class="block">{header}{_moves(elsewhere)}</div>')
    return '\n<div class="arrow"></div>\n'.join(drawn)


def _block(block: DiagramBlock, layouts: Mapping[str, Layout], colours: Mapping[str, str]) -> str:
    repeated = block.repeats > 1
    times = f' <span class="faint">x {block.repeats}</span>' if repeated else ""
    title = escape(block.path) + times
    parts = "\n".join(_part(part, layouts, colours) for part in block.parts.values())
    kind = "block repeated" if repeated else "block"
    head = f"<header>{title}</header>{_moves(block.moves)}"
    return f'<div class="{kind}">{head}\n{parts}</div>'


def _part(part: BlockPart, layouts: Mapping[str, Layout], colours: Mapping[str, str]) -> str:
    chips = "".join(_chip(row, part, layouts[row.names[0]], colours) for row in part.rows)
    return (
        f'<div class="part"><div class="label">{escape(part.label)}</div>'
        f'<div class="chips">{chips}</div>{_moves(part.moves)}</div>'
    )


def _chip(row: ParameterRow, part: BlockPart, layout: Layout, colours: Mapping[str, str]) -> str:
    name = fold(row.names[0]).removeprefix(f"{part.path}.")
    shape = " x ".join(str(size) for size in row.shape)
    hint = escape(f"{row.title}: {row.layout}. {row.reason}", quote=True)
    return (
        f'<span class="chip {colours[row.stored]}" title="{hint}">{glyph(layout)}'
        f'<span>{escape(name)} <span class="faint">{shape}</span></span></span>'
    )


def _moves(moves: list[CommunicationRow]) -> str:
    """One pill per phase, kind and axes; its hint says what they are for."""
    alike: dict[tuple[str, str, tuple[str, ...]], list[CommunicationRow]] = {}
    for move in moves:
        alike.setdefault((move.phase, move.kind, move.axes), []).append(move)
    pills = []
    for (phase, kind, axes), group in alike.items():
        hint = "\n".join(f"{phase}, {move.module}: {move.reason}" for move in group)
        count, size = sum(m.count for m in group), bytes_words(sum(m.step_bytes for m in group))
        what = f"{f'{count} ' if count > 1 else ''}{escape(kind)} over {escape(axes_words(axes))}"
        title = escape(hint, quote=True)
        pills.append(f'<span class="move" title="{title}">{ARROWS[phase]} {what}, {size}</span>')
    return f'<div class="moves">{"".join(pills)}</div>'


def glyph(layout: Layout) -> str:
    """A small SVG of a tensor: rows are its last but one dim, columns its last."""
    cuts = [_pieces(layout, dim) for dim in range(len(layout.dims))]
    rows, columns = ([1, 1, *cuts])[-2:]
    height = HEIGHT if len(cuts) > 1 else HEIGHT // 2
    filled = (WIDTH / columns, height / rows)
    outside = max(1, _product(cuts[:-2]))
    lines = [_line(WIDTH * i / columns, 0, 0, height) for i in _marks(columns)]
    lines += [_line(0, height * i / rows, WIDTH, 0) for i in _marks(rows)]
    return (
        f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'stroke="currentColor" stroke-opacity=".55" fill="none" aria-hidden="true">'
        f'<rect width="{filled[0]:.1f}" height="{filled[1]:.1f}" stroke="none" '
        f'fill="currentColor" fill-opacity="{0.4 / outside:.2f}"/>'
        f'{"".join(lines)}<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}"/></svg>'
    )


def _line(x: float, y: float, width: float, height: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x + width:.1f}" y2="{y + height:.1f}"/>'


def _pieces(layout: Layout, dim: int) -> int:
    return _product([layout.mesh.axis_size(axis) for axis in layout.dims[dim]])


def _product(numbers: list[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _marks(pieces: int) -> range:
    """Where the lines between pieces go; none where they would run into each other."""
    return range(1, pieces if pieces <= MOST_LINES else 1)
