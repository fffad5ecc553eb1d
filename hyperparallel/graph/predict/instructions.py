"""A rank's program as plain instructions for the simulator: what each node computes, reads and moves.

The nodes are run on tensors without memory, in program order, so every number is this rank's own, uneven
pieces included. Products count as torch's FLOP counter does; an op's traffic is what it reads and writes.
Views are free where they do not copy. A result's memory is taken when it is made and given back behind its
last use, that of a start's operand behind its wait; what is returned stays.

Leaves out what kernels keep in caches, and stretches that Inductor fuses: they are listed by their ops.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode  # private, checked on torch 2.13
from torch.utils._python_dispatch import TorchDispatchMode  # private, checked on torch 2.13
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hyperparallel.errors import CaptureError
from hyperparallel.graph import communication
from hyperparallel.graph.build import Built
from hyperparallel.graph.collective import CollectiveKind, GroupMember, ManyCollective
from hyperparallel.graph.local.local_op import unless_empty
from hyperparallel.graph.passes.phases import split_stages
from hyperparallel.graph.predict.reuse import storage, tensors, with_reuse
from hyperparallel.graph.predict.update_work import FUSED_ADAM, UpdateWork
from hyperparallel.graph.program import RankProgram
from hyperparallel.graph.region.segments import Segment
from hyperparallel.shard.rules.table import facts_of
from hyperparallel.workload.instruction import Accesses, Instruction, Tensors

aten = torch.ops.aten

WRAPPED = 3
"""Arguments of `unless_empty` before those of the op."""


def unsized_instructions(nodes: Sequence[fx.Node]) -> list[Instruction]:
    """The nodes in order, without sizes: names, kinds and what they need of one another."""
    place = {node: i for i, node in enumerate(nodes)}
    found = []
    for node in nodes:
        needs = tuple(place[used] for used in node.all_input_nodes if used in place)
        if _is_start(node):
            found.append(_unsized_start(node, needs))
        elif node.target is communication.wait:
            found.append(Instruction(node.name, "wait", "wait", needs))
        else:
            found.append(Instruction(node.name, kind_of(_called(node)), "op", needs))
    return found


def instructions(
    program: RankProgram, stage: str = "joint", inputs: Mapping[str, torch.dtype] | None = None
) -> list[Instruction]:
    """One stage ("joint", "forward" or "backward") of a rank's program, with flops, bytes and memory.

    inputs: dtypes of the inputs of a program that finishes gradients, which names no origins. Raises
    `CaptureError` for a node that cannot be run without data.
    """
    stages = split_stages(program)
    part = getattr(stages, stage)
    sizes = _Sizes(program, inputs or {})
    # A later stage reads what earlier ones made: those run too, uncounted.
    for node in (*stages.setup.nodes, *(stages.forward.nodes if stage == "backward" else ())):
        sizes.run(node)
    old = set(map(storage, tensors(list(sizes.made.values()))))
    found = [
        replace(one, **sizes.run(node))
        for one, node in zip(unsized_instructions(part.nodes), part.nodes, strict=True)
    ]
    kept = old.union(*(map(storage, tensors(sizes.made[node])) for node in part.outputs))
    found = with_reuse(found, part.nodes, sizes.made)
    return _with_tensors(found, part.nodes, sizes.made, old, kept)


def step_instructions(
    built: Built, rank: int, *, runs: int = 1, clip: bool = True, update: UpdateWork = FUSED_ADAM
) -> list[Instruction]:
    """A whole step of `TrainStep`: the joint program, several times for micro-batches, and the update.

    built: for one micro-batch. runs: micro-batches. clip: whether the gradient norm is limited. update: what
    the optimizer does with each parameter. Names are those of a traced step (`runtime/module/tracing.py`).
    """
    program = built.rank_program(rank, defer=runs > 1)
    # Counted once: every micro-batch runs the same program.
    parts = [instructions(program)] * runs
    if any(spec.partial for spec in program.grad_specs.values()):
        kinds = {name: built.workload.values[value].dtype for name, value in built.workload.grads.items()}
        dtypes = {name: getattr(torch, kind) for name, kind in kinds.items()}
        parts.append(instructions(built.reduction_program(program), inputs=dtypes))
    found: list[Instruction] = []
    for i, part in enumerate(parts):
        first, suffix = len(found), f" #{i + 1}" if len(parts) > 1 else ""
        found += [_again(one, first, suffix) for one in part]
    stored = built.decisions.stored
    elements = sum(math.prod(stored[name].local_shape(rank)) for name in program.grads)
    # Of mixed dtypes the widest: what an update moves is then an upper bound.
    itemsize = max((built.workload.values[v].itemsize for v in built.workload.grads.values()), default=4)
    return [*found, *_behind(len(program.grads), float(elements * itemsize), clip, update)]


def _again(one: Instruction, first: int, suffix: str) -> Instruction:
    """An instruction of a program that runs several times; first: position of the run's first one."""

    def named(tensors: Tensors) -> Tensors:
        return tuple((name + suffix, size) for name, size in tensors)

    return replace(
        one,
        name=one.name + suffix,
        needs=tuple(first + need for need in one.needs),
        makes=named(one.makes),
        reads=tuple(name + suffix for name in one.reads),
        last_reads=named(one.last_reads),
    )


