"""Run one op on virtual ranks: cut operands by factor, run the local form, join the results.

Ranks run one after another. An all-reduce inside a local form needs all of them at once, so a rank
that reaches one it has no result for stops there; when every rank has, the results are known and
all start again. That is lockstep without threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hyperparallel.graph.local.local_op import FactorPiece, LocalOp
from hyperparallel.graph.local.localise import localise
from hyperparallel.shard.rules.rule import FactorDims, Rule
from hyperparallel.workload import Op, Ref, Value

SEED = 7


def chunks(size: int, count: int) -> list[FactorPiece]:
    """The pieces of torch.chunk: ceil(size / count) each, the last smaller or empty."""
    step = -(-size // count)
    return [FactorPiece(min(i * step, size), max(min(step, size - i * step), 0)) for i in range(count)]


class OpRun:
    """One op with real operands: its description, and the result of the uncut run."""

    def __init__(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.target, self.args, self.kwargs = target, tuple(args), dict(kwargs)
        self.operands: list[torch.Tensor] = []
        self.values: dict[str, Value] = {}
        plain = tuple(self._record(a) for a in self.args)
        plain_kwargs = {k: self._record(v) for k, v in self.kwargs.items()}
        self.results = self._call(self.args, self.kwargs)
        outputs = tuple(self._name(r, f"out{i}") for i, r in enumerate(self.results))
        inputs = tuple(f"in{i}" for i in range(len(self.operands)))
        self.op = Op("op", str(target), plain, plain_kwargs, inputs, outputs)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        torch.manual_seed(SEED)
        given = self.target(*args, **kwargs)
        return list(given) if isinstance(given, (tuple, list)) else [given]

    def _record(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            name = f"in{len(self.operands)}"
            self.operands.append(argument)
            self._name(argument, name)
            return Ref(name)
        if isinstance(argument, (list, tuple)):
            return tuple(self._record(a) for a in argument)
        if isinstance(argument, torch.dtype):
            return str(argument).removeprefix("torch.")
        return argument

    def _name(self, value: Any, name: str) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        dtype = str(value.dtype).removeprefix("torch.")
        self.values[name] = Value(name, tuple(value.shape), dtype, value.element_size())
        return name

    def filled(self, operands: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in place of the op's."""
        left = iter(operands)

        def fill(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                return next(left)
            if isinstance(argument, (list, tuple)):
                return [fill(a) for a in argument]
            return argument

        return tuple(fill(a) for a in self.args), {k: fill(v) for k, v in self.kwargs.items()}

    def whole(self, operands: Sequence[torch.Tensor]) -> list[Any]:
        """The uncut op on other operands."""
        args, kwargs = self.filled(operands)
        return self._call(args, kwargs)

    def cut(self, rule: Rule, counts: Mapping[str, int]) -> list[Any]:
        """The results put together from ranks that cut each factor in so many pieces."""
        pieces = {f: chunks(rule.sizes[f], n) for f, n in counts.items()}
        ranks = list(itertools.product(*(range(n) for n in counts.values())))
        places = [dict(zip(counts, rank, strict=True)) for rank in ranks]
        known: list[list[torch.Tensor]] = []
        while True:
            asked: list[torch.Tensor] = []
            done: list[tuple[Any, ...]] = []
            factors: list[tuple[str, str]] = []
            for place in places:
                here = {f: pieces[f][i] for f, i in place.items()}
                rank = _Rank(known, len(done) + len(asked))
                try:
                    done.append(self._local(rule, here, rank.reduce))
                except _Waiting as waiting:
                    asked.append(waiting.value)
                    factors.append((waiting.how, waiting.factor))
            if not asked:
                break
            assert not done and len(set(factors)) == 1, "ranks ask for different exchanges"
            known.append(_reduced(asked, places, *factors[0]))
        return [
            self._joined(rule, i, [r[i] for r in done], places, pieces)
            for i in range(len(self.results))
        ]

    def _local(
        self, rule: Rule, here: Mapping[str, FactorPiece], reduce: Callable[..., Any]
    ) -> tuple[Any, ...]:
        cut = [
            narrowed(x, dims, rule.sizes, here)
            for x, dims in zip(self.operands, rule.inputs, strict=True)
        ]
        args, kwargs = self.filled(cut)
        torch.manual_seed(SEED)
        local = LocalOp(
            self.op, rule, self.target, args, kwargs, here, lambda f, *a, **k: f(*a, **k), reduce
        )
        results = localise(local)
        assert len(results) == len(self.op.outputs)
        for i, result in enumerate(results):
            if rule.outputs[i] is not None and self.op.outputs[i] is not None:
                assert tuple(result.shape) == local.output_shape(i), (i, result.shape)
                assert result.dtype == self.results[i].dtype, (i, result.dtype)
        return results

    def _joined(
        self,
        rule: Rule,
        i: int,
        parts: Sequence[Any],
        places: Sequence[Mapping[str, int]],
        pieces: Mapping[str, list[FactorPiece]],
    ) -> Any:
        dims = rule.outputs[i]
        if dims is None or self.op.outputs[i] is None:
            return None
        flat = [f for dim in dims for f in dim]
        inside = rule.inside or {}
        full = torch.zeros(
            [rule.sizes[f] for f in flat], dtype=parts[0].dtype, device=parts[0].device
        )
        seen: dict[tuple[int, ...], torch.Tensor] = {}
        for place, part in zip(places, parts, strict=True):
            here = {f: pieces[f][n] for f, n in place.items()}
            key = tuple(place[f] for f in place if f in flat)
            shape = [here[f].size if f in here else rule.sizes[f] for f in flat]
            part = part.reshape(shape)
            if key in seen:
                pending = [f for f in place if f not in flat and f not in inside]
                fixed = all(place[f] == 0 for f in place if f not in flat and f in inside)
                if pending and fixed:
                    seen[key] = combine(rule.reduce, seen[key], part)
                elif not pending:
                    torch.testing.assert_close(part, seen[key], equal_nan=True)
            else:
                seen[key] = part
        for place in places:
            here = {f: pieces[f][n] for f, n in place.items()}
            key = tuple(place[f] for f in place if f in flat)
            where = tuple(
                slice(here[f].offset, here[f].offset + here[f].size) if f in here else slice(None)
                for f in flat
            )
            full[where] = seen[key]
        return full.reshape([torch.Size(rule.sizes[f] for f in dim).numel() for dim in dims])


def narrowed(
    x: torch.Tensor, dims: FactorDims, sizes: Mapping[str, int], here: Mapping[str, FactorPiece]
) -> torch.Tensor:
    """The piece of x that a rank holds; dims merged from several factors are cut within."""
    flat = [f for dim in dims for f in dim]
    assert [torch.Size(sizes[f] for f in dim).numel() for dim in dims] == list(x.shape), (
        dims,
        x.shape,
    )
    if not any(f in here for f in flat):
        return x
    x = x.reshape([sizes[f] for f in flat])
    for at, factor in enumerate(flat):
        if factor in here:
            x = x.narrow(at, here[factor].offset, here[factor].size)
    local = [
        torch.Size(here[f].size if f in here else sizes[f] for f in dim).numel() for dim in dims
    ]
    return x.reshape(local)


def combine(how: str | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two candidates or summands of a pending value."""
    if how == "sum":
        return a + b
    if how == "prod":
        return a * b
    assert how in ("max", "min"), how
    return torch.maximum(a, b) if how == "max" else torch.minimum(a, b)


class _Waiting(Exception):
    def __init__(self, value: torch.Tensor, how: str, factor: str) -> None:
        self.value, self.how, self.factor = value, how, factor


class _Rank:
    def __init__(self, known: list[list[torch.Tensor]], number: int) -> None:
        self.known, self.number, self.calls = known, number, 0

    def reduce(self, x: torch.Tensor, how: str, factor: str, parts: int = 1) -> torch.Tensor:
        if self.calls == len(self.known):
            raise _Waiting(x, how, factor)
        self.calls += 1
        return self.known[self.calls - 1][self.number].clone()


def _reduced(
    asked: Sequence[torch.Tensor], places: Sequence[Mapping[str, int]], how: str, factor: str
) -> list[torch.Tensor]:
    totals: dict[tuple[int, ...], torch.Tensor] = {}
    keys = [tuple(n for f, n in place.items() if f != factor) for place in places]
    for key, value in zip(keys, asked, strict=True):
        totals[key] = combine(how, totals[key], value) if key in totals else value
    return [totals[key] for key in keys]
