"""A certificate: the derived program computes what the single-device model computes.

All ranks' programs run in lockstep in this process, on the model's own weights and a real batch, from
the same random state as one plain run of the module. Results, gradients and the random state afterwards
are compared, and pieces that several ranks hold must be equal on all of them.

In 16 bits both runs round, and differ by about what either is off. So the plain module is also run in
float32, which tells how far off rounding alone is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyperparallel.graph.build import Built, build
from hyperparallel.graph.capture.batch_tree import call_of, flatten
from hyperparallel.graph.capture.precision import LOW, computing
from hyperparallel.graph.capture.skeleton import batch_device
from hyperparallel.graph.program import RankProgram
from hyperparallel.plan.plan import Plan
from hyperparallel.runtime.exec.virtual import Lockstep
from hyperparallel.runtime.module.as_dtensor import local_piece
from hyperparallel.runtime.module.local_batch import input_cuts, own_piece
from hyperparallel.shard.spec import Spec

NEGLIGIBLE = 1e-3
ROUNDING = {"float32": 1e-4, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""What a difference may always be: sums in another order; in 16 bits, one rounding."""
SPREAD = 3.0
"""Two runs that round differently may differ by this many times what one of them is off."""


@dataclass(frozen=True)
class Certificate:
    """Largest differences between the derived program and the plain module.

    errors: per result ("loss") or gradient ("grad of NAME"), the largest absolute difference divided by
    the largest magnitude of the true value (of gradients, at least `NEGLIGIBLE` of the largest one: the
    true gradient of a key bias, for instance, is zero, and what is computed is rounding).
    replicas_agree: pieces held by several ranks are bit-equal.
    random_state_equal: both runs drew equally many random numbers, from the CPU's generator.
    precision: the dtype with the fewest bits that the program computes in ("float32" at most).
    rounding: in 16 bits, the same measure of the plain module against itself in float32.
    """

    errors: Mapping[str, float]
    replicas_agree: bool
    random_state_equal: bool
    num_ranks: int
    precision: str = "float32"
    rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> tuple[str, float]:
        """The result or gradient that differs most, and by how much."""
        return max(self.errors.items(), key=lambda item: item[1], default=("nothing", 0.0))

    def allowed(self, name: str) -> float:
        """What the precision lets a result or gradient differ by."""
        least = ROUNDING[self.precision]
        return SPREAD * max(self.rounding.get(name, least), least) if self.rounding else least

    def holds(self, tolerance: float | None = None) -> bool:
        """Whether every difference is within `tolerance` and everything else agrees.

        None: within what the precision allows, 1e-4 in float32 and, in 16 bits, three times what rounding
        does on one device.
        """
        within = all(e <= (tolerance or self.allowed(name)) for name, e in self.errors.items())
        return within and self.replicas_agree and self.random_state_equal

    def __str__(self) -> str:
        name, error = self.largest
        agree = "agree" if self.replicas_agree else "DIFFER"
        drawn = "the same" if self.random_state_equal else "DIFFERENT"
        return (
            f"{len(self.errors)} results and gradients compared on {self.num_ranks} virtual ranks: "
            f"largest relative error {error:.2e} ({name}){self._rounding_words()}; replicas {agree}; "
            f"{drawn} random numbers"
        )

    def _rounding_words(self) -> str:
        if not self.rounding:
            return ""
        name, off = max(self.rounding.items(), key=lambda item: item[1])
        return f", where {self.precision} on one device is off from float32 by up to {off:.2e} ({name})"


def certify(model: nn.Module, plan: Plan, batch: Any, *, seed: int = 0) -> Certificate:
    """Compare a plan's program with the plain `model` on a global batch, all ranks in this process.

    The model must hold real weights; it is run once in training mode. It and the random generators are left
    as they were.

    >>> import torch, hyperparallel as hp
    >>> mesh = hp.Layout((2,), ("tp",))
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> hp.certify(model, hp.Plan(mesh, {"0.weight": mesh("tp", None)}), torch.ones(4, 8)).holds()
    True
    """
    args, kwargs = call_of(batch)
    built = build(model, plan, args, kwargs)
    used = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(used):  # named: of several devices it would warn
        return certify_built(model, built, args, kwargs, seed=seed)


def certify_built(
    model: nn.Module,
    built: Built,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    seed: int = 0,
) -> Certificate:
    """`certify` for a program that was built already; seeds the random generators."""
    leaves = built.captured.flatten_inputs(args, kwargs)
    compute, precision = built.decisions.plan.compute, fewest_bits(built)
    truth, drawn = _dense(model, built, args, kwargs, seed, compute)
    exact: dict[str, Tensor] = {}
    if precision != "float32":
        wide, wide_args, wide_kwargs = _in_float32(model, args, kwargs)
        exact, _ = _dense(wide, built, wide_args, wide_kwargs, seed, None)
    programs = [built.rank_program(rank) for rank in built.decisions.mesh.ranks]
    mesh = built.decisions.mesh
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    rows = [_placeholders(program, built, params, buffers, leaves, truth) for program in programs]
    torch.manual_seed(seed)  # the state in which the plain run began
    with torch.no_grad():
        results = Lockstep(programs, lambda rank, axes: mesh.group(rank, axes)).run(rows)
    same_random = bool(torch.equal(torch.get_rng_state(), drawn))
    errors: dict[str, float] = {}
    agree = True
    rounding: dict[str, float] = {}
    grads = [float(x.abs().max()) for n, x in truth.items() if n.startswith("grad") and x.numel()]
    smallest = NEGLIGIBLE * max(grads, default=0.0)
    for position, (name, spec) in enumerate(_result_names(programs[0])):
        pieces = [row[position] for row in results]
        whole, same = assemble(pieces, spec, list(mesh.ranks))
        agree &= same
        if name in truth:
            floor = smallest if "grad of" in name else 0.0
            errors[name] = _difference(whole, truth[name], floor)
            if name in exact:
                rounding[name] = _difference(truth[name], exact[name], floor)
    return Certificate(errors, agree, same_random, mesh.size, precision, rounding)


