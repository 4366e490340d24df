"""The price by hand and by Alpa's formula, what is refused, and the memory rule against torch's own actions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dejavu.foundation.errors import InputError
from dejavu.plans import DoesNotFitError, Plan, Problem, Stage, StageConfiguration, check, price, step_seconds
from dejavu.plans.schedule import SCHEDULES, Schedule, actions
from dejavu.plans.stage_costs import AdditiveCosts, DenseCosts, PlanError
from dejavu.testing.schedules import CASES as EVERY_CASE

ONE = StageConfiguration("gpu")
TWO = StageConfiguration("gpu", devices_per_node=2, tensor_parallel=2)
ADDITIVE_TABLES = ["seconds_CL", "per_step_seconds_CL", "fixed_bytes_CL", "activation_bytes_CL", "temporary_bytes_CL"]


def costs() -> AdditiveCosts:
    return AdditiveCosts(
        seconds_CL=np.array([[1.0, 2.0, 3.0], [0.5, 1.0, 1.5]]),
        per_step_seconds_CL=np.array([[0.25, 0.25, 0.5], [0.0, 0.0, 8.0]]),
        per_step_latency_seconds_C=np.array([0.0, 0.125]),
        fixed_bytes_CL=np.array([[10.0, 20.0, 30.0], [5.0, 10.0, 15.0]]),
        activation_bytes_CL=np.array([[1.0, 2.0, 4.0], [0.5, 1.0, 2.0]]),
        temporary_bytes_CL=np.array([[3.0, 7.0, 5.0], [3.0, 7.0, 5.0]]),
        capacity_bytes_C=np.array([43.0, 100.0]),
    )


def problem() -> Problem:
    return Problem(
        layers=("embed", "block", "head"),
        configurations=(ONE, TWO),
        device_counts={"gpu": 3},
        costs=costs(),
        cut_bytes_L1=np.array([0.0, 10.0, 20.0, 0.0]),
        link_latency_seconds_CC=np.array([[0.0, 0.5], [0.25, 0.0]]),
        link_seconds_per_byte_CC=np.array([[0.0, 0.1], [0.2, 0.0]]),
        schedule="1f1b",
        num_microbatches=4,
    )


def plan(*stages: Stage, schedule: str = "1f1b", num_microbatches: int = 4) -> Plan:
    return Plan(stages, schedule, num_microbatches)


CUT_AT_2 = plan(Stage(0, 2, ONE), Stage(2, 3, TWO))


def test_price_by_hand() -> None:
    bill = price(problem(), CUT_AT_2)
    assert bill.stage_seconds == (3.0, 1.5)
    assert bill.per_step_seconds == (0.5, 8.125)
    assert bill.transfer_seconds == (2 * (0.5 + 0.1 * 20.0),)
    # 3 · 5.0 on the link is more than 3 · 3.0 + 0.5 and 3 · 1.5 + 8.125 on the stages
    assert bill.step_seconds == 3.0 + 1.5 + 5.0 + 15.0
    assert bill.peak_bytes == (30.0 + 2 * 3.0 + 7.0, 15.0 + 1 * 2.0 + 5.0)
    assert bill.bubble_fraction == pytest.approx(1 - (4 * 4.5 + 8.625) / (2 * 24.5))


def test_what_bounds_the_step_changes_with_the_links() -> None:
    near = replace(problem(), link_latency_seconds_CC=np.zeros((2, 2)), link_seconds_per_byte_CC=np.zeros((2, 2)))
    assert step_seconds(near, CUT_AT_2) == 4.5 + max(3 * 3.0 + 0.5, 3 * 1.5 + 8.125)
    quick = replace(
        near, costs=replace(costs(), per_step_seconds_CL=np.zeros((2, 3)), per_step_latency_seconds_C=np.zeros(2))
    )
    assert step_seconds(quick, CUT_AT_2) == 4.5 + 3 * 3.0


@pytest.mark.parametrize("seed", range(20))
def test_without_links_and_per_step_seconds_it_is_alpas_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    L, B = 6, int(rng.integers(1, 9))
    seconds = rng.random((1, L, L + 1))
    asked = Problem(
        layers=tuple(map(str, range(L))),
        configurations=(ONE,),
        device_counts={"gpu": L},
        costs=DenseCosts(seconds, np.zeros_like(seconds), np.full(seconds.shape, 100)),
        cut_bytes_L1=np.zeros(L + 1),
        link_latency_seconds_CC=np.zeros((1, 1)),
        link_seconds_per_byte_CC=np.zeros((1, 1)),
        schedule="1f1b",
        num_microbatches=B,
    )
    cuts = [0, *np.flatnonzero(rng.random(L - 1) < 0.5) + 1, L]
    spans = [(int(a), int(b)) for a, b in pairwise(cuts)]
    t = [seconds[0, a, b] for a, b in spans]
    stages = (Stage(a, b, ONE) for a, b in spans)
    assert step_seconds(asked, plan(*stages, num_microbatches=B)) == pytest.approx(sum(t) + (B - 1) * max(t))


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
@pytest.mark.parametrize("name", ADDITIVE_TABLES)
def test_additive_costs_refuse_what_is_no_cost(name: str, value: float) -> None:
    if value == np.inf and "seconds" in name:
        return  # a layer that cannot run there
    table = getattr(costs(), name).copy()
    table[1, 2] = value
    with pytest.raises(PlanError, match=rf"{name}\[1, 2\] is .*wanted a (finite )?number ≥ 0"):
        replace(costs(), **{name: table})


def test_costs_refuse_wrong_shapes_and_say_which() -> None:
    with pytest.raises(PlanError, match=r"fixed_bytes_CL has shape \(2, 2\); wanted \(2, 3\)"):
        replace(costs(), fixed_bytes_CL=np.zeros((2, 2)))
    with pytest.raises(PlanError, match=r"capacity_bytes_C has shape \(3,\); wanted \(2,\)"):
        replace(costs(), capacity_bytes_C=np.zeros(3))
    with pytest.raises(PlanError, match=r"stage costs have shape \(2, 3, 3\)"):
        DenseCosts(np.zeros((2, 3, 3)), np.zeros((2, 3, 3)), np.zeros((2, 3, 3), dtype=int))


@pytest.mark.parametrize("value", [np.nan, -1.0])
@pytest.mark.parametrize("name", ["seconds_CLL1", "per_step_seconds_CLL1"])
def test_dense_costs_refuse_what_is_no_cost(name: str, value: float) -> None:
    dense = costs().dense()
    table = getattr(dense, name).copy()
    table[1, 0, 2] = value
    with pytest.raises(PlanError, match=r"of configuration 1, layers 0 to 2 is .*; wanted ≥ 0"):
        replace(dense, **{name: table})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "needs layers and configurations; found 0 and 2"),
        ({"layers": ("one", "two")}, r"costs are for 2 configurations × 3 layers; wanted 2 × 2"),
        ({"num_microbatches": 0}, "num_microbatches is 0; wanted ≥ 1"),
        ({"max_stages": 0}, "max_stages is 0; wanted ≥ 1, or None for no bound"),
        ({"cut_bytes_L1": np.zeros(3)}, r"cut_bytes_L1 has shape \(3,\); wanted \(4,\)"),
        ({"cut_bytes_L1": np.array([0, 1, np.nan, 0])}, "cut_bytes_L1 holds a value that is negative or not finite"),
        ({"link_latency_seconds_CC": -np.ones((2, 2))}, "link_latency_seconds_CC holds a value that is negative"),
        ({"device_counts": {"cpu": 3}}, "asks for 'gpu'; the cluster has cpu"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(change: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(problem(), **change)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(InputError, match="unknown schedule '2f2b'"):
        replace(problem(), schedule="2f2b")


def test_a_configuration_whose_degrees_do_not_multiply_is_refused() -> None:
    with pytest.raises(PlanError, match="data parallel 3 × tensor parallel 1 must equal its 2 devices"):
        StageConfiguration("gpu", devices_per_node=2, data_parallel=3)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (plan(Stage(1, 3, ONE)), PlanError, r"does not begin where the stage before it ends \(layer 0\)"),
        (plan(Stage(0, 1, ONE), Stage(2, 3, ONE)), PlanError, r"ends \(layer 1\)"),
        (plan(Stage(0, 2, ONE)), PlanError, "stages end at layer 2; the problem has 3"),
        (plan(Stage(0, 3, TWO), schedule="gpipe"), PlanError, "the plan is for gpipe × 4 microbatches"),
        (plan(Stage(0, 3, TWO), num_microbatches=8), PlanError, "the plan is for 1f1b × 8 microbatches"),
        (plan(Stage(0, 2, TWO), Stage(2, 3, TWO)), PlanError, "the plan uses 4 × gpu; the cluster has 3"),
        (plan(Stage(0, 3, StageConfiguration("gpu", recompute=True))), PlanError, "is none of the problem's"),
        (plan(Stage(0, 3, ONE)), DoesNotFitError, "with 1 microbatch in flight: it needs 74 bytes"),
    ],
)
def test_a_plan_that_is_not_the_problems_is_refused(wrong: Plan, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check(problem(), wrong)
    with pytest.raises(error, match=message):
        price(problem(), wrong)


@pytest.mark.parametrize("name", ["seconds", "per_step_seconds"])
def test_a_stage_that_is_not_possible_is_refused(name: str) -> None:
    dense = costs().dense()
    table = getattr(dense, f"{name}_CLL1").copy()
    table[1, 2, 3] = np.inf
    with pytest.raises(PlanError, match=f"layer 2 on 2 × gpu, tp 2 is not possible: its {name} is inf"):
        check(replace(problem(), costs=replace(dense, **{f"{name}_CLL1": table})), CUT_AT_2)


def test_more_stages_than_allowed_are_refused() -> None:
    check(replace(problem(), max_stages=2), CUT_AT_2)
    with pytest.raises(PlanError, match="the plan has 2 stages; the problem wants at most 1"):
        check(replace(problem(), max_stages=1), CUT_AT_2)


def test_every_device_must_be_used_where_that_is_the_rule() -> None:
    strict = replace(problem(), use_all_devices=True)
    check(strict, CUT_AT_2)
    with pytest.raises(PlanError, match="the plan uses 2 × gpu; the cluster has 3"):
        check(strict, plan(Stage(0, 3, TWO)))


def test_memory_binds_by_the_position_in_the_schedule() -> None:
    check(problem(), CUT_AT_2)  # 43 bytes: 2 in flight in 1f1b just fit
    with pytest.raises(DoesNotFitError, match="4 microbatches in flight: it needs 49 bytes"):
        check(replace(problem(), schedule="gpipe"), replace(CUT_AT_2, schedule="gpipe"))


def test_a_plan_survives_json() -> None:
    mixed = plan(Stage(0, 2, StageConfiguration("a100", 2, 4, 4, 2, recompute=True, zero_level=1)), Stage(2, 9, ONE))
    assert Plan.from_dict(json.loads(json.dumps(mixed.to_dict()))) == mixed
    assert mixed.cuts == (2,)
    old = mixed.to_dict()
    for stage in old["stages"]:  # written before stages could do so
        for name in ("sequence_parallel", "expert_parallel", "context_parallel"):
            del stage["configuration"][name]
    assert Plan.from_dict(old) == mixed
    split = replace(mixed.stages[0].configuration, sequence_parallel=True)
    assert str(split) == "8 × a100 on 2 nodes, dp 4, tp 2, sp, recompute, ZeRO-1"
    by_expert = replace(split, expert_parallel=True)
    assert str(by_expert) == "8 × a100 on 2 nodes, dp 4, tp 2, sp, ep, recompute, ZeRO-1"
    sharing = replace(split, context_parallel=2)
    assert str(sharing) == "8 × a100 on 2 nodes, dp 2, cp 2, tp 2, sp, recompute, ZeRO-1"
    assert str(replace(sharing, num_nodes=1, devices_per_node=8)) == str(sharing).replace(" on 2 nodes", "")
    with pytest.raises(PlanError, match="runs of 3 of 4 replicas share examples"):
        replace(split, context_parallel=3)
    for one in (split, by_expert, sharing):
        assert Plan.from_dict(json.loads(json.dumps(plan(Stage(0, 2, one)).to_dict()))).stages[0].configuration == one


@pytest.mark.parametrize("seed", range(20))
def test_both_forms_of_costs_agree_to_the_last_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    C, L = 3, 7
    tables = {name: rng.random((C, L)) for name in ADDITIVE_TABLES}
    additive = AdditiveCosts(**tables, per_step_latency_seconds_C=rng.random(C), capacity_bytes_C=rng.random(C) * 8)
    # Memory that just fits must just fit in both.
    capacity = np.array([additive.peak_bytes(0, 3, c, 0) for c in range(C)])
    for form in (additive, replace(additive, capacity_bytes_C=capacity)):
        dense = form.dense()
        for c in range(C):
            for start in range(L):
                for stop in range(start + 1, L + 1):
                    assert dense.stage_seconds(start, stop, c) == form.stage_seconds(start, stop, c)
                    assert dense.per_step_seconds(start, stop, c) == form.per_step_seconds(start, stop, c)
                    assert dense.max_in_flight(start, stop, c) == form.max_in_flight(start, stop, c)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.__name__)  # one after the other of each schedule,
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)  # whose lists of actions are kept meanwhile
def test_every_schedule_does_what_it_says(schedule: Schedule, case: Callable[[Schedule], None]) -> None:
    case(schedule)


def test_fewer_microbatches_than_stages_are_refused() -> None:
    with pytest.raises(InputError, match="2 microbatches for 3 stages under 1f1b; wanted 3 or more"):
        actions("1f1b", 3, 2)
