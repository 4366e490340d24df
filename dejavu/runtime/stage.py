"""One stage under torch's pipeline runtime, whose neighbours may have other numbers of replicas.

Torch's stages talk to one upstream and one downstream rank. Here a stage talks to every replica of its neighbours that
shares examples with it; forward and backward, autograd, buffers and the order of actions stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    FORWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)

from dejavu.binding.binding import Placement
from dejavu.foundation.registry import named
from dejavu.graphs.in_parts.split_backward import Groups, backward_input, backward_weight, node_of
from dejavu.plans.schedule import SCHEDULES, torch_actions
from dejavu.runtime.gradients.replicas import ReplicaGradients
from dejavu.runtime.gradients.sharded import ShardedWithGradients, add_up
from dejavu.runtime.layout import Exchange, Layout
from dejavu.runtime.process.group import backend_of, to_receive, to_send
from dejavu.runtime.process.passes import check_form, naming_errors
from dejavu.runtime.replicas import WithGradients, left_whole, split_by_sequence, sum_gradients
from dejavu.runtime.shapes import part_of
from dejavu.runtime.splits.slices import SlicedSequence
from dejavu.runtime.training import Layers


class StageGroups(NamedTuple):
    """The process groups of a stage on one rank.

    Attributes:
        alone: of this rank only; torch asks it for its size, messages use the world's group.
        replicas: makes one gradient of those of the ranks that hold the same weights; None: there are no others, or
            FSDP sums them.
        shards: the ranks that share each layer; None: there are no others.
        sharding: the ranks over which FSDP shards the weights; None: it does not.
    """

    alone: dist.ProcessGroup
    replicas: ReplicaGradients | None = None
    shards: dist.ProcessGroup | None = None
    sharding: dist.ProcessGroup | None = None


class ReplicatedStage(PipelineStage):
    """A stage of the plan on this rank, which processes some examples of every microbatch.

    Args:
        ends: one whole microbatch at the stage's two cuts (`boundaries`).
        shards_gradients: the gradients are reduced, and weights gathered, in every microbatch (ZeRO 2 and 3).
    """

    def __init__(
        self,
        module: Layers,
        stage: int,
        layout: Layout,
        place: Placement,
        ends: tuple[torch.Tensor, torch.Tensor],
        device: torch.device,
        groups: StageGroups,
        *,
        shards_gradients: bool = False,
    ) -> None:
        start, stop = layout.rows(place)
        plan, parts = layout.plan, layout.num_parts(place.pipeline_rank)
        # What goes into the model, and what comes out, is whole; inside, shards may have parts of the sequence.
        inner = (stage > 0, stage < len(plan.stages) - 1)
        arriving, leaving = (
            part_of(one, stop - start, parts if is_inner else 1) for one, is_inner in zip(ends, inner, strict=True)
        )
        self.slices = module.sequence if isinstance(module.sequence, SlicedSequence) else None
        if self.slices is not None:  # torch sets up all passes alike, as the first; see `_as_slices`
            arriving, leaving = (self.slices.cut([one])[0] for one in (arriving, leaving))
        self.number, self.copy, self._count = stage, layout.copy or 0, len(plan.stages)
        index, row = torch_index(stage, self.copy, self._count), self._count * (1 if layout.copy is None else 3)
        super().__init__(module, index, row, device, arriving, leaving, group=groups.alone)
        self._arriving, self._leaving = arriving, leaving
        self.group = None
        self.group_rank, self.group_size = place.pipeline_rank, len(plan.ranks)
        self._layers, self.first_microbatch, self.is_last_run = module, 0, True
        self._replicas, self._shards_gradients = groups.replicas, shards_gradients
        self._shards, self._sharding = groups.shards, groups.sharding
        self._left_whole = left_whole(module)
        self._whole_with = self._sharded_with = None
        if groups.sharding is not None:
            self._whole_with = WithGradients(self._left_whole, groups.sharding, device)
            self._sharded_with = ShardedWithGradients(
                module, groups.sharding, device, in_every_microbatch=shards_gradients
            )
        self._by_sequence = split_by_sequence(module, plan.rank_configuration(place.pipeline_rank))
        rank_of = {s: rank for rank, stages in enumerate(plan.ranks) for s in stages}
        before, after = rank_of.get(stage - 1), rank_of.get(stage + 1)
        lengths = [one.shape[1] if one.dim() > 1 else 1 for one in ends]
        self._from_before, self._to_before, self._from_after, self._to_after = (
            () if other is None else layout.exchanges(place, other, length, sends=sends)
            for other, length in ((before, lengths[0]), (after, lengths[1]))
            for sends in (False, True)
        )
        self._waiting: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self._count - 1

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        chunk = self.first_microbatch + fwd_chunk_id
        if self.slices is None:
            self._layers.microbatch = chunk
        else:
            self._layers.microbatch, self.slices.index = divmod(chunk, self.slices.count)
        with self._naming_errors("forward"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if not self.is_last:
            self._check_output(output, fwd_chunk_id)
        elif not torch.is_grad_enabled():
            self.fwd_cache.pop(fwd_chunk_id)  # no backward pass will take the logits: they are the largest output
        return output

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._naming_errors("backward"):
            return super().backward_one_chunk(*args, **options)

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._naming_errors("backward"):
            return super().backward_weight_one_chunk(*args, **options)

    def _naming_errors(self, direction: str) -> AbstractContextManager[None]:
        what = f"the {direction} pass of stage {self.number} in step {self._layers.step + 1}"
        return naming_errors(what, self._layers)

    def _check_output(self, output: Any, chunk: int) -> None:
        names = ", ".join(name for name, _ in self._layers.named_children())
        what = f"stage {self.number} (layers {names}) in step {self._layers.step + 1}"
        check_form(output, (self._shape_of(self._leaving, chunk), self._leaving.dtype), what)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._as_slices(self.args_recv_info, self._arriving)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._as_slices(self.grad_recv_info, self._leaving)

    def _as_slices(self, infos: dict[int, tuple[Any, ...]], end: torch.Tensor) -> None:
        """Give what arrives for each slice its own length."""
        pairs = ((chunk, info) for chunk, row in infos.items() for info in row)
        for chunk, info in pairs if self.slices is not None else ():
            if getattr(info, "buffer", None) is not None:
                info.buffer = info.buffer.new_empty(self._shape_of(end, chunk))

    def _shape_of(self, end: torch.Tensor, chunk: int) -> tuple[int, ...]:
        if self.slices is None:
            return tuple(end.shape)
        examples, _, *rest = end.shape
        return (examples, self.slices.lengths[chunk % self.slices.count], *rest)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Say nothing before the first step (asked for by torch < 2.13): messages use the group of all ranks."""
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receives(self.args_recv_info[fwd_chunk_id], self._from_before)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        (output,), _ = self.fwd_cache[fwd_chunk_id]
        return _sends(output, self._to_after)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self._leaving.requires_grad:
            return []
        return self._receives(self.grad_recv_info[bwd_chunk_id], self._from_after)

    def received_gradients(self) -> list[torch.Tensor]:
        """Return what the downstream stage has sent in the last step; a buffer for each microbatch stays."""
        infos = [info for chunk in self.grad_recv_info.values() for info in chunk]
        return [info.buffer.detach() for info in infos if getattr(info, "buffer", None) is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        if not self._arriving.requires_grad:  # nobody waits for it: the upstream layers have no weights
            return []
        if gradient is None:
            shape = self._shape_of(self._arriving, bwd_chunk_id)
            gradient = torch.zeros(shape, dtype=self._arriving.dtype, device=self.device)
        return _sends(gradient, self._to_before)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if backward_type != "full" and isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)  # ZeRO 1, as torch has it: reduced at the end of the step
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            ends, arriving, inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
            of_inputs, later = backward_input(ends, arriving, inputs, self.submod.parameters())
            add_up(self.submod)
            return of_inputs, later
        if self._replicas is not None and not self._replicas.gathers and last_backward and self.is_last_run:
            self._replicas.begin_last_pass()
            if backward_type == "weight":
                self._backward_weight(self._replicas, bwd_kwargs["param_groups"])
                return (), None
        if backward_type == "weight":
            backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"])
            add_up(self.submod)
            return (), None
        if not self._shards_gradients:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "rejected by preflight: FSDP reduces as soon as the input's gradient exists"
        names = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[name] for name in names)), None

    def _backward_weight(self, replicas: ReplicaGradients, groups: Groups) -> None:
        """Run the second part of the last backward pass group by group of weights, whose sums over replicas begin."""
        weights = {node_of(one): one for one in self.submod.parameters() if one.requires_grad}
        later = {node for group in groups for node in group["params"]}
        replicas.arrived(weight for node, weight in weights.items() if node not in later)
        for group in groups:
            own = [weights[node] for node in group["params"]]
            backward_weight(weights.values(), [group])
            replicas.arrived(own)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Begin to make one gradient of the replicas'.

        Torch's schedules call this when all of the stage's gradients exist; other stages of the rank may compute on.
        """
        if self._sharded_with is not None and not self._shards_gradients:
            self._sharded_with.agree()
        super().perform_reduce_grad(grad_scale_factor)  # FSDP's part, if it shards
        if self._replicas is not None:
            self._replicas.combine(self._layers.step, self._by_sequence)

    def finish_gradients(self) -> None:
        """Wait until the stage's gradients are the step's."""
        if self._replicas is not None:
            self._replicas.finish()
        if self._sharded_with is not None and self._shards_gradients:
            self._sharded_with.agree()
            self._sharded_with.forget_others()
        are_compared = self._replicas is not None and self._replicas.gathers  # sums over shards, else any order does
        if self._sharding is not None and self._whole_with is not None and not are_compared:
            self._whole_with.agree()
            sum_gradients(self._left_whole, self._sharding, self.device)
        if self._by_sequence and self._shards is not None and not are_compared:
            sum_gradients(self._by_sequence, self._shards, self.device)

    def _receives(self, infos: Sequence[Any], exchanges: Sequence[Exchange]) -> list[dist.P2POp]:
        (info,) = infos
        if getattr(info, "buffer", None) is None:  # the model's own input
            return []
        parts = [_part(info.buffer.detach(), part) for part in exchanges]
        # What is no run of memory (positions of several examples) arrives beside, and is copied when it is used; so
        # does what passes through the host's memory.
        arrivals = [to_receive(part) for part in parts]
        pairs = [(part, arrived) for part, arrived in zip(parts, arrivals, strict=True) if arrived is not part]
        if pairs:
            self._waiting[id(info)] = pairs
        return [dist.P2POp(dist.irecv, one, part.peer) for one, part in zip(arrivals, exchanges, strict=True)]

    def _put_in_place(self, infos: Sequence[Any]) -> None:
        for info in infos:
            for part, arrived in self._waiting.pop(id(info), ()):
                part.copy_(arrived)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._put_in_place(self.args_recv_info[fwd_chunk_id])
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._put_in_place(self.grad_recv_info[bwd_chunk_id])
        return super()._retrieve_recv_grads(bwd_chunk_id)


def _sends(tensor: torch.Tensor, exchanges: Sequence[Exchange]) -> list[dist.P2POp]:
    whole = tensor.detach()
    return [dist.P2POp(dist.isend, to_send(_part(whole, part)), part.peer) for part in exchanges]


def _part(tensor: torch.Tensor, part: Exchange) -> torch.Tensor:
    rows = tensor[part.start : part.stop]
    return rows if part.positions is None else rows[:, slice(*part.positions)]


def receives_first(listed: list[Any]) -> list[Any]:
    """Return a rank's actions with all receives at the begin of the step, in their order, which is the senders'.

    Torch posts a receive when its message is needed. Gloo sends nothing before its receive is posted: the sender, who
    computes its next pass by then, answers when gloo's thread gets a turn on its core, 2 to 7 ms later. A message whose
    receive was posted before is on its way before that pass.

    Not for NCCL, where a receive that waits holds up what its rank sends.
    """
    return sorted(listed, key=lambda action: action.computation_type not in (RECV_F, RECV_B))


def torch_index(stage: int, copy: int, num_stages: int) -> int:
    """Return torch's number of a stage: those of all copies are in one row, in which no copy's follow another's."""
    return stage + 2 * copy * num_stages