def _behind(count: int, size: float, clip: bool, update: UpdateWork) -> Iterator[Instruction]:
    """What comes behind the programs, on that many tensors of together `size` bytes."""
    if clip:  # read for the norm, read and written to scale
        parts = [("linalg_vector_norm", 1), ("mul", 2)]
        yield _on_tensors("clip", parts, count, size, ((size, size), (size, size)))
    # Parameter and moments were last touched in the forward and the step before, the gradient by `clip`.
    reuse = ((math.inf, (update.tensors - 1) * size), (size, size))
    yield _on_tensors("update", update.calls, count, size, reuse)


def _on_tensors(
    name: str, calls: Sequence[tuple[str, int]], count: int, size: float, reuse: Accesses
) -> Instruction:
    """Ops with their accesses, each called on `count` tensors of together `size` bytes."""
    parts = tuple(
        Instruction(kernel, "elementwise", num_bytes=accesses * size, kernel=kernel, calls=max(1, count))
        for kernel, accesses in calls
    )
    traffic, times = sum(one.num_bytes for one in parts), sum(one.calls for one in parts)
    return Instruction(name, name, num_bytes=traffic, calls=max(1, times), reuse=reuse, parts=parts)


def kind_of(target: Any) -> str:
    """What an op is grouped under in a timeline.

    >>> kind_of(torch.ops.aten.addmm.default), kind_of(torch.ops.aten.add.Tensor)
    ('matmul', 'elementwise')
    """
    if target is operator.getitem:
        return "view"
    if target in (communication.pack, communication.unpack, communication.pend):
        return "data movement"
    if isinstance(target, Segment):
        return "region"
    name = _kernel(target)
    if not isinstance(target, torch._ops.OpOverload):
        return "stretch" if name == "stretch" else "loss" if name.startswith("nll") else "other"
    known = facts_of(str(target)).group
    if known:
        return known
    return "elementwise" if torch.Tag.pointwise in target.tags else "data movement"


def _called(node: fx.Node) -> Any:
    """The op that a node calls, or that the local form it calls is made around."""
    return node.args[0] if node.target is unless_empty else node.target


