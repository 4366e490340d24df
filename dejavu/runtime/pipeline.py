"""One rank's part of a training: its stages under the plan's schedule and parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dejavu.binding.binding import Placement
from dejavu.graphs.compiling import compile_layers
from dejavu.graphs.graph import DTYPES
from dejavu.init import Draw
from dejavu.plans.schedule import SCHEDULES
from dejavu.runtime.batches.held_out import evaluating
from dejavu.runtime.both_ways.schedule import BothWaysSchedule, half_of
from dejavu.runtime.gradients.held_out import HeldOutGradient
from dejavu.runtime.gradients.replicas import ReplicaGradients, ReplicaGroups
from dejavu.runtime.gradients.shared import SharedGradients, own_group
from dejavu.runtime.gradients.tied import TiedGradients, ends_of, without_copies
from dejavu.runtime.job.suspects import Suspect
from dejavu.runtime.layout import Seat, World
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process.gradients import are_finite
from dejavu.runtime.process.passes import naming_errors
from dejavu.runtime.process.state_files import StateFiles
from dejavu.runtime.replicas import clip_gradients, meshes, spread
from dejavu.runtime.shapes import boundaries
from dejavu.runtime.splits.classes import loss_of_own_classes
from dejavu.runtime.splits.sequence import SequencePart, context_meshes, sequence_part
from dejavu.runtime.splits.slices import SlicedSequence
from dejavu.runtime.stage import ListedSchedule, ReplicatedStage, StageGroups
from dejavu.runtime.training import Layers, Loss, build_layers
from dejavu.timing.clock import Clock
from dejavu.workload.models import LayerBuilder, layers_of, model_of, splits_loss
from dejavu.workload.models.ties import ties_of
from dejavu.workload.slices import slice_lengths


class Pipeline:
    """The executor of one rank. Every rank of the world makes one at the same time.

    Args:
        workload: of the whole training.

    Attributes:
        workload: of the own pipeline: of several, some examples of every batch.
        modules: the layers of each of the rank's stages, by stage.
        clock: when each pass ran.
        loss_scale: what the loss of the next step is multiplied by, and with it the gradients.
    """

    def __init__(self, draw: Draw, world: World, place: Placement, device: torch.device) -> None:
        number = world.number_of(place)
        layout, workload = world.layouts[number], world.workload_of(place)
        self.layout, self.place, self.world = layout, place, world
        plan, self.workload, self.device = layout.plan, workload, device
        self.configuration = plan.rank_configuration(place.pipeline_rank)
        cuts, builders, ties = boundaries(workload), layers_of(workload), ties_of(layers_of(workload))
        # Every rank of the world makes the groups of all pipelines, in one order.
        every = [(meshes(one, device), context_meshes(one, device), ends_of(ties, one)) for one in world.layouts]
        mesh, sharing = (found[place.pipeline_rank] for found in every[number][:2])
        self._own_pipeline = own_group(world, place)
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        replicas = mesh.get_group("replica") if mesh is not None and self.configuration.data_parallel > 1 else None
        shards = mesh.get_group("shard") if mesh is not None and self.configuration.tensor_parallel > 1 else None
        sequence = sequence_part(sharing, builders[-1])
        lengths = slice_lengths(workload)
        self._slices = SlicedSequence(lengths) if lengths else None
        self._losses_group = replicas
        self._replica_gradients: list[ReplicaGradients] = []
        self.modules: dict[int, Layers] = {}
        self.clock, stages = Clock(device, slices=max(1, len(lengths))), list[ReplicatedStage]()
        self.frees_gradients, self._used = self.configuration.shards_state, set[nn.Parameter]()
        holds_masters = self.frees_gradients and workload.optimizer.master_weights
        computes_in = DTYPES[workload.dtype] if holds_masters else None
        self._seats = world.seats(place)
        own = [(s, seat) for seat in self._seats for s in plan.ranks[seat.place.pipeline_rank]]
        for s, seat in own:
            span = plan.stages[s]
            module = build_layers(
                workload, draw, device, span.start, span.stop,
                recompute=self.configuration.recompute, offload=self.configuration.offload,
            )  # fmt: skip
            if mesh is not None:
                module.computes_in = computes_in
                spread(
                    module, builders[span.start : span.stop], self.configuration, mesh, plan, computes_in=computes_in
                )
            if workload.compile:
                compile_layers(module)
            # Microbatches of both of two copies are numbered through.
            module.first_example = layout.rows(place)[0] + (layout.first_example if layout.copy is None else 0)
            module.sequence = sequence or self._slices
            module.fixed = sum(not one.requires_grad for one in cuts[1:])
            module.in_parts = SCHEDULES[plan.schedule].splits_backward
            self.modules[s] = module
            groups = StageGroups(
                alone, self._combining(s, replicas, shards), shards, replicas if self.frees_gradients else None
            )
            stage = ReplicatedStage(
                module, s, *seat, (cuts[span.start], cuts[span.stop]), device, groups,
                shards_gradients=self.configuration.reduces_in_passes,
            )  # fmt: skip
            self.clock.watch(stage)
            stages.append(stage)
        self._stages = {stage.number: stage for stage in stages}
        self.loss_scale = 1.0
        weighted = self._weighted(self._loss_of_outputs(builders[-1], cuts[-1].shape[-1], mesh), sequence)
        kind = ListedSchedule if layout.copy is None else BothWaysSchedule
        self._schedule = kind(plan.schedule, stages, plan.num_microbatches, weighted)
        self._ties = ties
        layers = {name: layer for module in self.modules.values() for name, layer in module.named_children()}
        tied = TiedGradients(ties, layers, every[number][2], place, device)
        self._sum_tied = self.clock.watch_once(tied.sum_gradients) if ties else tied.sum_gradients
        self._sum_shared: Callable[[], object] = _nothing
        if world.is_shared:
            spans = ((plan.stages[s].start, module) for s, module in self.modules.items())
            held = {start + k: layer for start, module in spans for k, layer in enumerate(module)}
            shared = SharedGradients(world, held, device)
            self._sum_shared, self._losses_group = self.clock.watch_once(shared.sum), shared.of_last
        ends = 0, len(plan.stages) - 1
        self._first, self._last = (next((seat for seat in self._seats if seat.has(end)), None) for end in ends)

    def _weighted(self, loss: Loss, sequence: SequencePart | None) -> Loss:
        """Return what a replica's examples of a microbatch, or its part of them, add to the step's loss."""
        start, stop = self.layout.rows(self.place)
        part = (stop - start) / self.world.workload.batch_size  # of the step that this replica has of each microbatch
        by_position = sequence is not None and sequence.loss_by_position
        # Replicas that share examples have each a part of their loss, or all of them the same one.
        self._times_counted = 1 if sequence is None or by_position else sequence.count
        if sequence is not None and by_position:
            loss, part = sequence.loss_of_own(loss), part / sequence.count
        if self._slices is not None:
            loss = self._slices.part_of_loss(loss)

        def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            layers = next(iter(self.modules.values()))
            with naming_errors(f"the loss in step {layers.step + 1}", layers):
                # Of bfloat16 weights the losses are bfloat16, too: as one process does, they are added up in float32.
                return loss(output, target).float() * (part * self.loss_scale)

        return self.clock.watch_loss(weighted)

    def _loss_of_outputs(self, last: LayerBuilder, num_classes: int, mesh: DeviceMesh | None) -> Loss:
        """Return the model's loss of what the last layer puts out, which may be a device's own classes' scores."""
        loss, degree = model_of(self.workload).loss, self.configuration.tensor_parallel
        found = self.layout.plan.split_of(last.name, degree)
        are_parts = found.split_loss if found else splits_loss(last.tensor_parallel, num_classes, degree)
        return loss_of_own_classes(loss, mesh["shard"], num_classes) if are_parts and mesh is not None else loss

    def _combining(
        self, stage: int, replicas: dist.ProcessGroup | None, shards: dist.ProcessGroup | None
    ) -> ReplicaGradients | None:
        if replicas is None or self.world.is_shared:  # alone, or with all others who hold the layers elsewhere
            return None
        module, settings = self.modules[stage], self.workload.gradients
        if self.configuration.zero_level and not settings.gathers:  # torch's FSDP sums gradients
            return None
        groups = ReplicaGroups(stage, self.layout, self.place, replicas, shards, self.device)
        made = ReplicaGradients(module, settings, groups)
        module.besides = made if settings.gathers else None
        if settings.rule == "zeno":
            made.held_out = HeldOutGradient(self.workload, module, self.device, made.sharded)
        self._replica_gradients.append(made)
        return made

    def suspects(self) -> list[Suspect]:
        """Return the replicas of this rank's stages that are suspected, told by the first replica's first shard."""
        if self.place.replica or self.place.shard:
            return []
        return [suspect for one in self._replica_gradients for suspect in one.suspects()]

    @property
    def has_loss(self) -> bool:
        """Whether this rank is the one that reports the loss."""
        is_first = self.world.number_of(self.place) == 0 and self._last is self._seats[0]
        return is_first and self.place.replica == 0 and self.place.shard == 0

    @property
    def rows(self) -> np.ndarray:
        """This replica's examples of every microbatch, as places in the batch; none without the first or last stage."""
        start, stop = self.layout.rows(self.place) if self._first or self._last else (0, 0)
        runs = np.arange(self.world.workload.batch_size).reshape(self.workload.accumulate, -1)
        if len(self._seats) > 1:  # the examples of one copy, and the targets of the other
            return runs.ravel() if stop else runs[:0].ravel()
        first = self.layout.first_example
        own = runs[:, first : first + self.workload.run_size].reshape(-1, self.layout.microbatch_size)
        return own[:, start:stop].ravel()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer of the rank's weights, with its state where the plan keeps it."""
        away = self.configuration.offload
        return make_optimizer(
            self.workload.optimizer,
            self.parameters(),
            on_host=away.optimizer == "host" and away.parameters is None,
            files=StateFiles(Path(self.place.device.disk_folder)) if away.optimizer == "nvme" else None,
            fused=away.parameters is not None and self.device.type == "cuda",
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in self.modules.values():
            yield from module.parameters()

    def __call__(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Run the own `rows` of a batch forward and backward; return the mean loss on ranks with the last stage."""
        for module in self.modules.values():
            module.step = step
        if self._slices is not None:
            self._slices.forget()
        self.clock.begin_step()
        losses = self._schedule.train(
            self._runs(inputs, self._first), self._runs(targets, self._last), runs=self.workload.accumulate
        )
        self._sum_shared()
        self._sum_tied()
        self._complete_gradients()
        loss = self._whole(losses)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.clock.end_step()
        return loss

    def _complete_gradients(self) -> None:
        """Give zeros to a weight without a gradient in this step, where gradients that are kept would be zeros.

        They are of weights that had one before, and of all that have a master beside them.
        """
        for module in self.modules.values() if self.frees_gradients else ():
            for one in filter(lambda one: one.requires_grad, module.parameters()):
                if one.grad is not None:
                    self._used.add(one)
                elif one in self._used or module.computes_in is not None:
                    one.grad = torch.zeros_like(one)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Return the mean loss of a batch, forward only, on ranks that hold the last stage; after at least one step."""
        losses = list[torch.Tensor]()
        own = self._runs(self._own(inputs), self._first), self._runs(self._own(targets), self._last)
        with evaluating(list(self.modules.values())):
            for run in range(self.workload.accumulate):
                losses += self._schedule.evaluate(*(None if parts is None else parts[run] for parts in own))
        return self._whole(losses)

    def _runs(self, batch: torch.Tensor, seat: Seat | None) -> Sequence[torch.Tensor] | None:
        """Return each run's part of the own `rows` where there is such a stage; of two copies, that of its copy."""
        if seat is None:
            return None
        runs = batch.chunk(self.workload.accumulate)
        return runs if seat.layout.copy is None else [half_of(run, seat.layout.copy) for run in runs]

    def _whole(self, losses: list[torch.Tensor]) -> float | None:
        """Return the sum over microbatches and replicas, each its part of the mean, where the last stage is."""
        if self._last is None:
            return None
        own = torch.stack(losses).sum().detach() / self._times_counted
        mean = own.clone()
        if self._losses_group is not None:
            dist.all_reduce(mean, group=self._losses_group)
            if self.workload.gradients.gathers and not mean.isfinite():
                mean = self._of_finite(own, self._losses_group)
        return float(mean) / self.loss_scale

    def _of_finite(self, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the mean loss of those replicas whose loss is a number; a rule leaves out the others' gradients."""
        start, stop = self.layout.rows(self.place)
        share = torch.full_like(own, (stop - start) / self.layout.microbatch_size)
        both = torch.stack((own, share)) if own.isfinite() else torch.zeros(2).to(own)
        dist.all_reduce(both, group=group)
        return both[0] / both[1]

    def arrived_finite(self, stage: int) -> bool:
        """Return whether all gradients are finite that this rank's stage was sent in the last step."""
        return are_finite(self._stages[stage].received_gradients())

    def clip_gradients(self, most: float) -> None:
        first = [module for s, module in self.modules.items() if self._seats[0].has(s)]  # of two copies, one
        counted = [one for module in first for one in without_copies(module, self._ties)]
        own, devices = list(self.parameters()), self.configuration.num_devices
        clip_gradients(own, counted, devices, most, self.device, self._own_pipeline)

    def _own(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this replica's examples of every microbatch."""
        return batch[torch.from_numpy(self.rows)]


def _nothing() -> None:
    """Sum with nobody."""
