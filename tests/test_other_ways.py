"""Sequences in slices and both directions as choices of planning: one price, one simulation, and the plan that runs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.binding import bind
from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.cost.priced_problem import as_planned
from dejavu.cost.trainings.steps import Basis
from dejavu.foundation.errors import InputError
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest, choice_to_dict, print_choice, reason
from dejavu.planning.considered import considered_table
from dejavu.planning.schedules import fits
from dejavu.planning.sentences import OTHER_WAYS, what_is_proved, what_was_gained
from dejavu.planning.ways import slices
from dejavu.plans import Plan, Problem, Stage, StageConfiguration, price
from dejavu.plans.priced_problem import PassCost, PricedProblem, SlicePrices
from dejavu.plans.schedule import OF_FEW, SCHEDULES, torch_actions
from dejavu.plans.slicing import best_slices
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.report.topology import links_used
from dejavu.runtime.job.resume import earlier_training
from dejavu.schedules import PIPELINE_SCHEDULES, simulate_schedule
from dejavu.simulation import StageSeconds, both_ways_seconds, price_of_simulated, simulate, simulate_plan
from dejavu.what_if import price_own_plan, read_plan
from dejavu.workload import Workload
from tests.rows import fast_hosts

ONE = StageConfiguration("gpu")
ROOT = Path(__file__).resolve().parents[1]
H200 = "H200-SXM-141GB"
WORKLOAD = {
    "model": "llama",
    "model_options": {"num_blocks": 14, "width": 1024, "num_heads": 8, "num_kv_heads": 8, "feedforward": 4096},
    "data": "synthetic",
    "synthetic": {"num_classes": 4096},
    "sequence_length": 8192,
    "batch_size": 1,
    "num_microbatches": 1,
    "dtype": "bfloat16",
    "trials": {"count": 0},
}
FEW = [(P, B, N) for P in (2, 3, 4, 6) for B in range(1, P + 1) for N in (2, 3, 5) if B * N >= P]


def cluster(num_devices: int = 4) -> Cluster:
    link = Link(50e9, 1e-5)
    group = NodeGroup("g", 1, (), ((H200, num_devices),), link)
    return Cluster("test", (group,), {H200: catalogue()[H200]}, {("g", "g"): link})


def request(folder: Path, **changes: object) -> PlanRequest:
    workload = Workload.model_validate(WORKLOAD | changes)
    return PlanRequest(workload, cluster(), folder, Parallelism.one_device(), budget_seconds=0.5)


def priced_of(
    seconds_L: np.ndarray, num_microbatches: int, num_slices: int = 1, *, link_seconds: float = 0.0
) -> PricedProblem:
    """Layers on devices alike, forward as long as backward; what they hold counts their seconds."""
    half_CL = seconds_L[None] / 2
    zero = np.zeros_like(half_CL)
    L = len(seconds_L)
    costs = AdditiveCosts(
        2 * half_CL, 0.1 * half_CL, np.zeros(1), 10 * half_CL, half_CL, half_CL, np.full(1, 1e9),
        message_bytes_CL1=np.zeros((1, L + 1)), step_bytes_CL=zero,
    )  # fmt: skip
    links = np.full((1, 1), link_seconds)
    problem = Problem(
        tuple(map(str, range(L))), (ONE,), {"gpu": L}, costs, np.zeros(L + 1), links, np.zeros((1, 1)), "gpipe",
        num_microbatches * num_slices, num_slices=num_slices,
    )  # fmt: skip
    each = np.stack([half_CL] * num_slices)
    slices = SlicePrices((1,) * num_slices, each, each) if num_slices > 1 else None
    return PricedProblem(problem, half_CL, half_CL, slices=slices, gradient_bytes_L=np.zeros(L))


def plan_of(bounds: tuple[int, ...], schedule: str, count: int, slices: int = 1, *, both_ways: bool = False) -> Plan:
    stages = tuple(Stage(a, b, ONE) for a, b in itertools.pairwise(bounds))
    return Plan(stages, schedule, count, slices=(1,) * slices if slices > 1 else (), both_ways=both_ways)


@pytest.mark.parametrize("name", OF_FEW)
@pytest.mark.parametrize(("P", "B", "N"), FEW)
def test_fewer_microbatches_than_ranks_pass_in_slices(name: str, P: int, B: int, N: int) -> None:
    """Every pass once, nobody waits for ever, and no stage holds more than the rule says."""
    listed = torch_actions(SCHEDULES[name], P, B, N)
    for rank, order in listed.items():
        passes = {(one.stage_index, one.computation_type.name, one.microbatch_index) for one in order}
        assert len(passes) == len(order) == 2 * B * N and {stage for stage, *_ in passes} == {rank}
    found = simulate(plan_of(tuple(range(P + 1)), name, B, N), [StageSeconds(1.0, 1.0, 0.0)] * P)
    assert found.in_flight == tuple(SCHEDULES[name].in_flight(s, P, B) for s in range(P))
    assert found.step_seconds == pytest.approx(2 * (B * N + P - 1))  # no slice waits but for the first and the last


def test_too_few_slices_are_refused() -> None:
    with pytest.raises(InputError, match="wanted 4 or more"):
        torch_actions(SCHEDULES["1f1b"], 4, 1, 3)
    with pytest.raises(InputError, match="two parts"):
        torch_actions(SCHEDULES["zbv"], 4, 4, 2)
    with pytest.raises(InputError, match="wanted even numbers"):
        simulate(plan_of((0, 1, 2, 3), "1f1b", 4, both_ways=True), [StageSeconds(1.0, 1.0, 0.0)] * 6)


@pytest.mark.parametrize(("P", "B"), [(2, 2), (2, 6), (4, 4), (4, 6), (4, 8), (6, 6), (6, 12)])
def test_both_directions_are_simulated_as_the_schedule_is(P: int, B: int) -> None:
    """By the planner's simulation and by that of `dejavu.schedules`: stages of any seconds, messages or none."""
    rng = np.random.default_rng(P * B)
    for transfer in (0.0, 0.3):
        stages = [StageSeconds(*rng.uniform(0.5, 2.0, 2), 0.0, transfer_seconds=transfer) for _ in range(P)]
        between = StageSeconds(*rng.uniform(0.5, 2.0, 2), 0.0)
        ours = simulate(plan_of(tuple(range(P + 1)), "1f1b", B, both_ways=True), [*stages, *stages])
        other = simulate_schedule(PIPELINE_SCHEDULES["chimera"], stages, B)
        held = tuple(max(pair) for pair in zip(ours.in_flight[:P], ours.in_flight[P:], strict=True))
        assert held == other.in_flight_S and between.per_step_seconds == 0.0
        if transfer == 0.0:  # with them, ours has links that both copies share
            assert ours.step_seconds == pytest.approx(other.step_seconds)
            assert ours.bubble_fraction == pytest.approx(other.bubble_fraction)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["1f1b", "zbv", "interleaved_1f1b", "in slices", "both ways"])
