"""Rows of equal stages: what a person tries before any planner, and cuts for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, permutations, repeat

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Answer, DoesNotFitError, Obstacle, Plan, Problem, Stage, StageConfiguration
from dejavu.plans.pricing import check
from dejavu.plans.stage_costs import AdditiveCosts, Floats, PlanError
from dejavu.search._base import Incumbent

_NEAR = 0.1  # of the cheapest price: over slow links messages make a step longer than its price by as much
_MAX_TYPES_IN_EVERY_ORDER = 3  # 3! orders; with more types only the cluster's own order is tried

Row = Sequence[StageConfiguration]
Ints = NDArray[np.int64]


def rows_of_one_type(problem: Problem) -> Iterator[list[StageConfiguration]]:
    """One configuration, any number of stages that there are devices for."""
    for configuration in problem.configurations:
        room = problem.device_counts[configuration.kind] // configuration.num_devices
        for num_stages in range(1, min(room, problem.most_stages) + 1):
            yield [configuration] * num_stages


def rows_of_several_types(problem: Problem) -> Iterator[list[StageConfiguration]]:
    """One shape of stage on several types, as many stages as each type has room for, the types in any order."""
    alike: dict[StageConfiguration, list[StageConfiguration]] = {}
    for configuration in problem.configurations:
        alike.setdefault(_shape(configuration), []).append(configuration)
    for present in alike.values():
        for order in _orders(present):
            stages = [c for c in order for _ in range(problem.device_counts[c.kind] // c.num_devices)]
            if 1 <= len(stages) <= problem.most_stages:
                yield stages


def plan_of_row(problem: Problem, row: Row, cuts: Sequence[int]) -> Plan:
    """The row's stages between these cuts."""
    stages = (Stage(a, b, configuration) for (a, b), configuration in zip(pairwise(cuts), row, strict=True))
    return Plan(tuple(stages), problem.schedule, problem.num_microbatches)


def indices(problem: Problem, row: Row) -> list[int]:
    """The index of each stage's configuration; equal neighbours are looked up once."""
    return [c for configuration, same in groupby(row) for c in repeat(problem.index(configuration), len(list(same)))]


def cheapest(problem: Problem, rows: Iterable[tuple[Row, Sequence[int]]], best: Incumbent, what: str) -> Answer:
    """The cheapest of those that fit; `what` names them where none does. It proves nothing.

    Rows are looked at by rising price, so that the first one that fits is the cheapest: few are priced as plans. Of
    each other number of stages the cheapest is near it, if it costs at most `_NEAR` more.
    """
    complaint, near = "", dict[int, Plan]()  # by the number of stages
    found, most = [(row, cuts) for row, cuts in rows], np.inf
    prices = _QuickPrice(problem).step_seconds(found)
    for k in np.argsort(prices, kind="stable"):
        if near and not prices[k] <= most:
            break
        if len(found[k][0]) in near:
            continue
        plan = plan_of_row(problem, *found[k])
        try:
            if near:
                check(problem, plan)
            else:
                best.offer(plan)
                most = prices[k] * (1 + _NEAR)
        except (PlanError, DoesNotFitError) as error:
            complaint = complaint or str(error)
            continue
        near[len(plan.stages)] = plan
    if best.plan is None:
        why = f"the cheapest: {complaint}" if complaint else "no configuration fits the devices"
        return best.not_found(Obstacle.NONE_CONSIDERED_FITS, f"no plan of {what} fits ({why}); another may")
    return replace(best.result(lower_bound_seconds=0.0), near=tuple(near.values())[1:])


class _QuickPrice:
    """`plans.price` without its checks, from the sums over layers that it has itself; as near to it as rounding.

    Shape suffixes: R = rows of equal length, S = their stages, S1 = S + 1 cuts.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, costs = problem, problem.costs
        self._sums_2CL1 = list[Floats]()  # of seconds and of per-step seconds: on the grid, and the rests
        if isinstance(costs, AdditiveCosts) and costs.can_run_CL.all():
            every = range(costs.num_configurations)
            for name in ("seconds_CL", "per_step_seconds_CL"):
                self._sums_2CL1.append(np.stack([costs.sums[name].row(c) for c in every], axis=1))

    def step_seconds(self, rows: Sequence[tuple[Row, Sequence[int]]]) -> Floats:
        """The formula's step of each; inf or nan where a stage is not possible."""
        by_length: dict[int, list[int]] = {}
        for k, (row, _) in enumerate(rows):
            by_length.setdefault(len(row), []).append(k)
        found = np.empty(len(rows))
        for alike in by_length.values():
            c_RS = np.array([indices(self._problem, rows[k][0]) for k in alike])
            found[alike] = self._of_one_length(c_RS, np.array([rows[k][1] for k in alike]))
        return found

    def _of_one_length(self, c_RS: Ints, cut_RS1: Ints) -> Floats:
        problem, repeats = self._problem, self._problem.num_microbatches - 1
        start_RS, stop_RS = cut_RS1[:, :-1], cut_RS1[:, 1:]
        if self._sums_2CL1 and isinstance(problem.costs, AdditiveCosts):
            seconds, once = ((sums[:, c_RS, stop_RS] - sums[:, c_RS, start_RS]).sum(axis=0) for sums in self._sums_2CL1)
            once = once + problem.costs.per_step_latency_seconds_C[c_RS]
        else:
            spans = np.stack([start_RS, stop_RS, c_RS], axis=-1).reshape(-1, 3).tolist()
            seconds = np.array([problem.costs.stage_seconds(*span) for span in spans]).reshape(c_RS.shape)
            once = np.array([problem.costs.per_step_seconds(*span) for span in spans]).reshape(c_RS.shape)
        ends = c_RS[:, :-1], c_RS[:, 1:]
        per_byte = problem.link_seconds_per_byte_CC[ends]
        links = 2.0 * (problem.link_latency_seconds_CC[ends] + per_byte * problem.cut_bytes_L1[stop_RS[:, :-1]])
        once = once + repeats * seconds if repeats else once  # 0 · inf is no number
        busiest = np.maximum(once.max(axis=1), repeats * links.max(axis=1, initial=0.0))
        step_seconds: Floats = seconds.sum(axis=1) + links.sum(axis=1) + busiest
        return step_seconds


def _orders(present: list[StageConfiguration]) -> Iterator[tuple[StageConfiguration, ...]]:
    if len(present) > _MAX_TYPES_IN_EVERY_ORDER:
        yield tuple(present)
        return
    for num_types in range(2, len(present) + 1):
        yield from permutations(present, num_types)


def _shape(configuration: StageConfiguration) -> StageConfiguration:
    return replace(configuration, device_type="", groups=())
