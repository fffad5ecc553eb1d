"""What a parallelized model holds, found once and looked up quickly at every call.

Walking a module tree and resolving dotted names take longer than the small ops between which they stand.
So the dictionaries in which parameters and buffers live are kept, with their keys; what lies in them is
read anew each time, and a replaced submodule makes everything be found again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperparallel.errors import UserError

Slot = tuple[dict[str, Any], str]
"""A dictionary of a module, and the key of a parameter or buffer in it."""


class Holdings:
    """The modules, parameters and buffers of one model object; a copy finds those of its own."""

    def __init__(self) -> None:
        self._links: list[Slot] = []
        self._children: list[nn.Module | None] = []
        self._parts: tuple[nn.Module, ...] = ()
        self._slots: tuple[Slot, ...] = ()
        self._of_program: dict[Any, tuple[tuple[Slot, ...], tuple[Slot, ...]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Holdings:
        return Holdings()

    def look(self, model: nn.Module) -> tuple[tuple[bool, ...], tuple[Any, ...]]:
        """What a program depends on: the modes of all modules, and which parameters are trained."""
        # The cheapest look that sees a replaced submodule: the objects in the dictionaries, by identity.
        if not self._parts or [modules.get(key) for modules, key in self._links] != self._children:
            self._find(model)
        modes = tuple([part.training for part in self._parts])
        held = [p for parameters, key in self._slots if (p := parameters.get(key)) is not None]
        return modes, tuple([(p.requires_grad, p.dtype) for p in held])

    def _find(self, model: nn.Module) -> None:
        self._parts = tuple(model.modules())
        self._links = [(part._modules, key) for part in self._parts for key in part._modules]
        self._children = [modules[key] for modules, key in self._links]
        self._slots = tuple((part._parameters, key) for part in self._parts for key in part._parameters)
        self._of_program = {}

    def tensors(
        self, model: nn.Module, program: Any, parameters: Iterable[str], buffers: Iterable[str]
    ) -> tuple[list[DTensor], list[Tensor]]:
        """A program's parameters and buffers as they are now; `program` stands for their names.

        Raises `UserError` for a parameter that is no DTensor.
        """
        found = self._of_program.get(program)
        if found is None:
            names = tuple(parameters)
            found = (
                tuple(_slot(model, n, "_parameters") for n in names),
                tuple(_slot(model, n, "_buffers") for n in buffers),
            )
            self._of_program[program] = found
        # Read anew: a loop may have put another object there (`module.weight = ...`).
        params = [held[key] for held, key in found[0]]
        for parameter, name in zip(params, parameters, strict=True):
            if not isinstance(parameter, DTensor):
                wanted = "the DTensor that parallelize put there"
                raise UserError(f"parameter {name}", "a plain tensor", wanted)
        return params, [held[key] for held, key in found[1]]


def _slot(model: nn.Module, name: str, kind: str) -> Slot:
    owner, _, key = name.rpartition(".")
    return getattr(model.get_submodule(owner), kind), key


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter in the place of the one of this name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
