"""Problems whose memory is about the least with which they have a plan, and a check of that which no search shares.

The check asks for cuts, not for costs: from which cuts can all layers to the last be run by so many stages with such
devices? It takes every cut and every count one after the other, with its own sums, and no shortcut.
Shape suffixes as in `dejavu.plans`; S = stages that follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem, StageConfiguration
from dejavu.plans.stage_costs import AdditiveCosts

LARGE_LAYERS = (257, 500)
MOST_OVER = 0.02  # memory over the least that works, and as much below it
HALVINGS = 24  # of the range in which the least memory is looked for
SUMMED_TO = 1e-12  # relative: sums of the same numbers in another order


@dataclass(frozen=True, eq=False)
class Tight:
    """A problem, and whether it has a plan.

    Attributes:
        over: its memory over the least that works, as a fraction; nan where no memory would do.
    """

    problem: Problem
    has_a_plan: bool
    over: float
    seed: int


def tight(seed: int, large: bool) -> Tight:
    """A problem of that seed with memory within two percent of the least that works, or exactly that."""
    rng = np.random.default_rng(seed)
    problem = _problem(rng, large)
    over = 0.0 if rng.random() < 0.2 else float(rng.uniform(-MOST_OVER, MOST_OVER))
    least = least_memory(problem)
    if least is None:
        return Tight(problem, False, math.nan, seed)
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    asked = replace(problem, costs=replace(costs, capacity_bytes_C=least * (1 + over) * costs.capacity_bytes_C))
    return Tight(asked, has_a_plan(asked), over, seed)


def has_a_plan(problem: Problem) -> bool:
    """Whether any plan fits."""
    return any(_reachable(problem, _needed_bytes(problem), 1.0))


def has_a_plan_by_listing(problem: Problem) -> bool:
    """The same by every cut and every configuration of a small problem."""
    L, counts = problem.num_layers, problem.device_counts
    for num_stages in range(1, min(L, problem.max_stages or L) + 1):
        for cuts in combinations(range(1, L), num_stages - 1):
            bounds = (0, *cuts, L)
            for chosen in product(range(len(problem.configurations)), repeat=num_stages):
                used = dict.fromkeys(counts, 0)
                for c in chosen:
                    used[problem.configurations[c].device_type] += problem.configurations[c].num_devices
                if any(used[name] > counts[name] for name in counts):
                    continue
                if problem.use_all_devices and used != dict(counts):
                    continue
                spans = zip(bounds, bounds[1:], chosen, strict=False)
                if all(_stage_fits(problem, a, b, c, num_stages - s) for s, (a, b, c) in enumerate(spans)):
                    return True
    return False


def plan_fits(problem: Problem, plan: Plan) -> bool:
    """Whether a plan covers the layers with the devices that there are, each stage within its memory."""
    used = dict.fromkeys(problem.device_counts, 0)
    at = 0
    for s, stage in enumerate(plan.stages):
        c = problem.configurations.index(stage.configuration)
        used[stage.configuration.device_type] += stage.configuration.num_devices
        if stage.start != at or stage.stop <= at or not _stage_fits(problem, at, stage.stop, c, len(plan.stages) - s):
            return False
        at = stage.stop
    enough = all(used[name] <= count for name, count in problem.device_counts.items())
    all_used = not problem.use_all_devices or used == dict(problem.device_counts)
    return at == problem.num_layers and enough and all_used and len(plan.stages) <= (problem.max_stages or at)


def least_memory(problem: Problem) -> float | None:
    """The factor of every device's memory from which on there is a plan; None if no memory would do."""
    needed = _needed_bytes(problem)
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    low, high = 0.0, 2.0 * float((needed[np.isfinite(needed)] if np.isfinite(needed).any() else np.ones(1)).max())
    high /= float(costs.capacity_bytes_C.min())
    if not any(_reachable(problem, needed, high)):
        return None
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if any(_reachable(problem, needed, middle)):
            high = middle
        else:
            low = middle
    # What some stage needs, of all that any needs the one that decides: exactly as much is enough.
    shares = (needed / costs.capacity_bytes_C[None, :, None, None]).ravel()
    shares = shares[(shares > low) & (shares <= high * (1 + SUMMED_TO))]
    return float(shares.max()) if len(shares) else high


def _held(problem: Problem, successors: int) -> int:
    """Microbatches that a stage holds with so many stages from it to the last."""
    return problem.num_microbatches if problem.schedule == "gpipe" else min(problem.num_microbatches, successors)


def _needed_bytes(problem: Problem) -> NDArray[np.float64]:
    """[held, c, start, stop]: what a stage needs with 1, 2, … microbatches in flight; inf where it cannot run."""
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    C, L = costs.fixed_bytes_CL.shape
    most = _held(problem, min(L, sum(problem.device_counts.values())))
    needed = np.full((most, C, L, L + 1), np.inf)
    for c in range(C):
        for start in range(L):
            span = slice(start, L)
            fixed = np.cumsum(costs.fixed_bytes_CL[c, span])
            active, step = np.cumsum(costs.activation_bytes_CL[c, span]), np.cumsum(costs.step_bytes_CL[c, span])
            scratch = np.maximum.accumulate(costs.temporary_bytes_CL[c, span])
            messages = costs.message_bytes_CL1[c, start] + costs.message_bytes_CL1[c, start + 1 :]
            possible = np.maximum.accumulate(np.isinf(costs.seconds_CL[c, span])) == 0
            for held in range(1, most + 1):
                total = fixed + messages + np.maximum(scratch + held * active, step)
                needed[held - 1, c, start, start + 1 :] = np.where(possible, total, np.inf)
    return needed


