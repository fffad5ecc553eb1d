"""Start/wait pairs of any stream under a byte budget: counted over the order, simulated, measured."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import hyperparallel as hp
from hyperparallel.cluster import Rates
from hyperparallel.graph import communication
from hyperparallel.graph.build import Built, build
from hyperparallel.graph.passes.overlap import overlap
from hyperparallel.graph.passes.phases import split_stages
from hyperparallel.graph.predict.instructions import instructions
from hyperparallel.graph.program import RankProgram, Transfer
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.exec.codegen import compile_nodes
from hyperparallel.runtime.module.certify import certify_built
from hyperparallel.simulate import simulate
from hyperparallel.simulate.rank_tasks import RatePrices, program_tasks
from tests.models import plain_decoder, token_batches

pytestmark = pytest.mark.fake
FSDP = hp.Layout((2,), ("dp",))
LAYERS = 4
GATHERS = (communication.all_gather_start, communication.all_gather_many_start)
MOVES = {*communication.STARTS, communication.wait}


@cache
def llama() -> tuple[Any, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 40, (4, 8))
    return LlamaForCausalLM(config).double(), {"input_ids": tokens, "labels": tokens}


@cache
def built() -> Built:
    model, batch = llama()
    return build(model, hp.Plan(FSDP, fsdp="dp"), (), batch, loss="loss")


def with_budget(budget: int | None) -> Built:
    """The same decisions under another budget."""
    plan = dataclasses.replace(built().decisions.plan, in_flight_bytes=budget)
    return dataclasses.replace(built(), decisions=dataclasses.replace(built().decisions, plan=plan))


def whole_bytes(start: fx.Node) -> int:
    """What a gather of whole parameters makes, or a reduction of whole gradients takes, by their shapes."""
    values = built().workload.values
    return sum(values[name].num_bytes for name in start.meta["transfer"].value.split(", "))


def under_way(program: RankProgram, kinds: Sequence[Any]) -> list[int]:
    """Bytes between start and wait at every node that computes."""
    now: dict[fx.Node, int] = {}
    found = []
    for node in program.graph.nodes:
        if node.target in kinds:
            now[node] = whole_bytes(node)
        elif node.target is communication.wait:
            now.pop(node.args[0], None)  # type: ignore[call-overload]
        elif node.op == "call_function" and not is_local(node):
            found.append(sum(now.values()))
    return found


def is_local(node: fx.Node) -> bool:
    return node.target in MOVES or getattr(node.target, "__name__", "") == "getitem"


REDUCTIONS = (communication.reduce_scatter_start, communication.reduce_scatter_many_start)
BLOCK = 8 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32)
"""Bytes of one layer's parameters in float64."""


@pytest.mark.parametrize("budget", [0, 10_000, BLOCK, 2 * BLOCK, 3 * BLOCK, 1 << 30])
@pytest.mark.parametrize("joint", [True, False])
def test_no_more_bytes_than_the_budget_are_under_way(budget: int, joint: bool) -> None:
    program = with_budget(budget).rank_program(0, joint=joint)
    gathers, reductions = under_way(program, GATHERS), under_way(program, REDUCTIONS)
    assert max(gathers) <= budget
    assert max(reductions) <= budget
    if budget >= BLOCK:
        assert max(gathers) > budget - 2 * BLOCK or max(gathers) > LAYERS * BLOCK, "it is made use of"
    if budget == 1 << 30:
        first = next(i for i, n in enumerate(program.graph.nodes) if n.target is torch.ops.aten.mm.default)
        starts = [i for i, n in enumerate(program.graph.nodes) if n.target in GATHERS]
        forward = LAYERS + 2  # with the embedding and the head
        assert sum(i < first for i in starts) >= forward, "all can go at once"


def test_without_a_budget_the_next_block_is_under_way_and_two_reductions() -> None:
    program = with_budget(None).rank_program(0)
    assert max(under_way(program, GATHERS)) == BLOCK
    assert max(under_way(program, REDUCTIONS)) == 2 * BLOCK


def test_a_tensor_above_the_budget_is_gathered_at_its_use() -> None:
    program = with_budget(BLOCK - 1).rank_program(0)
    nodes = list(program.graph.nodes)
    for i, node in enumerate(nodes):
        if node.target in GATHERS and whole_bytes(node) >= BLOCK:
            after = next(n for n in nodes[i + 1 :] if n.target not in communication.STARTS)
            assert after.target is communication.wait and after.args[0] is node


@pytest.mark.parametrize("budget", [0, BLOCK, 1 << 30])
def test_results_do_not_depend_on_the_budget(budget: int) -> None:
    model, batch = llama()
    certificate = certify_built(model, with_budget(budget), (), batch)
    usual = certify_built(model, built(), (), batch)
    assert certificate.replicas_agree and certificate.errors == usual.errors, "bit for bit"
    assert max(certificate.errors.values()) <= 1e-6, "the model's norms compute in float32"


def simulated_peak(budget: int) -> float:
    program = with_budget(budget).rank_program(0)
    fast_links = Rates(1e9, 1e9, 1e15, 0.0)  # whatever is started is there at once
    timeline = simulate(program_tasks({0: instructions(program)}, RatePrices(fast_links)))
    return float(timeline.peak_bytes())


class Watched:
    """Counts the bytes of gathered tensors while anybody has them."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


class Repeated:
    """Transports of a rank whose peers all have what it has."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Any:
        result = torch.cat([x] * len(sizes), dim)
        self.watched.see(result)
        return collectives.Ready(result)

    def all_gather_many(self, xs: Any, dims: Any, sizes: Any) -> Any:
        return collectives.Several([self.all_gather(*one) for one in zip(xs, dims, sizes, strict=True)])

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], op: str) -> Any:
        return collectives.Ready(x.split(list(sizes), dim)[0] * len(sizes))

    def reduce_scatter_many(self, xs: Any, dims: Any, sizes: Any, op: str) -> Any:
        parts = [self.reduce_scatter(*one, op) for one in zip(xs, dims, sizes, strict=True)]
        return collectives.Several(parts)

    def all_reduce(self, x: Tensor, op: str, over: bool = False) -> Any:
        return collectives.Ready(x * 2)


def measured_peak(budget: int) -> int:
    """Of gathered parameters, while a rank's program runs on real tensors."""
    from hyperparallel.runtime.comm.group import Group

    program = with_budget(budget).rank_program(0)
    stages, watched = split_stages(program), Watched()
    group = Group((0, 1), rank=0)
    group.transport = Repeated(watched)
    joint, setup = stages.joint, stages.setup
    values = {node: dummy(program, node) for node in program.graph.nodes if node.op == "placeholder"}
    made = compile_nodes(setup.nodes, setup.inputs, setup.outputs, lambda axes: group)
    values.update(zip(setup.outputs, made(*(values[n] for n in setup.inputs)), strict=True))
    run = compile_nodes(joint.nodes, joint.inputs, joint.outputs, lambda axes: group)
    gc.disable()
    try:
        run(*(values[node] for node in joint.inputs))
    finally:
        gc.enable()
    return watched.peak


def dummy(program: RankProgram, node: fx.Node) -> Tensor:
    shape = tuple(node.meta["spec"].local_shape(program.rank))
    dtype = node.meta["origin"].meta["val"].dtype
    return torch.ones(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def test_a_smaller_budget_has_a_lower_peak_simulated_and_measured() -> None:
    budgets = [0, BLOCK, 2 * BLOCK, 4 * BLOCK]
    simulated, measured = [*map(simulated_peak, budgets)], [*map(measured_peak, budgets)]
    assert simulated == sorted(simulated) and len(set(simulated)) == len(budgets), simulated
    assert measured == sorted(measured) and len(set(measured)) == len(budgets), measured
    head = 8 * (40 * 32 + 32)
    assert measured[0] <= BLOCK + head, "one block, with the head and the last norm"
    for budget, peak in zip(budgets, measured, strict=True):
        assert peak <= budget + BLOCK + head


def copy_out_start(x: Tensor) -> Any:
    """A store to another tier, for this test."""
    return collectives.Ready(x.clone())


copy_in_start = copy_out_start


def copied() -> tuple[RankProgram, dict[str, fx.Node]]:
    """y = ((x sin) cos) ... with the first value stored in the host's memory and fetched for the end."""
    graph = fx.Graph()
    named: dict[str, fx.Node] = {"x": graph.placeholder("x"), "w": graph.placeholder("w")}

    def call(name: str, target: Any, *args: Any, **transfer: Any) -> fx.Node:
        node = named[name] = graph.call_function(target, args)
        node.meta = {"backward": False, "module": "", "constant": False}
        if transfer:
            node.meta["transfer"] = Transfer("copy", (), 64, name, "", False, "", **transfer)
        return node

    def pair(name: str, target: Any, x: fx.Node, **transfer: Any) -> fx.Node:
        return call(name, communication.wait, call(f"{name}_start", target, x, **transfer))

    saved = call("saved", torch.ops.aten.sin.default, named["x"])
    host = pair("host", copy_out_start, saved, tier="host", stream="copy.host.out")
    h = saved
    for i in range(6):
        h = call(f"h{i}", torch.ops.aten.cos.default, h)
    weight = pair("weight", copy_in_start, named["w"], stream="copy.host.in")
    h = call("scaled", torch.ops.aten.mul.Tensor, h, weight)
    back = pair("back", copy_in_start, host, stream="copy.host.in")
    h = call("y", torch.ops.aten.mul.Tensor, h, back)
    graph.output((h,))
    program = RankProgram(graph, 0, {}, {}, {}, {}, [("output", "y")], {}, {}, {}, Rates())
    return program, named


@pytest.mark.parametrize("budget, ahead", [(0, ()), (64, ("weight",)), (128, ("weight", "back"))])
def test_copies_between_tiers_are_placed_by_the_same_rules(budget: int, ahead: Sequence[str]) -> None:
    program, named = copied()
    program.in_flight_bytes = budget
    overlap(program)
    nodes = list(program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    assert place[named["host_start"]] == place[named["saved"]] + 1, "a store starts when its operand is made"
    for name, use in (("weight", "scaled"), ("back", "y")):
        start, wait = place[named[f"{name}_start"]], place[named[name]]
        assert place[named["host"]] < place[named["back_start"]], "not before it lies there"
        assert nodes[wait + 1] in (named[use], named["back_start"]), "waited for just before its use"
        assert (start < place[named["h5"]]) == (name in ahead)
    calls = [n for n in nodes if n.op == "call_function"]
    inputs = [n for n in nodes if n.op == "placeholder"]
    x, w = torch.randn(3), torch.randn(3)
    (y,) = compile_nodes(calls, inputs, [named["y"]], lambda axes: None)(x, w)
    h = x.sin()
    for _ in range(6):
        h = h.cos()
    torch.testing.assert_close(y, h * w * x.sin())


def test_gathers_of_16_bit_casts_count_as_what_moves() -> None:
    """Under `compute` a piece is cast before it is gathered: half the bytes, twice as many ahead."""
    model, (ids,) = plain_decoder(), token_batches(1)
    plan = hp.Plan(FSDP, fsdp="dp", compute="bfloat16")
    program = build(model, plan, (), {"ids": ids}, loss="loss").rank_program(0)
    for node in program.graph.nodes:
        if node.target in GATHERS and node.meta["dtype"] == "bfloat16":
            transfer = node.meta["transfer"]
            assert transfer.held_bytes == 2 * transfer.num_bytes, "two ranks: what is received is half"
