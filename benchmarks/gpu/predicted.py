"""The demo's step on this machine: predicted from timings of the devices, then traced, then compared.

Writes `machine.yaml` (the description), `predicted.json` and `measured.json` (timelines for a trace viewer)
and `comparison.json`. It passes when all of that could be made: how far off a prediction is on a machine that
it never saw is a finding, not a failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.machine import described
from benchmarks.gpu.parts import mesh_words
from hyperparallel.cluster.files import cluster_yaml


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    folder: Path = given.folder
    cluster = described(given.ranks, folder)
    (folder / "machine.yaml").write_text(cluster_yaml(cluster))
    print((folder / "machine.yaml").read_text())
    predicted, measured = folder / "predicted.json", folder / "measured.json"
    demo = ("llama_demo", "--mesh", mesh_words(given.ranks))
    run("plan", *demo, "--cluster", str(folder / "machine.yaml"), "--trace", str(predicted))
    more = ("--steps", "12", "--trace", str(measured), "--run-folder", str(folder / "traced"))
    run("train", *demo, *more)
    print(run("compare", str(predicted), str(measured)))
    (folder / "comparison.json").write_text(run("compare", str(predicted), str(measured), "--json"))
    return 0


def run(*words: str) -> str:
    """What a command of the library prints; its failure ends this one with what it said."""
    command = [sys.executable, "-m", "hyperparallel", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\nhyperparallel {words[0]} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
