"""One rank's part of a training by any schedule's orders: several copies of the model, or late gradients.

What `dejavu.runtime` trains is synchronous, has one copy of the model and torch's stages. Here a rank carries out its
tasks in their order with plain messages: small, for schedules that torch's runtime cannot run, and no part of
`dejavu run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from dejavu.schedules._base import PipelineSchedule
from dejavu.schedules.timeline import uses
from dejavu.schedules.training import Carried, Loss, Rates, TrainedStage, Weights, parts
from dejavu.simulation import StageSeconds


def train_rank(
    schedule: PipelineSchedule,
    modules: Sequence[nn.Module],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss: Loss,
    rates: Rates,
    num_microbatches: int,
) -> dict[int, float]:
    """Train the own stages' modules in place; return the losses of microbatches whose last stage is on this rank.

    All ranks of the default process group call this, rank r as rank r of the pipeline, with equal arguments.

    Args:
        modules: all stages, in the model's order, drawn alike on all ranks; of those that are not its own a rank looks
            at shapes only. A rank with two copies' stages has a module for each.

    Raises:
        InputError: as `training.train_by`.
    """
    P, rank = dist.get_world_size(), dist.get_rank()
    schedule.check(P, num_microbatches)
    S = len(modules)
    orders = schedule.orders(P, num_microbatches, len(batches), [StageSeconds(1.0, 2.0, 0.0)] * S)
    own = {(task.copy, task.stage): TrainedStage(modules[task.stage]) for task in orders[rank]}
    examples = parts(batches, num_microbatches)
    mail = _Messages(schedule, S, _shapes(modules, examples[0][0]))
    carried = Carried(schedule, own, examples, loss, rates, num_microbatches, mail, S)
    carried.run([(task, version) for task, _, version in uses(schedule, orders[rank], num_microbatches)])
    mail.close()
    return carried.losses


def _shapes(modules: Sequence[nn.Module], inputs: torch.Tensor) -> list[torch.Size]:
    """Return the shape of one microbatch before each stage."""
    found = [inputs.shape]
    with torch.no_grad():
        for module in modules[:-1]:
            inputs = module(inputs)
            found.append(inputs.shape)
    return found


class _Messages:
    """What goes between stages: on one rank directly, else as a message that its tag names."""

    def __init__(self, schedule: PipelineSchedule, num_stages: int, shapes: Sequence[torch.Size]) -> None:
        self._schedule, self._num_stages, self._shapes = schedule, num_stages, shapes
        self._here: dict[tuple[int, int, int, bool], torch.Tensor] = {}
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []  # the tensor lives until it has gone
        self._groups = self._groups_of_copies()

    def _rank_of(self, copy: int, stage: int) -> int:
        return self._schedule.rank_of(stage, dist.get_world_size(), copy)

    def _groups_of_copies(self) -> Mapping[int, dist.ProcessGroup]:
        """Return for each stage the ranks that have a copy of it; every rank makes every group, in one order."""
        if self._schedule.num_copies == 1:
            return {}
        found = {}
        for stage in range(self._num_stages):
            ranks = sorted({self._rank_of(copy, stage) for copy in range(self._schedule.num_copies)})
            found[stage] = dist.new_group(ranks)
        return found

    def _tag(self, to: tuple[int, int, int], is_gradient: bool) -> int:
        copy, stage, number = to
        return ((number * self._num_stages + stage) * self._schedule.num_copies + copy) * 2 + is_gradient

    def give(self, to: tuple[int, int, int], tensor: torch.Tensor, *, is_gradient: bool) -> None:
        """Give it to a copy's stage, for a microbatch, without waiting."""
        peer = self._rank_of(*to[:2])
        if peer == dist.get_rank():
            self._here[(*to, is_gradient)] = tensor
            return
        self._sent = [(work, kept) for work, kept in self._sent if work is not None and not work.is_completed()]
        kept = tensor.contiguous()
        self._sent.append((dist.isend(kept, peer, tag=self._tag(to, is_gradient)), kept))

    def take(self, to: tuple[int, int, int], *, is_gradient: bool) -> torch.Tensor:
        """Return what was given to it, once it is here."""
        copy, stage, _ = to
        sender = self._rank_of(copy, stage + (1 if is_gradient else -1))
        if sender == dist.get_rank():
            return self._here.pop((*to, is_gradient))
        arrived = torch.empty(self._shapes[stage + is_gradient])
        dist.recv(arrived, sender, tag=self._tag(to, is_gradient))
        return arrived

    def add_copies(self, stage: int, gradients: Weights) -> None:
        """Sum the copies' gradients; their order is the same on all ranks."""
        if stage in self._groups:
            for name in sorted(gradients):
                gradients[name] = gradients[name].clone()
                dist.all_reduce(gradients[name], group=self._groups[stage])

    def close(self) -> None:
        """Wait until everything has gone."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
