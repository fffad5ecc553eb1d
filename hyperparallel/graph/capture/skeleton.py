"""A copy of a module whose tensors are fake: same classes, names and ties, no memory, nothing
shared.

Capture runs the user's forward on this copy, so that whatever the forward stores on its modules
stays off the user's own. Tensors on the `meta` device are given the batch's device, so that modules
which were never initialised can be captured beside real inputs. `use_cache` is switched off on
every configuration found: a generation cache has no place in a training step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # checked on torch 2.13


def fake_tensor(mode: FakeTensorMode, x: torch.Tensor, device: torch.device, all_moved: bool) -> torch.Tensor:
    """A fake of `x` (shape, stride, dtype, requires_grad), on `device` if `x` is on meta or `all_moved`."""
    where = device if all_moved or x.device.type == "meta" else x.device
    with mode:
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where)
        if isinstance(x, nn.Parameter):
            return nn.Parameter(fake, requires_grad=x.requires_grad)
        return fake.requires_grad_(x.requires_grad)


def named_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All parameters and all buffers by every name they have; ties give one tensor several."""
    return (
        dict(module.named_parameters(remove_duplicate=False)),
        dict(module.named_buffers(remove_duplicate=False)),
    )


def skeleton(
    module: nn.Module,
    mode: FakeTensorMode,
    device: torch.device,
    all_moved: bool = False,
    stand_ins: Mapping[int, nn.Module] | None = None,
) -> nn.Module:
    """Copy `module` with fake tensors; `stand_ins` replaces parts, by the id of the part.

    device: where tensors on meta, or with `all_moved` all tensors, are.
    """
    memo: dict[int, Any] = dict(stand_ins or {})
    for part in list(_walk(module, memo)):
        for x in (*part._parameters.values(), *part._buffers.values()):
            if x is not None and id(x) not in memo:
                memo[id(x)] = fake_tensor(mode, x, device, all_moved)
    # `memo` says what is copied already: tensors as fakes (ties stay ties), dropped blocks as stand-ins.
    twin = copy.deepcopy(module, memo)
    for part in twin.modules():
        config = getattr(part, "config", None)
        if config is not None and getattr(config, "use_cache", None) is True:
            config.use_cache = False
    return twin


def _walk(module: nn.Module, memo: Mapping[int, Any]) -> Iterable[nn.Module]:
    seen: set[int] = set()
    todo = [module]
    while todo:
        part = todo.pop()
        if id(part) in seen or id(part) in memo:
            continue
        seen.add(id(part))
        yield part
        todo.extend(child for child in part._modules.values() if child is not None)


def batch_device(leaves: Iterable[torch.Tensor]) -> torch.device:
    """The device of the first real tensor of a batch, the CPU if there is none."""
    for x in leaves:
        if x.device.type != "meta":
            return x.device
    return torch.device("cpu")
