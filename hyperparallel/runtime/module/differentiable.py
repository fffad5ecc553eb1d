"""One kind of call as one node of autograd: a rank's forward and backward program behind `apply`.

What each stage reads is found by position, decided once: parameters, buffers, inputs and constants stand in
one list, from which an `itemgetter` takes a stage's arguments. Programs run below autograd; gradients of
parameters are handed over by `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperparallel.errors import RunError, UserError
from hyperparallel.graph.build import Built
from hyperparallel.runtime.exec.compiled import Compiled, below_autograd
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.as_dtensor import Presenter, cuts
from hyperparallel.runtime.module.fast_path.gradients import hand_over
from hyperparallel.runtime.module.local_batch import input_cuts, local_leaves, own_piece
from hyperparallel.shard.spec import Spec

Pick = Callable[[Sequence[Any]], Sequence[Any]]


def _pick(places: Sequence[int]) -> Pick:
    """Takes the items at these places, in order.

    >>> _pick([2, 0])("abc"), _pick([1])("abc"), _pick([])("abc")
    (('c', 'a'), ('b',), ())
    """
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


class Differentiable:
    """This rank's compiled program for one kind of call."""

    def __init__(self, built: Built, compiled: Compiled, here: Here, presenter: Presenter) -> None:
        program, stages = compiled.program, compiled.stages
        self.built, self.compiled, self.here, self.presenter = built, compiled, here, presenter
        self.params, self.buffers = tuple(program.params), tuple(program.buffers)
        self.outputs, self.updated = tuple(program.outputs), tuple(program.mutations)
        self.input_cuts = tuple(input_cuts(program).values())
        self.specs = [program.output_specs.get(name) for name in (*self.outputs, *self.updated)]
        self.is_cut = any(spec is not None and not spec.is_whole() for spec in self.specs)
        names = [*program.params.values(), *program.buffers.values(), *program.inputs.values()]
        at = {n: place for place, n in enumerate([*names, *(n.name for n in stages.setup.outputs)])}
        self.forward_arguments = _pick([at[node.name] for node in stages.forward.inputs])
        results = [node.name for node in stages.forward.outputs[: compiled.num_results]]
        # Autograd would take what is not the program's own, or is given twice, for its one output.
        self.borrowed = [i for i, name in enumerate(results) if name in at or name in results[:i]]
        self._plan_saving(at, set(results))
        self._plan_gradients()

    def _plan_saving(self, at: dict[str, int], results: set[str]) -> None:
        """Which values the backward reads, where the forward finds them, and in which order they go."""
        program, stages = self.compiled.program, self.compiled.stages
        extra = {name: len(at) + i for i, name in enumerate(self.compiled.saved_names())}
        at = at | extra
        tangents = [program.tangents[path] for path in self.outputs if path in program.tangents]
        kept = [node.name for node in stages.backward.inputs if node.name not in tangents]
        self.saved = _pick([at[name] for name in kept])
        # A result that is saved as it is would hold its own node, and so itself: it would never be freed.
        self.aliased = [place for place, name in enumerate(kept) if name in results]
        order = {name: place for place, name in enumerate([*kept, *tangents])}
        self.backward_arguments = _pick([order[node.name] for node in stages.backward.inputs])
        self.read_again = [i for i, name in enumerate(program.params.values()) if name in kept]

    def _plan_gradients(self) -> None:
        """Where gradients come in and go out."""
        program, work = self.compiled.program, self.built.workload
        self.roots = [path in program.tangents for path in self.outputs]
        self.tangent_specs = [
            self.built.decisions.sources[work.tangents[path]] if root else None
            for path, root in zip(self.outputs, self.roots, strict=True)
        ]
        self.tangent_cuts = [spec and cuts(spec, self.here.rank) for spec in self.tangent_specs]
        grads = {name: i for i, name in enumerate(program.grads)}
        self.param_grads = [grads.get(name) for name in self.params]
        of_inputs = {path: len(grads) + i for i, path in enumerate(program.input_grads)}
        self.leaf_grads = [of_inputs.get(path) for path in program.inputs]

    def call(self, params: Sequence[DTensor], buffers: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        """The model's result for a batch; buffers that the model updates are updated."""
        results = _Step.apply(self, buffers, len(params), *params, *leaves)  # type: ignore[no-untyped-call]
        if self.updated:
            results, updates = results[: len(self.outputs)], results[len(self.outputs) :]
            held = dict(zip(self.buffers, buffers, strict=True))
            with torch.no_grad():
                for name, new in zip(self.updated, updates, strict=True):
                    held[name].copy_(new)
        return self.built.captured.rebuild_outputs(results)

    def values(
        self, params: Sequence[Tensor], buffers: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """Everything that the program reads, in the order by which stages find their arguments."""
        named = dict(zip(self.buffers, buffers, strict=True))
        constants = self.compiled.constants(named).values()
        return [*params, *buffers, *local_leaves(leaves, self.input_cuts, self.here.device), *constants]

    def results(self, found: Sequence[Tensor]) -> list[Tensor]:
        """What the forward returns, as the caller is to see it."""
        results = list(found[: self.compiled.num_results])
        for place in self.borrowed:
            results[place] = results[place].clone()
        if self.is_cut:
            for place, spec in enumerate(self.specs):
                if spec is not None and not spec.is_whole():
                    results[place] = self.presenter.present(results[place], spec)
        return results

    def tangents(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Incoming gradients as the local pieces that the backward expects."""
        found = []
        for place, grad in enumerate(grads[: len(self.outputs)]):
            spec = self.tangent_specs[place]
            if spec is not None:
                found.append(self._tangent(place, spec, grad))
            elif grad is not None:
                known = [path for path, root in zip(self.outputs, self.roots, strict=True) if root]
                path = self.outputs[place]
                raise UserError(
                    "gradient", f"one of the result {path!r}", f"gradients of {', '.join(known)}",
                    f"parallelize(..., grad_outputs={[*known, path]})",
                )  # fmt: skip
        return found

    def _tangent(self, place: int, spec: Spec, grad: Tensor | None) -> Tensor:
        if grad is None:
            kind = self.built.workload.values[self.built.workload.tangents[self.outputs[place]]].dtype
            zero = torch.zeros((), dtype=getattr(torch, kind), device=self.here.device)
            # One element, whatever the shape.
            return zero.expand(spec.local_shape(self.here.rank))
        return own_piece(grad, self.tangent_cuts[place] or (), self.here.device)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Differentiable, buffers: Sequence[Tensor], count: int, *tensors: Any) -> Any:
        params = tensors[:count]
        # Not `to_local`, which goes through autograd and the dispatcher for each parameter.
        local = [p._local_tensor for p in params]
        with below_autograd():
            values = step.values(local, buffers, tensors[count:])
            found = step.compiled.function("forward")(*step.forward_arguments(values))
            saved = list(step.saved(values + list(found[step.compiled.num_results :])))
            for place in step.aliased:
                saved[place] = saved[place].detach()
        # Not by `save_for_backward`, which wraps each tensor: what it checks is checked below for parameters.
        ctx.step, ctx.saved, ctx.params = step, saved, params
        # A DTensor counts changes by torch ops, its local tensor those made on that (TrainStep).
        ctx.read = [x for i in step.read_again for x in (params[i], local[i])]
        ctx.versions = [x._version for x in ctx.read]
        # No zeros for results that nobody used: `_tangent` makes them without memory.
        ctx.set_materialize_grads(False)
        results = step.results(found)
        fixed = [x for x in results if not (x.is_floating_point() or x.is_complex())]
        ctx.mark_non_differentiable(*results[len(step.outputs) :], *fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        step: Differentiable = ctx.step
        if ctx.saved is None:
            raise RunError("backward through a parallelized model twice: its saved values were freed")
        if ctx.versions != [x._version for x in ctx.read]:
            raise RunError("a parameter was changed in place between forward and backward")
        arguments = list(step.backward_arguments([*ctx.saved, *step.tangents(grads)]))
        function = step.compiled.function("backward")
        ctx.saved = ctx.read = None  # the list alone holds what the forward saved
        with below_autograd():
            results = function(arguments)
        # The program gives each memory of its own: two that are one value would be added to twice.
        pieces = [None if i is None else results[i] for i in step.param_grads]
        handed = hand_over(ctx.params, pieces, ctx.next_functions)
        return None, None, None, *handed, *(None if i is None else results[i] for i in step.leaf_grads)
