"""Run one rank's program: the nodes become one straight-line Python function.

Each node is one line that calls its kernel; values are dropped after their last use. There is no
interpreter and no dispatch of our own at run time, so the cost per node is that of a Python call. Kernels
that are tensor methods or have a direct Python binding are called so (about one microsecond less than the
generic overload object, same kernel), and write over a dead operand where they can (`passes/inplace.py`).
Communication targets are bound to the groups of this rank.

Leaves out the order of nodes, which is the schedule's business (`graph/passes/overlap.py`).
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from hyperparallel.graph import communication
from hyperparallel.graph.passes.inplace import reusable
from hyperparallel.runtime.comm import collectives
from hyperparallel.runtime.comm.group import Bind

FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    word: collectives.starter(which.name) for word, which in communication.STARTS.items()
}
"""The word of each collective -> the function that starts it."""

_METHODS = (
    "view", "reshape", "expand", "permute", "transpose", "unsqueeze", "squeeze", "t", "mm", "bmm", "mv",
    "addmm", "baddbmm", "addmv", "addcmul", "add", "sub", "mul", "div", "neg", "exp", "log", "cos", "sin",
    "rsqrt", "sqrt", "reciprocal", "tanh", "sigmoid", "abs", "pow", "mean", "sum", "amax", "amin", "clone",
    "index_select", "gather", "eq", "ne", "le", "lt", "ge", "gt", "bitwise_and", "cumsum", "logical_and",
    "logical_not", "maximum", "minimum", "erf", "roll",
)  # fmt: skip
_FUNCTIONS = (
    "cat", "where", "embedding",
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
)  # fmt: skip
_OVERLOADS = ("default", "int", "Tensor", "Scalar", "Tensor_Scalar", "self", "dim", "dim_IntList")
_SPREAD = ("view", "reshape", "expand", "permute")
"""Methods that take sizes as separate integers, half a microsecond sooner than as a list."""
_BARE = ("sum", "mean", "roll")
"""Methods that take one integer sooner without a list around it."""
_serial = count()


def fast_binding(target: Any) -> Any:
    """The direct Python binding of an ATen overload where there is one, else its bare operation.

    >>> fast_binding(torch.ops.aten.cat.default) is torch.cat
    True
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    name = target._schema.name.removeprefix("aten::")
    if name in _FUNCTIONS and target._overloadname in _OVERLOADS:
        return getattr(torch, name)
    if name == "silu":
        return torch._C._nn.silu
    return target._op  # what the overload's own __call__ calls


def in_place_twin(target: Any) -> Any:
    """The overload that writes its result over its first operand, None where there is none.

    >>> in_place_twin(torch.ops.aten.relu.default)
    <OpOverload(op='aten.relu_', overload='default')>
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    space = getattr(torch.ops, target.namespace)
    packet = getattr(space, target._schema.name.partition("::")[2] + "_", None)
    return getattr(packet, target._overloadname or "default", None)


def _method(target: Any) -> str:
    """The tensor method that is an ATen overload, "" where there is none."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    name = target._schema.name.removeprefix("aten::")
    # Unsafe for autograd only, and programs run below that.
    if name == "_unsafe_view":
        return "view"
    return name if name in _METHODS and target._overloadname in _OVERLOADS else ""


