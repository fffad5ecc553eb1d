"""Results of a built program on virtual ranks, as it is and without local rewrites."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyperparallel.graph.build import RANK_PASSES, Built, RankPass
from hyperparallel.graph.passes.peephole.sweeps import peephole
from hyperparallel.runtime.exec.virtual import Lockstep
from hyperparallel.runtime.module.certify import _dense, _placeholders


def results(model: nn.Module, built: Built, batch: dict[str, Any]) -> list[list[Tensor]]:
    """What every rank's program returns for a batch."""
    leaves = built.captured.flatten_inputs((), batch)
    programs = [built.rank_program(rank) for rank in built.decisions.mesh.ranks]
    truth, _ = _dense(model, built, (), batch, 0, None)  # tells the shapes of incoming gradients
    held = dict(model.named_parameters()), dict(model.named_buffers())
    rows = [_placeholders(program, built, *held, leaves, truth) for program in programs]
    mesh = built.decisions.mesh
    with torch.no_grad():
        found = Lockstep(programs, lambda rank, axes: mesh.group(rank, axes)).run(rows)
    return [list(row) for row in found]


def with_passes(built: Built, rewrites: Sequence[RankPass]) -> Built:
    """The program with these passes in the place of `peephole`."""
    rest = [each for each in RANK_PASSES if each is not peephole]
    return dataclasses.replace(built, rank_passes=(*rewrites, *rest))


def same_bits(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all results of all ranks are equal; a zero may have another sign."""
    pairs = [pair for row in zip(one, other, strict=True) for pair in zip(*row, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)
