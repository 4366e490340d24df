"""How initial weights are drawn, and which draws are tried. To add either: its class, and one line here."""

from __future__ import annotations

import torch
from torch import nn

from dejavu.errors import InputError
from dejavu.init._base import Draw, KeepDefault, Scheme, layer_seed, matrices
from dejavu.init.proposers import LatinHypercube, Proposer, Seeds
from dejavu.init.schemes import DepthScaled, Normal, Torch
from dejavu.models import LayerBuilder

__all__ = ["PROPOSERS", "SCHEMES", "Draw", "Proposer", "Scheme", "draw_layer", "proposer_named"]

SCHEMES: dict[str, Scheme] = {
    "default": KeepDefault(),
    "xavier": Torch(nn.init.xavier_normal_),
    "kaiming": Torch(nn.init.kaiming_normal_),
    "orthogonal": Torch(nn.init.orthogonal_),
    "normal": Normal(),
    "depth_scaled": DepthScaled(),
}
PROPOSERS: dict[str, Proposer] = {"latin_hypercube": LatinHypercube(), "seeds": Seeds()}


def proposer_named(name: str) -> Proposer:
    """The proposer that a workload names.

    Raises:
        InputError: there is none of that name.
    """
    if name not in PROPOSERS:
        raise InputError(
            f"trials: unknown proposer {name!r}; wanted one of {', '.join(PROPOSERS)}", ("trials", "proposer")
        )
    return PROPOSERS[name]


def draw_layer(builder: LayerBuilder, draw: Draw, *, depth: int) -> nn.Module:
    """The layer with its weights drawn, the same in every process; torch's global random state is left as it was."""
    seed = layer_seed(draw.seed, builder.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = builder.build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in matrices(module):
            SCHEMES[draw.scheme].fill(weight, generator, depth=depth)
            weight.mul_(draw.gain)
    return module
