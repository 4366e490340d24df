"""Memory of one device: weights, gradients, optimizer state, activations in flight, messages and temporaries.

The one memory model of plans: sums over layers, so that searches can add them up, and an upper bound on a stage's need.
`configuration_memory` puts them together; what is above it are its terms. `python -m benchmarks.cost --memory` measures
how much too high it is, against the allocator of real ranks.

Shape suffixes: L = layers, L1 = L + 1 cut positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.gradients import adding_bytes, gathered_bytes, held_out_share
from dejavu.cost.kernels.experts import most_rows
from dejavu.cost.kernels.sequence import OwnTokens, attended_bytes, gathers_output, keys_and_values_bytes
from dejavu.cost.kernels.sharding import degree_of, gathers_scores, split_loss, trained_bytes, weight_bytes
from dejavu.graphs.graph import FoundSplit, Graph, Layer
from dejavu.graphs.liveness import ARRIVING, OUTPUT
from dejavu.graphs.split_loss import BEGINS, SplitLoss
from dejavu.plans import StageConfiguration
from dejavu.workload import OptimizerSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.slices import slice_lengths

Floats = NDArray[np.float64]
T = TypeVar("T", float, Floats)

TARGET_BYTES = 8  # int64
MASTER_RATIO = 2  # a float32 master's bytes for each of its bfloat16 weight's

# What torch's optimizers allocate while they step, in tensors as large as one weight. One weight after another on
# CPUs (torch/optim/adam.py, `_single_tensor_adam`: a root and its quotient; sgd.py: the gradient with weight decay),
# all weights at once on GPUs (`_multi_tensor_adam`).
ONE_BY_ONE_TENSORS = {"adamw": 2, "sgd": 1}
ALL_AT_ONCE_TENSORS = {"adamw": 1, "sgd": 1}

# Keys and values of all positions that are there at once while a layer runs that gathers them: as kept, as they arrive,
# their gradients, and these as they are sent.
GATHERED_TENSORS = 4
# Of a layer under ZeRO, by level, its gradients as they are copied to be reduced, and whole, where others are shards.
_REDUCED_TENSORS = (0, 1, 2, 2)
_GRADIENTS, _WEIGHTS = 2, 3  # the levels from which on these are sharded
FETCHED_TENSORS = 2  # of a layer whose weights come from the node's memory: these, and their gradients


@dataclass(frozen=True)
class ForEachByte:
    """What training holds for each byte of a weight, the weight itself left out.

    In bytes a parameter: float32 with AdamW 4 + 8 beside the weight's 4; bfloat16 2 + 4 beside its 2; bfloat16 with
    float32 masters 4 + 12 beside its 2, 18 in all, as Megatron-LM counts its mixed precision
    (`megatron/training/theoretical_memory_usage.py`).

    Attributes:
        gradient_bytes: one gradient.
        optimizer_bytes: the optimizer's moments, and the float32 master where there is one.
        update_bytes: one tensor of the type in which the optimizer works.
    """

    gradient_bytes: float
    optimizer_bytes: float
    update_bytes: float

    @classmethod
    def of(cls, optimizer: OptimizerSettings) -> ForEachByte:
        wide = MASTER_RATIO if optimizer.master_weights else 1
        moments = 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)
        return cls(wide, wide * (moments + int(optimizer.master_weights)), wide)


@dataclass(frozen=True)
class Shard:
    """What one of a stage's tensor-parallel devices holds of a layer.

    Of what a layer needs, the sharded products' inputs stay whole on each device, gathered or not. So do norms'
    inputs and what crosses the cuts, unless the devices split the sequence (Korthikanti et al., MLSys 2023, section
    4.2, where the products' inputs are split as well, and gathered again going backward).

    Attributes:
        degree: into how many parts this layer is sharded.
        by_sequence: the devices split the sequence outside the products.
        by_expert: of experts the device has some whole, and as many rows as their router may send there.
        found: how the layer is split, where that was found.
        context_parallel: into how many replicas that share examples split the sequence, through all layers.
        gathered_bytes: keys and values of all positions, which such a device keeps in place of its part.
        attended_bytes: what comes out of its causal attention, which it keeps twice: as two chunks, and whole.
        has_loss: such a device gathers the layer's output, and computes the loss of all.
        loss: what the device does for the loss of its own classes' scores, by direction; None: nothing such.
        has_all_scores: the scores of all classes are gathered, and the loss is computed by each device.
    """

    degree: int = 1
    by_sequence: bool = False
    by_expert: bool = False
    found: FoundSplit | None = None
    context_parallel: int = 1
    gathered_bytes: float = 0.0
    attended_bytes: float = 0.0
    has_loss: bool = False
    loss: Mapping[str, SplitLoss] | None = None
    has_all_scores: bool = False

    @classmethod
    def of(cls, layer: Layer, configuration: StageConfiguration, *, has_loss: bool = False) -> Shard:
        degree, parts = configuration.tensor_parallel, configuration.context_parallel
        own_degree = degree_of(layer, degree)
        tokens = OwnTokens(parts, has_loss)
        loss = {way: one for way in BEGINS if (one := split_loss(layer, way, degree, tokens)) is not None}
        return cls(
            own_degree,
            configuration.sequence_parallel,
            configuration.expert_parallel,
            layer.found_split(degree),
            parts,
            sum(keys_and_values_bytes(layer)) / own_degree if parts > 1 else 0.0,
            attended_bytes(layer) / own_degree / parts if parts > 1 else 0.0,
            has_loss and parts > 1,
            loss or None,
            gathers_scores(layer, degree),
        )

    def output_bytes(self, layer: Layer) -> float:
        """Return the device's part of the layer's output; of scores its own classes', if the loss takes them."""
        is_split = self.by_sequence and layer.tensor_parallel is not None and bool(layer.tensor_parallel.forward_sums)
        degree = self.found.degree if self.found else self.degree
        whole = layer.footprint.output_bytes / (degree if is_split or self.loss else 1)
        return whole / self.context_parallel + (whole if self.has_loss else 0.0)

    def more_bytes(self, direction: str) -> float:
        """Return what a split loss has at once, beyond a part of what the whole one has."""
        if not self.loss or direction not in self.loss or self.found:  # what was found has it in its share
            return 0.0
        return self.loss[direction].more_bytes(direction)

    def input_bytes(self, layer: Layer) -> float:
        """Return the device's part of the layer's input, where it is counted as whole on each shard."""
        return layer.footprint.input_bytes / self.context_parallel

    def part(self, layer: Layer, own_bytes: float) -> float:
        """Return the device's part of what the layer has allocated of its own; where the loss is, all of it."""
        return self._of_tokens(layer, own_bytes) / (1 if self.has_loss else self.context_parallel)

    def _of_tokens(self, layer: Layer, own_bytes: float) -> float:
        if self.found:
            return own_bytes * max(self.found.held_share, self.found.peak_share)
        if self.has_all_scores:  # what follows the gather, the loss, is on each: an upper bound
            return own_bytes
        whole = min(own_bytes, self._whole_bytes(layer))
        return whole + (own_bytes - whole) * self._part_of_rows(layer)

    def _part_of_rows(self, layer: Layer) -> float:
        """Return the most that the device gets of a layer's rows: where it holds whole experts, no equal part."""
        experts = layer.tensor_parallel.experts if layer.tensor_parallel else None
        return most_rows(experts, self.degree) if experts and self.by_expert else 1 / self.degree

    def _whole_bytes(self, layer: Layer) -> float:
        split = layer.tensor_parallel
        if split is None or self.degree == 1:
            return 0.0
        inputs = sum(split.backward_sums)  # each gets its gradient by a sum
        normalized = 0.0 if self.by_sequence else sum(split.forward_sums[:-1])  # the last sum is the output
        choices = split.experts.choices or 0 if split.experts else 0  # a token's results, before they are summed
        rows = choices * (1 if self.by_expert else 2)  # and what experts of which each has a part receive
        return (inputs + normalized + rows) * layer.output_bytes


ALONE = Shard()


def layer_activation_bytes(layer: Layer, *, recompute: bool = False, shard: Shard = ALONE) -> float:
    """Count what a layer adds to each microbatch in flight.

    Its own and its output, which the layer after it needs or the pipeline holds.
    """
    footprint = layer.recompute_footprint if recompute else layer.footprint
    output = 0.0 if footprint.passes_input else shard.output_bytes(layer)
    besides = 0.0 if recompute else shard.gathered_bytes + shard.attended_bytes
    return shard.part(layer, footprint.held_bytes) + output + besides


def kept_keys_bytes(layer: Layer, num_slices: int, configuration: StageConfiguration) -> float:
    """Count the keys and values that a layer keeps of a microbatch whose sequences come in equal slices.

    Each slice's own wait for the later ones; and each slice's attention has a copy of all until it, unless it is
    recomputed.
    """
    copies = 1.0 if configuration.recompute else (num_slices + 1) / 2
    return copies * sum(keys_and_values_bytes(layer)) / degree_of(layer, configuration.tensor_parallel)


def offloaded_bytes(layer: Layer, *, recompute: bool = False, shard: Shard = ALONE) -> float:
    """Count what a layer's forward pass moves to the host's memory and its backward pass back (`graphs.offload`)."""
    if recompute:
        return shard.part(layer, layer.recompute_footprint.held_bytes) + shard.input_bytes(layer)
    return shard.part(layer, layer.activation_bytes) + shard.gathered_bytes + shard.attended_bytes


def layer_temporary_bytes(
    layer: Layer,
    optimizer: OptimizerSettings,
    *,
    recompute: bool = False,
    offload: bool = False,
    fetched: bool = False,
    shard: Shard = ALONE,
) -> float:
    """Count what a stage needs while it runs this layer, besides what layers hold; the largest of them counts.

    Of a layer whose activations are offloaded all are there while it runs, and its input, which no layer holds. Of one
    whose weights are fetched they are, and its gradients: autograd passes them on when the layer has gone backward.
    """
    footprint = layer.recompute_footprint if recompute else layer.footprint
    largest = footprint.largest_parameter_bytes / shard.degree
    weight, output = shard.found.largest_parameter_bytes if shard.found else largest, shard.output_bytes(layer)
    in_step = not fetched and layer.trained_bytes > 0
    step = max(ONE_BY_ONE_TENSORS.values()) * ForEachByte.of(optimizer).update_bytes * weight * in_step
    forward = (shard.part(layer, moment.own_bytes) + output * (OUTPUT in moment.alive) for moment in footprint.forward)
    backward = (  # where the layer is the stage's last, the pipeline holds its output
        shard.part(layer, moment.own_bytes) + output * max(len(moment.alive & {OUTPUT, ARRIVING}), 1)
        for moment in footprint.backward
    )
    most = max(forward) + shard.more_bytes("forward")
    cast = cast_bytes(weight, optimizer) * in_step
    most = max(most, max(backward) + shard.more_bytes("backward") + cast)
    passes = most + GATHERED_TENSORS * shard.gathered_bytes + shard.attended_bytes
    passes += FETCHED_TENSORS * layer.parameter_bytes * fetched
    if offload:
        return max(passes + shard.input_bytes(layer), step)
    held = layer_activation_bytes(layer, recompute=recompute, shard=shard)
    return max(passes - held, step - held, 0.0)


def cast_bytes(weight_bytes: T, optimizer: OptimizerSettings) -> T:
    """Count the float32 copy of a weight's gradient, which is made to be added to the others'; none without masters."""
    return weight_bytes * (MASTER_RATIO if optimizer.master_weights else 0)


def step_bytes(parameter_bytes_L: Floats, optimizer: OptimizerSettings, device: DeviceType) -> Floats:
    """Count a layer's part of the optimizer's temporaries where it steps all weights at once, as on GPUs; else 0."""
    tensors = 0 if device.kind == "cpu" else ALL_AT_ONCE_TENSORS[optimizer.name]
    return tensors * ForEachByte.of(optimizer).update_bytes * parameter_bytes_L


def tied_bytes(layer: Layer, configuration: StageConfiguration, each_byte: ForEachByte) -> float:
    """Count the whole gradients of tied weights that their sum over both ends takes, beside the device's own part.

    The other end's, and its own where devices have parts of it (`runtime.gradients.tied`).
    """
    in_parts = configuration.tensor_parallel > 1 or configuration.zero_level > 0
    return (2 if in_parts else 1) * each_byte.gradient_bytes * layer.tied_bytes


def example_bytes(workload: Workload) -> int:
    """Count the inputs and targets of one step, which the training loop gives to the first stage and the last."""
    shape = dataset_of(workload).shape
    inputs = math.prod(shape.input_shape) * shape.input_dtype.itemsize
    return workload.batch_size * (inputs + math.prod(shape.target_shape) * TARGET_BYTES)


def message_bytes(cut_bytes: T, num_microbatches: int) -> T:
    """Count what a stage holds for messages across one of its cuts: a step's worth each way.

    Torch's stage makes its receiving buffers once, for all microbatches, and torch's runtime keeps everything that a
    step sends until the step's end (`_PipelineScheduleRuntime._step_microbatches`, `send_ops`).
    """
    return 2 * num_microbatches * cut_bytes


class HeldState(NamedTuple):
    """What a device holds for each byte of a weight.

    Attributes:
        parameters: as weights, from the beginning to the end of a step.
        gradients: of those that are trained, alike; and what masters in their shards' place take more than these.
        optimizer: what it has of these.
        reduced: of one layer's trained weights, besides, while their gradients are reduced.
        arriving: of one layer's weights, besides, while they are gathered.
    """

    parameters: float
    gradients: float
    optimizer: float
    reduced: float = 0.0
    arriving: float = 0.0

    @classmethod
    def of(cls, configuration: StageConfiguration, settings: OptimizerSettings) -> HeldState:
        """Count it as torch's FSDP2 holds it, where replicas shard.

        ZeRO levels 1, 2 and 3 shard optimizer state, gradients and weights (Rajbhandari et al., SC 2020, fig. 1). FSDP
        always has its shards: of the weights, or of their float32 masters, which take their place. Levels 1 and 2 have
        the gathered weights beside them, level 3 those of one layer, and the buffer in which they arrive. Gradients
        are copied to be reduced; from level 2 on they are whole in one layer at a time.
        """
        each = ForEachByte.of(settings)
        if not configuration.shards_state:
            return cls(1.0, each.gradient_bytes, each.optimizer_bytes)
        level, part = configuration.zero_level, 1 / configuration.data_parallel
        master = MASTER_RATIO if settings.master_weights else 0
        return cls(
            parameters=part + (level < _WEIGHTS),
            gradients=each.gradient_bytes * (part if level >= _GRADIENTS else 1) + max(master - 1, 0) * part,
            optimizer=(each.optimizer_bytes - master) * part,
            reduced=(_REDUCED_TENSORS[level] + part) * each.gradient_bytes,
            arriving=2.0 * (level >= _WEIGHTS),
        )


@dataclass(frozen=True, eq=False)
class ConfigurationMemory:
    """The memory fields of `AdditiveCosts`, for one configuration.

    Attributes:
        offloaded_bytes_L: what a layer keeps in the host's memory for one microbatch in flight of one device.
        state_away_bytes_L: of the optimizer, and of weights and gradients, what one device keeps elsewhere.
    """

    capacity_bytes: float
    fixed_bytes_L: Floats
    activation_bytes_L: Floats
    temporary_bytes_L: Floats
    message_bytes_L1: Floats
    step_bytes_L: Floats
    offloaded_bytes_L: Floats
    state_away_bytes_L: Floats


def configuration_memory(
    configuration: StageConfiguration,
    graph: Graph,
    workload: Workload,
    device: DeviceType,
    example_bytes: float,
) -> ConfigurationMemory:
    """Compute it for a graph captured at a replica's microbatch; `example_bytes`: a whole step's inputs and targets.

    What FSDP holds of one layer at a time is charged for the model's largest (`HeldState`). That and the replica's
    examples are held once per stage, so half is charged at each of its two cuts: also of stages between the first and
    the last, which have no examples. Weights in the node's memory are on the device, with their gradients, while their
    layer runs.
    """
    kinds, kind_L = graph.kinds
    last = kind_L[-1] if gathers_output(graph.layers[-1]) else -1
    shards = [Shard.of(layer, configuration, has_loss=k == last) for k, layer in enumerate(kinds)]
    weights_L = np.array([weight_bytes(layer, configuration.tensor_parallel) for layer in kinds])[kind_L]
    trained_L = np.array([trained_bytes(layer, configuration.tensor_parallel) for layer in kinds])[kind_L]
    buffers_L = np.array([float(layer.footprint.buffer_bytes) for layer in kinds])[kind_L]
    each_byte, away = ForEachByte.of(workload.optimizer), configuration.offload
    held = HeldState.of(configuration, workload.optimizer)
    gathered = float((held.reduced * trained_L + held.arriving * weights_L).max())
    if configuration.zero_level and workload.gradients.gathers:  # a layer's, as they arrive from all replicas
        gathered += each_byte.gradient_bytes * float(trained_L.max())
    messages_L1 = message_bytes(graph.cut_bytes_L1 / configuration.sequence_parts, workload.num_microbatches)

    def each(size: Callable[..., float]) -> Floats:
        pairs = zip(kinds, shards, strict=True)
        return np.array([size(layer, recompute=configuration.recompute, shard=shard) for layer, shard in pairs])[kind_L]

    held_L = each(layer_activation_bytes)
    if lengths := slice_lengths(workload):
        earlier_L = np.array([kept_keys_bytes(layer, len(lengths), configuration) for layer in kinds])[kind_L]
        held_L = held_L + earlier_L
    needs = partial(layer_temporary_bytes, optimizer=workload.optimizer, fetched=away.parameters is not None)
    temporary_L = each(needs)
    offloaded_L = np.zeros_like(held_L)
    if away.activations:  # the model's last layer keeps what it has, and its input, which no other holds
        offloaded_L[:-1] = each(offloaded_bytes)[:-1]
        temporary_L[:-1] = each(partial(needs, offload=True))[:-1]
        held_L[:-1] = 0.0
        held_L[-1] += shards[kind_L[-1]].input_bytes(graph.layers[-1])
    rule, gradient_L = workload.gradients, each_byte.gradient_bytes * trained_L
    compared_L = adding_bytes(rule, configuration, gradient_L)
    tied_L = np.array([tied_bytes(layer, configuration, each_byte) for layer in kinds])[kind_L]
    here_L = held.parameters * weights_L + held.gradients * trained_L
    there_L = np.zeros_like(here_L)
    if away.parameters:
        here_L, there_L = there_L, here_L
    return ConfigurationMemory(
        capacity_bytes=float(device.memory_bytes),
        fixed_bytes_L=here_L + (0.0 if away.optimizer else held.optimizer) * trained_L + buffers_L + compared_L,
        activation_bytes_L=held_L,
        temporary_bytes_L=temporary_L,
        message_bytes_L1=messages_L1 + (gathered + example_bytes / configuration.example_parts) / 2,
        # Gathered gradients, and those of both ends of a tied weight, are gone when the optimizer steps.
        step_bytes_L=np.maximum.reduce(
            (
                (0.0 if away.optimizer else 1.0)
                * step_bytes(trained_L, workload.optimizer, device)
                / (configuration.data_parallel if configuration.shards_state else 1),
                gathered_bytes(rule, configuration, gradient_L, on_cpu=device.kind == "cpu")
                - compared_L
                + held_out_share(rule, configuration) * held_L,
                tied_L,
            )
        ),
        offloaded_bytes_L=offloaded_L,
        state_away_bytes_L=there_L + (held.optimizer if away.optimizer else 0.0) * trained_L,
    )
