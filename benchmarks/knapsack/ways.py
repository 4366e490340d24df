"""Ways to fill a knapsack without gradients: dynamic programs, greed, and a price on the room; the contract of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_WEIGHT, LARGEST_VALUE = 1000, 100  # as in the paper

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

    def weight(self, chosen: Chosen) -> int:
        return int(self.weights[chosen].sum())

    def fits(self, chosen: Chosen) -> bool:
        return self.weight(chosen) <= self.capacity


@dataclass(frozen=True)
class Point:
    """What a way had found after so many of its steps: the most value of what was kept, fitting or not."""

    step: int
    seconds: float
    kept_value: float
    fitting_value: float


@dataclass(frozen=True, eq=False)
class Answer:
    """What a way takes.

    Attributes:
        bound: no value may be above it; None: nothing was proved.
        refused: roundings that were looked at and did not fit.
        fitting: the best of what it saw that fits, where that is not `chosen`; None: the same.
        curve: how it got there; empty for ways that answer once.
    """

    chosen: Chosen
    bound: int | None = None
    refused: int = 0
    fitting: Chosen | None = None
    curve: tuple[Point, ...] = ()


def generated(num_items: int, capacity: int, seed: int) -> Knapsack:
    rng = np.random.default_rng(seed)
    values = rng.integers(1, LARGEST_VALUE + 1, num_items)
    return Knapsack(values, rng.integers(1, LARGEST_WEIGHT + 1, num_items), capacity)


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
