"""What a person does by hand: equal stages, layers cut evenly by count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar

from dejavu.plan import Answer, DoesNotFitError, Obstacle, Plan, Problem, Stage, StageConfiguration
from dejavu.search._base import Incumbent, Search
from dejavu.stage_costs import PlanError

_MAX_TYPES_IN_EVERY_ORDER = 3  # 3! orders; with more types only the cluster's own order is tried


@dataclass(frozen=True)
class Uniform(Search):
    """The best plan whose stages are all alike: the yardstick that a search must beat.

    Each plan has one shape of stage (nodes × devices, data and tensor parallel, recompute, ZeRO), on one type of
    device with any number of stages, or on several types with as many stages as each type has room for, if the layers
    and the problem's `max_stages` allow so many. Layers are cut evenly by count, the earlier stages taking one more. A
    person leaves no device idle: with `all_devices_first` the plans that use the most devices are looked at first, and
    the cheapest of those that fit is taken, even where fewer devices would be faster. It proves nothing, and finds
    nothing where only an uneven cut fits.
    """

    name: ClassVar[str] = "uniform"
    all_devices_first: bool = True

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        complaint = ""
        used = 0
        for plan in sorted(even_plans(problem), key=_num_devices, reverse=True):
            if best.plan is not None and (
                best.remaining_seconds < 0 or (self.all_devices_first and _num_devices(plan) < used)
            ):
                break
            try:
                best.offer(plan)
                used = _num_devices(plan)
            except (PlanError, DoesNotFitError) as error:
                complaint = str(error)
        if best.plan is None:
            why = f"the last one tried: {complaint}" if complaint else "no configuration fits the devices"
            few = "" if problem.max_stages is None else f", at most {problem.max_stages},"
            return best.not_found(
                Obstacle.NONE_CONSIDERED_FITS, f"no plan of equal stages{few} fits ({why}); an uneven one may"
            )
        return best.result(lower_bound_seconds=0.0)


def even_plans(problem: Problem) -> Iterator[Plan]:
    """Every plan of equal stages, fitting its memory or not; on one type of device first."""
    most = problem.most_stages
    for configuration in problem.configurations:
        room = problem.device_counts[configuration.device_type] // configuration.num_devices
        for num_stages in range(1, min(room, most) + 1):
            yield _even_plan(problem, [configuration] * num_stages)
    for shape in dict.fromkeys(_shape(configuration) for configuration in problem.configurations):
        present = [c for c in problem.configurations if _shape(c) == shape]
        for order in _orders(present):
            stages = [c for c in order for _ in range(problem.device_counts[c.device_type] // c.num_devices)]
            if 1 <= len(stages) <= most:
                yield _even_plan(problem, stages)


def _orders(present: list[StageConfiguration]) -> Iterator[tuple[StageConfiguration, ...]]:
    if len(present) > _MAX_TYPES_IN_EVERY_ORDER:
        yield tuple(present)
        return
    for num_types in range(2, len(present) + 1):
        yield from permutations(present, num_types)


def _shape(configuration: StageConfiguration) -> StageConfiguration:
    return replace(configuration, device_type="")


def _even_plan(problem: Problem, configurations: list[StageConfiguration]) -> Plan:
    each, longer = divmod(problem.num_layers, len(configurations))
    stages, start = [], 0
    for s, configuration in enumerate(configurations):
        stop = start + each + (s < longer)
        stages.append(Stage(start, stop, configuration))
        start = stop
    return Plan(tuple(stages), problem.schedule, problem.num_microbatches)


def _num_devices(plan: Plan) -> int:
    return sum(stage.configuration.num_devices for stage in plan.stages)
