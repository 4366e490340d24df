"""Every plan of a small problem, one after the other: the referee of the other searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from dejavu.foundation.units import plural
from dejavu.plans import Answer, DoesNotFitError, Obstacle, Plan, Problem, Stage
from dejavu.plans.stage_costs import PlanError
from dejavu.search._base import Incumbent, Search, TooLargeError


@dataclass(frozen=True)
class Exhaustive(Search):
    """Prices every plan; slow, and too simple to be wrong.

    Attributes:
        max_plans: problems with more plans than this, before memory is looked at, are refused.
    """

    name: ClassVar[str] = "exhaustive"
    max_plans: int = 200_000

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        late = f"exhaustive search did not look at every plan in {best.budget_seconds:g} s"

        def is_late() -> bool:
            return best.remaining_seconds < 0

        count = count_plans(problem, is_late)
        if count is None:
            return best.not_found(Obstacle.OUT_OF_TIME, late)
        if count > self.max_plans:
            raise TooLargeError(
                f"exhaustive search takes problems of at most {self.max_plans:,} plans; this one has {count:,}"
            )
        complaint = ""
        for plan in all_plans(problem, is_late):
            try:
                best.offer(plan)
            except (PlanError, DoesNotFitError) as error:
                complaint = str(error)
        if is_late():
            return best.not_found(Obstacle.OUT_OF_TIME, late)
        if best.plan is None:
            why = f"none of the {count:,} plans fits; the last one looked at: {complaint}"
            few = "" if problem.max_stages is None else f" in at most {plural(problem.max_stages, 'stage')}"
            return best.infeasible(why if count else f"no stage configurations together fit the devices{few}")
        return best.result(lower_bound_seconds=best.step_seconds)


def count_plans(problem: Problem, is_late: Callable[[], bool] = lambda: False) -> int | None:
    """How many ways there are to cut the layers and spread the stages within the stage and device counts.

    None where it was stopped.
    """
    types = tuple(problem.device_counts)
    L = problem.num_layers
    left = tuple(problem.device_counts.values())
    ways = {left: [1] + [0] * L}  # of so many stages, by the devices left and the layers that they hold
    total = 0
    for _ in range(problem.most_stages):
        longer: dict[tuple[int, ...], list[int]] = {}
        for devices, by_layers in ways.items():
            if is_late():
                return None
            below = list(accumulate(by_layers, initial=0))[:-1]  # [layers]: ways to hold fewer
            for rest in _after_one_stage(problem, types, devices):
                counts = longer.setdefault(rest, [0] * (L + 1))
                for layers in range(1, L + 1):
                    counts[layers] += below[layers]
        total += sum(by[L] for devices, by in longer.items() if not (problem.use_all_devices and any(devices)))
        ways = longer
        if not ways:
            break
    return total


def all_plans(problem: Problem, is_late: Callable[[], bool] = lambda: False) -> Iterator[Plan]:
    """Every plan within the stage and device counts, fitting its memory or not; no more once it is late."""

    def stages(start: int, room: int, left: dict[str, int]) -> Iterator[tuple[Stage, ...]]:
        if start == problem.num_layers:
            if not (problem.use_all_devices and any(left.values())):
                yield ()
            return
        if room == 0:
            return
        for configuration in problem.configurations:
            kind, taken = configuration.kind, configuration.num_devices
            if taken <= left[kind]:
                for stop in range(start + 1, problem.num_layers + 1):
                    if is_late():
                        return
                    for rest in stages(stop, room - 1, {**left, kind: left[kind] - taken}):
                        yield (Stage(start, stop, configuration), *rest)

    for chosen in stages(0, problem.most_stages, dict(problem.device_counts)):
        yield Plan(chosen, problem.schedule, problem.num_microbatches)


def _after_one_stage(problem: Problem, types: tuple[str, ...], left: tuple[int, ...]) -> list[tuple[int, ...]]:
    rests = []
    for configuration in problem.configurations:
        at = types.index(configuration.kind)
        if configuration.num_devices <= left[at]:
            rests.append((*left[:at], left[at] - configuration.num_devices, *left[at + 1 :]))
    return rests
