"""What this machine has, what would work on it, and how fast it is, in words.

Calibration keeps the description that plans for the cluster "laptop" are made with.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import typer

from hyperparallel.cli.doctor.machine import Finding, findings, memory_bytes, num_cores
from hyperparallel.cluster import Cluster
from hyperparallel.cluster.presets.laptop import calibrated_path
from hyperparallel.errors import UserError

MARKS = {True: "ok", None: "--", False: "NO"}


def diagnose(calibrate: bool, ranks: int) -> None:
    """Print what this machine has and what would work; `typer.Exit` with 1 if training would not."""
    found = findings()
    width = max(len(item.name) for item in found)
    for item in found:
        line = f"{MARKS[item.good]}  {item.name:<{width}}  {item.found}"
        typer.echo(f"{line}  ({item.advice})" if item.advice else line)
    typer.echo("")
    for sentence in verdicts(found):
        typer.echo(sentence)
    if lacking(found):
        raise typer.Exit(1)
    if calibrate:
        typer.echo("")
        typer.echo(f"Timing {ranks} ranks at once; about half a minute on an idle machine.")
        for sentence in calibrated(ranks):
            typer.echo(sentence)


def calibrated(ranks: int) -> list[str]:
    """Time this machine, write its description where `preset("laptop")` looks; say what was found."""
    from hyperparallel.cluster.calibration import describe
    from hyperparallel.cluster.files import cluster_yaml
    from hyperparallel.runtime.calibrate.calibrate import measure

    path = calibrated_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UserError(
            "cache folder", str(path.parent), f"a folder to write to ({error.strerror})"
        ) from None
    timings = measure(ranks, num_cores(), memory_bytes()[0], path.parent)
    cluster = describe(timings, f"on {datetime.date.today().isoformat()}")
    _replace(path, cluster_yaml(cluster))
    return [*figures(cluster), f"Written to {path}; `preset` and `--cluster` know it as laptop."]


def _replace(path: Path, text: str) -> None:
    """Write whole or not at all: a plan may read the file meanwhile."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def figures(cluster: Cluster) -> list[str]:
    """What one rank does per second, a line each."""
    device, host, disk = cluster.device, cluster.tier("host"), cluster.tier("disk")
    lines = [f"matrix products  {peak / 1e9:.3g} GFLOP/s {name}" for name, peak in device.peak_flop_s.items()]
    lines.append(
        f"memory           {device.memory_bytes_s / 1e9:.3g} GB/s, copies {host.read_bytes_s / 1e9:.3g}"
    )
    lines.append(f"one small op     {device.launch_s * 1e6:.3g} us")
    for link in cluster.fabric:
        lines.append(f"collectives      {link.latency_s * 1e6:.3g} us and {link.bytes_s / 1e9:.3g} GB/s")
    lines.append(
        f"disk             {disk.read_bytes_s / 1e9:.3g} GB/s read, {disk.write_bytes_s / 1e9:.3g} written"
    )
    return lines


def lacking(found: Sequence[Finding]) -> list[str]:
    """Names of what a run needs and this machine lacks."""
    return [item.name for item in found if item.good is False]


def verdicts(found: Sequence[Finding]) -> list[str]:
    """What would work, one sentence each."""
    if lacks := lacking(found):
        return [f"Training would not work: {', '.join(lacks)}."]
    by_name = {item.name: item for item in found}
    devices = [item for item in found if item.name.startswith("CUDA device")]
    cores = num_cores()
    said = []
    if devices and by_name["NCCL"].good:
        said.append(f"Training on {len(devices)} CUDA devices over NCCL would work.")
    elif devices:
        said.append("CUDA devices are there but NCCL is not: ranks would talk over gloo.")
    said.append(
        f"Training on CPU ranks over gloo would work; {cores} ranks keep {cores} cores busy, more take turns."
    )
    compiler = by_name["C++ compiler"].good
    said.append(f"compile=True would {'work' if compiler else 'not work'} on CPU ranks.")
    return said