def _reachable(problem: Problem, needed: NDArray[np.float64], factor: float) -> Iterator[bool]:
    """For each number of stages and each way to use devices, whether its stages can hold every layer."""
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    L, names = problem.num_layers, list(problem.device_counts)
    capacity = factor * costs.capacity_bytes_C * (1 + SUMMED_TO)
    fits = [needed[held] <= capacity[:, None, None] for held in range(len(needed))]
    start = np.zeros(L + 1, dtype=bool)
    start[L] = True
    states = {tuple([0] * len(names)): start}
    for successors in range(1, min(L, problem.max_stages or L) + 1):
        longer: dict[tuple[int, ...], NDArray[np.bool_]] = {}
        for used, cuts in states.items():
            for c, configuration in enumerate(problem.configurations):
                t = names.index(configuration.device_type)
                more = (*used[:t], used[t] + configuration.num_devices, *used[t + 1 :])
                if more[t] > problem.device_counts[names[t]]:
                    continue
                reached = fits[_held(problem, successors) - 1][c][:, cuts].any(axis=1)
                known = longer.setdefault(more, np.zeros(L + 1, dtype=bool))
                known[:L] |= reached
        states = {used: cuts for used, cuts in longer.items() if cuts.any()}
        for used, cuts in states.items():
            yield bool(cuts[0]) and (not problem.use_all_devices or used == tuple(problem.device_counts.values()))
        if not states:
            return


def _stage_fits(problem: Problem, start: int, stop: int, c: int, successors: int) -> bool:
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    span = slice(start, stop)
    if np.isinf(costs.seconds_CL[c, span]).any():
        return False
    active = _held(problem, successors) * math.fsum(costs.activation_bytes_CL[c, span])
    working = max(costs.temporary_bytes_CL[c, span].max() + active, math.fsum(costs.step_bytes_CL[c, span]))
    messages = costs.message_bytes_CL1[c, start] + costs.message_bytes_CL1[c, stop]
    needed = math.fsum(costs.fixed_bytes_CL[c, span]) + messages + working
    return bool(needed <= costs.capacity_bytes_C[c] * (1 + SUMMED_TO))


def _problem(rng: np.random.Generator, large: bool) -> Problem:
    """A problem of one or two types; each device's memory is a share, to be multiplied by what is wanted."""
    L = int(rng.integers(LARGE_LAYERS[0], LARGE_LAYERS[1] + 1)) if large else int(rng.integers(2, 7))
    num_types = int(rng.integers(1, 3))
    most = 12 if large else 4
    total = int(rng.integers(2, most + 1))
    first = total if num_types == 1 else int(rng.integers(1, total))
    counts = {"a": first} if num_types == 1 else {"a": first, "b": total - first}
    configurations = [StageConfiguration(name) for name in counts]
    for name in counts:  # wider stages, with and without sharded states
        if rng.random() < 0.5:
            levels = (0, 1, 3) if rng.random() < 0.3 else (int(rng.choice([0, 1, 3])),)
            configurations += [StageConfiguration(name, 1, 2, data_parallel=2, zero_level=level) for level in levels]
    C = len(configurations)
    whole = rng.random() < 0.5
    share = {name: 1.0 if rng.random() < 0.5 else float(rng.uniform(0.4, 1.0)) for name in counts}

    def draw(most_bytes: float) -> NDArray[np.float64]:
        values = rng.uniform(0.1, 1.0, L) * most_bytes * (rng.random(L) < 0.95)
        return np.ceil(values) if whole else values

    def of_each(row: NDArray[np.float64], sharded: bool) -> NDArray[np.float64]:
        parts = [
            configuration.data_parallel if sharded and configuration.zero_level == 3 else 1
            for configuration in configurations
        ]
        return np.stack([row / part for part in parts])

    nothing = np.zeros((C, L))
    speed_C = np.array([1.0 if configuration.device_type == "a" else 2.0 for configuration in configurations])
    work = rng.uniform(0.5, 1.5, L) if rng.random() < 0.7 else np.ones(L)
    seconds = work[None, :] / (speed_C * [configuration.num_devices for configuration in configurations])[:, None]
    if rng.random() < 0.2:
        seconds = np.where(rng.random((C, L)) < (0.01 if large else 0.1), np.inf, seconds)
    held = rng.random() < 0.6
    messages = draw(40.0)[None, :].repeat(C, axis=0) if rng.random() < 0.4 else np.zeros((C, L))
    steps = of_each(draw(200.0), sharded=True) if rng.random() < 0.3 else nothing
    return Problem(
        layers=tuple(f"layer {i}" for i in range(L)),
        configurations=tuple(configurations),
        device_counts=counts,
        costs=AdditiveCosts(
            seconds_CL=seconds,
            per_step_seconds_CL=nothing,
            per_step_latency_seconds_C=np.zeros(C),
            fixed_bytes_CL=of_each(draw(100.0), sharded=True),
            activation_bytes_CL=of_each(draw(30.0), sharded=False) if held else nothing,
            temporary_bytes_CL=of_each(draw(50.0), sharded=False) if rng.random() < 0.3 else nothing,
            capacity_bytes_C=np.array([share[configuration.device_type] for configuration in configurations]),
            message_bytes_CL1=np.pad(messages, ((0, 0), (0, 1))),
            step_bytes_CL=steps,
        ),
        cut_bytes_L1=np.ones(L + 1),
        link_latency_seconds_CC=np.zeros((C, C)),
        link_seconds_per_byte_CC=np.full((C, C), 1e-3),
        schedule=str(rng.choice(["1f1b", "gpipe"])),
        num_microbatches=int(rng.choice([1, 4, 8])),
        use_all_devices=bool(rng.random() < 0.2),
        max_stages=int(rng.integers(2, 9)) if rng.random() < 0.2 else None,
    )
