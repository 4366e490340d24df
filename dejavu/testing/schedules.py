"""What every schedule owes: torch runs it, its memory rule is true, and it can be searched and simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from dejavu.foundation.registry import named
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, Action, Pass, Schedule, actions, allowed_microbatches
from dejavu.simulation import StageSeconds, simulate
from dejavu.testing.expect import expect

MOST_RANKS, MOST_MICROBATCHES = 4, 13


def check_schedule(name: str) -> None:
    """Hold a schedule to every case of this file.

        SCHEDULES["mine"] = Schedule("mine", "MyScheduleInTorch", in_flight)
        check_schedule("mine")

    Raises:
        AssertionError: it breaks one of them.
        InputError: there is no such schedule.
    """
    schedule = named(SCHEDULES, name)
    for case in CASES:
        case(schedule)


def sizes(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Numbers of stages and of microbatches that the schedule runs."""
    for ranks in range(1, MOST_RANKS + 1):
        S = ranks * schedule.stages_per_rank
        yield from ((S, B) for B in range(ranks, MOST_MICROBATCHES + 1) if allowed_microbatches(schedule.name, S, B))


def most_held(order: Sequence[Action]) -> dict[int, int]:
    """Of each stage, the most microbatches between their forward and the end of their backward pass."""
    held: Counter[int] = Counter()
    most: dict[int, int] = {}
    for action in order:
        held[action.stage] += {Pass.FORWARD: 1, Pass.BACKWARD_INPUT: 0}.get(action.direction, -1)
        most[action.stage] = max(most.get(action.stage, 0), held[action.stage])
    left = {stage: count for stage, count in held.items() if count}
    expect(not left, f"microbatches are held when the step ends: {left} by stage")
    return most


def its_name_is_its_key_and_what_stands_for_it_in_searches_runs_one_stage_a_rank(schedule: Schedule) -> None:
    """The searches price and bound schedules of one stage a rank only."""
    expect(SCHEDULES.get(schedule.name) is schedule, f"{schedule.name!r} is not the key that it stands under")
    rule = named(SCHEDULES, schedule.searched_as)
    expect(rule.stages_per_rank == 1, f"{schedule.name}: searched_as is {rule.name}, which runs several stages a rank")
    if schedule.stages_per_rank == 1:
        expect(rule is schedule, f"{schedule.name}: searched_as is {rule.name}; wanted itself")


def it_runs_some_size(schedule: Schedule) -> None:
    """Of every number of ranks, twice as many microbatches at least."""
    found = set(sizes(schedule))
    for ranks in range(1, MOST_RANKS + 1):
        S = ranks * schedule.stages_per_rank
        expect(
            any(size[0] == S for size in found), f"{schedule.name}: torch runs it on no number of microbatches, {S=}"
        )


def it_runs_as_few_microbatches_as_it_says(schedule: Schedule) -> None:
    """Planners look for no more ranks than a step has microbatches for."""
    for ranks in range(1, MOST_RANKS + 1):
        S, said = ranks * schedule.stages_per_rank, ranks * schedule.microbatches_per_rank
        fewest = min((B for stages, B in sizes(schedule) if stages == S), default=None)
        expect(
            fewest == said, f"{schedule.name}: {S} stages run {fewest} microbatches; microbatches_per_rank says {said}"
        )


def every_stage_is_on_one_rank(schedule: Schedule) -> None:
    """And a rank runs so many as the schedule says."""
    for ranks in range(1, MOST_RANKS + 1):
        S = ranks * schedule.stages_per_rank
        own = schedule.ranks(S)
        expect(sorted(s for row in own for s in row) == list(range(S)), f"{schedule.name}: {S} stages are run as {own}")
        expect({len(row) for row in own} == {schedule.stages_per_rank}, f"{schedule.name}: ranks run {own}")


def every_pass_is_done_once_by_the_stages_own_rank(schedule: Schedule) -> None:
    """Forward, and backward whole or in its two parts."""
    for S, B in sizes(schedule):
        for rank, order in enumerate(actions(schedule.name, S, B)):
            told = f"{schedule.name}, {S} stages, {B} microbatches, rank {rank}"
            stages = {action.stage for action in order}
            expect(stages == set(schedule.stages_of(rank, S)), f"{told}: torch runs the stages {stages} there")
            for stage in stages:
                ways = Counter((action.direction, action.microbatch) for action in order if action.stage == stage)
                expect(set(ways.values()) == {1}, f"{told}: stage {stage} does some pass twice, {ways}")
                for kinds in ({Pass.FORWARD}, {Pass.BACKWARD, Pass.BACKWARD_INPUT}):
                    done = sorted(m for way, m in ways if way in kinds)
                    expect(
                        done == list(range(B)), f"{told}: stage {stage} does {set(kinds)} of the microbatches {done}"
                    )
                inputs, weights = (
                    {m for way, m in ways if way == part} for part in (Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)
                )
                expect(inputs == weights, f"{told}: stage {stage} splits {inputs}, but has the weights of {weights}")


def no_stage_holds_more_microbatches_than_it_says(schedule: Schedule) -> None:
    """And of one stage a rank exactly so many: plans that just fit are found by this rule."""
    for S, B in sizes(schedule):
        for order in actions(schedule.name, S, B):
            for stage, held in most_held(order).items():
                said = schedule.in_flight(stage, S, B)
                told = (
                    f"{schedule.name}, {S} stages, {B} microbatches: stage {stage} holds {held}, in_flight says {said}"
                )
                expect(held <= said, told)
                expect(held == said or schedule.stages_per_rank > 1, told)


def a_simulated_step_is_no_shorter_than_its_work(schedule: Schedule) -> None:
    """Nor than the way of one microbatch there and back, nor longer than everything one after the other."""
    configuration = StageConfiguration("device")
    for S, B in sizes(schedule):
        stages = [StageSeconds(1.0 + s, 2.0 + s, 0.5) for s in range(S)]
        plan = Plan(tuple(Stage(s, s + 1, configuration) for s in range(S)), schedule.name, B)
        found = simulate(plan, stages).step_seconds
        work = [B * (one.forward_seconds + one.backward_seconds) + one.per_step_seconds for one in stages]
        waited_for = 0.5 if schedule.splits_backward else 1.0  # nobody waits for the weights' part
        path = sum(one.forward_seconds + waited_for * one.backward_seconds for one in stages)
        least = max(path, *(sum(work[s] for s in own) for own in plan.ranks))
        told = f"{schedule.name}, {S} stages, {B} microbatches: a step of {found} s"
        expect(least - 1e-9 <= found <= sum(work) + 1e-9, f"{told}; wanted from {least} to {sum(work)}")


CASES: tuple[Callable[[Schedule], None], ...] = (
    its_name_is_its_key_and_what_stands_for_it_in_searches_runs_one_stage_a_rank,
    it_runs_some_size,
    it_runs_as_few_microbatches_as_it_says,
    every_stage_is_on_one_rank,
    every_pass_is_done_once_by_the_stages_own_rank,
    no_stage_holds_more_microbatches_than_it_says,
    a_simulated_step_is_no_shorter_than_its_work,
)
