"""One gradient of those of a stage's replicas: by an all-reduce, or by a rule of all gradients, whole or in shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dejavu.binding.binding import Placement
from dejavu.runtime.gradients.faults import FaultyGradients
from dejavu.runtime.gradients.overlapped import OverlappedSum
from dejavu.runtime.gradients.remembered import Remembered
from dejavu.runtime.gradients.rules import Part, combine, rule_of
from dejavu.runtime.gradients.sharded import ShardedGradients
from dejavu.runtime.gradients.watching import Watch
from dejavu.runtime.job.suspects import Suspect
from dejavu.runtime.layout import Layout
from dejavu.runtime.replicas import WithGradients, parts_of, sum_gradients
from dejavu.runtime.state import State, belongs, local_of
from dejavu.workload import GradientSettings

HeldOut = Callable[[int], torch.Tensor]
Named = Sequence[tuple[str, nn.Parameter]]


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
    all and computes the same, so replicas keep equal weights. Where replicas shard (ZeRO), each has all gradients of
    its shard, and what rules measure is summed over the ranks.

    Attributes:
        held_out: (step) → the gradient of held-out examples, which `zeno` compares with.
        sharded: None: each replica has whole gradients.
    """

    def __init__(self, module: nn.Module, settings: GradientSettings, groups: ReplicaGroups) -> None:
        self._module, self._groups, self._settings = module, groups, settings
        self._rule = rule_of(settings)
        self.held_out: HeldOut | None = None
        self.sharded = ShardedGradients(module, groups.replicas) if isinstance(module, FSDPModule) else None
        layout, place = groups.layout, groups.place
        grid = layout.grids[place.pipeline_rank]
        replica_of = {int(rank): replica for replica, row in enumerate(grid) for rank in row}
        # The group's order is of the world's ranks, which need not be that of the replicas.
        self._order = [replica_of[rank] for rank in dist.get_process_group_ranks(groups.replicas)]
        rows = [layout.rows(layout.placed(int(grid[n, place.shard]))) for n in range(len(grid))]
        self._share_N = torch.tensor([(stop - start) / layout.microbatch_size for start, stop in rows])
        self._faults = FaultyGradients.of_rank(dist.get_rank())
        # In a drill of shards all replicas take part.
        self._are_faulty = any(map(FaultyGradients.of_rank, dist.get_process_group_ranks(groups.replicas)))
        self._trust_SN = torch.zeros(0)
        self._watch: Watch | None = None
        self._sections: list[tuple[str, ...]] = []  # their layers
        named = [layout.placed(int(grid[n, 0])).device for n in self._order]
        self._memory = Remembered(settings, [f"{device.host}:{device.index}" for device in named])
        self._recalled: State = {}
        self._sum = None if self.gathers else OverlappedSum(module, groups.replicas, groups.device)
        self._with_gradients = WithGradients(module.parameters(), groups.replicas, groups.device)

    @property
    def gathers(self) -> bool:
        """Whether the replicas' gradients are gathered; else they are summed as they are."""
        return self._settings.gathers

    def begin_last_pass(self) -> None:
        """Let sums begin while the step's last backward pass computes, where gradients are summed as they are."""
        if self._sum is not None and not self._faults:
            self._sum.begin()

    def arrived(self, weights: Iterable[nn.Parameter]) -> None:
        """Take note of weights whose gradients of the last pass are complete, where autograd does not say so itself."""
        if self._sum is not None:
            for weight in weights:
                self._sum.arrived(weight)

    def combine(self, step: int, by_sequence: Sequence[nn.Parameter] = ()) -> None:
        """Begin to replace this rank's gradients by one of all replicas; every replica calls it together.

        Args:
            by_sequence: weights of which each of the stage's shards has the gradient of its positions alone; a rule
                compares the sums over them, which others make of what is combined.
        """
        if self._sum is not None:
            if self._faults:
                self._combine_whole(step)
            self._sum.send_rest()
        elif self.sharded is not None:
            self._combine_shards(step, self.sharded, by_sequence)
        else:
            self._with_gradients.agree()
            if by_sequence and self._groups.shards is not None:
                sum_gradients(by_sequence, self._groups.shards, self._groups.device)
            self._combine_whole(step)

    def finish(self) -> None:
        """Wait until the gradients are replaced."""
        if self._sum is not None:
            self._sum.wait()

    def _combine_whole(self, step: int) -> None:
        named = [(name, p) for name, p in self._module.named_parameters() if p.grad is not None]
        if not named:
            return
        gradients = [local_of(p.grad) for _, p in named if p.grad is not None]
        sizes = [gradient.numel() for gradient in gradients]
        found_P = self._spoiled(step, torch.cat([gradient.flatten() for gradient in gradients]), named, sizes)
        if self.gathers:
            gathered_NP = found_P.new_empty(len(self._order), found_P.numel())
            dist.all_gather_single(gathered_NP.view(-1), found_P, group=self._groups.replicas)
            found_P = self._by_rule(step, gathered_NP, named, list(itertools.accumulate(sizes)))
        for gradient, part in zip(gradients, found_P.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _combine_shards(self, step: int, sharded: ShardedGradients, by_sequence: Sequence[nn.Parameter]) -> None:
        rows_NS, places = sharded.take(), sharded.places()
        if rows_NS is None:
            return
        named, summed = [(place.name, place.weight) for place in places], set(by_sequence)
        for place in places if self._groups.shards is not None else ():
            if place.weight in summed:
                columns = rows_NS[:, place.columns].contiguous()
                dist.all_reduce(columns, group=self._groups.shards)
                rows_NS[:, place.columns] = columns
        if self._are_faulty:
            order = {name: k for k, (name, _) in enumerate(self._module.named_parameters())}
            in_order = sorted(places, key=lambda place: order[place.name])
            about = [(place.name, place.weight) for place in in_order], [place.numel for place in in_order]
            sharded.spoil(rows_NS, lambda own_P: self._spoiled(step, own_P, *about))
        stops = [place.columns.stop for place in places[:-1]]  # what is between and after them are zeros
        found_S = self._by_rule(step, rows_NS, named, [*stops, sharded.width])
        for place in places:
            assert place.weight.grad is not None
            own = local_of(place.weight.grad)
            own.copy_(found_S[place.columns][: own.numel()].view_as(own))

    def _spoiled(self, step: int, own_P: torch.Tensor, named: Named, sizes: list[int]) -> torch.Tensor:
        """Return the gradient as a drill has it; usually as it is."""
        columns_of = _columns((name for name, _ in named), sizes)
        for fault in self._faults:
            own_P = fault.spoil(step, own_P, columns_of)
        return own_P

    def _by_rule(self, step: int, gathered_NP: torch.Tensor, named: Named, stops: list[int]) -> torch.Tensor:
        """Combine the replicas' gradients, which are in the group's order.

        Args:
            stops: of each weight's columns.
        """
        parts = self._parts(named, stops)
        # All ranks compute with the rows in the order of the group: the same numbers in the same order.
        gathered_NP /= self._share_N[self._order].to(gathered_NP)[:, None]
        if self._watch is None:
            self._watch = self._begin(gathered_NP.device)
        held_out_P = None if self.held_out is None else self.held_out(step)
        found = combine(self._rule, gathered_NP, parts, self._trust_SN, add_up=self._over_parts, held_out_P=held_out_P)
        self._trust_SN = found.trust_SN
        self._watch.look(step, found.suspicion_SN)
        return found.gradient_P

    def _begin(self, device: torch.device) -> Watch:
        """Begin to judge: with what a checkpoint knows of these replicas, else with equal trust."""
        count = len(self._order)
        watch = Watch(len(self._sections), count, self._settings.num_suspected)
        self._trust_SN = torch.full((len(self._sections), count), 1 / count, dtype=torch.float64, device=device)
        for section, layers in enumerate(self._sections):
            if known := self._memory.of_state(self._recalled, layers):
                self._trust_SN[section], watch.tallies[section] = known[0].to(device), known[1]
        self._recalled = {}
        return watch

    def remembered(self) -> State:
        """Return trust and tallies for a checkpoint."""
        if self._watch is None:
            return dict(self._recalled)
        state: State = {}
        for layers, trust_N, tallies in zip(self._sections, self._trust_SN, self._watch.tallies, strict=True):
            state |= self._memory.to_state(layers, trust_N, tallies)
        return state

    def recall(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on in the next step with what a checkpoint has of these replicas."""
        own = {layer for layer, _ in self._module.named_children()}
        self._recalled = {
            name: one for name, one in state.items() if name.startswith("gradients.") and belongs(name, own)
        }
        self._watch = None

    def _over_parts(self, measured: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that have other parts of the same gradients."""
        if self.sharded is not None:
            dist.all_reduce(measured, group=self._groups.replicas)
        if self._groups.shards is not None:
            dist.all_reduce(measured, group=self._groups.shards)
        return measured

    def _parts(self, named: Named, stops: list[int]) -> list[Part]:
        """Return the runs of columns that count alike: of a section, and held by as many of the ranks that add up."""
        per_layer, grid = self._settings.per == "layer", self._groups.layout.grids[self._groups.place.pipeline_rank]
        layers = list(dict.fromkeys(_layer(name) for name, _ in named))
        self._sections = [(layer,) for layer in layers] if per_layer else [tuple(layers)]
        parts, start = list[Part](), 0
        holders = grid.shape[1] if self.sharded is None else grid.size
        for (name, parameter), stop in zip(named, stops, strict=True):
            assert parameter.grad is not None
            section = layers.index(_layer(name)) if per_layer else 0
            share = parts_of(parameter.grad) / holders
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
                    layers=tuple(self._sections[s][0] for s in sections) if self._settings.per == "layer" else (),
                )
            )
        return found


def _layer(name: str) -> str:
    return name.partition(".")[0]


def _columns(names: Iterable[str], sizes: list[int]) -> dict[str, slice]:
    """Return where each layer's gradients are among all of them, one after another."""
    found, start = dict[str, slice](), 0
    for name, size in zip(names, sizes, strict=True):
        layer = _layer(name)
        found[layer] = slice(found[layer].start if layer in found else start, start + size)
        start += size
    return found
