"""One gradient of those of a stage's replicas, on each of them: by an all-reduce, or gathered and by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from dejavu.binding.binding import Placement
from dejavu.runtime.gradients.faults import FaultyGradients
from dejavu.runtime.gradients.overlapped import OverlappedSum
from dejavu.runtime.gradients.rules import Part, combine, rule_of
from dejavu.runtime.gradients.watching import Watch
from dejavu.runtime.job.suspects import Suspect
from dejavu.runtime.layout import Layout
from dejavu.runtime.replicas import parts_of
from dejavu.runtime.state import local_of
from dejavu.workload import GradientSettings

HeldOut = Callable[[int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ReplicaGroups:
    """Who combines a stage's gradients.

    Attributes:
        stage: its number.
        replicas: the ranks that hold the same weights.
        shards: the ranks that share each layer of this replica; None: there are no others.
        device: of this rank.
    """

    stage: int
    layout: Layout
    place: Placement
    replicas: dist.ProcessGroup
    shards: dist.ProcessGroup | None
    device: torch.device


class ReplicaGradients:
    """Makes one gradient of those of a stage's replicas. Every rank of the stage has one.

    A replica's gradient is that of its own examples, whose loss is weighted by their share of the microbatch. So a sum
    is the whole gradient; a rule is given each divided by its share, N estimates of the whole one. Each rank gathers
    all and computes the same, so replicas keep equal weights.

    Args:
        held_out: (step) → the gradient of held-out examples, which `zeno` compares with.
    """

    def __init__(
        self, module: nn.Module, settings: GradientSettings, groups: ReplicaGroups, held_out: HeldOut | None = None
    ) -> None:
        self._module, self._groups, self._settings = module, groups, settings
        self._rule, self._held_out = rule_of(settings), held_out
        layout, place = groups.layout, groups.place
        grid = layout.grids[place.pipeline_rank]
        replica_of = {int(rank): replica for replica, row in enumerate(grid) for rank in row}
        # The group's order is of the world's ranks, which need not be that of the replicas.
        self._order = [replica_of[rank] for rank in dist.get_process_group_ranks(groups.replicas)]
        rows = [layout.rows(layout.placed(int(grid[n, place.shard]))) for n in range(len(grid))]
        self._share_N = torch.tensor([(stop - start) / layout.microbatch_size for start, stop in rows])
        self._faults = FaultyGradients.of_rank(dist.get_rank())
        self._trust_SN = torch.zeros(0)
        self._watch: Watch | None = None
        self._layers: list[str] = []
        self._sum = OverlappedSum(module, groups.replicas, groups.device)

    @property
    def gathers(self) -> bool:
        """Whether the replicas' gradients are gathered; else they are summed as they are."""
        return self._settings.gathers

    def begin_last_pass(self) -> None:
        """Let sums begin while the step's last backward pass computes, where gradients are summed as they are."""
        if not self._faults and not self.gathers:
            self._sum.begin()

    def arrived(self, weights: Iterable[nn.Parameter]) -> None:
        """Take note of weights whose gradients of the last pass are complete, where autograd does not say so itself."""
        for weight in weights:
            self._sum.arrived(weight)

    def combine(self, step: int) -> None:
        """Begin to replace this rank's gradients by one of all replicas; every replica calls it together."""
        if self._faults or self.gathers:
            self._spoil_and_gather(step)
        if not self.gathers:
            self._sum.send_rest()

    def finish(self) -> None:
        """Wait until the gradients are replaced."""
        self._sum.wait()

    def _spoil_and_gather(self, step: int) -> None:
        named = [(name, p) for name, p in self._module.named_parameters() if p.grad is not None]
        if not named:
            return
        gradients = [local_of(p.grad) for _, p in named if p.grad is not None]
        own_P = torch.cat([gradient.flatten() for gradient in gradients])
        columns_of = _columns(self._module, (name for name, _ in named), [g.numel() for g in gradients])
        for fault in self._faults:
            own_P = fault.spoil(step, own_P, columns_of)
        found_P = own_P
        if self.gathers:
            parts = self._parts(list(columns_of), named)
            found_P = self._by_rule(step, own_P, parts)
        for gradient, part in zip(gradients, found_P.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _by_rule(self, step: int, own_P: torch.Tensor, parts: list[Part]) -> torch.Tensor:
        count = len(self._order)
        gathered_NP = own_P.new_empty(count, own_P.numel())
        dist.all_gather_single(gathered_NP.view(-1), own_P, group=self._groups.replicas)
        # All ranks compute with the rows in the order of the group: the same numbers in the same order.
        gathered_NP /= self._share_N[self._order].to(gathered_NP)[:, None]
        if self._watch is None:
            num_sections = 1 + parts[-1].section
            self._trust_SN = torch.full((num_sections, count), 1 / count, dtype=torch.float64, device=own_P.device)
            self._watch = Watch(num_sections, count, self._settings.num_suspected)
        held_out_P = None if self._held_out is None else self._held_out(step)
        found = combine(self._rule, gathered_NP, parts, self._trust_SN, add_up=self._over_shards, held_out_P=held_out_P)
        self._trust_SN = found.trust_SN
        self._watch.look(step, found.suspicion_SN)
        return found.gradient_P

    def _over_shards(self, measured: torch.Tensor) -> torch.Tensor:
        if self._groups.shards is not None:
            dist.all_reduce(measured, group=self._groups.shards)
        return measured

    def _parts(self, layers: list[str], named: list[tuple[str, nn.Parameter]]) -> list[Part]:
        """Return the runs of columns that count alike: of a section, and held by as many of the stage's shards."""
        per_layer, degree = self._settings.per == "layer", self._groups.layout.grids[self._groups.place.pipeline_rank]
        self._layers, parts, start = layers if per_layer else [], list[Part](), 0
        for name, parameter in named:
            assert parameter.grad is not None
            section = layers.index(_layer(name)) if per_layer else 0
            share = parts_of(parameter.grad) / degree.shape[1]
            stop = start + local_of(parameter.grad).numel()
            if parts and parts[-1][2:] == (section, share):
                start = parts.pop().start
            parts.append(Part(start, stop, section, share))
            start = stop
        return parts

    def suspects(self) -> list[Suspect]:
        """Return the replicas that are suspected far more often than by chance; every replica knows the same."""
        if self._watch is None:
            return []
        groups, found = self._groups, []
        grid = groups.layout.grids[groups.place.pipeline_rank]
        for position, sections in self._watch.named().items():
            replica = self._order[position]
            rank = int(grid[replica, groups.place.shard])
            device = groups.layout.placed(rank).device
            # Of several layers the one that says it most often.
            most = max((self._watch.tallies[s][position] for s in sections), key=lambda tally: tally.num_steps)
            ratios = sorted(most.ratios)
            found.append(
                Suspect(
                    stage=groups.stage,
                    replica=replica,
                    rank=rank,
                    host=device.host,
                    device=device.index,
                    first_step=most.first_step,
                    last_step=most.last_step,
                    num_steps=most.num_steps,
                    watched_steps=most.watched_steps,
                    suspicion=ratios[len(ratios) // 2] if ratios else None,
                    num_not_finite=most.num_not_finite,
                    layers=tuple(self._layers[s] for s in sections) if self._layers else (),
                )
            )
        return found


def _layer(name: str) -> str:
    return name.partition(".")[0]


def _columns(module: nn.Module, names: Iterable[str], sizes: list[int]) -> dict[str, slice]:
    """Return where each layer's gradients are among all of them, one after another."""
    found, start = dict[str, slice](), 0
    for name, size in zip(names, sizes, strict=True):
        layer = _layer(name)
        found[layer] = slice(found[layer].start if layer in found else start, start + size)
        start += size
    return found
