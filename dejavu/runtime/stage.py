"""One stage under torch's pipeline runtime, whose neighbours may have other numbers of replicas.

Torch's stages talk to one upstream and one downstream rank. Here a stage talks to every replica of its neighbours that
shares examples with it; forward and backward, autograd, buffers and the order of actions stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    FORWARD,
    REDUCE_GRAD,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)

from dejavu.binding.binding import Placement
from dejavu.foundation.registry import named
from dejavu.plans.schedule import SCHEDULES, torch_actions
from dejavu.runtime.gradients.replicas import ReplicaGradients
from dejavu.runtime.layout import Exchange, Layout
from dejavu.runtime.process.group import to_receive, to_send
from dejavu.runtime.replicas import split_by_sequence, sum_gradients
from dejavu.runtime.shapes import part_of
from dejavu.runtime.split_backward import backward_input
from dejavu.runtime.training import Layers


class StageGroups(NamedTuple):
    """The process groups of a stage on one rank.

    Attributes:
        alone: of this rank only; torch asks it for its size, messages use the world's group.
        replicas: makes one gradient of those of the ranks that hold the same weights; None: there are no others, or
            FSDP does it.
        shards: the ranks that share each layer; None: there are no others.
    """

    alone: dist.ProcessGroup
    replicas: ReplicaGradients | None = None
    shards: dist.ProcessGroup | None = None


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
        super().__init__(module, stage, len(plan.stages), device, arriving, leaving, group=groups.alone)
        self._arriving, self._leaving = arriving, leaving
        self.group = None
        self.group_rank, self.group_size = place.pipeline_rank, len(plan.ranks)
        self._layers, self.first_microbatch = module, 0
        self._replicas, self._shards_gradients = groups.replicas, shards_gradients
        self._shards = groups.shards
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

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._layers.microbatch = self.first_microbatch + fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if self.is_last and not torch.is_grad_enabled():
            self.fwd_cache.pop(fwd_chunk_id)  # no backward pass will take the logits: they are the largest output
        return output

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
            gradient = torch.zeros(self._arriving.shape, dtype=self._arriving.dtype, device=self.device)
        return _sends(gradient, self._to_before)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if backward_type == "input":
            if isinstance(self.submod, FSDPModule):  # ZeRO 1, as torch has it: reduced at the end of the step
                self.submod.set_is_last_backward(False)
                self.submod.set_reshard_after_backward(False)
                self.submod.set_requires_gradient_sync(False)
            ends, arriving, inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
            return backward_input(ends, arriving, inputs, self.submod.parameters())
        if not self._shards_gradients:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "rejected by preflight: FSDP reduces as soon as the input's gradient exists"
        names = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[name] for name in names)), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Make one gradient of the replicas'; torch's schedules call this when all of the stage's gradients exist."""
        # A rule compares whole gradients; sums over shards and over replicas may come in any order.
        are_compared = self._replicas is not None and self._replicas.gathers
        if are_compared:
            self._sum_over_shards()
        if self._replicas is not None:
            self._replicas.combine(self._layers.step)
        super().perform_reduce_grad(grad_scale_factor)
        if not are_compared:
            self._sum_over_shards()

    def _sum_over_shards(self) -> None:
        if self._by_sequence and self._shards is not None:
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


class ListedSchedule(_PipelineScheduleRuntime):
    """Torch's runtime executing torch's own action list of any schedule, also of schedules with one stage per rank.

    One runtime for all, so that what is simulated is what runs, messages overlap with computation under every schedule,
    and shapes are known beforehand. Gradients add up as they are: the loss of a microbatch is its part of the step's.
    A step may run the list several times; replicas' gradients are summed in the last run.
    """

    def __init__(
        self, name: str, stages: list[ReplicatedStage], num_microbatches: int, loss: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__(stages, num_microbatches, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]  # torch's has no types
        self._own = stages
        self._compute_order = torch_actions(named(SCHEDULES, name), self._num_stages, num_microbatches)
        self._prepare_schedule_with_comms({rank: list(listed) for rank, listed in self._compute_order.items()})

        self._training_order, self._forward_order = self.pipeline_order_with_comms, self._of_forwards()
        self._accumulating_order = {
            rank: [one for one in listed if one.computation_type is not REDUCE_GRAD]
            for rank, listed in self._training_order.items()
        }

    def _of_forwards(self) -> dict[int, list[Any]]:
        """Return the forward passes alone, in the schedule's own order, which therefore cannot block; with messages."""
        compute = {
            rank: _add_unshard_reshard([one for one in listed if one.computation_type is FORWARD])
            for rank, listed in self._compute_order.items()
        }
        return _add_send_recv(compute, lambda s: self.stage_index_to_group_rank[s], self._num_stages)

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
                stage.first_microbatch = run * self._n_microbatches
            is_last = run == runs - 1
            self.pipeline_order_with_comms = self._training_order if is_last else self._accumulating_order
            arguments = () if inputs is None else (inputs[run],)
            own: list[torch.Tensor] = []
            known: dict[str, Any] = {} if targets is None else {"target": targets[run], "losses": own}
            self.step(*arguments, return_outputs=False, **known)
            losses += own
        return losses

    def evaluate(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> list[torch.Tensor]:
        """Run the forward passes of a batch, without graph; return each microbatch's loss where the last stage is.

        The stages have to be set up by a step before.

        Args:
            inputs: where the first stage is, and `targets` where the last one is.
        """
        for stage in self._stages:
            stage.clear_runtime_states()
        arguments, options = self._split_inputs(() if inputs is None else (inputs,))
        losses: list[torch.Tensor] = []
        self.pipeline_order_with_comms = self._forward_order
        try:
            parts = None if targets is None else list(targets.chunk(self._n_microbatches))
            self._step_microbatches(arguments, options, parts, losses, return_outputs=False)
        finally:
            self.pipeline_order_with_comms = self._training_order
        for stage in self._stages:
            stage.clear_runtime_states()
        return losses

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        from torch.distributed.pipelining._utils import InferenceMode  # only torch's versions that call this have it

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC
