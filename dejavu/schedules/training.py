"""A training in one process by a schedule's own orders, each pass on the version of the weights that its rule says.

For what staleness does to a loss, and to show that synchronous orders change nothing: copies of the model, stashed
versions and late gradients are exact; nothing runs in parallel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call

from dejavu.foundation.errors import InputError
from dejavu.plans.schedule import Pass
from dejavu.schedules._base import UPDATE, PipelineSchedule, Task, WeightRule
from dejavu.schedules.timeline import timeline, uses
from dejavu.simulation import StageSeconds

Weights = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DECAY_AT_DELAY = (
    0.135  # PipeMare's D (section 3.2): of the average of weights' changes, after as many steps as the delay
)


@dataclass(frozen=True)
class Rates:
    """The steps of plain gradient descent, and PipeMare's corrections of them.

    Attributes:
        learning_rate: of a mean gradient over an update's microbatches.
        rescheduled_steps: T1: the rate is divided by τ ** (1 − k / steps) at update k until then; 0: never.
        corrects_weights: T2: the backward pass takes the weights minus τ times their average change.
        taus: updates between a stage's forward and backward weights, by stage; both corrections take them.
    """

    learning_rate: float
    rescheduled_steps: int = 0
    corrects_weights: bool = False
    taus: tuple[float, ...] = ()

    def rate(self, stage: int, update: int) -> float:
        if not self.rescheduled_steps:
            return self.learning_rate
        power = 1.0 - min(update / self.rescheduled_steps, 1.0)
        return self.learning_rate / float(max(self.taus[stage], 1.0) ** power)


@dataclass
class _Stage:
    """One stage's weights: the newest in the module, older versions as long as somebody wants them."""

    module: nn.Module
    versions: dict[int, Weights] = field(default_factory=dict)
    gradients: Weights = field(default_factory=dict)
    changes: Weights = field(default_factory=dict)  # the moving average of updates
    count: int = 0


def train_by(
    schedule: PipelineSchedule,
    modules: Sequence[nn.Module],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss: Loss,
    rates: Rates,
    num_microbatches: int,
) -> list[float]:
    """Train the stages' modules in place by the schedule; return each batch's loss, as its microbatches met it.

    Args:
        modules: in the model's order, `stages_per_rank` for each rank.
        batches: one for each step, of (inputs, targets) that divide into the microbatches.
        loss: the mean over a microbatch's examples.

    Raises:
        InputError: the schedule has no order for so many stages and microbatches, or it splits the backward pass.
    """
    S, P = len(modules), len(modules) // schedule.stages_per_rank
    schedule.check(P, num_microbatches)
    seconds = [StageSeconds(1.0, 2.0, 0.0)] * S
    orders = schedule.orders(P, num_microbatches, len(batches), seconds)
    tasks = _in_time(schedule, orders, seconds, num_microbatches)
    last_use = {(t.stage, version): i for i, (t, version) in enumerate(tasks)}
    examples = [
        pair
        for inputs, targets in batches
        for pair in zip(inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True)
    ]
    carried = _Carried(schedule, [_Stage(module) for module in modules], examples, loss, rates, num_microbatches)
    for i, (task, version) in enumerate(tasks):
        if task.kind == Pass.FORWARD:
            carried.forward(task, version)
        elif task.kind == Pass.BACKWARD:
            carried.backward(task)
        elif task.kind == UPDATE:
            carried.update(task)
        else:
            raise InputError(f"{task.kind} is part of a backward pass; wanted a schedule that does not split it")
        for known in [v for v in carried.stages[task.stage].versions if last_use.get((task.stage, v), -1) <= i]:
            del carried.stages[task.stage].versions[known]
    starts = range(0, len(examples), num_microbatches)
    return [sum(carried.losses[first + m] for m in range(num_microbatches)) / num_microbatches for first in starts]


def _in_time(
    schedule: PipelineSchedule, orders: Sequence[Sequence[Task]], seconds: Sequence[StageSeconds], num_microbatches: int
) -> list[tuple[Task, int]]:
    """Return all tasks as they begin, so that each follows what it waits for, with the versions that they meet."""
    found = timeline(schedule, orders, seconds)
    timed = []
    for order, starts in zip(orders, found.start_seconds, strict=True):
        met = uses(schedule, order, num_microbatches)
        rows = enumerate(zip(starts, met, strict=True))
        timed += [(start, place, task, version) for place, (start, (task, _, version)) in rows]
    timed.sort(key=lambda row: (row[0], row[1]))
    return [(task, version) for _, _, task, version in timed]


class _Carried:
    """The training under way: what is between the stages, and their weights."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: list[_Stage],
        examples: Sequence[tuple[torch.Tensor, torch.Tensor]],
        loss: Loss,
        rates: Rates,
        num_microbatches: int,
    ) -> None:
        self.stages, self.losses = stages, dict[int, float]()
        self._schedule, self._examples, self._loss, self._rates = schedule, examples, loss, rates
        self._per_update = schedule.microbatches_per_update(num_microbatches)
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, Weights]] = {}
        self._arrived: dict[tuple[int, int], torch.Tensor] = {}  # activations of a stage's microbatch, then gradients
        self._updates = defaultdict[tuple[int, int], int](int)

    def forward(self, task: Task, version: int) -> None:
        stage, key = self.stages[task.stage], (task.stage, task.number)
        inputs = self._arrived.pop(key) if task.stage else self._examples[task.number][0]
        inputs = inputs.detach().requires_grad_(task.stage > 0)
        weights: Weights = dict(stage.module.named_parameters())
        if self._schedule.weights is not WeightRule.NEWEST:
            if version == stage.count and version not in stage.versions:
                stage.versions[version] = _copied(stage.module)
            weights = stage.versions[version]
        output = functional_call(stage.module, weights, (inputs,))
        if task.stage + 1 == len(self.stages):
            output = self._loss(output, self._examples[task.number][1])
            self.losses[task.number] = float(output.detach())
        else:
            self._arrived[task.stage + 1, task.number] = output
        self._kept[key] = inputs, output, weights

    def backward(self, task: Task) -> None:
        stage = self.stages[task.stage]
        inputs, output, weights = self._kept.pop((task.stage, task.number))
        arriving = None if task.stage + 1 == len(self.stages) else self._arrived.pop((task.stage, task.number))
        names, wanted = list(weights), [*weights.values(), *([inputs] if task.stage else [])]
        moved = self._rates.corrects_weights and bool(stage.changes)
        if moved:  # autograd keeps the weights themselves, so it takes what is in them now
            before = {name: one.detach().clone() for name, one in weights.items()}
            tau = self._rates.taus[task.stage]
            for name, one in weights.items():
                one.data.sub_(tau * stage.changes[name])
        found = torch.autograd.grad(output, wanted, arriving)
        if moved:
            for name, one in weights.items():
                one.data.copy_(before[name])
        for name, gradient in zip(names, found, strict=False):
            stage.gradients[name] = stage.gradients[name] + gradient if name in stage.gradients else gradient
        if task.stage:
            self._arrived[task.stage - 1, task.number] = found[-1]

    def update(self, task: Task) -> None:
        self._updates[task.stage, task.number] += 1
        if self._updates[task.stage, task.number] > 1:
            return  # the first copy's update waited for all copies' gradients, and they have one module here
        stage, rates = self.stages[task.stage], self._rates
        if self._schedule.weights is not WeightRule.NEWEST and stage.count not in stage.versions:
            stage.versions[stage.count] = _copied(stage.module)
        for name, weight in stage.module.named_parameters():
            change = stage.gradients[name] * (-rates.rate(task.stage, task.number) / self._per_update)
            if rates.corrects_weights:
                decay = DECAY_AT_DELAY ** (1.0 / rates.taus[task.stage]) if rates.taus[task.stage] else 0.0
                average = stage.changes.get(name, torch.zeros_like(change))
                stage.changes[name] = decay * average + (1.0 - decay) * change
            weight.data.add_(change)  # through .data: passes under way keep their graphs (the newest-weights rule)
        stage.gradients.clear()
        stage.count += 1


def _copied(module: nn.Module) -> Weights:
    return {name: weight.detach().clone().requires_grad_() for name, weight in module.named_parameters()}
