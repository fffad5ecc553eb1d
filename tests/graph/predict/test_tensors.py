"""Tensors that instructions name: what they say exists is what exists while the program runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import hyperparallel as hp
from hyperparallel.graph import communication
from hyperparallel.graph.build import build
from hyperparallel.graph.passes.phases import split_stages
from hyperparallel.graph.predict.instructions import instructions
from hyperparallel.graph.predict.reuse import storage, tensors
from hyperparallel.graph.program import RankProgram
from hyperparallel.runtime.exec.virtual import run_virtual
from tests.models import plain_decoder, token_batches

pytestmark = pytest.mark.fake
PLANS = {
    "one rank": hp.Plan(hp.Layout((1,), ("dp",))),
    "dp": hp.Plan(hp.Layout((2,), ("dp",))),
    "fsdp": hp.Plan(hp.Layout((2,), ("dp",)), fsdp="dp"),
}


def program_of(plan: str) -> RankProgram:
    model, (ids,) = plain_decoder(), token_batches(1)
    return build(model, PLANS[plan], (), {"ids": ids}, loss="loss").rank_program(0)


def received(program: RankProgram, node: fx.Node, args: Any) -> Any:
    """What a collective gives where every peer has what this rank has, by virtual ranks."""
    if node.target not in communication.STARTS:
        return node.target(*args)  # type: ignore[operator]
    graph = fx.Graph()
    places = [graph.placeholder(f"x{i}") for i in range(len(node.all_input_nodes))]
    named = dict(zip(node.all_input_nodes, places, strict=True))
    start = graph.call_function(node.target, fx.node.map_arg(node.args, named.__getitem__))  # type: ignore[arg-type]
    graph.output(graph.call_function(communication.wait, (start,)))
    mesh = next(iter(program.grad_specs.values())).mesh
    inputs = [list(tensors(args))[: len(places)]] * mesh.size
    copies = [type("Copy", (), {"graph": graph})() for _ in range(mesh.size)]
    made = run_virtual(copies, inputs, lambda rank, axes: mesh.group(rank, axes))[program.rank]
    return tuple(x.clone() for x in made) if isinstance(made, tuple) else made.clone()


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_said_to_exist_is_what_exists(plan: str) -> None:
    """Every value is dropped behind its last use, a start's operand behind its wait; storages are counted."""
    program = program_of(plan)
    stages = split_stages(program)
    joint = stages.joint
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            meta = node.meta["origin"].meta["val"]
            values[node] = torch.ones(node.meta["spec"].local_shape(0)).to(meta.dtype)
    for node in stages.setup.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    inputs = list(values.values())  # who runs a program keeps them
    before = set(map(storage, tensors(inputs)))
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(joint.nodes):
        held = [a for used in node.all_input_nodes for a in used.all_input_nodes]
        last.update(dict.fromkeys([*node.all_input_nodes, node], i))
        if node.target is communication.wait:
            last.update(dict.fromkeys(held, i))
    in_use, peak = 0.0, 0.0
    for i, (node, one) in enumerate(zip(joint.nodes, instructions(program), strict=True)):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target is communication.wait:
            values[node] = args[0]
        else:
            values[node] = received(program, node, args) if not kwargs else node.target(*args, **kwargs)  # type: ignore[operator]
        assert in_use + one.alloc_bytes == bytes_of(values, before), one.name
        peak = max(peak, in_use + one.alloc_bytes)
        for used in [n for n, place in last.items() if place == i and n not in joint.outputs]:
            values.pop(used)
        in_use += one.alloc_bytes - one.free_bytes
        assert in_use == bytes_of(values, before), f"behind {one.name}"
    assert peak > in_use > 0 and inputs


def bytes_of(values: dict[fx.Node, Any], before: set[int]) -> float:
    """Of all blocks of memory that values lie in, apart from those that were there before."""
    blocks: dict[int, Tensor] = {storage(x): x for x in tensors(list(values.values()))}
    return float(sum(x.untyped_storage().nbytes() for block, x in blocks.items() if block not in before))


@pytest.mark.parametrize("plan", PLANS)
def test_names_tell_who_made_a_tensor_and_when_it_is_gone(plan: str) -> None:
    program = program_of(plan)
    there = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    there |= {node.name for node in split_stages(program).setup.nodes}
    gone: set[str] = set()
    found = instructions(program)
    for one in found:
        made = [name for name, _ in one.makes]
        assert set(one.reads) <= there, one.name
        assert not gone & {*one.reads, *made} and not there & set(made)
        there |= set(made)
        dead = {name for name, _ in one.last_reads}
        assert dead <= there
        there -= dead
        gone |= dead
    by_name = {one.name: one for one in found}
    for one in found:
        if one.role == "wait":
            start = found[one.needs[0]]
            assert set(start.reads) <= set(one.reads), "its operand is held until its wait"
            assert {name for name, _ in start.makes} <= set(one.reads)
    assert len(by_name) == len(found)
    if plan == "fsdp":
        streams = {one.stream for one in found if one.role == "start"}
        assert streams == {"comm.dp"}
