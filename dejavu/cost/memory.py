"""What one device has to hold: weights, gradients, optimizer state, activations in flight, messages and temporaries.

The moments at which each layer holds most are known from capture (`dejavu.liveness`); here they are put together for a
stage, in the order in which a pipeline schedule runs its layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.data import dataset_of
from dejavu.graph import Layer
from dejavu.liveness import ARRIVING, INPUT, OUTPUT, Footprint, Moment
from dejavu.workload import OptimizerSettings, Workload

Floats = NDArray[np.float64]
T = TypeVar("T", float, Floats)

TARGET_BYTES = 8  # int64

# What torch's optimizers hold besides while they step, in tensors as large as one weight. One weight after another on
# CPUs (torch/optim/adam.py, `_single_tensor_adam`: a root and its quotient; sgd.py: the gradient with weight decay),
# all weights at once on GPUs (`_multi_tensor_adam`).
_ONE_BY_ONE_TENSORS = {"adamw": 2, "sgd": 1}
_ALL_AT_ONCE_TENSORS = {"adamw": 1, "sgd": 1}


def moments(optimizer: OptimizerSettings) -> int:
    """Tensors as large as the weights that the optimizer keeps."""
    return 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)


def fixed_bytes(parameter_bytes: float, optimizer: OptimizerSettings) -> float:
    """Weights, one gradient of the same size, and the optimizer's moments."""
    return parameter_bytes * (2 + moments(optimizer))


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


def stage_memory(
    layers: Sequence[Layer],
    *,
    microbatches_in_flight: int,
    num_microbatches: int,
    optimizer: OptimizerSettings,
    recompute: bool = False,
    zero_level: int = 0,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    is_first: bool = False,
    is_last: bool = False,
    example_bytes: float = 0.0,
    foreach: bool = False,
) -> StageMemory:
    """The peak of a stage of these layers, in a training's second step and later.

    Optimizer state, gradients and weights are sharded by ZeRO levels 1, 2 and 3 (Rajbhandari et al., SC 2020, fig. 1);
    of sharded gradients or weights one layer is whole at a time. Tensor parallelism divides weights and what layers
    hold, as with sequence parallelism (Korthikanti et al., MLSys 2023, eq. 4); tensors that cross cuts stay whole.

    Args:
        microbatches_in_flight: how many the schedule lets the stage hold (`Schedule.in_flight`).
        num_microbatches: of one step, on this replica.
        recompute: activation checkpointing of every layer.
        is_first, is_last: whether there is no stage before, or behind.
        example_bytes: a step's inputs and targets, which the training loop gives to every stage.
        foreach: the optimizer steps all weights at once, torch's default on GPUs.
    """
    footprints = [layer.recompute_footprint if recompute else layer.footprint for layer in layers]
    weights = [layer.parameter_bytes / tensor_parallel for layer in layers]
    chain = _Chain(tuple(footprints), tensor_parallel, gradients_arrive=not is_last)
    waiting = chain.waiting_bytes()
    activations = microbatches_in_flight * waiting
    messages = example_bytes
    if not is_first:
        messages += message_bytes(footprints[0].input_bytes, num_microbatches)
    if not is_last:
        messages += message_bytes(footprints[-1].output_bytes, num_microbatches)
        # The last output of the warm-up is one too many only while as many others are in flight behind it.
        if num_microbatches < 2 * microbatches_in_flight - 1 or microbatches_in_flight == 1:
            messages -= footprints[-1].output_bytes
    step = _optimizer_temporary_bytes(footprints, sum(weights), optimizer, tensor_parallel, foreach=foreach)
    step /= data_parallel if zero_level >= 1 else 1
    return StageMemory(
        parameter_bytes=_sharded(weights, data_parallel if zero_level >= 3 else 1)
        + sum(footprint.buffer_bytes for footprint in footprints),
        gradient_bytes=_sharded(weights, data_parallel if zero_level >= 2 else 1),
        optimizer_bytes=moments(optimizer) * sum(weights) / (data_parallel if zero_level >= 1 else 1),
        activation_bytes=activations,
        message_bytes=messages,
        temporary_bytes=max(chain.worst_bytes() - waiting, step - activations),
    )


def layer_activation_bytes(layer: Layer, *, recompute: bool = False, tensor_parallel: int = 1) -> float:
    """What a layer adds to each microbatch in flight, for plans that add layers up.

    Its own and its output, which the layer behind it needs or the pipeline holds. Never less than in `stage_memory`.
    """
    footprint = layer.recompute_footprint if recompute else layer.footprint
    return footprint.held_bytes / tensor_parallel + (0 if footprint.passes_input else footprint.output_bytes)