def test_links_carry_what_the_simulation_sends(way: str, seed: int) -> None:
    """Cut by cut of other sizes: those of both copies, and all slices."""
    rng = np.random.default_rng(seed)
    P, B, N = int(rng.choice([2, 4])), int(rng.choice([4, 6, 8])), 3 if way == "in slices" else 1
    schedule = way if way in SCHEDULES else "1f1b"
    S = P * SCHEDULES[schedule].stages_per_rank
    priced = replace(priced_of(np.full(S, 0.5), B, N), accumulate=int(rng.integers(1, 4)))
    priced = replace(priced, problem=replace(priced.problem, cut_bytes_L1=rng.uniform(1e6, 9e6, S + 1)))
    plan = plan_of(tuple(range(S + 1)), schedule, B, N, both_ways=way == "both ways")
    kind = replace(catalogue()[H200], name="gpu")
    group = NodeGroup("g", 1, (), (("gpu", P),), Link(50e9, 1e-5))
    hardware = Cluster("test", (group,), {"gpu": kind}, {})
    found, sent = simulate_plan(priced, plan), dict[tuple[int, ...], float]()
    for message in found.messages:
        cut = plan.seats[message.stage + (message.name[0] == "F")].start
        ends = tuple(sorted((message.rank, message.to_rank)))
        size = priced.accumulate * priced.problem.cut_bytes_L1[cut]
        sent[ends] = sent.get(ends, 0.0) + size
    links = links_used(bind(priced.problem, plan, hardware), hardware, priced, found)
    assert {(one.rank, one.to_rank): one.bytes_per_step for one in links} == pytest.approx(sent)


