"""Gradients of layers that several pipelines hold, those of virtual workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dejavu.binding.binding import Placement
from dejavu.runtime.layout import World
from dejavu.runtime.replicas import WithGradients, sum_gradients


def own_group(world: World, place: Placement) -> dist.ProcessGroup | None:
    """Make a group of each pipeline, all ranks together, and return the rank's own; None: that is the world's."""
    if not world.is_shared:
        return None
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in world.ranks]
    return groups[world.number_of(place)]


class SharedGradients:
    """Sums the gradients of each layer over all who hold it. Every rank of the world makes one at the same time.

    Args:
        layers: of this rank's stages, by their places in the model.
        device: of this rank.
    """

    def __init__(self, world: World, layers: dict[int, nn.Module], device: torch.device) -> None:
        own, self._device = dist.get_rank(), device
        self._sums = list[tuple[Sequence[nn.Parameter], WithGradients, dist.ProcessGroup]]()
        self.of_last: dist.ProcessGroup | None = None
        for held in world.holders:
            for ranks in held.ranks:
                group = dist.new_group(ranks)
                if own not in ranks:
                    continue
                weights = [one for k in range(held.start, held.stop) for one in layers[k].parameters()]
                self._sums.append((weights, WithGradients(weights, group, device), group))
                if held is world.holders[-1]:
                    self.of_last = group

    def sum(self) -> None:
        """Replace each gradient by the sum over its holders; in the order of the layers, so nobody waits in a ring."""
        for weights, with_gradients, group in self._sums:
            with_gradients.agree()
            sum_gradients(weights, group, self._device)
