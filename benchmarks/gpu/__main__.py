"""Run every part on all CUDA devices and write one folder of results: `make gpu`.

Run as `python -m benchmarks.gpu [--minutes N] [--started SECONDS] [--folder DIR] [--cpu]`. The exit status is
0 if all parts passed, 1 if not. Without a CUDA device it says what it would have run and ends with 0: nothing
is wrong with such a machine. `--cpu` runs the same parts on two ranks of the CPU, to try the command itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import Part, parts
from benchmarks.gpu.run import Status, run_parts, table

CPU_RANKS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--started", type=float, help="when the minutes began (seconds of the epoch)")
    parser.add_argument("--folder", type=Path, help="for the results; runs/gpu-TIME by default")
    parser.add_argument("--cpu", action="store_true", help="on two CPU ranks, to try the command itself")
    given = parser.parse_args(arguments)
    device, num_ranks = ("cpu", CPU_RANKS) if given.cpu else ("cuda", num_cuda_devices())
    folder = (given.folder or Path("runs") / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    if num_ranks == 0:
        print(without_cuda(parts("cuda", 1, folder)))
        return 0
    spent = 0.0 if given.started is None else time.time() - given.started
    if spent > 60:
        print(f"{spent:.0f} s of {60 * given.minutes:.0f} went into installing; the next run has them all")
    wanted = parts(device, num_ranks, folder, given.minutes)
    outcomes = run_parts(wanted, folder, time.monotonic() + 60 * given.minutes - spent)
    print(table(outcomes))
    print(f"results in {folder}")
    return 0 if all(one.status is Status.PASSED for one in outcomes) else 1


def num_cuda_devices() -> int:
    """The devices that torch would use; counted without starting CUDA."""
    import torch

    return torch.cuda.device_count()


def without_cuda(all_parts: Sequence[Part]) -> str:
    """What a machine without a CUDA device is told."""
    width = max(len(part.name) for part in all_parts)
    lines = [f"  {part.name:<{width}}  {part.seconds:>4.0f} s  {part.about}" for part in all_parts]
    head = "No CUDA device: nothing was run. With one (and a torch built for CUDA) this would run:"
    return "\n".join([head, *lines, "`python -m benchmarks.gpu --cpu` tries the command on two CPU ranks."])


if __name__ == "__main__":
    sys.exit(main())
