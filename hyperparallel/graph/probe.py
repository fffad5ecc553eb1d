"""Find the sharding rule of an op that the tables lack, by trying it on small random tensors.

For every way to pick at most one dim per operand, all of one size, the op runs on the parts of a
cut there. If every result is the concatenation of the parts' results along some dim, or their sum,
those dims are one factor. Two cut points, one uneven, and random data make a false match as good as
impossible. Where no dim can be cut, all are blocked: operands are gathered, with one warning per
op.

Not found: factors inside merged dims, results that need communication, ops that take sizes in their
arguments. `register_rule` is for those. An op whose results differ from run to run is never cut.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hyperparallel.shard.rules.operands import uncut
from hyperparallel.shard.rules.rule import Rule
from hyperparallel.workload import Op, Ref, Value

_KNOWN: dict[tuple[Any, ...], Rule | None] = {}
_WARNED: set[str] = set()
_LARGEST = 1 << 20
"""Elements of the largest operand that is tried at its real size."""
_MOST_PICKS = 256
Pick = tuple[int | None, ...]
Outcome = tuple[int | None, ...]
"""Per result, the dim along which parts are joined, or None where they are added."""


def probe(op: Op, values: Mapping[str, Value], target: Callable[..., Any]) -> Rule:
    """The sharding rule of `op`, found by calling `target`; warns once if nothing can be cut.

    >>> def scaled(x, w): return x * w
    >>> x, w = Value("x", (6, 4), "float32", 4), Value("w", (4,), "float32", 4)
    >>> op = Op("y", "mylib.scaled", (Ref("x"), Ref("w")), {}, ("x", "w"), ("y",))
    >>> probe(op, {"x": x, "w": w, "y": Value("y", (6, 4), "float32", 4)}, scaled).outputs
    ((('a',), ('b',)),)
    """
    key = (op.target, _anonymous(op.args), _anonymous(dict(op.kwargs)), *_shapes(op, values))
    if key not in _KNOWN:
        _KNOWN[key] = _try(op, values, target)
    rule = _KNOWN[key]
    if rule is not None:
        return rule
    if op.inputs and op.target not in _WARNED:
        _WARNED.add(op.target)
        gathered = sum(values[name].num_bytes for name in op.inputs)
        warnings.warn(
            f"{op.target} (in {op.module or 'the model'}) has no sharding rule, and trying it "
            f"found none: its operands ({gathered} bytes) are gathered on every rank; "
            f'register_rule("{op.target}", "...") gives it one',
            stacklevel=2,
        )
    return uncut(op, values)


def _shapes(op: Op, values: Mapping[str, Value]) -> Iterator[Any]:
    for name in (*op.inputs, *op.outputs):
        yield None if name is None else (values[name].shape, values[name].dtype)


def _anonymous(argument: Any) -> str:
    if isinstance(argument, Ref):
        return "tensor"
    if isinstance(argument, tuple):
        return f"({','.join(map(_anonymous, argument))})"
    if isinstance(argument, dict):
        return f"({','.join(f'{k}={_anonymous(v)}' for k, v in argument.items())})"
    return repr(argument)


def _try(op: Op, values: Mapping[str, Value], target: Callable[..., Any]) -> Rule | None:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for small, device in itertools.product((True, False), devices):
        # Whatever an unknown op raises on made-up data only says that this trial is no use.
        try:
            # Trials must not move the generator: dropout of the run would change.
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                rules = [
                    _Trial(op, values, target, small, device, seed).rule() for seed in range(2)
                ]
        except Exception:
            continue
        if rules[0] is not None and rules[0] == rules[1]:
            return rules[0]
    return None


class _Trial:
    """One set of made-up operands for an op, and the results of the whole run."""

    def __init__(
        self,
        op: Op,
        values: Mapping[str, Value],
        target: Callable[..., Any],
        small: bool,
        device: str,
        seed: int,
    ) -> None:
        self.op, self.values, self.target = op, values, target
        self.shapes = [values[name].shape for name in op.inputs]
        sizes = sorted({n for shape in self.shapes for n in shape})
        # Distinct sizes stay distinct, so that dims which merely look alike are told apart.
        used = itertools.count(5)
        self.sizes = {n: n if not small or n < 5 else next(used) for n in sizes}
        # Sizes below 5 are kept, so a large operand may stay large.
        if any(_product(self._scaled(shape)) > _LARGEST for shape in self.shapes):
            raise ValueError("too large to try")
        generator = torch.Generator().manual_seed(seed)
        # Integers may be indices: none is beyond the smallest dim.
        high = min([5, *(n for n in self.sizes.values() if n > 1)])
        self.operands = [
            _random(self._scaled(values[n].shape), values[n].dtype, high, generator).to(device)
            for n in op.inputs
        ]
        self.results = self.run(self.operands)
        again = self.run(self.operands)
        if not all(map(_close, self.results, again)):
            raise ValueError("results differ from run to run")
        shapes = [values[n].shape for n in op.outputs if n is not None]
        if [tuple(r.shape) for r in self.results] != [self._scaled(s) for s in shapes]:
            # A size in the arguments is global: the op would make the same shape of any piece.
            raise ValueError("results do not scale with the operands")

    def _scaled(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.sizes.get(n, n) for n in shape)

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results that are tensors and used."""
        left = iter([x.clone() for x in operands])

        def fill(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return next(left)
            if isinstance(argument, tuple):
                return [fill(item) for item in argument]
            return _restored(argument)

        args = [fill(argument) for argument in self.op.args]
        kwargs = {name: fill(argument) for name, argument in self.op.kwargs.items()}
        given = self.target(*args, **kwargs)
        listed = list(given) if isinstance(given, (tuple, list)) else [given]
        return [r for r, name in zip(listed, self.op.outputs, strict=True) if name is not None]

    def rule(self) -> Rule | None:
        """The rule made of all factors found, or None if there is none."""
        picks, outcomes = self._factors()
        if not picks:
            return None
        names = [chr(ord("a") + i) for i in range(26)][: len(picks)]
        sizes = {
            name: next(s[d] for s, d in zip(self.shapes, pick, strict=True) if d is not None)
            for name, pick in zip(names, picks, strict=False)
        }
        blocked: dict[str, int] = {}
        columns = [list(column) for column in zip(*picks, strict=True)]
        rows = [list(row) for row in zip(*outcomes, strict=True)]

        def dims(shape: Sequence[int], cut: list[int | None], prefix: str) -> Any:
            made: list[tuple[str, ...]] = []
            for d, size in enumerate(shape):
                # A dim of size one is no factor: it broadcasts.
                if d in cut and size != 1:
                    made.append((names[cut.index(d)],))
                elif size == 1:
                    made.append(())
                else:
                    blocked[f"{prefix}{d}"] = size
                    made.append((f"{prefix}{d}",))
            return tuple(made)

        inputs = tuple(
            dims(shape, column, f"i{k}_")
            for k, (shape, column) in enumerate(zip(self.shapes, columns, strict=True))
        )
        cuts = iter(rows)
        outputs = tuple(
            None if name is None else dims(self.values[name].shape, next(cuts), f"o{k}_")
            for k, name in enumerate(self.op.outputs)
        )
        every = sizes | blocked
        return Rule(inputs, outputs, every, frozenset(blocked), linear=self._linear())

    def _factors(self) -> tuple[list[Pick], list[Outcome]]:
        picks: list[Pick] = []
        outcomes: list[Outcome] = []
        for pick in itertools.islice(self._picks(), _MOST_PICKS):
            # A dim belongs to one factor; the first pick that holds, with the fewest operands, has it.
            if len(picks) == 26 or any(
                a is not None and a == b for old in picks for a, b in zip(old, pick, strict=True)
            ):
                continue
            outcome = self._outcome(pick)
            taken = outcome is not None and any(
                a is not None and a == b
                for old in outcomes
                for a, b in zip(old, outcome, strict=True)
            )
            if outcome is not None and not taken:
                picks.append(pick)
                outcomes.append(outcome)
        return picks, outcomes

    def _picks(self) -> Iterator[Pick]:
        """Ways to pick one dim or none of every operand, all of one size; few operands first."""
        found: list[Pick] = []
        for size in sorted({n for shape in self.shapes for n in shape if n > 1}):
            choices = [
                [None, *(d for d, n in enumerate(shape) if n == size)] for shape in self.shapes
            ]
            every = itertools.islice(itertools.product(*choices), 4 * _MOST_PICKS)
            found += [pick for pick in every if any(d is not None for d in pick)]
        return iter(sorted(found, key=lambda pick: sum(d is not None for d in pick)))

    def _outcome(self, pick: Pick) -> Outcome | None:
        size = next(x.shape[d] for x, d in zip(self.operands, pick, strict=True) if d is not None)
        # At the middle and behind the first: an op that pairs equal halves passes one of them only by chance.
        found = {self._cut(pick, size, at) for at in {size // 2, 1}}
        return found.pop() if len(found) == 1 else None

    def _cut(self, pick: Pick, size: int, at: int) -> Outcome | None:
        parts = []
        for start, length in ((0, at), (at, size - at)):
            cut = [
                x if d is None else x.narrow(d, start, length)
                for x, d in zip(self.operands, pick, strict=True)
            ]
            try:
                parts.append(self.run(cut))
            except Exception:
                return None
        outcome: list[int | None] = []
        for result, *pieces in zip(self.results, *parts, strict=True):
            joined = [d for d in range(result.ndim) if _joins(result, pieces, d)]
            added = not joined and _adds(result, pieces)
            if not joined and not added:
                return None
            outcome.append(joined[0] if joined else None)
        return tuple(outcome)

    def _linear(self) -> tuple[tuple[int, ...], ...]:
        """The operands in which the op is linear, each by itself."""
        if not all(r.is_floating_point() for r in self.results):
            return ()
        found = []
        for i, x in enumerate(self.operands):
            if not x.is_floating_point():
                continue
            # Shares of both signs: with parts of one sign relu and abs look linear too.
            share = torch.randn(x.shape, dtype=torch.float32).to(x)
            parts = [
                self.run([*self.operands[:i], part, *self.operands[i + 1 :]])
                for part in (x * share, x - x * share)
            ]
            if all(map(_adds, self.results, zip(*parts, strict=True))):
                found.append((i,))
        return tuple(found)


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _random(
    shape: tuple[int, ...], dtype: str, high: int, generator: torch.Generator
) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        wide = torch.complex128 if kind.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(kind)
    high = 2 if kind == torch.bool else high
    return torch.randint(0, high, shape, generator=generator).to(kind)


def _restored(argument: Any) -> Any:
    """An argument as ATen takes it: dtypes and formats are kept by name in a workload."""
    if isinstance(argument, str):
        known = getattr(torch, argument.removeprefix("torch."), None)
        if isinstance(known, (torch.dtype, torch.memory_format, torch.layout)):
            return known
    return argument


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return bool(torch.equal(a, b))
    rough = torch.finfo(a.dtype).eps ** 0.5
    return bool(torch.allclose(a, b, rtol=rough, atol=rough, equal_nan=True))


def _joins(result: torch.Tensor, pieces: Sequence[torch.Tensor], dim: int) -> bool:
    shapes = [list(p.shape) for p in pieces]
    if any(len(s) != result.ndim for s in shapes) or any(
        s[:dim] + s[dim + 1 :] != list(result.shape[:dim]) + list(result.shape[dim + 1 :])
        for s in shapes
    ):
        return False
    return _close(result, torch.cat(list(pieces), dim))


def _adds(result: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
    if result.dtype == torch.bool or any(p.shape != result.shape for p in pieces):
        return False
    # Zeros add up to zeros whatever was cut: that proves nothing.
    if not result.any():
        return False
    return _close(result, sum(pieces[1:], pieces[0]))
