"""Names, layouts and sizes in words, the same words in every report.

Repeated blocks are folded by name: `model.layers.3.mlp` becomes `model.layers.*.mlp`. Bytes are
decimal (1 MB = 10**6 bytes), as network and memory rates are given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hyperparallel.layout import Layout, Mesh

REPLICATED = "replicated"
"""A layout that cuts nothing, in words."""

# A number that stands after an identifier and a dot, so that 0.5 in a sentence stays a number.
_INDEX = re.compile(r"(?<=[A-Za-z_]\.)\d+(?=\.\D|\.?[\s,;:)]|\.?$)")


def fold(text: str) -> str:
    """A name, or a sentence with names, with the index of every repeated block as a star.

    >>> fold("model.layers.11.mlp.weight")
    'model.layers.*.mlp.weight'
    >>> fold("follows h.3 at 0.5 of the cost")
    'follows h.* at 0.5 of the cost'
    """
    return _INDEX.sub("*", text)


def folded_name(names: Iterable[str]) -> str:
    """The name of a group of names that fold alike, with how many there are.

    >>> folded_name(["h.0.weight", "h.1.weight"])
    'h.*.weight [x2]'
    >>> folded_name(["h.1.weight"])
    'h.1.weight'
    """
    every = list(names)
    return every[0] if len(every) == 1 else f"{fold(every[0])} [x{len(every)}]"


def bytes_words(num_bytes: float) -> str:
    """A number of bytes as a person reads it.

    >>> bytes_words(512), bytes_words(40_300_000)
    ('512 B', '40.3 MB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def seconds_words(seconds: float) -> str:
    """A duration as a person reads it.

    >>> seconds_words(0.0000042), seconds_words(0.1234), seconds_words(75.0)
    ('4.2 us', '123 ms', '75 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def count_words(count: float) -> str:
    """A large count with its suffix.

    >>> count_words(950), count_words(10_123_456)
    ('950', '10.1 M')
    """
    for suffix, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {suffix}"
    return f"{count:.0f}"


def axes_words(axes: Iterable[str]) -> str:
    """Mesh axes as one word.

    >>> axes_words(("dp", "tp"))
    'dp x tp'
    """
    return " x ".join(axes)


def mesh_words(mesh: Mesh) -> str:
    """The axes of a mesh with their sizes.

    >>> from hyperparallel.layout import Mesh
    >>> mesh_words(Mesh((2, 4), ("dp", "tp")))
    'dp=2, tp=4'
    """
    return ", ".join(f"{name}={mesh.axis_size(name)}" for name in mesh.names)


def layout_words(layout: Layout) -> str:
    """What a layout does to its tensor.

    >>> from hyperparallel.layout import Layout, Mesh
    >>> lay = Layout((2, 4), ("dp", "tp"))
    >>> layout_words(lay(None, ("dp", "tp")))
    'dim 1 in 8 by dp x tp'
    >>> layout_words(lay(None, "tp", partial={"dp": "sum"}))
    'dim 1 in 4 by tp, pending sum on dp'
    >>> layout_words(lay(None, None))
    'replicated'
    """
    said = []
    for dim, axes in enumerate(layout.dims):
        if axes:
            pieces = 1
            for axis in axes:
                pieces *= layout.mesh.axis_size(axis)
            said.append(f"dim {dim} in {pieces} by {axes_words(axes)}")
    said += [f"pending {op} on {axis}" for axis, op in layout.partial]
    if layout.tier != "device":
        said.append(f"kept in {layout.tier} memory")
    return ", ".join(said) or REPLICATED
