"""What the results of a folder were made with: `versions.json`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import machine, versions
from hyperparallel.cli.doctor.machine import findings

PACKAGES = ("torch", "triton", "numpy", "transformers", "hyperparallel")


def facts() -> dict[str, Any]:
    """Every fact that can be read; those that cannot say why."""
    read: dict[str, Callable[[], Any]] = {
        "machine": machine,
        "packages": lambda: versions(PACKAGES),
        "cuda": lambda: torch.version.cuda,
        "cudnn": lambda: torch.backends.cudnn.version(),
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": lambda: said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "devices": lambda: [device(index) for index in range(torch.cuda.device_count())],
        "links": lambda: said("nvidia-smi", "topo", "-m"),
        "commit": lambda: said("git", "rev-parse", "HEAD"),
        "changed files": lambda: said("git", "status", "--porcelain"),
        "doctor": lambda: {item.name: item.found for item in findings()},
    }
    found = {}
    for name, fact in read.items():
        try:
            found[name] = fact()
        except Exception as error:  # a fact that is not there is no reason to lose the others
            found[name] = f"unknown: {type(error).__name__}: {error}"
    return found


def device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "units": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }


def said(*words: str) -> str:
    """What a command prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    found = json.dumps(facts(), indent=1)
    (parser.parse_args().folder / "versions.json").write_text(found + "\n")
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