def fewest_bits(built: Built) -> str:
    """The floating dtype with the fewest bits that a program computes in, "float32" at most."""
    found = {value.dtype for value in built.workload.values.values()}
    return next((name for name in ("bfloat16", "float16") if name in found), "float32")


def _in_float32(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """A model and its batch with all 16-bit floats in float32."""

    def wide(x: Tensor) -> Tensor:
        return x.float() if x.dtype in LOW else x

    if any(x.dtype in LOW for x in (*model.parameters(), *model.buffers())):
        model = copy.deepcopy(model).float()
    tree, leaves = flatten((tuple(args), dict(kwargs)))
    return model, *tree.rebuild(iter([wide(x) for x in leaves]))


def _result_names(program: RankProgram) -> list[tuple[str, Spec | None]]:
    """Name and layout of each result, in the program's order (gradients first)."""
    found: list[tuple[str, Spec | None]] = [
        (f"grad of {name}", program.grad_specs[name]) for name in program.grads
    ]
    found += [(f"grad of input {path}", None) for path in program.input_grads]
    found += [(name, program.output_specs[name]) for name in program.outputs]
    found += [(f"new {name}", None) for name in program.mutations]
    return found


def _placeholders(
    program: RankProgram,
    built: Built,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    leaves: Sequence[Tensor],
    truth: Mapping[str, Tensor],
) -> list[Tensor]:
    values: dict[str, Tensor] = {}
    rank, stored = program.rank, built.decisions.stored
    cut = dict(zip(program.inputs.values(), input_cuts(program).values(), strict=True))
    for name, node in program.params.items():
        values[node] = local_piece(params[name].detach(), stored[name], rank).clone()
    for name, node in program.buffers.items():
        values[node] = buffers[name].detach().clone()
    for (node, where), leaf in zip(cut.items(), leaves, strict=True):
        values[node] = own_piece(leaf, where, leaf.device)
    for path, node in program.tangents.items():
        spec = built.decisions.sources[built.workload.tangents[path]]
        values[node] = local_piece(torch.ones_like(truth[path]), spec, rank)
    return [values[n.name] for n in program.graph.nodes if n.op == "placeholder"]


def _dense(
    model: nn.Module,
    built: Built,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int,
    compute: str | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Results and gradients of the plain module, and the random state after both."""
    modes = [(part, part.training) for part in model.modules()]
    kept = {name: b.detach().clone() for name, b in model.named_buffers()}
    if not model.training:  # else `train` would end the evaluation mode of its parts
        model.train()
    torch.manual_seed(seed)
    device = batch_device(flatten((tuple(args), dict(kwargs)))[1])
    try:
        with computing(compute, device.type):
            _, outputs = flatten(model(*args, **kwargs))
        found = _results(model, built, outputs)
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        for part, mode in modes:
            part.training = mode
    return found, torch.get_rng_state()


def _results(model: nn.Module, built: Built, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Results, gradients and new buffers by the names of `_result_names`."""
    truth = dict(zip(built.captured.out_spec.paths(), outputs, strict=False))
    truth = {path or "output": x for path, x in truth.items()}
    roots = [path for path in built.captured.tangents if truth[path].requires_grad]
    trained = {n: p for n, p in model.named_parameters() if n in built.captured.grads}
    grads = torch.autograd.grad(
        [truth[path] for path in roots],
        list(trained.values()),
        [torch.ones_like(truth[path]) for path in roots],
        allow_unused=True,
    )
    found = {path: truth[path].detach() for path in built.captured.outputs}
    found |= {f"grad of {name}": g for name, g in zip(trained, grads, strict=True) if g is not None}
    return found | {f"new {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}


def assemble(pieces: Sequence[Tensor], spec: Spec | None, ranks: Sequence[int]) -> tuple[Tensor, bool]:
    """The whole tensor from every rank's piece, and whether equal pieces are bit-equal."""
    if spec is None or spec.is_whole():
        return pieces[0], all(bool(_alike(pieces[0], p).all()) for p in pieces[1:])
    # NaN where no rank has a piece: a hole cannot pass for a value.
    whole = torch.full(spec.shape, float("nan")).to(pieces[0].dtype)
    for piece, rank in zip(pieces, ranks, strict=True):
        local_piece(whole, spec, rank).copy_(piece)
    same = all(
        bool(_alike(local_piece(whole, spec, rank), piece).all())
        for piece, rank in zip(pieces, ranks, strict=True)
    )
    return whole, same


def _alike(one: Tensor, two: Tensor) -> Tensor:
    """Where two tensors hold the same; NaN is the same as NaN."""
    return (one == two) | ((one != one) & (two != two))


def _difference(got: Tensor, true: Tensor, floor: float) -> float:
    """The largest difference relative to the largest finite magnitude; infinite where one is NaN."""
    if got.numel() == 0:
        return 0.0
    got, true = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (got, true))
    sizes = true.abs()
    scale = max(float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0, floor) or 1.0
    errors = torch.where(_alike(got, true), 0.0, (got - true).abs() / scale)
    return float(errors.nan_to_num(nan=math.inf).max())
