"""The way from a module to one rank's program: an ordered list of passes, visible here.

capture (with its exact rewrites, `joint/`) -> extract -> rules -> decide -> partition -> peephole ->
coalesce -> bucket -> overlap.

`Built` is the part that all ranks share; `rank_program` is one rank's. Users add their own passes over
the joint graph (`joint_passes`) or over a rank's program (`rank_passes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyperparallel.cluster import Rates
from hyperparallel.errors import CaptureError, UserError
from hyperparallel.graph.capture.capture import Captured, capture, check_outputs, gradient_roots, keep_outputs
from hyperparallel.graph.capture.extract import extract
from hyperparallel.graph.passes.bucket import bucket
from hyperparallel.graph.passes.coalesce import coalesce
from hyperparallel.graph.passes.overlap import overlap
from hyperparallel.graph.passes.partition import gradient_reduction, partition
from hyperparallel.graph.passes.peephole.sweeps import peephole
from hyperparallel.graph.probe import probe
from hyperparallel.graph.program import RankProgram
from hyperparallel.plan.decide import Decisions, decide
from hyperparallel.plan.plan import Plan
from hyperparallel.shard.rules.operands import uncut
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.shard.rules.table import facts_of, rule_for
from hyperparallel.workload import Workload

JointPass = Callable[[Captured], Any]
RankPass = Callable[[RankProgram], RankProgram]
# `overlap` is last: joined starts may stand behind readers of their results until it sorts the program.
RANK_PASSES: tuple[RankPass, ...] = (peephole, coalesce, bucket, overlap)


@dataclass(frozen=True)
class Built:
    """What all ranks share of a program: the captured graph, its workload, rules and decisions."""

    captured: Captured
    workload: Workload
    rules: Mapping[str, Rule]
    decisions: Decisions
    rank_passes: Sequence[RankPass] = field(default=RANK_PASSES)

    @property
    def model_hash(self) -> str:
        """Identifies the captured program: shapes, ops and their order."""
        text = repr((self.workload.ops, dict(self.workload.values)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def rank_program(self, rank: int, *, defer: bool = False, joint: bool = True) -> RankProgram:
        """The program of one rank.

        defer: leave gradients pending (see `partition`). joint: forward and backward run as one.
        """
        program = partition(self.captured, self.workload, self.rules, self.decisions, rank, defer=defer)
        program.joint = joint
        return self._passed(program)

    def reduction_program(self, program: RankProgram) -> RankProgram:
        """The program that finishes the gradients of one built with `defer`."""
        return self._passed(gradient_reduction(program, self.workload, self.decisions))

    def _passed(self, program: RankProgram) -> RankProgram:
        program.exact = self.decisions.plan.exact
        for rank_pass in self.rank_passes:
            program = rank_pass(program)
        return program


def build(
    module: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    as_is: bool = False,
    loss: str | None = None,
    grad_outputs: Sequence[str] | None = None,
    whole_outputs: bool = False,
    micro_batches: int = 1,
    later: bool = False,
    rates: Rates | None = None,
    device: torch.device | None = None,
    joint_passes: Sequence[JointPass] = (),
    rank_passes: Sequence[RankPass] = RANK_PASSES,
) -> Built:
    """Capture, extract and decide: everything up to the ranks' own programs.

    loss: the one result to keep and to differentiate ("" finds it: the one called "loss", or the only
    one); None keeps all results, and differentiates `grad_outputs` (by default "loss" where there is one,
    else all). whole_outputs: those results end replicated. micro_batches: how often the program
    runs before gradients are reduced. train, as_is, device: see `capture`. later: see `decide`.
    Raises `CaptureError` where the module cannot be captured, `PlanError`/`LayoutError` for a plan that
    does not fit it, `UserError` for both a loss and grad_outputs.
    """
    captured = captured_model(
        module, plan, args, kwargs,
        train=train, as_is=as_is, loss=loss, grad_outputs=grad_outputs, device=device,
        joint_passes=joint_passes,
    )  # fmt: skip
    # A loss of "" is the only output that `captured_model` left, so `gradient_roots` finds it.
    roots = (loss,) if loss else grad_outputs
    if roots is None:
        roots = gradient_roots(list(captured.outputs))
    check_outputs(captured, roots)
    whole = frozenset(roots if whole_outputs else ())
    return decided(
        captured, plan,
        whole=whole, micro_batches=micro_batches, later=later, rates=rates, passes=rank_passes,
    )  # fmt: skip


def captured_model(
    module: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    as_is: bool = False,
    loss: str | None = None,
    grad_outputs: Sequence[str] | None = None,
    device: torch.device | None = None,
    joint_passes: Sequence[JointPass] = (),
) -> Captured:
    """The joint graph of a module after the passes over it; see `build` for the arguments.

    Of the plan only its dtype of compute and the mesh on which regions stand are looked at.
    """
    if loss is not None and grad_outputs is not None:
        raise UserError("grad_outputs", list(grad_outputs), "None where a loss is named")
    captured = capture(
        module,
        tuple(args),
        dict(kwargs or {}),
        train=train,
        as_is=as_is,
        grad_outputs=(loss,) if loss else grad_outputs,
        compute=plan.compute,
        mesh=plan.mesh,
        device=device,
    )
    if loss is not None:
        keep_outputs(captured, (loss or loss_of(captured),))
    for joint_pass in joint_passes:
        joint_pass(captured)
    return captured


def decided(
    captured: Captured,
    plan: Plan,
    *,
    whole: frozenset[str] = frozenset(),
    edges: frozenset[str] = frozenset(),
    micro_batches: int = 1,
    later: bool = False,
    rates: Rates | None = None,
    passes: Sequence[RankPass] = RANK_PASSES,
) -> Built:
    """Extract and decide: a captured graph, of a model or of a part of one, under a plan.

    whole: paths of results that end replicated. edges: those of gradients that another part
    takes as they lie. later: see `decide`.
    """
    workload = extract(captured)
    rules = rules_of(captured, workload)
    random = frozenset(op.name for op in workload.ops if facts_of(op.target).random)
    decisions = decide(
        workload, rules, plan, rates,
        random=random, whole=whole, edges=edges, micro_batches=micro_batches, later=later,
    )  # fmt: skip
    return Built(captured, workload, rules, decisions, passes)


def loss_of(captured: Captured) -> str:
    """The path of the result that is the loss: the one called "loss", or the only result."""
    paths = list(captured.outputs)
    if "loss" in paths or len(paths) == 1:
        return "loss" if "loss" in paths else paths[0]
    raise CaptureError("loss", paths, "one result called loss, or only one", "loss=<its path>")


def rules_of(captured: Captured, workload: Workload) -> dict[str, Rule]:
    """The sharding rule of every op; ops that the tables lack are probed."""
    targets = {n.name: n.target for n in captured.graph.nodes if n.op == "call_function"}
    rules: dict[str, Rule] = {}
    for op in workload.ops:
        # A region is cut as it declares: to the solver all its factors are blocked.
        known = uncut(op, workload.values) if op.layouts else rule_for(op, workload.values)
        rules[op.name] = known or probe(op, workload.values, targets[op.name])
    return rules
