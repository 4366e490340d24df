"""Tied weights: one matrix that two layers use, such as an embedding and the head, wherever the cuts are.

Each layer holds the matrix as a weight of its own, drawn equal. After the backward passes each gets the sum of both
gradients, so the same optimizer makes the same step of it on every rank that holds it, and they stay equal to the last
bit (Megatron-LM's treatment of embeddings, Narayanan et al., SC 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dejavu.binding.binding import Placement
from dejavu.runtime.layout import Layout
from dejavu.runtime.state import local_of, own_part
from dejavu.workload.models.ties import Tie


def without_copies(module: nn.Module, ties: Iterable[Tie]) -> list[nn.Parameter]:
    """Return the weights of some layers, a tied one only where its owner is: each counts once in a norm."""
    layers = dict(module.named_children())
    copies = {id(tie.copy.of(layers)) for tie in ties}
    return [parameter for parameter in module.parameters() if id(parameter) not in copies]


class Ends(NamedTuple):
    """The pipeline ranks that hold a tied weight's two ends.

    Attributes:
        group: all ranks that hold an end; None: the two are one.
        roots: of each end, the rank of the world that tells its gradient.
    """

    holders: tuple[int, int]
    group: dist.ProcessGroup | None
    roots: tuple[int, ...]


def ends_of(ties: Iterable[Tie], layout: Layout) -> tuple[Ends, ...]:
    """Find where the ends of tied weights are; every rank of the world makes the groups: a name counts them."""
    found = []
    for tie in ties:
        stage_of = [s for s, span in enumerate(layout.plan.stages) for _ in range(span.start, span.stop)]
        rank_of = {s: rank for rank, stages in enumerate(layout.plan.ranks) for s in stages}
        first, second = (rank_of[stage_of[end.position]] for end in tie.ends)
        if first == second:
            found.append(Ends((first, second), None, ()))
            continue
        grids = layout.grids[first], layout.grids[second]
        group = dist.new_group(sorted(int(rank) for grid in grids for rank in grid.flat))
        found.append(Ends((first, second), group, tuple(int(grid[0, 0]) for grid in grids)))
    return tuple(found)


class TiedGradients:
    """The tied weights that a rank holds, and with whom."""

    def __init__(
        self,
        ties: Sequence[Tie],
        layers: Mapping[str, nn.Module],
        ends: Sequence[Ends],
        place: Placement | None,
        device: torch.device | None = None,
    ) -> None:
        """Find the own ends; without a place all layers are here.

        Args:
            layers: of all this rank's stages.
            ends: of its own pipeline.
            device: of this rank, wherever its gradients are; None: nothing is sent.
        """
        self._device = device
        self._held: list[_Held] = []
        for number, tie in enumerate(ties):
            group, roots = None, list[int]()
            if place is not None:
                holders, group, (*roots,) = ends[number]
                if place.pipeline_rank not in holders:
                    continue
            weights = [weight for end in tie.ends if (weight := end.of(layers)) is not None]
            if not any(weight.requires_grad for weight in weights):  # frozen, on every rank
                continue
            own = [k for k, end in enumerate(tie.ends) if end.of(layers) is not None]
            self._held.append(_Held(weights, own, group, roots))

    def sum_gradients(self) -> None:
        """Give both ends of each tied weight the sum of their gradients; every rank that holds one calls it."""
        for held in self._held:
            whole = held.gradients(self._device)
            total = whole[0].add_(whole[1])
            for weight in held.weights:
                assert weight.grad is not None
                local_of(weight.grad).copy_(own_part(total, weight.grad))


class _Held(NamedTuple):
    """A tied weight on this rank.

    Attributes:
        weights: one or both of its ends.
        ends: which: 0 the owner, 1 the copy.
        group: all ranks that hold an end; None: both are here.
        roots: of each end, the rank of the world that tells its gradient.
    """

    weights: list[nn.Parameter]
    ends: list[int]
    group: dist.ProcessGroup | None
    roots: list[int]

    def gradients(self, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole gradients of both ends, where they can be sent."""
        own = [_whole(weight) if device is None else _whole(weight).to(device) for weight in self.weights]
        if self.group is None:
            return own[0], own[1]
        found = [own[self.ends.index(end)] if end in self.ends else torch.empty_like(own[0]) for end in (0, 1)]
        for gradient, root in zip(found, self.roots, strict=True):
            dist.broadcast(gradient, root, group=self.group)
        return found[0], found[1]


def _whole(weight: nn.Parameter) -> torch.Tensor:
    if weight.grad is None:  # this end is used without gradients, as an embedding whose rows only the head trains
        weight.grad = torch.zeros_like(weight)
    gradient = weight.grad
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.contiguous()
