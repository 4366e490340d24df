"""Rows of equal stages: what a person tries before any planner, and cuts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations

from dejavu.plan import Answer, DoesNotFitError, Obstacle, Plan, Problem, Stage, StageConfiguration
from dejavu.search._base import Incumbent
from dejavu.stage_costs import PlanError

_MAX_TYPES_IN_EVERY_ORDER = 3  # 3! orders; with more types only the cluster's own order is tried

Row = Sequence[StageConfiguration]
Cut = Callable[[Problem, Row], Sequence[int]]  # the S + 1 positions, from 0 to L, that a row of S stages is cut at


def rows_of_one_type(problem: Problem) -> Iterator[list[StageConfiguration]]:
    """One configuration, any number of stages that there are devices for."""
    for configuration in problem.configurations:
        room = problem.device_counts[configuration.device_type] // configuration.num_devices
        for num_stages in range(1, min(room, problem.most_stages) + 1):
            yield [configuration] * num_stages


def rows_of_several_types(problem: Problem) -> Iterator[list[StageConfiguration]]:
    """One shape of stage on several types, as many stages as each type has room for, the types in any order."""
    for shape in dict.fromkeys(_shape(configuration) for configuration in problem.configurations):
        present = [c for c in problem.configurations if _shape(c) == shape]
        for order in _orders(present):
            stages = [c for c in order for _ in range(problem.device_counts[c.device_type] // c.num_devices)]
            if 1 <= len(stages) <= problem.most_stages:
                yield stages


def plan_of_row(problem: Problem, row: Row, cuts: Sequence[int]) -> Plan:
    """The row's stages between these cuts."""
    stages = (Stage(a, b, how) for (a, b), how in zip(pairwise(cuts), row, strict=True))
    return Plan(tuple(stages), problem.schedule, problem.num_microbatches)


def cheapest(plans: Iterable[Plan], best: Incumbent, what: str) -> Answer:
    """The cheapest of those that fit; `what` names them where none does. It proves nothing."""
    complaint = ""
    for plan in plans:
        if best.is_late:
            break
        try:
            best.offer(plan)
        except (PlanError, DoesNotFitError) as error:
            complaint = str(error)
    if best.plan is None:
        why = f"the last one tried: {complaint}" if complaint else "no configuration fits the devices"
        return best.not_found(Obstacle.NONE_CONSIDERED_FITS, f"no plan of {what} fits ({why}); another may")
    return best.result(lower_bound_seconds=0.0)


def num_devices(plan: Plan) -> int:
    return sum(stage.configuration.num_devices for stage in plan.stages)


def _orders(present: list[StageConfiguration]) -> Iterator[tuple[StageConfiguration, ...]]:
    if len(present) > _MAX_TYPES_IN_EVERY_ORDER:
        yield tuple(present)
        return
    for num_types in range(2, len(present) + 1):
        yield from permutations(present, num_types)


def _shape(configuration: StageConfiguration) -> StageConfiguration:
    return replace(configuration, device_type="")
