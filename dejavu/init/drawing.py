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
    generator, stacks = torch.Generator().manual_seed(seed), _stacks(module)
    with torch.no_grad():
        for parameter in module.parameters():  # some schemes know no 16 bits; what trains converts the whole layer
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        for parameter, what in roles(module, builder, is_last=0 < position == depth - 1):
            if what == "bias":
                parameter.mul_(draw.bias)
            else:
                for matrix in parameter if id(parameter) in stacks else [parameter]:
                    scheme.fill(matrix, generator, role=what, depth=depth)
                parameter.mul_(draw.factor(what, position=position, depth=depth))
    return module


def _stacks(module: nn.Module) -> set[int]:
    """Return the ids of weights that are several matrices, one for each expert; a convolution's three sizes are one."""
    return {
        id(weight)
        for part in module.modules()
        for weight in part.parameters(recurse=False)
        if weight.dim() == 3 and not isinstance(part, nn.Conv1d | nn.ConvTranspose1d)
    }


def roles(
    module: nn.Module, builder: LayerBuilder, *, is_last: bool
) -> Iterator[tuple[nn.Parameter, Role | Literal["bias"]]]:
    """List each matrix and bias of a layer once, under the first of its names; other vectors (norms) are left out.

    So is what is frozen: no initial weights, but a table, a mask, or what the module's constructor has loaded.

    Args:
        is_last: the layer is the last of several. (The one layer of a model that could not be cut has no head.)
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, own_name = name.rpartition(".")
        owner = module.get_submodule(path)
        if parameter.dim() >= 2:
            if isinstance(owner, nn.Embedding):
                yield parameter, "embedding"
            elif is_last:
                yield parameter, "head"
            else:
                yield parameter, "residual" if path in builder.residual else "hidden"
        elif _is_bias(own_name) and any(own.dim() >= 2 for own in owner.parameters(recurse=False)):
            yield parameter, "bias"


def _is_bias(own_name: str) -> bool:
    return own_name.endswith("bias") or own_name.startswith("bias_")  # in_proj_bias; bias_ih_l0 of recurrent layers