class ListedSchedule(_PipelineScheduleRuntime):
    """Torch's runtime executing torch's own action list of any schedule, also of schedules with one stage per rank.

    One runtime for all, so that what is simulated is what runs, messages overlap with computation under every schedule,
    and shapes are known beforehand. Gradients add up as they are: the loss of a microbatch is its part of the step's.
    A step may run the list several times; replicas' gradients are summed in the last run.

    Where sequences come in slices, each pass of the list is one of every slice, one after the other: torch's runtime
    takes a slice for a microbatch.
    """

    def __init__(
        self, name: str, stages: list[ReplicatedStage], num_microbatches: int, loss: Callable[..., torch.Tensor]
    ) -> None:
        self._own, self._num_parts, self._slices = stages, num_microbatches, stages[0].slices
        self._copies = len({stage.copy for stage in stages})
        count = 1 if self._slices is None else self._slices.count
        super().__init__(stages, num_microbatches * count, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]  # torch's has no types
        self._compute_order = self._listed(name, num_microbatches)
        self._prepare()
        when = receives_first if backend_of(stages[0].device) == "gloo" else list
        self._training_order, self._forward_order = (
            {rank: when(listed) for rank, listed in order.items()}
            for order in (self.pipeline_order_with_comms, self._of_forwards())
        )
        self._accumulating_order = {
            rank: [one for one in listed if one.computation_type is not REDUCE_GRAD]
            for rank, listed in self._training_order.items()
        }

    def _listed(self, name: str, num_microbatches: int) -> dict[int, list[Any]]:
        """Return each rank's passes."""
        count = 1 if self._slices is None else self._slices.count
        return torch_actions(named(SCHEDULES, name), self._num_stages, num_microbatches, count)

    def _prepare(self) -> None:
        """Set the order of passes and messages of a step, and where torch's stages are."""
        self._prepare_schedule_with_comms({rank: list(listed) for rank, listed in self._compute_order.items()})

    def _with_messages(self, compute: dict[int, list[Any]]) -> dict[int, list[Any]]:
        return _add_send_recv(compute, lambda s: self.stage_index_to_group_rank[s], self._num_stages)

    def _of_forwards(self) -> dict[int, list[Any]]:
        """Return the forward passes alone, in the schedule's own order, which therefore cannot block; with messages."""
        compute = {
            rank: _add_unshard_reshard([one for one in listed if one.computation_type is FORWARD])
            for rank, listed in self._compute_order.items()
        }
        return self._with_messages(compute)

    def train(
        self, inputs: Sequence[torch.Tensor] | None, targets: Sequence[torch.Tensor] | None, *, runs: int
    ) -> list[torch.Tensor]:
        """Run a step's passes; return each microbatch's loss where the last stage is.

        Args:
            inputs: of each run where the first stage is, and `targets` where the last one is.
        """
        losses: list[torch.Tensor] = []
        for run in range(runs):
            for stage in self._own:
                stage.first_microbatch = (run * self._copies + stage.copy) * self._n_microbatches
                stage.has_backward, stage.is_last_run = True, run == runs - 1
            is_last = run == runs - 1
            self.pipeline_order_with_comms = self._training_order if is_last else self._accumulating_order
            losses += self._passes(None if inputs is None else inputs[run], None if targets is None else targets[run])
        for stage in self._own:
            stage.finish_gradients()
        return losses

    def _passes(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> list[torch.Tensor]:
        """Run the list; return each microbatch's loss, or each of its slices', where the last stage is."""
        for stage in self._stages:
            stage.clear_runtime_states()
        arguments = None if inputs is None else [(part,) for part in self._parts(inputs)]
        losses: list[torch.Tensor] = []
        self._step_microbatches(
            arguments, None, None if targets is None else self._parts(targets), losses, return_outputs=False
        )
        return losses

    def _parts(self, batch: torch.Tensor) -> list[torch.Tensor]:
        parts = list(batch.chunk(self._num_parts))
        return parts if self._slices is None else self._slices.cut(parts)

    def evaluate(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> list[torch.Tensor]:
        """Run the forward passes of a batch, without graph; return each microbatch's loss where the last stage is.

        The stages have to be set up by a step before.

        Args:
            inputs: where the first stage is, and `targets` where the last one is.
        """
        self.pipeline_order_with_comms = self._forward_order
        try:
            losses = self._passes(inputs, targets)
        finally:
            self.pipeline_order_with_comms = self._training_order
        for stage in self._stages:
            stage.clear_runtime_states()
        return losses

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        from torch.distributed.pipelining._utils import InferenceMode  # only torch's versions that call this have it

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC
