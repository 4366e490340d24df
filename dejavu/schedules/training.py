"""A training by a schedule's own orders, each pass on the version of the weights that its rule says.

For what staleness does to a loss, and to show that synchronous orders change nothing: copies of the model, stashed
versions and late gradients are exact. Here in one process, where nothing runs in parallel; `ranks.py` has each rank's
part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
DECAY_AT_DELAY = 0.135  # PipeMare's D (section 3.2): the average of changes decays to it within a delay


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


class Mail(Protocol):
    """What stages give each other: an activation to the next one, a gradient to the one before."""

    def give(self, to: tuple[int, int, int], tensor: torch.Tensor, *, is_gradient: bool) -> None:
        """Give it to a copy's stage, for a microbatch: (copy, stage, number)."""

    def take(self, to: tuple[int, int, int], *, is_gradient: bool) -> torch.Tensor:
        """Return what was given to it, or wait until it is there."""

    def add_copies(self, stage: int, gradients: Weights) -> None:
        """Add to a stage's gradients those of its other copies, of whom each has a part of the microbatches."""


class OwnMail(dict[tuple[int, int, int], torch.Tensor]):
    """Of stages in one process, whose copies share their weights and gradients."""

    def give(self, to: tuple[int, int, int], tensor: torch.Tensor, *, is_gradient: bool) -> None:
        self[to] = tensor

    def take(self, to: tuple[int, int, int], *, is_gradient: bool) -> torch.Tensor:
        return self.pop(to)

    def add_copies(self, stage: int, gradients: Weights) -> None:
        pass


@dataclass
class TrainedStage:
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
    stages = [TrainedStage(module) for module in modules]
    own = {(copy, s): stage for copy in range(schedule.num_copies) for s, stage in enumerate(stages)}
    carried = Carried(schedule, own, parts(batches, num_microbatches), loss, rates, num_microbatches, OwnMail(), S)
    carried.run(tasks)
    return carried.mean_losses()


def parts(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], num_microbatches: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the microbatches of all steps, in order."""
    chunks = ((inputs.chunk(num_microbatches), targets.chunk(num_microbatches)) for inputs, targets in batches)
    return [pair for inputs, targets in chunks for pair in zip(inputs, targets, strict=True)]


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


class Carried:
    """The training of some stages under way: all of them, or those of one rank.

    Args:
        stages: by copy and stage; in one process copies are one and the same.
        examples: all microbatches, for the first stage's inputs and the last one's targets.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: dict[tuple[int, int], TrainedStage],
        examples: Sequence[tuple[torch.Tensor, torch.Tensor]],
        loss: Loss,
        rates: Rates,
        num_microbatches: int,
        mail: Mail,
        num_stages: int,
    ) -> None:
        self.losses, self._num_stages = dict[int, float](), num_stages
        self._schedule, self._stages, self._examples, self._loss = schedule, stages, examples, loss
        self._rates, self._mail, self._num_microbatches = rates, mail, num_microbatches
        self._per_update = schedule.microbatches_per_update(num_microbatches)
        self._kept: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, Weights]] = {}

    def run(self, tasks: Sequence[tuple[Task, int]]) -> None:
        """Carry out tasks on these versions of the weights, one after the other.

        Raises:
            InputError: a backward pass is split.
        """
        last_use = {(task.copy, task.stage, version): i for i, (task, version) in enumerate(tasks)}
        for i, (task, version) in enumerate(tasks):
            if task.kind == Pass.FORWARD:
                self._forward(task, version)
            elif task.kind == Pass.BACKWARD:
                self._backward(task)
            elif task.kind == UPDATE:
                self._update(task)
            else:
                raise InputError(f"{task.kind} is part of a backward pass; wanted a schedule that does not split it")
            versions = self._stages[task.copy, task.stage].versions
            copies = range(self._schedule.num_copies)
            for known in list(versions):
                if max(last_use.get((copy, task.stage, known), -1) for copy in copies) <= i:
                    del versions[known]

    def mean_losses(self) -> list[float]:
        """Return each step's loss, the mean over its microbatches; of those whose last stage is here."""
        B = self._num_microbatches
        found: dict[int, list[float]] = defaultdict(list)
        for number, loss in sorted(self.losses.items()):
            found[number // B].append(loss)
        return [sum(losses) / len(losses) for _, losses in sorted(found.items())]

    def _ends(self, task: Task) -> bool:
        return task.stage + 1 == self._num_stages

    def _forward(self, task: Task, version: int) -> None:
        key, stage = (task.copy, task.stage, task.number), self._stages[task.copy, task.stage]
        inputs = self._mail.take(key, is_gradient=False) if task.stage else self._examples[task.number][0]
        inputs = inputs.detach().requires_grad_(task.stage > 0)
        weights: Weights = dict(stage.module.named_parameters())
        if self._schedule.weights is not WeightRule.NEWEST:
            if version == stage.count and version not in stage.versions:
                stage.versions[version] = _copied(stage.module)
            weights = stage.versions[version]
        output = functional_call(stage.module, weights, (inputs,))
        if self._ends(task):
            output = self._loss(output, self._examples[task.number][1])
            self.losses[task.number] = float(output.detach())
        else:
            self._mail.give((task.copy, task.stage + 1, task.number), output.detach(), is_gradient=False)
        self._kept[key] = inputs, output, weights

    def _backward(self, task: Task) -> None:
        key, stage = (task.copy, task.stage, task.number), self._stages[task.copy, task.stage]
        inputs, output, weights = self._kept.pop(key)
        arriving = None if self._ends(task) else self._mail.take(key, is_gradient=True)
        names = [name for name, one in weights.items() if one.requires_grad]
        wanted = [*(weights[name] for name in names), *([inputs] if task.stage else [])]
        moved = self._rates.corrects_weights and bool(stage.changes)
        if moved:  # autograd keeps the weights themselves, so it takes what is in them now
            before = {name: one.detach().clone() for name, one in weights.items()}
            tau = self._rates.taus[task.stage]
            for name, change in stage.changes.items():
                weights[name].data.sub_(tau * change)
        found = torch.autograd.grad(output, wanted, arriving, allow_unused=True) if wanted else ()
        if moved:
            for name, one in weights.items():
                one.data.copy_(before[name])
        for name, gradient in zip(names, found, strict=False):
            if gradient is None:  # the output does not depend on it
                continue
            stage.gradients[name] = stage.gradients[name] + gradient if name in stage.gradients else gradient
        if task.stage:
            before_it = torch.zeros_like(inputs) if found[-1] is None else found[-1]
            self._mail.give((task.copy, task.stage - 1, task.number), before_it, is_gradient=True)

    def _update(self, task: Task) -> None:
        stage, rates = self._stages[task.copy, task.stage], self._rates
        if stage.count > task.number:
            return  # one copy's update waited for all copies' gradients, and they have one module here
        self._mail.add_copies(task.stage, stage.gradients)
        if self._schedule.weights is not WeightRule.NEWEST and stage.count not in stage.versions:
            stage.versions[stage.count] = _copied(stage.module)
        for name, weight in stage.module.named_parameters():
            if name not in stage.gradients:  # it is frozen, or not used
                continue
            change = stage.gradients[name] * (-rates.rate(task.stage, task.number) / self._per_update)
            if rates.corrects_weights:
                decay = DECAY_AT_DELAY ** (1.0 / rates.taus[task.stage]) if rates.taus[task.stage] else 0.0
                average = stage.changes.get(name, torch.zeros_like(change))
                stage.changes[name] = decay * average + (1.0 - decay) * change
            weight.data.add_(change)  # through .data: passes under way keep their graphs (the newest-weights rule)
        stage.gradients.clear()
        stage.count += 1


def _copied(module: nn.Module) -> Weights:
    named = module.named_parameters()
    return {name: weight.detach().clone().requires_grad_(weight.requires_grad) for name, weight in named}
