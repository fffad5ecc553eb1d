"""What the executor carries of a layout today: pieces in the device's own memory, reductions done.

A `Layout` can say more: pieces in another memory tier, results that are pending a reduction. Where such a
layout would be stored as if it said nothing of the kind, it is refused by the name of the field.
"""

from __future__ import annotations

from collections.abc import Iterable

from hyperparallel.errors import LayoutError, UserError
from hyperparallel.layout.entries import DEVICE
from hyperparallel.layout.layout import Layout


def refuse_tier(layout: Layout, where: str, error: type[UserError] = LayoutError) -> None:
    """Refuse a layout in another memory than the device's; where: the field that it was given for.

    >>> from hyperparallel.layout import Mesh
    >>> refuse_tier(Mesh((2,), ("tp",))("tp", tier="host"), "params['a.weight']")
    Traceback (most recent call last):
    hyperparallel.errors.LayoutError: params['a.weight'].tier: got 'host'; allowed: 'device': no other ...
    """
    if layout.tier != DEVICE:
        allowed = f"{DEVICE!r}: no other memory is carried yet"
        raise error(f"{where}.tier", layout.tier, allowed, "a layout without tier")


def check_stored(layout: Layout, where: str, error: type[UserError] = LayoutError) -> None:
    """Refuse what a stored tensor can't be: in another memory, or pending a reduction."""
    refuse_tier(layout, where, error)
    if layout.partial:
        allowed = "nothing pending: a stored value is reduced"
        raise error(f"{where}.partial", dict(layout.partial), allowed, "a layout without partial")


def check_all(layouts: Iterable[object], where: str) -> None:
    """`refuse_tier` for each `Layout` among the entries of a list."""
    for i, layout in enumerate(layouts):
        if isinstance(layout, Layout):
            refuse_tier(layout, f"{where}[{i}]")
