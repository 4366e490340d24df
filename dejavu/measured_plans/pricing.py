"""Price a measured plan: by the searches' formula, and by simulating 1F1B with messages that block.

What decides the numbers, from the source of the engine that trains such plans (DeepSpeed's `PipelineEngine`, in which
Sailor's also mixes devices):

- Replica j of each stage makes one pipeline with replica j of the next. Pipelines meet once a step: at a barrier before
  gradients are reduced. So a slow replica slows its own pipeline alone, and the slowest pipeline counts.
- There are as many pipelines as the stage with the most replicas has. A replica of a stage with fewer is in several:
  it does and passes on a microbatch of each in turn, so that each pipeline waits for all of them.
- A message blocks both of its ends. Tensor-parallel ranks each send their part of it (`PartitionedTensor`): first a
  few numbers that say its form, then the part, and the receiver's ranks gather the whole. Where degrees differ, a rank
  sends its part to, or receives from, one rank of the other side after the other.
- Gradients are reduced by one ring for each tensor-parallel rank, then the optimizer steps.

Nothing is fitted to what was measured of plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.measured_plans.layers import LayerProfile
from dejavu.measured_plans.network import Network
from dejavu.measured_plans.plans import MeasuredPlan, MeasuredStage, Replica
from dejavu.plans import Plan, Problem, Stage, StageConfiguration, price
from dejavu.plans.stage_costs import DenseCosts
from dejavu.simulation import BlockingMessages, Sending, StageSeconds, simulate_blocking

_FORM_BYTES = 256.0  # a message's form: DeepSpeed's few numbers of 8 bytes; as long as the smallest message takes
Pipeline = tuple[Replica, ...]  # one replica of each stage


class MessageForm(Enum):
    """What tensor-parallel ranks send.

    PARTS: each its part, which the receiving ranks gather (DeepSpeed).
    WHOLE: each the whole message, to the rank of the same place (Megatron-LM without its scatter-gather option).
    """

    PARTS = "parts"
    WHOLE = "whole"


@dataclass(frozen=True)
class PlanPrice:
    """What a plan is predicted to take.

    Attributes:
        formula_seconds: by `plans.price`.
        simulated_seconds: by `simulate_blocking`.
        passes_seconds: of the simulated step, until the slowest pipeline has done its passes.
        reduction_seconds, update_seconds: of it, the slowest stage's.
        notes: what was not measured, and what was taken in its place.
    """

    formula_seconds: float
    simulated_seconds: float
    passes_seconds: float
    reduction_seconds: float
    update_seconds: float
    notes: tuple[str, ...]


def price_plan(
    plan: MeasuredPlan,
    layers: LayerProfile,
    network: Network,
    *,
    form: MessageForm = MessageForm.PARTS,
    sending: Sending = Sending.RENDEZVOUS,
) -> PlanPrice:
    """Price one plan.

    Raises:
        MissingProfileError: a layer cannot be priced from anything that was measured.
        InputError: no row says how long a message is, or a link that it takes has no bandwidth above 0.
    """
    notes: set[str] = set()
    pipelines, shares = _pipelines(plan, notes), _shares(plan)
    stages = {
        one: [_stage(plan, layers, s, replica, shares[s], notes) for s, replica in enumerate(one)] for one in pipelines
    }
    messages = {one: _messages(plan, layers, network, one, form, notes) for one in pipelines}
    reduction, update = _per_step(plan, layers, network, notes)
    passes = max(
        simulate_blocking(stages[one], messages[one], plan.num_microbatches, sending=sending).step_seconds
        for one in pipelines
    )
    return PlanPrice(
        formula_seconds=_by_formula(plan, stages, messages, [r + u for r, u in zip(reduction, update, strict=True)]),
        simulated_seconds=passes + max(reduction) + max(update),
        passes_seconds=passes,
        reduction_seconds=max(reduction),
        update_seconds=max(update),
        notes=tuple(sorted(notes)),
    )


def _pipelines(plan: MeasuredPlan, notes: set[str]) -> list[Pipeline]:
    """Return the distinct pipelines; where a stage has fewer replicas, they are in several."""
    counts = [len(stage.replicas) for stage in plan.stages]
    if len(set(counts)) > 1:
        notes.add(
            f"stages have {', '.join(map(str, counts))} replicas: {max(counts)} pipelines of {plan.num_microbatches} "
            "microbatches, and a replica of several does theirs in turn"
        )
    every = (tuple(stage.replicas[j % len(stage.replicas)] for stage in plan.stages) for j in range(max(counts)))
    return list(dict.fromkeys(every))


def _shares(plan: MeasuredPlan) -> list[int]:
    """Return in how many pipelines a replica of each stage is, at most."""
    most = max(len(stage.replicas) for stage in plan.stages)
    return [-(-most // len(stage.replicas)) for stage in plan.stages]


def _stage(
    plan: MeasuredPlan, layers: LayerProfile, s: int, replica: Replica, share: int, notes: set[str]
) -> StageSeconds:
    """Return the passes of one microbatch of each of the pipelines that share the replica."""
    span = _span(plan.stages[s])
    forward, backward = layers.passes_seconds(
        replica.device_type, plan.model, span, replica.tensor_parallel, plan.microbatch_size, notes
    )
    return StageSeconds(forward_seconds=share * forward, backward_seconds=share * backward, per_step_seconds=0.0)


def _span(stage: MeasuredStage) -> range:
    return range(stage.start, stage.stop)


def _messages(
    plan: MeasuredPlan, layers: LayerProfile, network: Network, pipeline: Pipeline, form: MessageForm, notes: set[str]
) -> list[BlockingMessages]:
    found = []
    shares = [max(pair) for pair in pairwise(_shares(plan))]  # a shared replica says the messages of all its pipelines
    for stage, here, there, share in zip(plan.stages[:-1], pipeline[:-1], pipeline[1:], shares, strict=True):
        size = layers.output_bytes(plan.model, stage.stop - 1, plan.microbatch_size)
        if size is None:
            raise InputError(f"plan {plan.id}: no row says output_bytes_mb1 of layer {stage.stop - 1} of {plan.model}")
        found.append(
            BlockingMessages(
                share * _message_seconds(network, here, there, size, form, notes),
                share * _message_seconds(network, there, here, size, form, notes),
            )
        )
    return found


def _message_seconds(
    network: Network, sender: Replica, receiver: Replica, size: float, form: MessageForm, notes: set[str]
) -> float:
    """Return one message between two replicas, until its receiver can compute with it."""
    ends = (sender.device_type, receiver.device_type)
    degrees = (sender.tensor_parallel, receiver.tensor_parallel)
    turns = -(-max(degrees) // degrees[0])  # a rank sends what it has to so many others, if they are more
    turns = max(turns, -(-degrees[0] // degrees[1]))  # or receives from so many
    if form is MessageForm.WHOLE:
        return network.message_seconds(ends, degrees, size, notes)
    start = network.message_seconds(ends, (1, 1), _FORM_BYTES, notes)
    part = network.message_seconds(ends, degrees, size / degrees[0], notes)
    return turns * (start + part) + network.gather_seconds(receiver.device_type, degrees[1], size, notes)


def _per_step(
    plan: MeasuredPlan, layers: LayerProfile, network: Network, notes: set[str]
) -> tuple[list[float], list[float]]:
    """Return each stage's reduction of gradients, and its optimizer's step on its slowest replica."""
    reductions, updates = [], []
    for stage in plan.stages:
        span = _span(stage)
        sizes, steps = [], []
        for replica in dict.fromkeys(stage.replicas):
            where = (replica.device_type, plan.model, span, replica.tensor_parallel)
            sizes.append(layers.parameter_bytes(*where, notes))
            steps.append(layers.update_seconds(*where, notes))
        degree = min(replica.tensor_parallel for replica in stage.replicas)
        devices = [replica.device_type for replica in stage.replicas]
        reductions.append(network.ring_seconds(devices, degree, max(sizes), notes))
        updates.append(max(steps))
    return reductions, updates


def _by_formula(
    plan: MeasuredPlan,
    stages: Mapping[Pipeline, list[StageSeconds]],
    messages: Mapping[Pipeline, list[BlockingMessages]],
    once: list[float],
) -> float:
    """Return `plans.price` of the plan, each stage as slow as its slowest replica, each cut as its slowest message."""
    S, L = len(plan.stages), plan.num_layers
    seconds = [max(rows[s].forward_seconds + rows[s].backward_seconds for rows in stages.values()) for s in range(S)]
    crossing = [
        max(rows[k].activation_seconds + rows[k].gradient_seconds for rows in messages.values()) for k in range(S - 1)
    ]
    configurations = tuple(_configuration(s, stage) for s, stage in enumerate(plan.stages))
    shape = (S, L, L + 1)
    seconds_CLL1, once_CLL1 = np.full(shape, np.inf), np.full(shape, np.inf)
    link_CC = np.zeros((S, S))
    for s, stage in enumerate(plan.stages):
        seconds_CLL1[s, stage.start, stage.stop], once_CLL1[s, stage.start, stage.stop] = seconds[s], once[s]
        if s:
            link_CC[s - 1, s] = crossing[s - 1] / 2.0  # the problem doubles it: there and back
    problem = Problem(
        layers=tuple(f"layer {layer}" for layer in range(L)),
        configurations=configurations,
        device_counts={one.device_type: one.num_devices for one in configurations},
        costs=DenseCosts(seconds_CLL1, once_CLL1, np.full(shape, plan.num_microbatches + S)),
        cut_bytes_L1=np.zeros(L + 1),
        link_latency_seconds_CC=link_CC,
        link_seconds_per_byte_CC=np.zeros((S, S)),
        schedule="1f1b",
        num_microbatches=plan.num_microbatches,
    )
    spans = zip(plan.stages, configurations, strict=True)
    priced = tuple(Stage(stage.start, stage.stop, configuration) for stage, configuration in spans)
    return price(problem, Plan(priced, "1f1b", plan.num_microbatches)).step_seconds


def _configuration(s: int, stage: MeasuredStage) -> StageConfiguration:
    """Return the stage's devices under a name of its own: types may be mixed, which a configuration's never are."""
    kinds = "+".join(dict.fromkeys(replica.device_type for replica in stage.replicas))
    return StageConfiguration(
        f"stage {s}: {kinds}", devices_per_node=len(stage.replicas), data_parallel=len(stage.replicas)
    )
