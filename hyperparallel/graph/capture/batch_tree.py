"""Nested batches and results as flat lists of tensors with readable paths, and back.

A batch or a model's result may nest dicts, lists, tuples, named tuples, dataclasses (Hugging Face's
`ModelOutput` included) and any type registered with torch's pytree. `Tree` remembers the nesting;
tensors become leaves named by their path ("batch.x.0"), plain Python values are baked in, anything
else that is not a tensor becomes None. Arguments of a call are matched by parameter name, so a
batch given by position and the same batch given by keyword are one batch; an argument equal to its
None default counts as not given.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree  # checked on torch 2.13

from hyperparallel.errors import UserError

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))


def call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments: a mapping is keywords, a tuple or list positions.

    >>> call_of({"x": 1}), call_of((1, 2)), call_of(3)
    (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


@dataclass(frozen=True)
class Tree:
    """One level of nesting: how to take an object apart, and how to build it again.

    `kind` is "tensor", "plain" or "node". A node has `keys` (path pieces), `children` and `build`,
    which makes the object from its children; `type` is the object's class.
    """

    kind: str
    value: Any = None
    type: type = object
    keys: tuple[str, ...] = ()
    children: tuple[Tree, ...] = ()
    build: Callable[[Sequence[Any]], Any] | None = None

    def paths(self, prefix: str = "") -> Iterator[str]:
        """Paths of the tensor leaves, in order."""
        if self.kind == "tensor":
            yield prefix
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(f"{prefix}.{key}" if prefix else key)

    def opaque(self, path: str = "") -> Iterator[tuple[str, Any]]:
        """Path and class of the objects that were neither plain nor could be taken apart."""
        if self.kind == "plain" and self.value is None and self.type is not type(None):
            yield path, self.type
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.opaque(f"{path}.{key}" if path else key)

    def outline(self) -> tuple[Any, ...]:
        """All but the tensors, as a value that hashes: equal outlines, equal nesting and plain values."""
        return self.kind, self.type, self.keys, self.value, *(c.outline() for c in self.children)

    def rebuild(self, leaves: Iterator[Any]) -> Any:
        """The object with its tensor leaves taken from `leaves`, in order."""
        if self.kind == "tensor":
            return next(leaves)
        if self.build is None:
            return self.value
        return self.build([child.rebuild(leaves) for child in self.children])


def _take_apart(obj: Any) -> tuple[tuple[str, ...], list[Any], Callable[..., Any]] | None:
    cls: Any = type(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = [f.name for f in dataclasses.fields(obj) if f.init]
        return tuple(fields), [getattr(obj, f) for f in fields], _keyword_builder(cls, fields)
    if isinstance(obj, tuple):
        names = getattr(obj, "_fields", None)
        keys = tuple(names) if names else tuple(str(i) for i in range(len(obj)))
        return keys, list(obj), (lambda vs: cls(*vs)) if names else (lambda vs: cls(vs))
    if isinstance(obj, list):
        return tuple(str(i) for i in range(len(obj))), list(obj), lambda vs: list(vs)
    if isinstance(obj, Mapping):
        names = list(obj)
        return tuple(str(k) for k in names), [obj[k] for k in names], _mapping_builder(obj, names)
    if cls in pytree.SUPPORTED_NODES:
        entry = pytree.SUPPORTED_NODES[cls]
        values, context = entry.flatten_fn(obj)
        keys = tuple(str(i) for i in range(len(values)))
        return keys, list(values), lambda vs: entry.unflatten_fn(vs, context)
    return None


def _keyword_builder(cls: Any, fields: Sequence[str]) -> Callable[..., Any]:
    return lambda values: cls(**dict(zip(fields, values, strict=True)))


def _mapping_builder(obj: Mapping[Any, Any], names: Sequence[Any]) -> Callable[..., Any]:
    if type(obj) is dict or not isinstance(obj, dict):
        return lambda values: dict(zip(names, values, strict=True))
    empty = copy.copy(obj)  # not cls(pairs): a defaultdict takes its factory first, a Counter counts
    empty.clear()

    def build(values: Sequence[Any]) -> dict[Any, Any]:
        made = copy.copy(empty)
        made.update(zip(names, values, strict=True))
        return made

    return build


def flatten(obj: Any) -> tuple[Tree, list[torch.Tensor]]:
    """Take `obj` apart into its `Tree` and its tensors, in order.

    >>> tree, leaves = flatten({"x": [torch.zeros(2), None], "n": 3})
    >>> list(tree.paths()), len(leaves)
    (['x.0'], 1)
    >>> tree.rebuild(iter([7]))
    {'x': [7, None], 'n': 3}
    """
    if isinstance(obj, torch.Tensor):
        return Tree("tensor", type=torch.Tensor), [obj]
    parts = None if isinstance(obj, _PLAIN) else _take_apart(obj)
    if parts is None:
        return Tree("plain", obj if isinstance(obj, _PLAIN) else None, type(obj)), []
    keys, values, build = parts
    below = [flatten(value) for value in values]
    children = tuple(tree for tree, _ in below)
    leaves = [leaf for _, found in below for leaf in found]
    return Tree("node", None, type(obj), keys, children, build), leaves


def _named_leaves(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tree, list[torch.Tensor]]:
    """A call taken apart; `UserError` for an argument whose content would be lost (a cache, say)."""
    tree, leaves = flatten(_named(signature, args, kwargs))
    for path, cls in tree.opaque():
        allowed = "tensors, plain Python values, and containers or dataclasses of them"
        raise UserError(f"batch.{path}", cls.__name__, allowed, "None")
    return tree, leaves


def _differences(given: Tree, known: Tree, path: str = "") -> Iterator[str]:
    if given.kind != known.kind or given.type is not known.type or given.keys != known.keys:
        was = known.value if known.kind == "plain" else f"{known.type.__name__} {known.keys or ''}"
        now = given.value if given.kind == "plain" else f"{given.type.__name__} {given.keys or ''}"
        yield f"{path or 'batch'} is {now} but was {was} when the model was captured"
    elif given.kind == "plain" and given.value != known.value:
        yield f"{path} is {given.value!r} but was {known.value!r} when the model was captured"
    else:
        for key, one, two in zip(known.keys, given.children, known.children, strict=True):
            yield from _differences(one, two, f"{path}.{key}" if path else key)


@dataclass(frozen=True)
class CallTree:
    """How a module is called: its signature and the nesting of the example batch."""

    signature: inspect.Signature
    tree: Tree

    def paths(self) -> tuple[str, ...]:
        return tuple(self.tree.paths())

    def call(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Call `function` with the batch rebuilt around `leaves`."""
        args, kwargs = _split_call(self.signature, self.tree.rebuild(iter(leaves)))
        return function(*args, **kwargs)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of another batch, in the captured order.

        Raises `UserError` naming the part that differs when the batch is not built like the
        example.
        """
        tree, leaves = _named_leaves(self.signature, args, kwargs)
        for difference in _differences(tree, self.tree):
            raise UserError("batch", difference, "a batch built like the example batch")
        return leaves


def _named(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UserError("batch", str(error), f"the arguments of forward{signature}") from None
    named: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        # `f(x)` and `f(x, mask=None)` are one batch.
        if name not in bound or (bound[name] is None and parameter.default is None):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            # The caller's order of keywords says nothing.
            named.update(sorted(bound[name].items()))
        else:
            named[name] = bound[name]
    return named


def _split_call(signature: inspect.Signature, named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments only where the signature allows nothing else."""
    args: list[Any] = []
    rest = dict(named)
    # With extra positional arguments, those in front of them have to be positional too.
    has_varargs = any(p.kind is p.VAR_POSITIONAL and rest.get(p.name) for p in signature.parameters.values())
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.extend(rest.pop(name, ()))
        elif parameter.kind is parameter.POSITIONAL_ONLY or (
            has_varargs and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            args.extend([rest.pop(name)] if name in rest else [])
    return args, rest


def call_tree(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[CallTree, list[torch.Tensor]]:
    """The `CallTree` of `module(*args, **kwargs)` and the batch's tensors."""
    signature = inspect.signature(module.forward)
    tree, leaves = _named_leaves(signature, args, kwargs)
    return CallTree(signature, tree), leaves
