"""Weights and buffers of a module in another type of numbers."""

from __future__ import annotations

import torch


def to_dtype(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert weights and buffers in place, but for whole numbers and complex ones, as a table of rotations.

    `module.to(dtype)` makes complex buffers real: their imaginary part is lost.
    """
    module._apply(lambda one: one.to(dtype) if one.is_floating_point() else one)


def to_dtype_of_fake(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Do the same to a module of fake tensors: torch converts none in place, so others take their places.

    A layer of a traced graph keeps what it names in `as_made`, as it does where torch converts it.

    A weight that two names share stays one. Tensors that are neither weights nor buffers stay as they were made, as
    they do in a training: building with another default dtype would give them that type, and leave their own to
    weights and buffers that say which they have.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    as_made = {id(part.get_buffer(name)) for part in module.modules() for name in getattr(part, "as_made", ())}
    for part in module.modules():
        own = (part.named_parameters, part.named_buffers)
        for name, one in [pair for named in own for pair in named(recurse=False, remove_duplicate=False)]:
            if not one.is_floating_point() or one.dtype == dtype or id(one) in as_made:
                continue
            if one not in made:
                found = one.detach().to(dtype)
                is_weight = isinstance(one, torch.nn.Parameter)
                made[one] = torch.nn.Parameter(found, one.requires_grad) if is_weight else found
            setattr(part, name, made[one])
