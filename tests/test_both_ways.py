"""Chimera by ranks: two copies of the model in opposite directions have the losses of one process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.binding.binding import Binding, VirtualWorker
from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.cost.trainings.remember import remember
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.launch.preflight import check_plan, check_spreading
from dejavu.planning import PlanRequest
from dejavu.plans.orders import BACKWARD, FORWARD, both_ways_orders
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.job import resumed
from dejavu.runtime.job.resume import earlier_training
from dejavu.runtime.layout import World
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.single import train_single
from dejavu.simulation import StageSeconds, simulate
from dejavu.timing.events import measured_events
from dejavu.timing.training_times import TrainingTimes
from dejavu.workload import Workload
from tests.test_pipeline import DROPOUT, GPT, TOLERANCE

one = one_device()
BOTH = GPT.model_copy(update={"both_ways": True})
SIZES = [(P, B) for P in (2, 4, 6, 8) for B in (2, 4, 6, 8, 10, 16, 24)]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_every_pass_of_both_copies_has_its_input(num_ranks: int, num_microbatches: int) -> None:
    """Each copy has half of the microbatches, numbered through, and no rank waits for ever."""
    P, B = num_ranks, num_microbatches
    orders, done = both_ways_orders(P, B), set()
    for copy in (0, 1):
        numbers = {one.number for row in orders for one in row if one.copy == copy}
        assert numbers == set(range(B // 2))
    waiting = [list(row) for row in orders]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(waiting):
            while row:
                s, direction, _, copy, number = row[0]
                assert rank == (P - 1 - s if copy else s)
                end = s == (0 if direction == FORWARD else P - 1)
                before = (copy, s - 1 if direction == FORWARD else s + 1, direction, number)
                if not (end or before in done) or (direction == BACKWARD and (copy, s, FORWARD, number) not in done):
                    break
                done.add((copy, s, direction, number))
                row.pop(0)
                is_moving = True
    assert not any(waiting)
    assert len(done) == 2 * P * B


def test_both_directions_have_half_of_every_run_s_examples() -> None:
    workload = BOTH.model_copy(update={"accumulate": 3})
    job = job_of(workload, by_hand("1f1b", (0, 1, 2, 5, 8), [one] * 4, 2), 1)
    world = World.of(job.binding, job.workload)
    held = defaultdict(list)
    for place in job.binding.placements:
        for layout, seat in world.seats(place):
            assert seat.device == place.device
            held[layout.copy].append(seat.pipeline_rank)
    assert held == {0: [0, 1, 2, 3], 1: [3, 2, 1, 0]}
    assert [layout.first_example for layout in world.layouts] == [0, workload.run_size // 2]
    for run in world.holders:
        (ranks,) = run.ranks
        assert len(ranks) == 2 and sum(ranks) == 3


def test_chimera_is_a_schedule_by_its_name() -> None:
    given = GPT.model_dump(exclude={"schedule", "both_ways"})
    found = Workload.model_validate({**given, "schedule": "chimera"})
    assert (found.planned_schedule, found.searched_schedule, found.both_ways) == ("1f1b", "1f1b", True)
    fitted = found.model_copy(update={"schedule": "1f1b"})  # as a plan's training has it
    assert Workload.model_validate_json(fitted.model_dump_json()) == fitted and fitted.both_ways
    assert not Workload.model_validate({**given, "schedule": "1f1b"}).both_ways
    assert Workload.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ValueError, match="did you mean 'chimera'"):
        Workload.model_validate({**given, "schedule": "chimaera"})


@pytest.mark.parametrize(
    ("change", "bounds", "ranks", "count", "message"),
    [
        ({}, (0, 3, 5, 8), [one] * 3, 4, "3 stages and 4 microbatches; wanted even numbers"),
        ({}, (0, 3, 8), [one] * 2, 3, "2 stages and 3 microbatches; wanted even numbers"),
        ({}, (0, 8), [one], 4, "1 stage and 4 microbatches"),
        ({}, (0, 3, 8), [one_device(2), one], 4, "wanted one device for each stage"),
        ({}, (0, 3, 8), [one_device(1, 2), one], 4, "wanted one device for each stage"),
        ({"slices": 2}, (0, 3, 8), [one] * 2, 4, "wanted no slices"),
        (
            {"model_options": {"num_blocks": 6, "width": 32, "num_heads": 4, "tied": True}},
            (0, 3, 8),
            [one] * 2,
            4,
            "tied",
        ),
    ],
)
def test_what_cannot_go_both_ways_says_so(
    change: dict, bounds: tuple[int, ...], ranks: list, count: int, message: str
) -> None:
    job = job_of(BOTH.model_copy(update=change), by_hand("1f1b", bounds, ranks, count), 1)
    with pytest.raises((InputError, LaunchError), match=message):
        check_spreading(job)


def test_other_schedules_and_virtual_workers_go_one_way() -> None:
    with pytest.raises(InputError, match="the plan's schedule is gpipe"):
        check_spreading(job_of(BOTH, by_hand("gpipe", (0, 3, 8), [one] * 2, 4), 1))
    job = job_of(GPT, by_hand("1f1b", (0, 3, 8), [one] * 2, 4), 1)
    halves = (VirtualWorker(job.binding.plan, 12),) * 2
    placements = [replace(place, worker=number) for number in range(2) for place in job.binding.placements]
    binding = replace(job.binding, workers=halves, placements=tuple(placements))
    check_plan(replace(job, binding=binding))
    with pytest.raises(LaunchError, match="wanted no virtual workers"):
        check_plan(replace(job, binding=binding, workload=job.workload.model_copy(update={"both_ways": True})))


def test_requests_ask_for_what_both_directions_can_have(tmp_path: Path) -> None:
    link = Link(50e9, 1e-5)
    group = NodeGroup("g", 1, (), (("H200-SXM-141GB", 4),), link)
    cluster = Cluster("test", (group,), {"H200-SXM-141GB": catalogue()["H200-SXM-141GB"]}, {("g", "g"): link})
    request = PlanRequest(BOTH.model_copy(update={"schedule": "chimera"}), cluster, tmp_path)
    assert request.allowed_schedules == ("chimera",) and not request.listed_schedules
    assert all(count % 2 == 0 for count in request.counts)
    assert request.spread.max_data_parallel == request.spread.max_tensor_parallel == 1
    with pytest.raises(InputError, match="wanted schedule: chimera in the workload"):
        replace(request, schedules=("gpipe",))
    with pytest.raises(InputError, match="wanted one that halves"):
        replace(request, workload=request.workload.model_copy(update={"batch_size": 3, "num_microbatches": 1}))


# In the order in which they are trained: those of two ranks, those of four.
BY_RANKS = {
    "two_uneven": (BOTH, (0, 3, 8), [one] * 2, 4),
    "two_accumulated": (BOTH.model_copy(update={"accumulate": 3}), (0, 5, 8), [one] * 2, 2),
    "two_with_dropout": (DROPOUT.model_copy(update={"both_ways": True}), (0, 3, 6), [one] * 2, 4),
    "four_recomputed": (BOTH, (0, 1, 2, 5, 8), [one, one, one_device(recompute=True), one], 4),
    "four_units": (BOTH, (0, 3, 4, 6, 8), [one] * 4, 8),
    "four_and_half_a_unit": (BOTH, (0, 3, 4, 6, 8), [one] * 4, 6),
}


@pytest.mark.integration
def test_ranks_have_the_losses_of_one_process() -> None:
    """Uneven cuts, clipped gradients, dropout; what is held out is evaluated alike, and all microbatches pass once."""
    jobs = [job_of(load, by_hand("1f1b", cuts, ranks, count), 3) for load, cuts, ranks, count in BY_RANKS.values()]
    for job in jobs:
        check_spreading(job)
    for name, found, job in zip(BY_RANKS, train_in_turn(jobs), jobs, strict=True):
        workload, evaluations = job.workload, list[float]()
        single = train_single(workload, Draw(), range(3), on_evaluation=lambda _, loss, to=evaluations: to.append(loss))
        assert found.losses == pytest.approx(single, abs=TOLERANCE), name
        assert found.evaluations == pytest.approx(evaluations, abs=TOLERANCE), name
        passed = defaultdict(list)
        for rank in found.passes:
            for timed in rank:
                passed[timed.stage, timed.direction].append(timed.microbatch)
        assert len(passed) == 2 * len(job.binding.plan.stages)
        for numbers in passed.values():
            assert sorted(numbers) == list(range(workload.microbatches_in_a_step)), name
        plan = replace(job.binding.plan, both_ways=True)
        seconds = [StageSeconds(1.0, 1.0, 0.0)] * len(plan.seats)
        listed = {
            (e.rank, e.stage % len(plan.stages), e.name) for e in simulate(plan, seconds).events if e.name[0] in "FB"
        }
        ran = {(event.rank, event.stage, event.name) for event in measured_events(job.binding, found.passes)}
        assert listed <= ran and (len(ran) == workload.accumulate * len(listed)), name  # the first run's are simulated


@pytest.mark.integration
@pytest.mark.slow
def test_a_training_goes_on_any_other_way(tmp_path: Path) -> None:
    """In both directions → in slices → as it was asked for, each from the checkpoint before it."""
    asked = GPT.model_copy(update={"num_steps": 6})
    ways: tuple[tuple[dict[str, Any], Binding], ...] = (
        ({"both_ways": True}, by_hand("1f1b", (0, 3, 8), [one] * 2, 4)),
        ({"slices": (4, 12)}, by_hand("gpipe", (0, 5, 8), [one] * 2, 4)),
        ({}, by_hand("zbv", (0, 2, 4, 6, 8), [one] * 2, 4)),
    )
    expected = train_single(asked, Draw(), range(6))
    for (way, binding), last in zip(ways, (2, 4, 6), strict=True):
        job = replace(job_of(asked.model_copy(update=way), binding, last), folder=str(tmp_path))
        if last > 2:
            assert earlier_training(tmp_path, asked).step == last - 2  # as `--resume` looks at it
            job = replace(resumed(tmp_path, job.workload, job.binding), last_step=last)
        assert launch(job).losses == pytest.approx(expected[:last], abs=TOLERANCE)


@pytest.mark.parametrize("change", [{"both_ways": True}, {"slices": (4, 12)}])
def test_of_other_ways_the_step_is_remembered(change: dict, tmp_path: Path) -> None:
    workload, database = GPT.model_copy(update=change), ProfileDatabase(tmp_path)
    job = job_of(workload, by_hand("1f1b", (0, 3, 8), [one] * 2, 4), 1)
    times = TrainingTimes(1.0, None, 1, (), ())
    assert remember(job.workload, job.binding, times, capture(GPT), database) == 1
    assert len(database.latest(kind="step")) == 1
