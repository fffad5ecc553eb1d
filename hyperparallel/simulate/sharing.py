"""Who gets how much of links that several want: max-min fairness by progressive filling.

All flows grow together until a link is full; those on it stay as they are, the others grow on. What grows
alike is the bandwidth that a flow takes of its most wanted link, so that on one full link all get the same,
but nobody more than it asked for (Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fair_rates(demands: Sequence[Mapping[str, float]]) -> list[float]:
    """The speed of each flow, 1 being its speed alone; demands: link -> share of capacity at speed 1.

    >>> fair_rates([{"a": 1.0}, {"a": 1.0}, {"b": 0.5}])
    [0.5, 0.5, 1.0]
    >>> fair_rates([{"a": 1.0}, {"a": 0.25}])
    [0.75, 1.0]
    """
    rates = [1.0] * len(demands)
    widest = [max(demand.values(), default=0.0) for demand in demands]
    growing = {i for i, width in enumerate(widest) if width}
    free: dict[str, float] = {}
    for i in growing:
        for link in demands[i]:
            free[link] = 1.0
    while growing:
        # Per link: what one more of bandwidth for every flow on it takes of its capacity.
        slope: dict[str, float] = {}
        for i in growing:
            for link, share in demands[i].items():
                slope[link] = slope.get(link, 0.0) + share / widest[i]
        level, full = min((free[link] / slope[link], link) for link in slope)
        # What is taken of a link may round above its capacity.
        level = max(level, 0.0)
        # Those that have all they asked for before any link is full stop first, and free the rest.
        done = [i for i in growing if widest[i] <= level]
        if not done:
            done = [i for i in growing if full in demands[i]]
        for i in done:
            rates[i] = min(1.0, level / widest[i])
            growing.discard(i)
            for link, share in demands[i].items():
                free[link] -= share * rates[i]
    return rates
