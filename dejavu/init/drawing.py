"""Drawing one layer: the roles of its parameters, and the factors on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from dejavu.foundation.registry import named
from dejavu.init._base import Draw, Role
from dejavu.init.schemes import SCHEMES
from dejavu.workload.models import LayerBuilder
from dejavu.workload.models.modules.experts import GroupedLinear


def layer_seed(seed: int, name: str) -> int:
    """Return the seed of one layer's own random stream."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def draw_layer(builder: LayerBuilder, draw: Draw, *, position: int, depth: int) -> nn.Module:
    """Build the layer with its weights drawn, the same in every process; torch's global random state is unchanged.

    Args:
        position: of the layer in its model of `depth` layers.

    Raises:
        InputError: there is no such scheme.
    """
    scheme, seed = named(SCHEMES, draw.scheme), layer_seed(draw.seed, builder.name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of device, for a millisecond
        module = builder.build()
    generator = torch.Generator().manual_seed(seed)
    grouped = {part.weight for part in module.modules() if isinstance(part, GroupedLinear)}
    with torch.no_grad():
        for parameter, what in roles(module, builder, is_last=0 < position == depth - 1):
            if what == "bias":
                parameter.mul_(draw.bias)
            else:
                for matrix in parameter.unbind() if parameter in grouped else (parameter,):
                    scheme.fill(matrix, generator, role=what, depth=depth)
                parameter.mul_(draw.factor(what, position=position, depth=depth))
    return module


def roles(
    module: nn.Module, builder: LayerBuilder, *, is_last: bool
) -> Iterator[tuple[nn.Parameter, Role | Literal["bias"]]]:
    """List each matrix and bias of a layer once, under the first of its names; other vectors (norms) are left out.

    Args:
        is_last: the layer is the last of several. (The one layer of a model that could not be cut has no head.)
    """
    for name, parameter in module.named_parameters():
        path, _, own_name = name.rpartition(".")
        owner = module.get_submodule(path)
        if parameter.dim() >= 2:
            if isinstance(owner, nn.Embedding):
                yield parameter, "embedding"
            elif is_last:
                yield parameter, "head"
            else:
                yield parameter, "residual" if path in builder.residual else "hidden"
        elif own_name.endswith("bias") and any(own.dim() >= 2 for own in owner.parameters(recurse=False)):
            yield parameter, "bias"
