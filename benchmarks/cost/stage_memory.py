"""The peak of a stage moment by moment, as its layers run one after another: the referee of what plans add up.

Closer to the allocator than plans' sums (`dejavu.cost.memory`), which never say less. No search uses it: it is no sum
over layers. The moments at which each layer holds most are known from capture (`dejavu.graphs.liveness`); here they
are put together for a stage, in the order in which a pipeline schedule runs its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dejavu.cost.memory.layers import ALL_AT_ONCE_TENSORS, ONE_BY_ONE_TENSORS, ForEachByte, cast_bytes
from dejavu.cost.memory.shard import Shard
from dejavu.graphs.graph import Layer
from dejavu.graphs.liveness import ARRIVING, INPUT, OUTPUT, Footprint, Moment
from dejavu.plans import StageConfiguration
from dejavu.workload import OptimizerSettings


@dataclass(frozen=True)
class StageMemory:
    """The peak of one device of a stage, part by part.

    Attributes:
        parameter_bytes: weights and the modules' other tensors.
        activation_bytes: what the microbatches in flight hold between forward and backward.
        message_bytes: what is received, what is being sent, and the step's examples.
        temporary_bytes: what the worst moment needs besides.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    message_bytes: float
    temporary_bytes: float

    @property
    def peak_bytes(self) -> float:
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.message_bytes
            + self.temporary_bytes
        )


@dataclass(frozen=True)
class StagePlace:
    """Where a stage is in the pipeline, and what passes there in a step.

    Attributes:
        microbatches_in_flight: how many the schedule lets the stage hold (`Schedule.in_flight`).
        num_microbatches: of one step, on this replica.
        is_first, is_last: whether there is no stage before, or after.
        example_bytes: a step's inputs and targets, which the training loop gives to the first stage and the last.
    """

    microbatches_in_flight: int
    num_microbatches: int
    is_first: bool = False
    is_last: bool = False
    example_bytes: float = 0.0


def stage_memory(
    layers: Sequence[Layer],
    configuration: StageConfiguration,
    place: StagePlace,
    optimizer: OptimizerSettings,
    *,
    foreach: bool = False,
) -> StageMemory:
    """The peak of a stage of these layers, in a training's second step and later.

    Optimizer state, gradients and weights are sharded by ZeRO levels 1, 2 and 3 (Rajbhandari et al., SC 2020, fig. 1);
    of sharded gradients or weights one layer is whole at a time. Tensor parallelism divides weights and what layers
    hold, but for what stays whole on each device (`cost.memory.Shard`).

    Args:
        layers: captured at a replica's microbatch.
        foreach: the optimizer steps all weights at once, torch's default on GPUs.
    """
    tensor_parallel, in_flight = configuration.tensor_parallel, place.microbatches_in_flight
    shards = [configuration.data_parallel if configuration.zero_level >= level else 1 for level in range(4)]
    footprints = [layer.recompute_footprint if configuration.recompute else layer.footprint for layer in layers]
    parts = [Shard.of(layer, configuration) for layer in layers]
    own = [partial(shard.part, layer) for shard, layer in zip(parts, layers, strict=True)]
    outputs = [shard.output_bytes(layer) for shard, layer in zip(parts, layers, strict=True)]
    weights = [layer.parameter_bytes / tensor_parallel for layer in layers]
    trained = [layer.trained_bytes / tensor_parallel for layer in layers]
    each = ForEachByte.of(optimizer)
    chain = _Chain(
        tuple(footprints), tuple(own), tuple(outputs), tensor_parallel, optimizer, gradients_arrive=not place.is_last
    )
    waiting = chain.waiting_bytes()
    cuts = 0.0 if place.is_first else footprints[0].input_bytes
    cuts += 0 if place.is_last else footprints[-1].output_bytes
    cuts /= configuration.sequence_parts
    received = place.num_microbatches * cuts  # torch's buffers, made once
    # What was sent is held to the step's end. Of microbatches in flight the output is among their activations, and the
    # gradient not there yet; as they get fewer, sent gradients take their place.
    sent = (place.num_microbatches - in_flight) * cuts
    sent = max(sent, (place.num_microbatches - 1) * cuts - (in_flight - 1) * waiting)
    activations = in_flight * waiting
    steps = [one for one, layer in zip(footprints, layers, strict=True) if layer.trained_bytes]
    step = _optimizer_temporary_bytes(steps, sum(trained), optimizer, tensor_parallel, foreach=foreach)
    step /= shards[1]
    return StageMemory(
        parameter_bytes=_sharded(weights, shards[3]) + sum(footprint.buffer_bytes for footprint in footprints),
        gradient_bytes=each.gradient_bytes * _sharded(trained, shards[2]),
        optimizer_bytes=each.optimizer_bytes * sum(trained) / shards[1],
        activation_bytes=activations,
        message_bytes=(place.example_bytes if place.is_first or place.is_last else 0.0) + received + sent,
        temporary_bytes=max(chain.worst_bytes() - waiting, step - activations - sent),
    )


def fixed_bytes(parameter_bytes: float, optimizer: OptimizerSettings) -> float:
    """Add up the weights, one gradient of each, and what the optimizer keeps."""
    each = ForEachByte.of(optimizer)
    return parameter_bytes * (1 + each.gradient_bytes + each.optimizer_bytes)


def _sharded(weights: Sequence[float], shards: int) -> float:
    """Bytes of tensors cut into shards; of the largest layer the missing parts are gathered, one layer at a time."""
    return sum(weights) / shards + (1 - 1 / shards) * max(weights)


def _optimizer_temporary_bytes(
    footprints: Sequence[Footprint],
    weights: float,
    optimizer: OptimizerSettings,
    tensor_parallel: int,
    *,
    foreach: bool,
) -> float:
    update = ForEachByte.of(optimizer).update_bytes
    if foreach:
        return ALL_AT_ONCE_TENSORS[optimizer.name] * update * weights
    largest = max((footprint.largest_parameter_bytes for footprint in footprints), default=0) / tensor_parallel
    return ONE_BY_ONE_TENSORS[optimizer.name] * update * largest


@dataclass(frozen=True)
class _Chain:
    """One microbatch through the layers of a stage. Cut k lies before layer k, the last cut after all.

    Attributes:
        own: of each layer, the device's part of what it allocates.
        output_bytes: of each layer, the device's part of its output.
        gradients_arrive: the gradient of the output comes as a message, which is not counted here; otherwise the last
            layer makes it from the loss.
    """

    footprints: tuple[Footprint, ...]
    own: tuple[Callable[[float], float], ...]
    output_bytes: tuple[float, ...]
    tensor_parallel: int
    optimizer: OptimizerSettings
    gradients_arrive: bool

    def waiting_bytes(self) -> float:
        """What it holds between its forward and its backward, the stage's input left out."""
        return self._own_bytes(len(self.footprints)) + self._cut_bytes(self._needed(len(self.footprints)))

    def worst_bytes(self) -> float:
        """The most that it has alive at once, forward or backward, the stage's input left out."""
        worst = 0.0
        for k, footprint in enumerate(self.footprints):
            before, needed, output = self._own_bytes(k), self._needed(k), self._storage(len(self.footprints))
            for moment in footprint.forward:  # the layer's caller keeps its input, whatever the layer does
                alive = self._cut_bytes(needed | self._storages(k, moment) | {self._storage(k)})
                worst = max(worst, before + alive + self.own[k](moment.own_bytes))
            for moment in footprint.backward:  # the pipeline keeps the stage's output until the backward's end
                alive = self._cut_bytes(needed | self._storages(k, moment) | {output})
                alive += self._gradient_bytes(k, moment)
                alive += cast_bytes(footprint.largest_parameter_bytes / self.tensor_parallel, self.optimizer)
                worst = max(worst, before + alive + self.own[k](moment.own_bytes))
        return worst

    def _own_bytes(self, count: int) -> float:
        return sum(own(one.held_bytes) for own, one in zip(self.own[:count], self.footprints[:count], strict=True))

    def _storage(self, cut: int) -> int:
        """The first cut whose tensor's memory this is: a layer may pass its input on."""
        while cut > 0 and self.footprints[cut - 1].passes_input:
            cut -= 1
        return cut

    def _needed(self, count: int) -> frozenset[int]:
        """The cuts whose tensors the first `count` layers hold for their backward; the pipeline holds the last."""
        layers = range(count)
        held = {self._storage(k) for k in layers if self.footprints[k].holds_input}
        held |= {self._storage(k + 1) for k in layers if self.footprints[k].holds_output}
        return frozenset(held | {self._storage(count)} if count == len(self.footprints) else held)

    def _storages(self, layer: int, moment: Moment) -> frozenset[int]:
        cuts = {INPUT: layer, OUTPUT: layer + 1}
        return frozenset(self._storage(cut) for name, cut in cuts.items() if name in moment.alive)

    def _cut_bytes(self, cuts: frozenset[int]) -> float:
        return sum(self.output_bytes[cut - 1] for cut in cuts if cut > 0)

    def _gradient_bytes(self, layer: int, moment: Moment) -> float:
        if ARRIVING not in moment.alive or (layer == len(self.footprints) - 1 and self.gradients_arrive):
            return 0.0
        return self.output_bytes[layer]