class WaitClock:
    """Waits for collectives and counts the seconds that took: communication that nothing hid."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def wait(self, pending: collectives.InFlight) -> Tensor:
        """The result of a started collective."""
        began = perf_counter()
        result = pending.wait()
        self.seconds += perf_counter() - began
        return result


class _Source:
    """Collects the lines of a function and the objects they refer to."""

    def __init__(self, bind: Bind, clock: WaitClock) -> None:
        self.bind = bind
        self.wait = clock.wait
        self.names: dict[Any, str] = {}
        # As `repr` writes these floats.
        self.scope: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
        self.lines: list[str] = []
        self.known: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        """The name of an object in the function's scope."""
        # By identity: the scope keeps the object, so no other one gets its id.
        key = id(value)
        if key not in self.known:
            self.known[key] = f"c{len(self.known)}"
            self.scope[self.known[key]] = value
        return self.known[key]

    def value(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return repr(arg)
        if isinstance(arg, (list, tuple)):
            items = ", ".join(self.value(item) for item in arg)
            return f"[{items}]" if isinstance(arg, list) else f"({items}{',' if arg else ''})"
        return self.constant(arg)

    def call(self, node: fx.Node, over: int | None = None) -> str:
        """The call of a node; over: the position of the operand that its result is written to."""
        target, args = node.target, list(node.args)
        if target in communication.STARTS:
            group = self.bind(args.pop())  # type: ignore[arg-type]
            arguments = [*map(self.value, args), self.constant(group)]
        else:
            arguments = [self.value(arg) for arg in args]
        if target is torch.ops.aten.slice.Tensor and len(args) == 4 and args[2] is not None:
            start, stop = args[2], args[3]
            # An open end is 2**63 - 1, and negative ends count from the back: `narrow` knows neither.
            if isinstance(stop, int) and isinstance(start, int) and 0 <= start <= stop < 2**31:
                return f"{arguments[0]}.narrow({args[1]!r}, {start}, {stop - start})"
        if getattr(target, "__name__", "") == "getitem":
            return f"{arguments[0]}[{arguments[1]}]"
        if target is communication.wait:
            return f"{self.constant(self.wait)}({arguments[0]})"
        method = _method(target) if args and isinstance(args[0], fx.Node) else ""
        if method:
            arguments[1:] = _spread(method, args, arguments)
        arguments += [f"{key}={self.value(arg)}" for key, arg in node.kwargs.items()]
        if method and over is not None:
            arguments.insert(0, arguments.pop(over))
            method += "_"
        if method:
            return f"{arguments[0]}.{method}({', '.join(arguments[1:])})"
        if over is not None and target in communication.STARTS:
            arguments.append("over=True")
        twin = None if over is None else in_place_twin(target)
        if twin is not None:  # an op of the user's own, which is no method of a tensor
            arguments.insert(0, arguments.pop(over or 0))
            target = twin
        function = FUNCTIONS.get(target) or fast_binding(target)  # type: ignore[arg-type]
        return f"{self.constant(function)}({', '.join(arguments)})"


def _spread(method: str, args: Sequence[Any], arguments: Sequence[str]) -> list[str]:
    """The arguments behind a method's first in their quickest form: integers rather than lists."""
    rest = list(arguments[1:])
    lists = [
        list(arg) if isinstance(arg, (list, tuple)) and all(type(n) is int for n in arg) else []
        for arg in args[1:]
    ]
    if method in _SPREAD and lists and lists[0]:
        return [*map(str, lists[0]), *rest[1:]]
    if method in _BARE:
        for i, numbers in enumerate(lists):
            rest[i] = str(numbers[0]) if len(numbers) == 1 else rest[i]
    return rest


def compile_nodes(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Iterable[fx.Node],
    bind: Bind,
    name: str = "program",
    clock: WaitClock | None = None,
    mark: Callable[[], None] | None = None,
    takes_over: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """A function of `inputs` that runs `nodes` in order and returns `outputs`.

    `nodes` must be in dependency order and depend only on `inputs` and one another. `clock` counts the
    time spent waiting. `mark` is called first and behind every node, to trace a run. takes_over: the function
    takes one list instead, which it empties, so that each input is freed after its last use.
    """
    source, results = _Source(bind, clock or WaitClock()), list(outputs)
    for i, node in enumerate(inputs):
        source.names[node] = f"i{i}"
    last_use: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for used in node.all_input_nodes:
            last_use[used] = i
        # What nobody reads is dropped where it is made.
        last_use.setdefault(node, i)
    kept = {*results} if takes_over else {*results, *inputs}
    over = reusable(nodes, inputs, results)
    marker = f" {source.constant(mark)}()" if mark else ""
    body: list[str] = [marker] if marker else []
    for i, node in enumerate(nodes):
        source.names[node] = f"v{i}"
        body.append(f" v{i} = {source.call(node, over.get(node))}")
        dead = [n for n in (*node.all_input_nodes, node) if last_use.get(n) == i and n not in kept]
        if dead:
            body.append(" del " + ", ".join(dict.fromkeys(source.names[n] for n in dead)))
        if marker:
            body.append(marker)
    taken = "".join(f"{source.names[n]}, " for n in inputs)
    header = f"def {name}({taken}):"
    if takes_over:  # a caller's list or frame would keep its values alive
        header = f"def {name}(taken):\n ({taken}) = taken\n taken.clear()"
    returned = "".join(f"{source.names[n]}, " for n in results)
    text = "\n".join((header, *body, f" return ({returned})"))
    filename = f"<hyperparallel {name} {next(_serial)}>"
    # For tracebacks; without a time the entry is never checked against a file and dropped.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), source.scope)
    function: Callable[..., tuple[Any, ...]] = source.scope[name]
    return function
