"""Data-parallel training with faulty replicas in one process: the runtime's own rules and faults, without ranks.

Shape suffixes: N = replicas, P = numbers of the gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dejavu.init import Draw
from dejavu.runtime.batches.held_out import evaluating, held_out_examples
from dejavu.runtime.gradients.faults import FaultyGradients, GradientFault
from dejavu.runtime.gradients.held_out import HeldOutGradient
from dejavu.runtime.gradients.rules import Part, Rule, combine, rule_of
from dejavu.runtime.gradients.watching import Watch
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.training import Layers, build_layers
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Replicated:
    """A training of whole-model replicas.

    Attributes:
        workload: its `gradients` say the rule.
        faults: of replicas, by `rank`.
        unequal_share: so much of a batch is given out by class, one or two classes to a replica.
        rule: in place of the workload's.
    """

    workload: Workload
    num_replicas: int
    faults: tuple[GradientFault, ...] = ()
    unequal_share: float = 0.0
    rule: Rule | None = None


@dataclass
class Outcome:
    """What became of it.

    Attributes:
        losses: of each step, before its update, the mean of all replicas' examples.
        accuracies: (steps done, share of the held-out examples that are classified as they should).
        named: replicas that were suspected far more often than by chance.
        combine_seconds: of all steps, the rule's part.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    named: tuple[int, ...] = ()
    combine_seconds: float = 0.0


def train(
    case: Replicated,
    draw: Draw,
    num_steps: int,
    *,
    evaluate_every: int = 0,
    until: Callable[[float], bool] | None = None,
) -> Outcome:
    """Train so many steps, or until a held-out accuracy is enough.

    It ends early where the loss is no number any more.

    Replica r of N has rows ⌊r b / N⌋ to ⌊(r + 1) b / N⌋ of each microbatch, as in the runtime.
    """
    workload, count = case.workload, case.num_replicas
    module = build_layers(workload, draw, CPU)
    optimizer = make_optimizer(workload.optimizer, module.parameters())
    data, outcome = dataset_of(workload), Outcome()
    sections = _parts(module, per_layer=workload.gradients.per == "layer")
    num_sections = 1 + sections[-1].section
    trust_SN = torch.full((num_sections, count), 1 / count, dtype=torch.float64)
    watch = Watch(num_sections, count, workload.gradients.num_suspected)
    devices = [(fault.rank, FaultyGradients(fault)) for fault in case.faults]
    held_out = HeldOutGradient(workload, module, CPU) if workload.gradients.rule == "zeno" else None
    rule = case.rule or rule_of(workload.gradients)
    for step in range(num_steps):
        inputs, targets = data.batch(step, workload.batch_size, seed=workload.seed)
        order = by_class(targets, case.unequal_share, count)
        inputs, targets = inputs[order], targets[order]
        module.step = step
        gradients_NP, loss = _gradients(module, workload, inputs, targets, count)
        for replica, device in devices:
            gradients_NP[replica] = device.spoil(step, gradients_NP[replica], _columns(module))
        started = time.perf_counter()
        held_out_P = held_out(step) if held_out else None
        found = combine(rule, gradients_NP, sections, trust_SN, held_out_P=held_out_P)
        outcome.combine_seconds += time.perf_counter() - started
        trust_SN = found.trust_SN
        watch.look(step, found.suspicion_SN)
        _put(module, found.gradient_P)
        optimizer.step()
        outcome.losses.append(loss)
        if not math.isfinite(loss):
            break
        if evaluate_every and (step + 1) % evaluate_every == 0:
            outcome.accuracies.append((step + 1, _accuracy(module, workload)))
            if until is not None and until(outcome.accuracies[-1][1]):
                break
    outcome.named = tuple(sorted(watch.named()))
    return outcome


def by_class(targets: torch.Tensor, share: float, count: int) -> torch.Tensor:
    """Return the order in which a share of each replica's rows is sorted by class over all replicas.

    Of a batch of one microbatch, whose rows are the replicas' one after another.
    """
    rows_NR = torch.arange(len(targets)).reshape(count, -1) if share else torch.arange(len(targets))[None]
    own_NR = rows_NR[:, : round(share * rows_NR.shape[1])]
    chosen = own_NR.flatten()
    order_NR = rows_NR.clone()
    order_NR[:, : own_NR.shape[1]] = chosen[targets[chosen].argsort(stable=True)].reshape(own_NR.shape)
    return order_NR.flatten()


def _gradients(
    module: Layers, workload: Workload, inputs: torch.Tensor, targets: torch.Tensor, count: int
) -> tuple[torch.Tensor, float]:
    """Return each replica's gradient of its own examples' mean loss, and the mean loss of all."""
    loss_of, number, size = model_of(workload).loss, workload.microbatches_in_a_step, workload.microbatch_size
    rows, loss_sum = [], 0.0
    for replica in range(count):
        start, stop = replica * size // count, (replica + 1) * size // count
        module.zero_grad(set_to_none=False)
        parts = zip(inputs.chunk(number), targets.chunk(number), strict=True)
        for module.microbatch, (x, y) in enumerate(parts):
            loss = loss_of(module(x[start:stop]), y[start:stop]) / number
            loss.backward()
            loss_sum += loss.item() * (stop - start) / size
        rows.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    return torch.stack(rows), loss_sum


def _put(module: Layers, gradient_P: torch.Tensor) -> None:
    weights = [weight for weight in module.parameters() if weight.grad is not None]
    for weight, part in zip(weights, gradient_P.split([weight.numel() for weight in weights]), strict=True):
        assert weight.grad is not None
        weight.grad.copy_(part.view_as(weight))


def _sizes(module: Layers) -> dict[str, int]:
    """The layers with weights, and how many."""
    counted = {name: sum(p.numel() for p in layer.parameters()) for name, layer in module.named_children()}
    return {name: count for name, count in counted.items() if count}


def _columns(module: Layers) -> dict[str, slice]:
    found, start = dict[str, slice](), 0
    for name, size in _sizes(module).items():
        found[name] = slice(start, start + size)
        start += size
    return found


def _parts(module: Layers, *, per_layer: bool) -> list[Part]:
    return [
        Part(columns.start, columns.stop, section if per_layer else 0)
        for section, columns in enumerate(_columns(module).values())
    ]


def _accuracy(module: Layers, workload: Workload) -> float:
    inputs, targets = held_out_examples(workload)
    with evaluating([module]):
        return float((module(inputs).argmax(dim=-1) == targets).float().mean())
