"""The few numbers of the cost model that are fitted, with their priors; all else is counted or measured.

Each is a factor on something physical. The prior is what one would say before seeing any run, and how sure
one is (a factor of e^sigma either way). `python -m benchmarks.leaderboard --fit` finds the values below from
published step times; docs/simulator.md has the equations that they stand in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Prior(NamedTuple):
    """A positive number believed to be `value`, give or take a factor e^`sigma`."""

    value: float
    sigma: float


PRIORS: Mapping[str, Prior] = {
    "matmul": Prior(0.9, 0.1),
    "waves": Prior(1.0, 0.5),
    "attention": Prior(0.65, 0.3),
    "memory": Prior(0.75, 0.25),
    "host": Prior(10.0, 0.7),
    "loop": Prior(5.0, 0.7),
    "jitter": Prior(0.05, 1.0),
    "link": Prior(0.77, 0.05),
    "network": Prior(0.65, 0.1),
    "exposed": Prior(0.4, 0.5),
    "dispatch": Prior(2.0, 0.5),
}
"""What is believed of each constant before any measured step is seen."""


@dataclass(frozen=True)
class Constants:
    """The fitted numbers.

    matmul: on the device's own peak share of big products. waves: power of the loss by a part-filled last
    wave of tiles. attention: share of matrix-product speed that fused attention and scans reach in open
    kernels (`Gemm.attention` in the vendor's). memory: share of the memory bandwidth that streaming kernels
    reach. host: host work per kernel, in units of the device's launch time. loop: host work per kernel of a
    loop over experts, in the same unit; it is not hidden, for the host has waited to learn how many tokens
    each expert got. jitter: growth of that work in tensor-parallel groups, whose ranks share a node's cores
    and wait for the slowest (for 8 ranks 7 times this). link, network: share of the bandwidth that
    collectives reach inside the innermost tier and outside. exposed: share of overlappable tensor-parallel
    communication that is not hidden. dispatch: on the bytes moved to sort tokens by expert.
    """

    matmul: float = 0.843
    waves: float = 0.749
    attention: float = 0.4206
    memory: float = 0.6348
    host: float = 19.72
    loop: float = 5.23
    jitter: float = 0.03099
    link: float = 0.7783
    network: float = 0.6596
    exposed: float = 0.2693
    dispatch: float = 2.091

    @classmethod
    def of_logs(cls, logs: npt.NDArray[np.float64]) -> Constants:
        """From logarithms in the order of `PRIORS`."""
        return cls(**dict(zip(PRIORS, np.exp(logs).tolist(), strict=True)))

    def logs(self) -> npt.NDArray[np.float64]:
        """Logarithms in the order of `PRIORS`."""
        return np.log([getattr(self, name) for name in PRIORS])

    def changed(self, **values: float) -> Constants:
        """With other values for some of them."""
        return replace(self, **values)


assert tuple(PRIORS) == tuple(f.name for f in fields(Constants))
