"""The simulator against formulas that are known exactly, and the price against the simulator."""

from __future__ import annotations

import itertools
import json

import pytest

from dejavu.errors import InputError
from dejavu.plan import Plan, Stage, StageConfiguration
from dejavu.schedule import SCHEDULES, Pass, actions
from dejavu.simulate import StageSeconds, simulate

CORE = StageConfiguration("core")


def plan_of(num_stages: int, num_microbatches: int, schedule: str) -> Plan:
    return Plan(tuple(Stage(s, s + 1, CORE) for s in range(num_stages)), schedule, num_microbatches)


every_size = pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 1), (1, 5), (2, 2), (2, 7), (3, 4), (4, 16), (8, 8)]
)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@every_schedule
@every_size
def test_equal_stages_take_the_textbook_time(schedule: str, num_stages: int, num_microbatches: int) -> None:
    """(B + S − 1)(f + b), bubble (S − 1)/(B + S − 1): Huang et al., GPipe, 2019; 1F1B has the same."""
    played = simulate(plan_of(num_stages, num_microbatches, schedule), [StageSeconds(1.0, 2.0, 0.0)] * num_stages)
    slots = num_microbatches + num_stages - 1
    assert played.step_seconds == pytest.approx(3.0 * slots)
    assert played.bubble_fraction == pytest.approx((num_stages - 1) / slots)


@every_schedule
@every_size
def test_nothing_runs_before_its_input_and_no_rank_does_two_things(
    schedule: str, num_stages: int, num_microbatches: int
) -> None:
    stages = [StageSeconds(1.0 + s % 3, 2.0 + s % 2, 0.5, 0.25) for s in range(num_stages)]
    played = simulate(plan_of(num_stages, num_microbatches, schedule), stages)
    when = {(event.stage, event.name): event for event in played.events}
    for m in range(num_microbatches):
        for s in range(num_stages - 1):
            assert when[s + 1, f"F{m}"].start_seconds >= when[s, f"F{m}"].stop_seconds + 0.25
            assert when[s, f"B{m}"].start_seconds >= when[s + 1, f"B{m}"].stop_seconds + 0.25
    for s in range(num_stages):
        own = sorted((e for e in played.events if e.stage == s), key=lambda event: event.start_seconds)
        assert len(own) == 2 * num_microbatches + 1
        assert all(a.stop_seconds <= b.start_seconds for a, b in itertools.pairwise(own))
        assert played.in_flight[s] == SCHEDULES[schedule].in_flight(s, num_stages, num_microbatches)


@every_schedule
@every_size
def test_the_step_is_between_the_bounds(schedule: str, num_stages: int, num_microbatches: int) -> None:
    stages = [StageSeconds(1.0 + s, 2.0 * (s + 1), 0.0) for s in range(num_stages)]
    played = simulate(plan_of(num_stages, num_microbatches, schedule), stages)
    each = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    assert played.step_seconds >= num_microbatches * max(each)
    assert played.step_seconds <= num_microbatches * sum(each) + 1e-9


def test_playing_tells_what_the_formula_hides() -> None:
    """1F1B waits for messages in its steady state, GPipe for the slowest forward and the slowest backward each."""
    B = 16
    waits = simulate(plan_of(2, B, "1f1b"), [StageSeconds(1 / 3, 2 / 3, 0.0, 0.5)] * 2)
    assert waits.step_seconds > 1.3 * (2 * 1.0 + 2 * 0.5 + (B - 1) * 1.0)
    uneven = simulate(plan_of(2, B, "gpipe"), [StageSeconds(0.8, 0.2, 0.0), StageSeconds(0.2, 0.8, 0.0)])
    assert uneven.step_seconds == pytest.approx((B * 0.8 + 0.2) * 2)


def test_the_trace_is_chrome_s() -> None:
    trace = simulate(plan_of(2, 3, "1f1b"), [StageSeconds(1.0, 2.0, 0.5)] * 2).to_trace()
    rows = [row for row in json.loads(json.dumps(trace))["traceEvents"] if row["ph"] == "X"]
    assert len(rows) == 2 * (2 * 3 + 1)
    assert all(row["dur"] > 0 and row["ts"] >= 0 for row in rows)


@every_schedule
@every_size
def test_torch_s_lists_hold_every_action_once(schedule: str, num_stages: int, num_microbatches: int) -> None:
    for stage, rank in enumerate(actions(schedule, num_stages, num_microbatches)):
        wanted = {(stage, direction, m) for direction in Pass for m in range(num_microbatches)}
        assert len(rank) == len(wanted)
        assert set(rank) == wanted
        for direction in Pass:  # each stage takes microbatches in order, as torch's runtime does
            assert [a.microbatch for a in rank if a.direction is direction] == list(range(num_microbatches))


@every_schedule
def test_fewer_microbatches_than_stages_are_refused(schedule: str) -> None:
    with pytest.raises(InputError, match="2 microbatches for 3 stages"):
        actions(schedule, 3, 2)
