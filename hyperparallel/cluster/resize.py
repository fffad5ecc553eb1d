"""A fabric of the same kind with another number of devices.

Tiers are filled from the inside: as long as the count is a multiple of a tier's size, that tier stays whole;
the first tier that the rest fits into takes a part of it, all further ones become 1. The outermost tier may
grow, a full mesh excepted (its ports are used up). A part of a mesh or torus is a smaller box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hyperparallel.cluster.bounds import MOST_DEVICES, MOST_WORDS
from hyperparallel.cluster.fabric import EXAMPLE_TIER, Fabric
from hyperparallel.errors import ClusterError

_SEARCHED = 4096
"""How far from the count that was asked the counts that work are searched, in devices."""


def resized_fabric(name: str, fabric: Sequence[Fabric], num_devices: int) -> tuple[Fabric, ...]:
    """The tiers of `fabric` for `num_devices`; a `ClusterError` names the nearest counts that work."""
    if num_devices < 1:
        raise ClusterError("devices", num_devices, "1 or more", "--devices 8 or another count")
    if num_devices > MOST_DEVICES:
        raise ClusterError("devices", num_devices, MOST_WORDS, f"a count of {MOST_DEVICES} or less")
    if not fabric and num_devices > 1:
        allowed = f"1, since no fabric tier connects devices of {name}"
        raise ClusterError("devices", num_devices, allowed, f"a tier under fabric, such as {EXAMPLE_TIER},")
    sizes = _sizes(fabric, num_devices)
    if sizes is None:
        near = _working(fabric, num_devices)
        whole = " x ".join(f"{tier.name} {'x'.join(map(str, tier.size))}" for tier in fabric)
        allowed = f"a count that fills {name}'s inner tiers ({whole}); the outermost may change"
        raise ClusterError("devices", num_devices, allowed, " or ".join(map(str, near)) or None)
    return tuple(
        tier if tier.size == size else tier.narrowed(size) for tier, size in zip(fabric, sizes, strict=True)
    )


def _sizes(fabric: Sequence[Fabric], count: int) -> list[tuple[int, ...]] | None:
    """Size of every tier for `count` devices; None where no box of each tier multiplies to it."""
    sizes: list[tuple[int, ...]] = []
    rest = count
    for index, tier in enumerate(fabric):
        outermost = index == len(fabric) - 1
        # Whole only if more follows outside: the last of the devices may be a smaller box of the same number.
        if not outermost and rest > tier.num_members and rest % tier.num_members == 0:
            sizes.append(tier.size)
            rest //= tier.num_members
            continue
        box = _box(tier, rest, outermost)
        if box is None:
            return None
        sizes.append(box)
        rest = 1
    return sizes if rest == 1 else None


def _box(tier: Fabric, count: int, may_grow: bool) -> tuple[int, ...] | None:
    """The best box of `count` members: inner dimensions whole for a mesh, near to a cube for a torus."""
    # A full mesh has no port left for another member.
    grows = may_grow and tier.kind != "mesh"
    limits = [count if grows else min(count, size) for size in tier.size]
    boxes = list(_boxes(count, limits))
    if not boxes:
        return None
    if tier.size in boxes:
        return tier.size
    if tier.kind == "torus":
        # Of boxes of one volume the one nearest to a cube has the least sum of sides, and the shortest ways.
        return min(boxes, key=lambda box: (sum(box), box))
    return max(boxes)


def _boxes(count: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations of `count` with factor i at most limits[i]."""
    if len(limits) == 1:
        if count <= limits[0]:
            yield (count,)
        return
    for factor in _divisors(count):
        if factor <= limits[0]:
            yield from ((factor, *rest) for rest in _boxes(count // factor, limits[1:]))


def _divisors(count: int) -> list[int]:
    """
    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return low + [count // d for d in reversed(low) if d * d != count]


def _working(fabric: Sequence[Fabric], asked: int) -> list[int]:
    """The nearest counts that work, one below and one above where there is one."""
    reach = range(1, _SEARCHED + 1)
    below = next((asked - k for k in reach if asked > k and _sizes(fabric, asked - k)), None)
    above = next((asked + k for k in reach if _sizes(fabric, asked + k)), None)
    return [count for count in (below, above) if count is not None]
