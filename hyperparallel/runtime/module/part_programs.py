"""A model in parts for one kind of batch, as far as one rank runs it: its parts' programs and the edges.

Forward goes through the parts in order, backward in reverse order; before a part runs, what it reads crosses
from the parts that made it. A rank that runs a part has its program; the random numbers of other parts it
draws and drops (`exec/replay.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hyperparallel.graph.build import Built
from hyperparallel.graph.decided import Decision, decisions
from hyperparallel.graph.edge import Edge
from hyperparallel.graph.parts import BuiltParts
from hyperparallel.runtime.exec.compiled import Compiled, NamedTensors
from hyperparallel.runtime.exec.replay import replay
from hyperparallel.runtime.job.agreement import agree
from hyperparallel.runtime.job.here import Here
from hyperparallel.runtime.module.edges import EdgeProgram
from hyperparallel.runtime.module.local_batch import input_cuts, own_piece
from hyperparallel.runtime.module.micro_batches import GradientReduction

Lent = dict[Edge, Tensor | None]
"""What has crossed in a step of parameters that other parts gave; they change between steps only."""


class PartProgram:
    """Forward and backward of one part on one rank of its mesh."""

    def __init__(self, built: Built, here: Here, *, defer: bool = False, compile: bool = False) -> None:
        self.here = here
        self.program = built.rank_program(here.rank, defer=defer, joint=False)
        options = {"compile": compile, "accumulate": defer}
        agree(here, decisions(built, self.program, options), "the program of a part")
        bind = here.binder(built.decisions.mesh, self.program)
        self.compiled = Compiled(self.program, bind, compile)
        self.finish = GradientReduction(built, self.program, here, self.compiled.clock)
        self._input_cuts = input_cuts(self.program)
        self._read_later = [node.name for node in self.compiled.stages.backward.inputs]
        self._saved: dict[str, Tensor] = {}
        self.trained = tuple(self.program.grads)

    def forward(
        self, params: NamedTensors, buffers: NamedTensors, batch: NamedTensors, received: NamedTensors
    ) -> dict[str, Tensor]:
        """This rank's pieces of the part's results; buffers are updated in place.

        params, buffers, received: local pieces by name. batch: whole tensors by path.
        """
        program, compiled = self.program, self.compiled
        values = {name: params[path] for path, name in program.params.items()}
        values |= {name: buffers[path] for path, name in program.buffers.items()}
        for path, name in program.inputs.items():
            if path in received:
                values[name] = received[path]
            else:
                values[name] = own_piece(batch[path], self._input_cuts[path], self.here.device)
        values |= compiled.constants({path: buffers[path] for path in program.buffers})
        results = compiled.run("forward", values)
        values |= zip(compiled.saved_names(), results[compiled.num_results :], strict=True)
        self._saved = {name: values[name] for name in self._read_later if name in values}
        for path, new in zip(program.mutations, results[len(program.outputs) :], strict=False):
            buffers[path].copy_(new)
        return dict(zip(program.outputs, results, strict=False))

    def backward(self, tangents: NamedTensors) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Gradients of the part's parameters, in the order of `trained`, and of what it received, from those
        of its results."""
        program, values = self.program, self._saved
        values |= {name: tangents[path] for path, name in program.tangents.items()}
        self._saved = {}
        results = self.compiled.run_backward(values)
        count = len(self.trained)
        return list(results[:count]), dict(zip(program.input_grads, results[count:], strict=True))


class PartsPrograms:
    """Forward and backward of all parts for one kind of batch; every rank of some part makes one.

    programs: of the parts that this rank runs, by number.
    """

    def __init__(
        self, built: BuiltParts, here: Here, *, defer: bool = False, compile: bool = False
    ) -> None:
        self.built, self.here = built, here
        agree(here, list(_agreed(built)), "the parts of a model")
        self.programs = {
            i: PartProgram(each, Here.in_job(each.decisions.mesh, here.groups), defer=defer, compile=compile)
            for i, each in enumerate(built.built)
            if here.rank in each.decisions.mesh.ranks
        }
        self._edges = {edge: self._edge(edge) for edge in (*built.edges, *built.reports)}

    def _edge(self, edge: Edge) -> EdgeProgram | None:
        if self.here.rank not in edge.ranks:
            return None
        return EdgeProgram(edge, self.here.rank, self.here.device, self.here.groups)

    @property
    def waited_seconds(self) -> float:
        """How long this rank has waited for communication."""
        clocks = [program.compiled.clock for program in self.programs.values()]
        clocks += [edge.clock for edge in self._edges.values() if edge is not None]
        return sum(clock.seconds for clock in clocks)

    def forward(
        self, leaves: Sequence[Tensor], params: NamedTensors, buffers: NamedTensors, lent: Lent
    ) -> Tensor | None:
        """The loss of a batch, None on ranks that do not run its part.

        leaves: the tensors of the global batch. params, buffers: this rank's, by name; buffers are updated
        in place. lent: empty at the beginning of a step.
        """
        whole = dict(zip(self.built.captured.inputs, leaves, strict=True))
        made: list[dict[str, Tensor]] = [{} for _ in self.built.built]
        for part, draws in enumerate(self.built.draws):
            received = self._crossed(self.built.into(part, backward=False), made, lent)
            if part in self.programs:
                made[part] = self.programs[part].forward(params, buffers, whole, received)
            else:
                replay(draws, self.here.device)
        return made[self.built.loss_part].get(self.built.loss)

    def backward(self, weight: float) -> dict[int, list[Tensor]]:
        """By part, the gradients of `weight` times the loss, in the order of its program's `trained`."""
        built, grads = self.built, {}
        made: list[dict[str, Tensor]] = [{} for _ in built.built]
        for part in reversed(range(len(built.built))):
            tangents = self._crossed(built.into(part, backward=True), made)
            if part not in self.programs:
                continue
            if part == built.loss_part:
                work = built.built[part].workload
                kind = getattr(torch, work.values[work.outputs[built.loss]].dtype)
                tangents[built.loss] = torch.full((), weight, dtype=kind, device=self.here.device)
            grads[part], made[part] = self.programs[part].backward(tangents)
        return grads

    def told(self, loss: Tensor | None) -> Tensor:
        """The loss, on every rank: from those that made it to the others."""
        built = self.built
        made: list[dict[str, Tensor]] = [{} for _ in built.built]
        if loss is not None:
            made[built.loss_part][built.loss] = loss
        found = self._crossed(built.reports, made).get(built.loss)
        if loss is None:
            loss = found
        assert loss is not None, "a report reaches every rank that did not make the loss"
        return loss

    def _crossed(
        self, edges: Sequence[Edge], made: Sequence[NamedTensors], lent: Lent | None = None
    ) -> dict[str, Tensor]:
        """What this rank gets through edges, in their order, from what the parts have made."""
        found = {}
        for edge in edges:
            program = self._edges[edge]
            if program is None:
                continue
            if lent is not None and edge in lent:
                piece = lent[edge]
            else:
                piece = program(made[edge.source][edge.name] if program.sends else None)
            if lent is not None and edge.is_lent:
                lent[edge] = piece
            if piece is not None:
                found[edge.name] = piece
        return found


def _agreed(built: BuiltParts) -> Iterator[Decision]:
    """What ranks of all parts decided alike: they plan each other's parts to know what crosses."""
    for number, each in enumerate(built.built):
        for about, value in decisions(each, None, {}):
            yield f"part {number}, {about}", value
    for edge in (*built.edges, *built.reports):
        yield edge.name, str(edge)
    for number, draws in enumerate(built.draws):
        yield f"part {number}, random ops", ", ".join(str(node.target) for node in draws)
