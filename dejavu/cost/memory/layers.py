"""The terms of a stage's memory that each of its layers adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.sequence import keys_and_values_bytes
from dejavu.cost.kernels.sharding import degree_of
from dejavu.cost.memory.shard import ALONE, Shard
from dejavu.graphs.graph import Layer
from dejavu.graphs.liveness import ARRIVING, OUTPUT
from dejavu.plans import StageConfiguration
from dejavu.workload import OptimizerSettings

Floats = NDArray[np.float64]
T = TypeVar("T", float, Floats)

MASTER_RATIO = 2  # a float32 master's bytes for each of its bfloat16 weight's
# What torch's optimizers allocate while they step, in tensors as large as one weight. One weight after another on
# CPUs (torch/optim/adam.py, `_single_tensor_adam`: a root and its quotient; sgd.py: the gradient with weight decay),
# all weights at once on GPUs (`_multi_tensor_adam`).
ONE_BY_ONE_TENSORS = {"adamw": 2, "sgd": 1}
ALL_AT_ONCE_TENSORS = {"adamw": 1, "sgd": 1}
# Keys and values of all positions that are there at once while a layer runs that gathers them: as kept, as they arrive,
# their gradients, and these as they are sent.
GATHERED_TENSORS = 4
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


def layer_activation_bytes(layer: Layer, *, recompute: bool = False, shard: Shard = ALONE) -> float:
    """Count what a layer adds to each microbatch in flight.

    Its own and its output, which the layer after it needs or the pipeline holds.
    """
    footprint = layer.recompute_footprint if recompute else layer.footprint
    output = 0.0 if footprint.passes_input else shard.output_bytes(layer)
    besides = 0.0 if recompute else shard.gathered_bytes + shard.attended_bytes
    return shard.part(layer, footprint.held_bytes) + output + besides


class InPartsBytes(NamedTuple):
    """What a layer adds to a stage whose backward passes run in two parts; as of `AdditiveCosts`."""

    retained: float
    waiting: float
    temporary: float


def in_parts_bytes(
    layer: Layer,
    optimizer: OptimizerSettings,
    *,
    recompute: bool = False,
    fetched: bool = False,
    shard: Shard = ALONE,
) -> InPartsBytes:
    """Count what a layer adds to a microbatch during the first part and between the parts, and needs besides in either.

    Between them are what the second reads, and the gradients that arrived where it begins.
    """
    footprint = layer.recompute_footprint if recompute else layer.footprint
    output = 0.0 if footprint.passes_input else shard.output_bytes(layer)
    besides = output + shard.gathered_bytes + shard.attended_bytes + shard.more_gradients_bytes(layer)
    retained, waiting, most = (shard.part(layer, own) for own in footprint.in_parts)
    passes = (
        max(most - retained, 0.0) + shard.more_bytes("backward") + FETCHED_TENSORS * layer.parameter_bytes * fetched
    )
    if not fetched and layer.trained_bytes > 0:
        weight = (
            shard.found.largest_parameter_bytes if shard.found else footprint.largest_parameter_bytes / shard.degree
        )
        passes += cast_bytes(weight, optimizer)
    return InPartsBytes(retained + besides, waiting + besides, passes)


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
    weight, output = _largest_weight_bytes(layer, shard), shard.output_bytes(layer)
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


def _largest_weight_bytes(layer: Layer, shard: Shard) -> float:
    return (
        shard.found.largest_parameter_bytes if shard.found else layer.footprint.largest_parameter_bytes / shard.degree
    )


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