class _Recording(TorchDispatchMode):
    """Lists the ops that are called inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[Instruction] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind != "view" and func.namespace == "aten":
            read = _touched(func, tensors((args, kwargs)))
            touched = sum(x.numel() * x.element_size() for x in (*read, *tensors(result)))
            one = Instruction(str(func), kind, num_bytes=float(touched), kernel=_kernel(func))
            self.parts.append(one)
        return result


class _Sizes:
    """Runs nodes on fake tensors and counts what they do."""

    def __init__(self, program: RankProgram, inputs: Mapping[str, torch.dtype]) -> None:
        self.program, self.inputs = program, inputs
        self.made: dict[fx.Node, Any] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mesh = next(iter((*program.input_specs.values(), *program.grad_specs.values()))).mesh
        paths = {node: path for path, node in program.inputs.items()}
        with self.mode:
            for node in program.graph.nodes:
                if node.op == "placeholder":
                    self.made[node] = self._placeholder(node, paths.get(node.name, ""))

    def _placeholder(self, node: fx.Node, path: str) -> Tensor:
        spec = node.meta.get("spec") or self.program.input_specs[path]
        dtype = node.meta["origin"].meta["val"].dtype if "origin" in node.meta else self.inputs[path]
        return torch.empty(tuple(spec.local_shape(self.program.rank)), dtype=dtype)

    def run(self, node: fx.Node) -> dict[str, Any]:
        """Make a node's result; its flops, traffic and dtype."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: self.made[used])
        with self.mode, torch.no_grad(), _Recording() as recording:
            self.made[node] = result = self._result(node, args, kwargs)
        read, written = tensors((args, kwargs)), tensors(result)
        if _is_start(node) or node.target is communication.wait:
            return {"dtype": _dtype(written)}
        called = _called(node)
        known: dict[str, Any] = {"dtype": _dtype(written), "kernel": _kernel(called)}
        # A view, or a helper that hands its operand on: result in old memory, nothing was moved.
        may_pass_on = not isinstance(called, torch._ops.OpOverload) or kind_of(called) == "view"
        if may_pass_on and {*map(storage, written)} <= {*map(storage, read)}:
            return known
        touched = sum(x.numel() * x.element_size() for x in (*_touched(called, read), *written))
        if kind_of(called) == "view":
            # A reshape that could not be a view has copied.
            known["kernel"] = "clone"
        if not isinstance(called, torch._ops.OpOverload):
            known["parts"] = tuple(recording.parts)  # a helper costs what the ops cost that it calls
        own = args[WRAPPED:] if node.target is unless_empty else args
        flops = _flops(called, own, kwargs, result)
        return {**known, "num_bytes": float(touched), "flops": flops, "sizes": _product_sizes(called, read)}

    def _result(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        # What a start stands for here is its result; there is no handle.
        if target is communication.wait:
            return args[0]
        if target in communication.STARTS:
            return self._received(communication.STARTS[target], args)
        if _is_start(node):
            return torch.empty_like(args[0])  # a copy to or from another tier
        try:
            return target(*args, **kwargs)
        except Exception as error:
            given = f"{node.name} ({target}): {error}"
            raise CaptureError("simulation", given, "ops whose sizes do not depend on data") from error

    def _received(self, which: CollectiveKind | ManyCollective, args: Any) -> Any:
        """What a collective makes on this rank."""
        rank, (*call, axes) = self.program.rank, args
        group = self.mesh.group(rank, axes)
        member = GroupMember(group.index(rank), len(group))
        made = [
            x.new_empty(which.single.returns(tuple(x.shape), member, *rest))
            for x, *rest in which.singles(tuple(call))
        ]
        return made[0] if which.single is which else made


def _kernel(called: Any) -> str:
    """The op's own name, without overload."""
    if isinstance(called, torch._ops.OpOverload):
        return called._schema.name.partition("::")[2]
    return str(getattr(called, "__name__", ""))


def _touched(called: Any, read: list[Tensor]) -> list[Tensor]:
    """What an op reads; of a table the rows that it looks up are as many as it makes, and counted there."""
    return read[1:] if facts_of(str(called)).looks_up else read


def _product_sizes(called: Any, read: Sequence[Tensor]) -> tuple[int, ...]:
    """m, n, k of a matrix product; () of others."""
    if kind_of(called) != "matmul" or len(read) < 2 or min(x.dim() for x in read[-2:]) < 2:
        return ()
    # The last two: `addmm` has its summand in front.
    left, right = read[-2:]
    return (int(left.shape[-2]), int(right.shape[-1]), int(left.shape[-1]))


def _flops(called: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = getattr(called, "overloadpacket", None)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    name = str(packet)
    # The registry lacks the CPU's attention.
    if "scaled_dot_product" in name:
        shapes = [x.shape for x in args[:4] if isinstance(x, Tensor)]
        return float(
            sdpa_backward_flop_count(*shapes) if "backward" in name else sdpa_flop_count(*shapes[:3])
        )
    return 0.0


def _is_start(node: fx.Node) -> bool:
    return node.target in communication.STARTS or "transfer" in node.meta


def _unsized_start(node: fx.Node, needs: tuple[int, ...]) -> Instruction:
    """A start without what it makes; where nobody noted what a collective moves, without its bytes."""
    transfer = node.meta.get("transfer")
    known = communication.STARTS.get(node.target)
    one_round = known is not None and known.single.one_round
    if transfer is None:
        assert known is not None
        kind, axes = known.single.name, tuple(node.args[-1])  # type: ignore[arg-type]
        return Instruction(node.name, kind, "start", needs, axes=axes, one_round=one_round)
    return Instruction(
        node.name, transfer.kind, "start", needs, num_bytes=transfer.num_bytes, axes=transfer.axes,
        one_round=one_round, stream=transfer.stream, tier=transfer.tier,
    )  # fmt: skip


def _read(node: fx.Node) -> list[fx.Node]:
    """What a node reads; a wait also what its start took, which nobody may free before."""
    (*used,) = node.all_input_nodes
    return [*used, *used[0].all_input_nodes] if node.target is communication.wait else used


def _with_tensors(
    found: Sequence[Instruction],
    nodes: Sequence[fx.Node],
    made: Mapping[fx.Node, Any],
    old: set[int],
    kept: set[int],
) -> list[Instruction]:
    """Name the tensors that each instruction makes, reads, and reads last: one for each block of memory.

    old: blocks that were there before; kept: those that stay.
    """
    known: dict[int, tuple[str, float]] = {}
    last: dict[int, int] = {}
    touched: list[tuple[list[int], list[int]]] = []
    for i, node in enumerate(nodes):
        read = [block for used in _read(node) for block in _named(known, used, made[used])]
        # `known` keeps the order of insertion: what comes behind `before` is new with this node.
        before = len(known)
        written = _named(known, node, made[node])
        touched.append((list(dict.fromkeys(read)), list(known)[before:]))
        last.update(dict.fromkeys((*read, *written), i))
    dying: dict[int, list[int]] = {}
    for block, i in last.items():
        if block not in kept:
            dying.setdefault(i, []).append(block)
    return [
        replace(
            one,
            makes=tuple(known[block] for block in fresh if block not in old),
            reads=tuple(known[block][0] for block in read),
            last_reads=tuple(known[block] for block in dying.get(i, ())),
        )
        for i, (one, (read, fresh)) in enumerate(zip(found, touched, strict=True))
    ]


def _named(known: dict[int, tuple[str, float]], node: fx.Node, value: Any) -> list[int]:
    """The blocks of a node's value; those that are new are named after it."""
    blocks: list[int] = []
    for x in tensors(value):
        block = storage(x)
        if block not in known:
            # Several new blocks of one node are told apart by a number: "node", "node:1".
            others = sum(known[other][0].partition(":")[0] == node.name for other in blocks)
            # What lies in another tier takes no memory of the device.
            on_device = "transfer" not in node.meta or node.meta["transfer"].tier == "device"
            size = float(x.untyped_storage().nbytes()) if on_device else 0.0
            known[block] = f"{node.name}:{others}" if others else node.name, size
        blocks.append(block)
    return blocks


def _dtype(made: Sequence[Tensor]) -> str:
    return str(made[0].dtype).removeprefix("torch.") if made else "float32"
