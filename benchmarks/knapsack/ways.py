"""The ways to fill a knapsack that the benchmark compares.

The relaxation is written from its description: a sigmoid for each item, minus the value plus a large penalty for excess
weight as the loss, Adam, restarts at once. A rounding that does not fit is refused, however good its loss; the best
that fits is kept, of all restarts and steps looked at. With the large penalty the settings are the best of those tried
by hand: one step over the capacity fills Adam's second moments, and thousands of small steps follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LARGEST = 1000  # weight and value
LOOK_EVERY = 10  # steps between two roundings


@dataclass(frozen=True)
class Relaxation:
    """Settings of the paper's way: the penalty is a unit of excess weight."""

    penalty: float = 1e7
    learning_rate: float = 0.5
    steps: int = 40_000
    restarts: int = 4


LARGE_PENALTY = Relaxation()
SMALL_PENALTY = Relaxation(penalty=10.0, learning_rate=0.1, steps=3000, restarts=16)

Ints = NDArray[np.int64]
Chosen = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Knapsack:
    """Take some of the items: the most value that the capacity has room for."""

    values: Ints
    weights: Ints
    capacity: int

    def value(self, chosen: Chosen) -> int:
        return int(self.values[chosen].sum())

    def fits(self, chosen: Chosen) -> bool:
        return int(self.weights[chosen].sum()) <= self.capacity


@dataclass(frozen=True, eq=False)
class Answer:
    """What was taken; no value may be above the bound (None: nothing was proved); roundings that did not fit."""

    chosen: Chosen
    bound: int | None = None
    refused: int = 0


def generated(num_items: int, capacity: int, seed: int) -> Knapsack:
    rng = np.random.default_rng(seed)
    values, weights = rng.integers(1, LARGEST + 1, (2, num_items))
    return Knapsack(values, weights, capacity)


def python_program(problem: Knapsack) -> Answer:
    """The textbook's loop over items and capacities."""
    best = [0] * (problem.capacity + 1)
    taken = []
    for value, weight in zip(problem.values.tolist(), problem.weights.tolist(), strict=True):
        here = bytearray(problem.capacity + 1)
        for room in range(problem.capacity, weight - 1, -1):
            total = best[room - weight] + value
            if total > best[room]:
                best[room] = total
                here[room] = 1
        taken.append(here)
    return Answer(_traced(problem, taken), bound=best[-1])


def numpy_program(problem: Knapsack) -> Answer:
    """The same, all capacities at once."""
    best = np.zeros(problem.capacity + 1, dtype=np.int64)
    taken = np.zeros((len(problem.values), problem.capacity + 1), dtype=np.bool_)
    for i, (value, weight) in enumerate(zip(problem.values, problem.weights, strict=True)):
        if weight <= problem.capacity:
            total = best[: problem.capacity + 1 - weight] + value
            np.greater(total, best[weight:], out=taken[i, weight:])
            np.maximum(total, best[weight:], out=best[weight:])
    return Answer(_traced(problem, taken), bound=int(best[-1]))


def _traced(problem: Knapsack, taken: Any) -> Chosen:
    chosen = np.zeros(len(problem.values), dtype=np.bool_)
    room = problem.capacity
    for i in range(len(chosen) - 1, -1, -1):
        if taken[i][room]:
            chosen[i] = True
            room -= int(problem.weights[i])
    return chosen


def greedy(problem: Knapsack) -> Answer:
    """Most value for its weight first; items that do not fit any more are passed over."""
    chosen = np.zeros(len(problem.values), dtype=np.bool_)
    room = problem.capacity
    for i in _by_density(problem):
        if problem.weights[i] <= room:
            chosen[i] = True
            room -= problem.weights[i]
    return Answer(chosen)


def _by_density(problem: Knapsack) -> Ints:
    return np.argsort(-problem.values / problem.weights, kind="stable")


def relaxation(problem: Knapsack, settings: Relaxation, seed: int = 0) -> Answer:
    """The paper's way; see the module."""
    generator = torch.Generator().manual_seed(seed)
    values, weights = (torch.tensor(table, dtype=torch.float64) for table in (problem.values, problem.weights))
    logits = torch.randn(settings.restarts, len(values), generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=settings.learning_rate)
    best, best_value, refused = torch.zeros(len(values), dtype=torch.bool), 0.0, 0
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
    return Answer(best.numpy(), refused=refused)


def priced(problem: Knapsack) -> Answer:
    """A price on the room decides most items; a program over the few that it leaves open finds and proves the best.

    At the price p of the relaxed problem (the density of the item that breaks), taking what is worth more than
    p · weight is worth bound = p · capacity + Σ max(0, v − p w) at most, and deciding item i the other way costs
    |v − p w| of that: items for which this is more than the distance to the greedy answer are settled. The others are
    taken or left one by one, those that cost most first, keeping the states that no other beats and that may still win.
    """
    incumbent = greedy(problem).chosen
    least = problem.value(incumbent)
    price = _price(problem)
    surplus = problem.values - price * problem.weights
    bound = price * problem.capacity + float(surplus.clip(min=0).sum())
    slack = 1e-6 * max(1.0, bound)  # of rounding; whole numbers are no closer to each other than 1
    open_items = np.flatnonzero(bound - np.abs(surplus) >= least + 1 - slack)
    open_items = open_items[np.argsort(-np.abs(surplus[open_items]), kind="stable")]
    settled = surplus > 0
    settled[open_items] = False
    room = problem.capacity - int(problem.weights[settled].sum())
    need = least + 1 - problem.value(settled)
    if room < 0 or not len(open_items):
        return Answer(incumbent, bound=least)
    weights, values = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    hope = float(surplus[open_items].clip(min=0).sum())
    parents, takings = [], []
    for i in open_items:
        hope -= max(0.0, float(surplus[i]))
        parent = np.tile(np.arange(len(weights)), 2)
        taking = np.repeat([False, True], len(weights))
        weights = np.concatenate([weights, weights + problem.weights[i]])
        values = np.concatenate([values, values + problem.values[i]])
        order = np.lexsort((-values, weights))
        before = np.maximum.accumulate(np.concatenate([[-1], values[order][:-1]]))
        kept = order[(values[order] > before) & (weights[order] <= room)]
        kept = kept[values[kept] + price * (room - weights[kept]) + hope >= need - slack]
        weights, values = weights[kept], values[kept]
        parents.append(parent[kept])
        takings.append(taking[kept])
        if not len(weights):
            return Answer(incumbent, bound=least)
    at = int(values.argmax())
    if values[at] < need:
        return Answer(incumbent, bound=least)
    chosen = settled.copy()
    for i, parent, taking in zip(open_items[::-1], parents[::-1], takings[::-1], strict=True):
        chosen[i] = taking[at]
        at = int(parent[at])
    return Answer(chosen, bound=problem.value(chosen))


def _price(problem: Knapsack) -> float:
    """The density of the first item, by density, that does not fit; nothing where all fit."""
    order = _by_density(problem)
    over = np.flatnonzero(np.cumsum(problem.weights[order]) > problem.capacity)
    return float(problem.values[order[over[0]]] / problem.weights[order[over[0]]]) if len(over) else 0.0


def ways(seed: int) -> dict[str, Callable[[Knapsack], Answer]]:
    return {
        "python program": python_program,
        "numpy program": numpy_program,
        "greedy": greedy,
        "relaxation, large penalty": lambda problem: relaxation(problem, LARGE_PENALTY, seed),
        "relaxation, small penalty": lambda problem: relaxation(problem, SMALL_PENALTY, seed),
        "price and open items": priced,
    }