@pytest.mark.parametrize("seed", range(12))
def test_the_critical_path_of_both_directions_adds_up(seed: int) -> None:
    """Also where a rank's last work waits for the rank that holds the same layers."""
    rng = np.random.default_rng(seed)
    P, B = int(rng.choice([2, 4, 6])), int(rng.choice([2, 4, 6, 8]))
    stages = [
        StageSeconds(*rng.uniform(0.5, 2.0, 2), rng.uniform(0.1, 2.0), rng.uniform(0.0, 0.2)) for _ in range(2 * P)
    ]
    found = simulate(plan_of(tuple(range(P + 1)), "1f1b", B, both_ways=True), stages)
    path = found.critical_path
    assert path[0].start_seconds == 0.0 and path[-1].stop_seconds == found.step_seconds
    assert [one.stop_seconds for one in path[:-1]] == pytest.approx([one.start_seconds for one in path[1:]])
    assert {one for one in path if one.to_rank is None} <= set(found.events)
    assert {one for one in path if one.to_rank is not None} <= set(found.messages)


@pytest.mark.parametrize(("P", "B"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16), (6, 6), (8, 8), (8, 16)])
def test_both_directions_have_the_closed_formula(P: int, B: int) -> None:
    priced = priced_of(np.full(2 * P, 0.5), B)
    plan = plan_of(tuple(range(0, 2 * P + 1, 2)), "1f1b", B, both_ways=True)
    found = simulate_plan(priced, plan)
    assert both_ways_seconds(priced, plan) == pytest.approx(found.step_seconds)
    theory = PIPELINE_SCHEDULES["chimera"].theory(P, B).bubble_fraction
    once = 0.05 * 2  # of a rank's two stages
    busy = B * 1.0 / (found.step_seconds - once)
    assert theory is not None and 1 - busy == pytest.approx(theory)


@pytest.mark.parametrize("name", OF_FEW)
@pytest.mark.parametrize(("P", "B", "N"), [(2, 1, 4), (4, 1, 8), (4, 2, 3), (3, 6, 2), (4, 4, 4)])
def test_equal_slices_are_priced_as_they_are_simulated(name: str, P: int, B: int, N: int) -> None:
    """The searches' formula, TeraPipe's equation and the simulation, and memory of the price and of the simulation."""
    priced = priced_of(np.full(P, 1.0), B, N)
    priced = replace(priced, problem=replace(priced.problem, schedule=name))
    plan = plan_of(tuple(range(P + 1)), name, B, N)
    found, priced_at = simulate_plan(priced, plan), price(priced.problem, plan)
    once = 0.05
    assert priced_at.step_seconds == pytest.approx(found.step_seconds)
    table = np.array([[1.0 * j if i + j <= N else 0.0 for i in range(N)] for j in range(1, N + 1)])
    assert best_slices(table, P, B).seconds + once == pytest.approx(priced_at.step_seconds)
    assert found.in_flight == tuple(priced.problem.in_flight(s, P) for s in range(P))
    assert priced_at.peak_bytes == pytest.approx(found.peak_bytes)


