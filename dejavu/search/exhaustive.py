"""Every plan of a small problem, one after the other: the referee of the other searches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from dejavu.plan import Answer, DoesNotFitError, Obstacle, Plan, Problem, Stage
from dejavu.search._base import Incumbent, Search, TooLargeError
from dejavu.stage_costs import PlanError


@dataclass(frozen=True)
class Exhaustive(Search):
    """Prices every plan; slow, and too simple to be wrong.

    Attributes:
        max_plans: problems with more plans than this, before memory is looked at, are refused.
    """

    name: ClassVar[str] = "exhaustive"
    max_plans: int = 200_000

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        count = count_plans(problem)
        if count > self.max_plans:
            raise TooLargeError(
                f"exhaustive search takes problems of at most {self.max_plans:,} plans; this one has {count:,}"
            )
        complaint = ""
        for plan in all_plans(problem):
            try:
                best.offer(plan)
            except (PlanError, DoesNotFitError) as error:
                complaint = str(error)
            if best.remaining_seconds < 0:
                late = f"exhaustive search found no plan in {best.budget_seconds:g} s; more may do"
                return best.not_found(Obstacle.OUT_OF_TIME, late)
        if best.plan is None:
            why = f"none of the {count:,} plans fits; the last one looked at: {complaint}"
            few = "" if problem.max_stages is None else f" in at most {problem.max_stages} stages"
            return best.infeasible(why if count else f"no stage configurations together fit the devices{few}")
        return best.result(lower_bound_seconds=best.step_seconds)


def count_plans(problem: Problem) -> int:
    """How many ways there are to cut the layers and spread the stages within the stage and device counts."""
    types = tuple(problem.device_counts)

    @cache
    def count(layers: int, stages: int, left: tuple[int, ...]) -> int:
        if layers == 0:
            return int(not (problem.use_all_devices and any(left)))
        if stages == 0:
            return 0
        return sum(
            count(layers - taken, min(stages - 1, layers - taken), rest)  # no bound on stages: no more states
            for rest in _after_one_stage(problem, types, left)
            for taken in range(1, layers + 1)
        )

    return count(problem.num_layers, problem.most_stages, tuple(problem.device_counts.values()))


def all_plans(problem: Problem) -> Iterator[Plan]:
    """Every plan within the stage and device counts, fitting its memory or not."""

    def stages(start: int, room: int, left: dict[str, int]) -> Iterator[tuple[Stage, ...]]:
        if start == problem.num_layers:
            if not (problem.use_all_devices and any(left.values())):
                yield ()
            return
        if room == 0:
            return
        for configuration in problem.configurations:
            kind, taken = configuration.device_type, configuration.num_devices
            if taken <= left[kind]:
                for stop in range(start + 1, problem.num_layers + 1):
                    for rest in stages(stop, room - 1, {**left, kind: left[kind] - taken}):
                        yield (Stage(start, stop, configuration), *rest)

    for chosen in stages(0, problem.most_stages, dict(problem.device_counts)):
        yield Plan(chosen, problem.schedule, problem.num_microbatches)


def _after_one_stage(problem: Problem, types: tuple[str, ...], left: tuple[int, ...]) -> list[tuple[int, ...]]:
    rests = []
    for configuration in problem.configurations:
        at = types.index(configuration.device_type)
        if configuration.num_devices <= left[at]:
            rests.append((*left[:at], left[at] - configuration.num_devices, *left[at + 1 :]))
    return rests
