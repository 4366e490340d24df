"""Fewer layers for a search: runs of layers that are cut where little crosses, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem, Stage
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search.coarse import refine
from dejavu.search.shared.stage_table import StageTable

Ints = NDArray[np.int64]

_LEAST_SECONDS = 1e-12  # of a layer, where the least plan takes about 1: free layers are spread over clusters too
FEWEST_CUTS, _LAYERS_EACH = 256, 10  # of a few, for prices to begin with
_HALVINGS = 12  # of the range of bottlenecks: to a four-thousandth


def boundaries(problem: Problem, num_clusters: int) -> Ints:
    """Cuts, 0 and L among them, between clusters of about equal work; each is the cheapest cut near its place.

    Work is what a layer takes under its best configuration. Between two places the cut with the fewest bytes is taken,
    the nearest of equals.
    """
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    L = problem.num_layers
    if num_clusters >= L:
        return np.arange(L + 1)
    work_L1 = np.concatenate([[0.0], np.cumsum(costs.least_seconds_L + _LEAST_SECONDS)])
    wanted = np.linspace(0.0, work_L1[-1], num_clusters + 1)
    middles = np.searchsorted(work_L1, 0.5 * (wanted[1:] + wanted[:-1]))
    found = [0]
    for k in range(1, num_clusters):
        near = np.arange(max(int(middles[k - 1]), found[-1] + 1), min(int(middles[k]) + 1, L))
        if len(near):
            distance = np.abs(work_L1[near] - wanted[k])
            found.append(int(near[np.lexsort((distance, problem.cut_bytes_L1[near]))[0]]))
    return np.unique([*found, L])


def num_few(problem: Problem) -> int:
    """How many clusters are few: prices begin with them, and whether any plan fits is asked over them."""
    return max(FEWEST_CUTS, problem.num_layers // _LAYERS_EACH)


def clustered(problem: Problem, cuts: Ints) -> Problem:
    """The problem whose layers are the runs between these cuts: its plans are plans of the original, at the same price.

    Sums are summed; scratch is the largest of a run's.
    """
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)

    def summed(table_CL: Floats) -> Floats:
        return np.add.reduceat(table_CL, cuts[:-1], axis=1)

    return replace(
        problem,
        layers=tuple(f"{problem.layers[a]} … {problem.layers[b - 1]}" for a, b in pairwise(cuts)),
        costs=AdditiveCosts(
            seconds_CL=summed(costs.seconds_CL),
            per_step_seconds_CL=summed(costs.per_step_seconds_CL),
            per_step_latency_seconds_C=costs.per_step_latency_seconds_C,
            fixed_bytes_CL=summed(costs.fixed_bytes_CL),
            activation_bytes_CL=summed(costs.activation_bytes_CL),
            temporary_bytes_CL=np.maximum.reduceat(costs.temporary_bytes_CL, cuts[:-1], axis=1),
            capacity_bytes_C=costs.capacity_bytes_C,
            message_bytes_CL1=costs.message_bytes_CL1[:, cuts],
            step_bytes_CL=summed(costs.step_bytes_CL),
            host_fixed_bytes_CL=summed(costs.host_fixed_bytes_CL),
            host_activation_bytes_CL=summed(costs.host_activation_bytes_CL),
            host_capacity_bytes_C=costs.host_capacity_bytes_C,
        ),
        cut_bytes_L1=problem.cut_bytes_L1[cuts],
    )


def unclustered(plan: Plan, cuts: Ints) -> Plan:
    """A plan of the clustered problem as one of the original."""
    stages = (Stage(int(cuts[stage.start]), int(cuts[stage.stop]), stage.configuration) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def reclustered(plan: Plan, cuts: Ints) -> Plan:
    """The way there: a plan of the original whose cuts are all among these."""
    at = {int(cut): k for k, cut in enumerate(cuts)}
    stages = (Stage(at[stage.start], at[stage.stop], stage.configuration) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def refined(problem: Problem, plan: Plan, reach: int, table: StageTable) -> Iterator[Plan]:
    """Plans with the same configurations and better cuts, each at most `reach` layers from where it was.

    The limit on the bottleneck is bisected; with it, cuts of the least Σ are a dynamic program (`coarse.refine`).
    """
    index = [problem.index(stage.configuration) for stage in plan.stages]
    S, B = len(index), plan.num_microbatches
    need = np.array([problem.in_flight(s, S) for s in range(S)], dtype=np.int64)
    cuts = np.array([0, *plan.cuts, problem.num_layers], dtype=np.int64)
    worst = max(
        (B - 1) * problem.costs.stage_seconds(stage.start, stage.stop, c)
        + problem.costs.per_step_seconds(stage.start, stage.stop, c)
        for stage, c in zip(plan.stages, index, strict=True)
    )
    low, high = 0.0, worst
    for _ in range(_HALVINGS):
        limit = 0.5 * (low + high)
        sum_seconds, found = refine.best_cuts(
            limit, float(B - 1), reach, cuts, need, np.array(index), table.costs, table.links
        )
        if sum_seconds == np.inf:
            low = limit
        else:
            high = limit
            pairs = zip(found, found[1:], plan.stages, strict=False)
            yield replace(plan, stages=tuple(replace(s, start=int(a), stop=int(b)) for a, b, s in pairs))