def layer_temporary_bytes(layer: Layer, *, recompute: bool = False, tensor_parallel: int = 1) -> float:
    """What a stage needs while it works on this layer, beside what its layers hold; the largest of them counts."""
    footprint = layer.recompute_footprint if recompute else layer.footprint
    step = max(_ONE_BY_ONE_TENSORS.values()) * footprint.largest_parameter_bytes / tensor_parallel
    forward = (
        moment.own_bytes / tensor_parallel + footprint.output_bytes * (OUTPUT in moment.alive)
        for moment in footprint.forward
    )
    backward = (  # where the layer is the stage's last, the pipeline holds its output
        moment.own_bytes / tensor_parallel + footprint.output_bytes * max(len(moment.alive & {OUTPUT, ARRIVING}), 1)
        for moment in footprint.backward
    )
    held = layer_activation_bytes(layer, recompute=recompute, tensor_parallel=tensor_parallel)
    return max(max(*forward, *backward, step) - held, 0.0)


def step_bytes(parameter_bytes_L: Floats, optimizer: OptimizerSettings, device: DeviceType) -> Floats:
    """A layer's part of what the optimizer needs while it steps all weights at once, as on GPUs; elsewhere nothing."""
    tensors = 0 if device.kind == "cpu" else _ALL_AT_ONCE_TENSORS[optimizer.name]
    return tensors * parameter_bytes_L


def example_bytes(workload: Workload) -> int:
    """Inputs and targets of one step, which the training loop gives to every stage."""
    shape = dataset_of(workload).shape
    inputs = math.prod(shape.input_shape) * shape.input_dtype.itemsize
    return workload.batch_size * (inputs + math.prod(shape.target_shape) * TARGET_BYTES)


def message_bytes(cut_bytes: T, num_microbatches: int) -> T:
    """What a stage holds for messages across one of its cuts: a buffer for each that a step brings, and one being sent.

    Torch's stage makes its receiving buffers once, for all microbatches. Of what it sends, it holds the gradient of the
    microbatch before, and the last output of the warm-up to the step's end.
    """
    return (num_microbatches + 1) * cut_bytes


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
    if foreach:
        return _ALL_AT_ONCE_TENSORS[optimizer.name] * weights
    largest = max(footprint.largest_parameter_bytes for footprint in footprints) / tensor_parallel
    return _ONE_BY_ONE_TENSORS[optimizer.name] * largest


@dataclass(frozen=True)
class _Chain:
    """One microbatch through the layers of a stage. Cut k lies before layer k, the last cut behind all.

    Attributes:
        gradients_arrive: the gradient of the output comes as a message, which is not counted here; otherwise the last
            layer makes it from the loss.
    """

    footprints: tuple[Footprint, ...]
    tensor_parallel: int
    gradients_arrive: bool

    def waiting_bytes(self) -> float:
        """What it holds between its forward and its backward, the stage's input left out."""
        return self._own_bytes(len(self.footprints)) + self._cut_bytes(self._needed(len(self.footprints)))

    def worst_bytes(self) -> float:
        """The most that it has alive at once, forward or backward, the stage's input left out."""
        worst = 0.0
        for k, footprint in enumerate(self.footprints):
            before, needed, behind = self._own_bytes(k), self._needed(k), self._storage(len(self.footprints))
            for moment in footprint.forward:  # the layer's caller keeps its input, whatever the layer does
                alive = self._cut_bytes(needed | self._storages(k, moment) | {self._storage(k)})
                worst = max(worst, before + alive + moment.own_bytes / self.tensor_parallel)
            for moment in footprint.backward:  # the pipeline keeps the stage's output until the backward's end
                alive = self._cut_bytes(needed | self._storages(k, moment) | {behind})
                alive += self._gradient_bytes(k, moment)
                worst = max(worst, before + alive + moment.own_bytes / self.tensor_parallel)
        return worst

    def _own_bytes(self, count: int) -> float:
        return sum(footprint.held_bytes for footprint in self.footprints[:count]) / self.tensor_parallel

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
        return float(sum(self.footprints[cut - 1].output_bytes for cut in cuts if cut > 0))

    def _gradient_bytes(self, layer: int, moment: Moment) -> float:
        if ARRIVING not in moment.alive or (layer == len(self.footprints) - 1 and self.gradients_arrive):
            return 0.0
        return float(self.footprints[layer].output_bytes)
