"""Ways to fill a knapsack by gradients: what the paper's listing does, and a relaxation of ours.

Both have a sigmoid for each item and a penalty on excess weight. They differ in what they keep: the listing keeps a
rounding where a *soft* weight fits, and what it keeps may be too heavy; ours refuses what does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.knapsack.ways import Answer, Knapsack, Point, greedy, numpy_program, priced, python_program

LOOK_EVERY = 10  # steps between two roundings of ours
POINTS = 200  # of a curve


@dataclass(frozen=True)
class Listing:
    """The settings of the paper's listing: one set of logits, drawn uniformly in [0, 1]."""

    sharpness: float = 0.5  # the sigmoid is of logit / sharpness
    penalty: float = 1e7  # of the squared excess of the soft weight
    learning_rate: float = 100.0
    steps: int = 10_000
    most_logit: float = 5.0  # after each step logits are clamped to ±


@dataclass(frozen=True)
class Relaxation:
    """Settings of ours: the penalty is for a unit of excess weight, all restarts step at once."""

    penalty: float = 1e7
    learning_rate: float = 0.5
    steps: int = 40_000
    restarts: int = 4


LISTING_SETTINGS = Listing()
LARGE_PENALTY = Relaxation()
SMALL_PENALTY = Relaxation(penalty=1.0, learning_rate=0.1, steps=3000, restarts=16)  # a unit of room is worth 0.14


def listing(problem: Knapsack, settings: Listing, seed: int = 0) -> Answer:
    """Repeat the paper's listing: RMSprop on one set of logits; where the soft weight fits, the best rounding is kept.

    The soft weight that is looked at is of the logits before a step, the rounding of those after it, so that what is
    kept may be too heavy. It is the listing's answer all the same; beside it goes the best of them that fits.
    """
    generator = torch.Generator().manual_seed(seed)
    values, weights = (torch.tensor(table, dtype=torch.float64) for table in (problem.values, problem.weights))
    logits = torch.rand(len(values), generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.RMSprop([logits], lr=settings.learning_rate)
    kept, fitting = (torch.zeros(len(values), dtype=torch.bool) for _ in range(2))
    kept_value = fitting_value = 0.0
    refused, curve, started = 0, [], time.process_time()
    for step in range(settings.steps):
        share = torch.sigmoid(logits / settings.sharpness)
        soft_weight = share @ weights
        excess = torch.relu(soft_weight - problem.capacity)
        optimizer.zero_grad()
        (settings.penalty * excess.square() - share @ values).backward()
        optimizer.step()
        with torch.no_grad():
            logits.clamp_(-settings.most_logit, settings.most_logit)
            if soft_weight <= problem.capacity:
                rounded = logits > 0
                value = float(rounded.double() @ values)
                fits = bool(rounded.double() @ weights <= problem.capacity)
                refused += not fits
                if value > kept_value:
                    kept, kept_value = rounded.clone(), value
                if fits and value > fitting_value:
                    fitting, fitting_value = rounded.clone(), value
        if (step + 1) % max(1, settings.steps // POINTS) == 0:
            curve.append(Point(step + 1, time.process_time() - started, kept_value, fitting_value))
    return Answer(kept.numpy(), refused=refused, fitting=fitting.numpy(), curve=tuple(curve))


def relaxation(problem: Knapsack, settings: Relaxation, seed: int = 0) -> Answer:
    """Adam on all restarts at once; the best rounding that fits is kept, of all restarts and steps looked at.

    With the large penalty the settings are the best of those tried by hand: one step over the capacity fills Adam's
    second moments, and thousands of small steps follow.
    """
    generator = torch.Generator().manual_seed(seed)
    values, weights = (torch.tensor(table, dtype=torch.float64) for table in (problem.values, problem.weights))
    logits = torch.randn(settings.restarts, len(values), generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=settings.learning_rate)
    best, best_value, refused = torch.zeros(len(values), dtype=torch.bool), 0.0, 0
    curve, started = [], time.process_time()
    for step in range(settings.steps):
        share = torch.sigmoid(logits)
        excess = torch.relu(share @ weights - problem.capacity)
        loss = (settings.penalty * excess - share @ values).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOOK_EVERY == LOOK_EVERY - 1 or step == settings.steps - 1:
            rounded = logits.detach() > 0
            fits = rounded.double() @ weights <= problem.capacity
            refused += int((~fits).sum())
            total = torch.where(fits, rounded.double() @ values, -1.0)
            winner = int(total.argmax())
            if total[winner] > best_value:
                best, best_value = rounded[winner].clone(), float(total[winner])
        if (step + 1) % max(1, settings.steps // POINTS) == 0:
            curve.append(Point(step + 1, time.process_time() - started, best_value, best_value))
    return Answer(best.numpy(), refused=refused, curve=tuple(curve))


LISTING, GREEDY = "the paper's listing", "greedy"


def ways(seed: int) -> dict[str, Callable[[Knapsack], Answer]]:
    return {
        "python program": python_program,
        "numpy program": numpy_program,
        GREEDY: greedy,
        LISTING: lambda problem: listing(problem, LISTING_SETTINGS, seed),
        "our relaxation, large penalty": lambda problem: relaxation(problem, LARGE_PENALTY, seed),
        "our relaxation, small penalty": lambda problem: relaxation(problem, SMALL_PENALTY, seed),
        "price and open items": priced,
    }
