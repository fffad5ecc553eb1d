from hyperparallel.cluster.files import cluster_yaml
"""The demo's step on this machine: predicted from timings of the devices, then traced, then compared.
from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml
Writes `machine.yaml` (the description), `predicted.json` and `measured.json` (timelines for a trace viewer)
from hyperparallel.cluster.files import cluster_yaml
and `comparison.json`. It passes when all of that could be made: how far off a prediction is on a machine that
from hyperparallel.cluster.files import cluster_yaml
it never saw is a finding, not a failure.
from hyperparallel.cluster.files import cluster_yaml
"""
from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml
from __future__ import annotations
from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml
import argparse
from hyperparallel.cluster.files import cluster_yaml
import subprocess
from hyperparallel.cluster.files import cluster_yaml
import sys
from hyperparallel.cluster.files import cluster_yaml
from pathlib import Path
from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml
from benchmarks.gpu.machine import described
from hyperparallel.cluster.files import cluster_yaml
from benchmarks.gpu.parts import mesh_words
from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml
def main() -> int:
from hyperparallel.cluster.files import cluster_yaml
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
from hyperparallel.cluster.files import cluster_yaml
    parser.add_argument("--device", required=True)
from hyperparallel.cluster.files import cluster_yaml
    parser.add_argument("--ranks", type=int, required=True)
from hyperparallel.cluster.files import cluster_yaml
    parser.add_argument("--folder", type=Path, required=True)
from hyperparallel.cluster.files import cluster_yaml
    given = parser.parse_args()
from hyperparallel.cluster.files import cluster_yaml
    folder: Path = given.folder
from hyperparallel.cluster.files import cluster_yaml
    cluster = described(given.ranks, folder)
from hyperparallel.cluster.files import cluster_yaml
    (folder / "machine.yaml").write_text(cluster_yaml(cluster))
from hyperparallel.cluster.files import cluster_yaml
    print((folder / "machine.yaml").read_text())
from hyperparallel.cluster.files import cluster_yaml
    predicted, measured = folder / "predicted.json", folder / "measured.json"
from hyperparallel.cluster.files import cluster_yaml
    demo = ("llama_demo", "--mesh", mesh_words(given.ranks))
from hyperparallel.cluster.files import cluster_yaml
    run("plan", *demo, "--cluster", str(folder / "machine.yaml"), "--trace", str(predicted))
from hyperparallel.cluster.files import cluster_yaml
    more = ("--steps", "12", "--trace", str(measured), "--run-folder", str(folder / "traced"))
from hyperparallel.cluster.files import cluster_yaml
    run("train", *demo, *more)
from hyperparallel.cluster.files import cluster_yaml
    print(run("compare", str(predicted), str(measured)))
from hyperparallel.cluster.files import cluster_yaml
    (folder / "comparison.json").write_text(run("compare", str(predicted), str(measured), "--json"))
from hyperparallel.cluster.files import cluster_yaml
    return 0
from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml
def run(*words: str) -> str:
from hyperparallel.cluster.files import cluster_yaml
    """What a command of the library prints; its failure ends this one with what it said."""
from hyperparallel.cluster.files import cluster_yaml
    command = [sys.executable, "-m", "hyperparallel", *words]
from hyperparallel.cluster.files import cluster_yaml
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
from hyperparallel.cluster.files import cluster_yaml
    if done.returncode:
from hyperparallel.cluster.files import cluster_yaml
        raise SystemExit(f"{done.stdout[-2000:]}\nhyperparallel {words[0]} ended with {done.returncode}")
from hyperparallel.cluster.files import cluster_yaml
    return done.stdout
from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml

from hyperparallel.cluster.files import cluster_yaml
if __name__ == "__main__":
from hyperparallel.cluster.files import cluster_yaml
    sys.exit(main())