@pytest.mark.parametrize("seed", range(6))
def test_memory_of_both_directions_is_that_of_both_copies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    P, B = int(rng.choice([2, 4])), int(rng.choice([4, 6, 8]))
    priced = priced_of(rng.uniform(0.1, 1.0, 3 * P), B)
    plan = plan_of(tuple(range(0, 3 * P + 1, 3)), "1f1b", B, both_ways=True)
    found = simulate_plan(priced, plan)
    peaks = price_of_simulated(priced, plan, found).peak_bytes
    assert len(peaks) == P
    for peak, simulated in zip(peaks, found.peak_bytes, strict=True):
        assert simulated <= peak * (1 + 1e-9)  # each stage's most need not be at one time
    for room in (1.01 * max(peaks), 0.99 * max(peaks)):
        costs = replace(priced.problem.costs, capacity_bytes_C=np.full(1, room))
        assert fits(replace(priced, problem=replace(priced.problem, costs=costs)), plan, found) == (room > max(peaks))


def test_slices_take_longer_the_more_a_pass_costs_by_itself() -> None:
    """And what a pass costs weighs on slices as often as there are of them."""
    steps: dict[int, list[float]] = {}
    for N in (1, 2, 4, 8):
        plan = plan_of(tuple(range(5)), "gpipe", 4, N)
        for each in (0.0, 0.01, 0.02, 0.1):
            priced = replace(priced_of(np.full(4, 1.0 / N), 4, N), pass_costs={"gpu": PassCost(each)})
            steps.setdefault(N, []).append(simulate_plan(priced, plan).step_seconds)
    assert all(a < b for row in steps.values() for a, b in itertools.pairwise(row))
    slopes = [row[-1] - row[0] for row in steps.values()]
    assert slopes == sorted(slopes)
    assert [row[0] for row in steps.values()] == sorted((row[0] for row in steps.values()), reverse=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fast_hosts(tmp_path_factory.mktemp("other-ways"), H200)


@pytest.fixture(scope="module")
def sliced(folder: Path) -> Choice:
    """One long sequence: whole, it goes through one device after the other."""
    return Planner().plan(request(folder))


def test_one_long_sequence_goes_in_slices(sliced: Choice, capsys: pytest.CaptureFixture[str]) -> None:
    plan, workload = sliced.plan, as_planned(sliced.request.workload, sliced.plan)
    assert plan.slices and sum(plan.slices) == 8192 and len(plan.stages) > plan.num_microbatches == 1
    assert workload.slices == plan.slices and not workload.both_ways
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    print_choice(sliced)
    said = capsys.readouterr().out
    assert f"{plan.num_slices} slices" in said and "without a proof" in said and "Proved: no plan under" in said
    assert f"{plan.num_slices} slices" in reason(sliced)


def test_of_other_ways_no_bound_is_shown(sliced: Choice) -> None:
    """Bounds are on whole sequences through one copy of the model: a row in slices may be far below them."""
    assert ", of whole sequences," in what_is_proved(sliced)
    table = considered_table(sliced)
    named, bounds = (list(table.columns[place].cells) for place in (0, 4))
    others = [bound for name, bound in zip(named, bounds, strict=True) if str(name).removeprefix("✔ ") in OTHER_WAYS]
    assert others and set(others) == {"–"} and set(bounds) != {"–"}
    for row in choice_to_dict(sliced)["considered"]:
        if row["simulated_lower_bound_seconds"] is not None and row["fits"]:
            assert row["simulated_lower_bound_seconds"] <= row["simulated_step_seconds"] * (1 + 1e-9), row["search"]


def test_of_ways_that_promise_the_same_each_is_tried(sliced: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as with and without recomputation, where nothing is computed again."""
    alike = [slices._Sketch(1e-9, 1, 2, replace(ONE, recompute=recompute)) for recompute in (True, False)]
    tried = []
    monkeypatch.setattr(slices, "_sketches", lambda *_: iter(alike))
    monkeypatch.setattr(slices, "_planned", lambda sketch, *_: tried.append(sketch))
    assert slices.plans_in_slices(sliced.request, sliced.prices, sliced.simulator) == []
    assert tried == alike


def test_the_chosen_is_no_dearer_than_anything_compared(sliced: Choice, folder: Path) -> None:
    choices = [sliced, Planner().plan(request(folder, batch_size=4, num_microbatches=4))]
    for choice in choices:
        found = [one for row in choice.considered for one in row.candidates if one.fits]
        assert choice.step_seconds <= min(one.step_seconds for one in found) * (1 + 1e-9)
        assert choice.simulated_lower_bound_seconds <= choice.simulated_seconds


@pytest.mark.parametrize(
    ("change", "schedules"),
    [
        ({"batch_size": 4, "slices": 4}, ()),
        ({"batch_size": 4, "slices": (1024, 3072, 4096)}, ("gpipe",)),
        ({"batch_size": 8}, ("chimera",)),
        ({"batch_size": 8, "schedule": "chimera"}, ()),
    ],
)
def test_what_is_named_is_planned_priced_and_bound_as_it_runs(
    change: dict, schedules: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    asked = replace(request(folder, **change), schedules=schedules)
    choice = Planner().plan(asked)
    plan = choice.plan
    assert plan.both_ways == ("chimera" in (*schedules, change.get("schedule")))
    assert plan.num_slices == (4 if change.get("slices") == 4 else 3 if "slices" in change else 1)
    assert "nothing about other plans" in reason(choice)
    trained = as_planned(asked.workload, plan)
    assert (trained.both_ways, trained.in_slices) == (plan.both_ways, bool(plan.slices))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(choice_to_dict(choice)))
    read = read_plan(path)
    assert read == plan
    own = price_own_plan(replace(asked, schedules=()), read)
    assert own.simulated_seconds == pytest.approx(choice.simulated_seconds)
    assert own.peak_bytes_S == pytest.approx(choice.chosen.price.peak_bytes)
    assert tuple(own.range_seconds) == pytest.approx(tuple(choice.range_seconds))


@pytest.mark.parametrize(
    ("change", "schedules", "message"),
    [
        ({"batch_size": 3}, ("chimera",), "wanted one that halves"),
        ({"batch_size": 4, "slices": 2}, ("chimera",), "chimera runs whole sequences"),
        ({"batch_size": 4, "slices": 2, "schedule": "chimera"}, (), "wanted no slices"),
        ({"batch_size": 4, "slices": 9000}, (), "9000 of a sequence of 8192"),
        ({"batch_size": 4, "gradients": "median"}, ("chimera",), "gradients: mean"),
        ({"batch_size": 4, "slices": 2, "compile": True}, (), "wanted compile: false"),
        ({"batch_size": 4, "slices": 2}, ("zbv",), "two parts"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_planned(
    change: dict, schedules: tuple[str, ...], message: str, folder: Path
) -> None:
    with pytest.raises(InputError, match=message):
        replace(request(folder, **change), schedules=schedules)


def test_other_ways_are_compared_only_where_nothing_is_said(folder: Path) -> None:
    free = request(folder, batch_size=4)
    assert free.may_slice and "chimera" in free.allowed_schedules and "chimera" not in free.listed_schedules
    for change in ({"slices": 1}, {"schedule": "1f1b"}, {"compile": True}, {"replan": {"action": "migrate"}}):
        assert not request(folder, batch_size=4, **change).may_slice, change
    assert "chimera" not in request(folder, batch_size=4, replan={"action": "migrate"}).allowed_schedules
    named = replace(free, schedules=("1f1b", "zbv"))
    assert not named.may_slice and named.allowed_schedules == ("1f1b", "zbv")


PLANNED = {  # of the workload below, whatever it asks for
    "whole": plan_of((0, 3, 8), "1f1b", 4),
    "in slices": plan_of((0, 3, 8), "gpipe", 2, slices=2),
    "both ways": plan_of((0, 3, 8), "1f1b", 8, both_ways=True),
    "two stages a rank": plan_of((0, 2, 4, 6, 8), "zbv", 4),
}


@pytest.mark.parametrize("planned", PLANNED)
@pytest.mark.parametrize(
    "asked", [{}, {"slices": 1}, {"schedule": "chimera"}, {"schedule": "1f1b", "num_microbatches": 8}], ids=str
)
def test_what_was_planned_is_resumed_as_it_was_asked_for(asked: dict, planned: str, tmp_path: Path) -> None:
    """`--resume` with the workload of the first run, whatever its plan made of it; finished, or with more steps."""
    workload = Workload.model_validate({"batch_size": 16, "num_steps": 8, **asked})
    plan = PLANNED[planned]
    binding = by_hand(plan.schedule, (0, 3, 8), [one_device()] * 2, plan.num_microbatches)
    job = job_of(as_planned(workload, plan), replace(binding, plan=plan), 8)
    replace(job, folder=str(tmp_path)).write()
    for num_steps in (8, 20):
        found = earlier_training(tmp_path, workload.model_copy(update={"num_steps": num_steps}))
        assert (found.step, found.num_steps) == (0, num_steps)
    with pytest.raises(InputError, match="was trained with seed 0; wanted the same, found seed 1"):
        earlier_training(tmp_path, workload.model_copy(update={"seed": 1}))


@pytest.mark.integration
@pytest.mark.slow
def test_a_plan_and_its_training_agree(tmp_path: Path) -> None:
    """`dejavu run` of one long sequence on two processes trains it in slices, and `dejavu plan` says the same plan."""
    workload = {
        "model": "gpt", "model_options": {"num_blocks": 6, "width": 256, "num_heads": 4}, "sequence_length": 512,
        "batch_size": 1, "num_microbatches": 1, "num_steps": 3, "trials": {"count": 0}, "compare": False,
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(workload))
    (tmp_path / "cluster.yaml").write_text("nodes: auto\n")
    environment = os.environ | {"PREFECT_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "flows"]

    def dejavu(*arguments: str) -> None:
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    dejavu("run", "--workload", "mine.yaml")
    (path,) = (tmp_path / ".dejavu" / "runs").glob("*/job.json")
    job = json.loads(path.read_text())
    trained = Plan.from_dict(job["binding"]["plan"])
    assert trained.slices and len(trained.stages) == 2 and job["workload"]["slices"] == list(trained.slices)
    dejavu("plan", "--model", "mine.yaml", "--json", "plan.json")
    assert read_plan(tmp_path / "plan.json") == trained


def test_of_a_slower_plan_it_is_said_why_it_is_kept(tmp_path: Path) -> None:
    """That it was trained only where it was; else that the baseline, which goes both ways, has to gain more."""
    asked = replace(request(tmp_path, batch_size=8, slices=1), schedules=("1f1b", "chimera"))
    choice = Planner().plan(asked)
    row = choice.best_baseline
    assert row is not None and row.best is not None and row.best.plan.both_ways, "not the case that is asked about"
    one_way = (one for row in choice.considered for one in row.candidates if not one.plan.both_ways)
    slower = next(one for one in one_way if one.step_seconds > 1.01 * row.best.step_seconds)
    trained = replace(slower, factor=replace(slower.factor, basis=Basis.OWN))
    said = [what_was_gained(replace(choice, chosen=one)) for one in (slower, trained)]
    assert all("slower than the best baseline" in text for text in said)
    assert "only if predicted 5% faster" in said[0] and "trained" not in said[0]
    assert "kept because it was trained before" in said[1]
