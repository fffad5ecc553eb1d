"""The parts of `make gpu`: what each runs, in how many seconds, and why it is there.

Each is a command of its own process, so that none can take the others down: first the facts, then the tests,
a run with parity, the machine against its prediction, and the speed beside the peers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

DEMO_STEPS = 6


@dataclass(frozen=True)
class Part:
    """One command. seconds: its budget; it is ended when that is over."""

    name: str
    about: str
    words: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


def mesh_words(num_ranks: int) -> str:
    """The demo's mesh on so many ranks: pairs of tensor-parallel ranks where they come out even.

    >>> mesh_words(1), mesh_words(3), mesh_words(8)
    ('dp=1', 'dp=3', 'dp=4,tp=2')
    """
    return f"dp={num_ranks // 2},tp=2" if num_ranks % 2 == 0 else f"dp={num_ranks}"


def parts(device: str, num_ranks: int, folder: Path, minutes: float = 8.0) -> tuple[Part, ...]:
    """All parts for ranks on "cuda", or "cpu" to try the command itself; their files go to `folder`.

    minutes: for all parts; their budgets are made for 8.
    """
    module = (sys.executable, "-m")
    where = ("--device", device, "--ranks", str(num_ranks), "--folder", str(folder))
    run_folder, mesh = folder / "demo", mesh_words(num_ranks)
    demo = ("train", "llama_demo", "--mesh", mesh, "--steps", str(DEMO_STEPS), "--check")
    tests = ("-m", "gpu", "tests") if device == "cuda" else ("-m", "procs", "tests/gpu")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    found = (
        Part("versions", "torch, CUDA, NCCL, driver, devices, commit",
             (*module, "benchmarks.gpu.versions", "--folder", str(folder)), 30),
        Part("tests", "tests marked gpu: NCCL groups, streams, copies, graphs, bf16, Inductor, checkpoints",
             (*module, "pytest", "-q", *tests, f"--junitxml={folder / 'tests.xml'}"), 170,
             {"HYPERPARALLEL_TESTS": device}),
        Part("demo", f"{DEMO_STEPS} steps of the demo, losses equal to the CPU's",
             (*module, "hyperparallel", *demo, "--run-folder", str(run_folder)), 70),
        Part("machine", "times the devices, predicts the demo's step, traces one, compares them",
             (*module, "benchmarks.gpu.predicted", *where), 90),
        Part("block", "one block beside hand-written and DTensor tensor parallelism",
             (*module, "benchmarks.gpu.speed", "block", *where), 60),
        Part("step", "training steps of a Llama beside DDP, FSDP2 and DTensor",
             (*module, "benchmarks.gpu.speed", "step", *where), 60),
    )  # fmt: skip
    scale = minutes / 8.0
    return tuple(
        replace(part, seconds=part.seconds * scale, environment={**part.environment, **hidden})
        for part in found
    )
