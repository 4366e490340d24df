"""The what-if door: what it answers, how sure it is, and what it says to mistakes."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.bound.every_plan import count, least_by_schedule, small_priced
from dejavu.binding import bind
from dejavu.binding.binder import bind_in_order
from dejavu.cluster import Cluster, load_cluster
from dejavu.cost.priced_problem import as_planned
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.foundation.tables import print_whole
from dejavu.foundation.units import format_bound, format_bytes
from dejavu.init import Draw
from dejavu.launch.preflight import check_plan, check_spreading
from dejavu.parallelism import Parallelism
from dejavu.planning import BASELINES, Choice, Planner, PlanRequest, choice_to_dict, print_choice
from dejavu.planning.candidates import TIE, Candidate, Simulator, moved_cut, ranked, simulate_bound
from dejavu.planning.choice import Considered
from dejavu.planning.considered import considered_table, stages_table
from dejavu.planning.planner import MET, REMEMBERED, PlanOptions, plan
from dejavu.planning.prices import Prices
from dejavu.planning.proofs.none_found import ONE_STAGE_ALONE
from dejavu.planning.questions import PROVER
from dejavu.planning.schedules import cut_evenly, fits, under
from dejavu.planning.sentences import OTHER_WAYS, short, what_is_likely, what_is_proved, within
from dejavu.plans import (
    Infeasible,
    NoPlanError,
    NotFound,
    Plan,
    Problem,
    SearchResult,
    Stage,
    StageConfiguration,
    price,
)
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES, allowed_microbatches
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.runtime.job import TrainingJob
from dejavu.search import SEARCHES
from dejavu.simulation import simulate_plan
from dejavu.workload import Workload
from dejavu.workload.loader import load_workload
from dejavu.workload.models import layers_of
from flows.__main__ import _with_json_target, app
from flows.inputs import read_what_if, whole_numbers
from tests.conftest import draws, some
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = {
    "model": "gpt",
    "model_options": {"num_blocks": 4, "width": 256, "num_heads": 4},
    "data": "synthetic",
    "synthetic": {"num_classes": 256},
    "sequence_length": 64,
    "batch_size": 16,
    "num_microbatches": 8,
    "trials": {"count": 0},
}
NODES = """
nodes:
  - {name: a, count: 2, devices: {type: V100-SXM2-16GB, count: 2}, link: {bandwidth: 150 GB/s, latency: 5 us}}
  - {name: b, count: 1, devices: {type: T4, count: 3}, link: {bandwidth: 12 GB/s, latency: 8 us}}
links: {default: {bandwidth: 25 Gbit/s, latency: 25 us}}
"""
MOST_PLANS = 700  # for every plan of a problem to be simulated in tenths of a second
KEYS = {
    *("step_seconds", "lower_bound_seconds", "gap_percent", "uniform_step_seconds", "stages", "schedule"),
    *("microbatches", "search", "considered"),
}


@cache
def workload() -> Workload:
    return Workload.model_validate(WORKLOAD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("what-if")
    (made / "cluster.yaml").write_text(NODES)
    (made / "mine.yaml").write_text(json.dumps(WORKLOAD))
    return made


@pytest.fixture(scope="module")
def choice(folder: Path) -> Choice:
    return Planner().plan(request(folder))


def request(folder: Path, **changes: Any) -> PlanRequest:
    asked: dict[str, Any] = {"microbatches": (2, 8), "budget_seconds": 10.0, "database": folder / "profiles_db"}
    return PlanRequest(**{"workload": workload(), "cluster": load_cluster(folder / "cluster.yaml"), **asked, **changes})


@pytest.mark.parametrize("replicas", [None, 1, 2])
@pytest.mark.parametrize("devices", [None, 1, 2])
def test_the_most_of_one_kind_is_one(replicas: int | None, devices: int | None, choice: Choice) -> None:
    """`--data-parallel 1` alone was "of at most 1 replicas for each stage"."""
    said = within(replace(choice, request=replace(choice.request, parallelism=Parallelism(replicas, devices))))
    for most, word in ((replicas, "replica"), (devices, "tensor-parallel device")):
        found = re.findall(rf"(\d+ {word}s?)\b", said)
        one_each = replicas == devices == 1  # "of one device for each stage"
        assert found == ([] if most is None or one_each else [f"{most} {word}{'s' if most > 1 else ''}"])


def test_the_chosen_is_the_least_simulated_that_fits(choice: Choice) -> None:
    assert {row.search for row in choice.considered} >= {PROVER, *BASELINES}
    assert {row.num_microbatches for row in choice.considered} == {2, 8}
    for row in choice.considered:
        for one in row.candidates:
            if one.fits:
                assert one.binding is not None
                on_devices = simulate_bound(row.priced, one.binding, choice.request.cluster)
                assert one.simulated_seconds == on_devices.step_seconds
                assert one.simulated_seconds >= simulate_plan(row.priced, one.plan).step_seconds
                assert choice.simulated_seconds <= one.simulated_seconds * (1 + TIE)
    assert choice.chosen.fits
    assert choice.plan.schedule in SCHEDULES


@pytest.mark.parametrize(("own", "given"), [(0, None), (7, None), (7, 3)])
def test_python_and_the_command_answer_alike(own: int, given: int | None, folder: Path) -> None:
    """The seed is the workload's where none is given: of searches, and of what ranges are drawn from."""
    (folder / "seeded.yaml").write_text(json.dumps({**WORKLOAD, "seed": own}))
    files, target = (folder / "seeded.yaml", folder / "cluster.yaml"), folder / "seeded.json"
    words = ["plan", "--workload", str(files[0]), "--cluster", str(files[1]), "--search", "uniform", "--schedule"]
    (new := folder / "new").mkdir(exist_ok=True)
    words += ["1f1b", "--microbatches", "8", "--database", str(new), "--json", str(target)]
    words += [] if given is None else ["--seed", str(given)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and f"--database {new} has no measured costs: all costs are predicted" in done.stderr
    asked: PlanOptions = {"searches": ("uniform",), "schedules": ("1f1b",), "microbatches": (8,), "database": new}
    choice = plan(*files, **asked) if given is None else plan(*files, **asked, seed=given)
    said, written = json.loads(json.dumps(choice_to_dict(choice))), json.loads(target.read_text())
    for one in (said, written):
        for row in one["considered"]:
            del row["search_seconds"]
    assert said == written and said["made_for"]["seed"] == (own if given is None else given)


def test_both_bounds_hold_for_all(choice: Choice) -> None:
    for row in choice.considered:
        if row.result is not None:
            assert price(row.priced.problem, row.result.plan).step_seconds == pytest.approx(row.result.step_seconds)
            assert choice.bound_seconds(row.num_microbatches) <= row.result.step_seconds * (1 + 1e-9)
        for one in row.candidates:
            if one.fits:
                assert choice.simulated_bound_seconds(row.num_microbatches) <= one.simulated_seconds
    assert 0 < choice.simulated_lower_bound_seconds <= choice.simulated_seconds
    assert 0 < choice.lower_bound_seconds <= choice.cheapest.step_seconds * (1 + 1e-9)
    assert choice.gap is not None


def test_a_gap_is_that_of_the_two_numbers_beside_it_and_none_where_one_is_missing(choice: Choice) -> None:
    """A plan that was met while bounding is no search's: the cost model has no best plan then, and no gap of 0 %."""
    met = Considered(MET, choice.priced, None, (choice.chosen,))
    for made in (choice, replace(choice, considered=(met,), origin=met)):
        said = choice_to_dict(made)
        best, bound = said["cheapest_step_seconds"], said["lower_bound_seconds"]
        wanted = None if best is None else pytest.approx(100 * (1 - bound / best), abs=1e-9)
        assert said["gap_percent"] == wanted
        low, step = said["simulated_lower_bound_seconds"], said["simulated_step_seconds"]
        assert said["simulated_gap_percent"] == pytest.approx(100 * (1 - low / step), abs=1e-9)


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("schedule", [name for name, one in SCHEDULES.items() if one.stages_per_rank > 1])
def test_searches_plan_ranks_that_a_schedule_of_several_stages_can_have(
    schedule: str, microbatches: int, folder: Path
) -> None:
    """Of six layers three ranks of two stages, or as many as it has microbatches for; more could not be run."""
    each = SCHEDULES[schedule].stages_per_rank
    most = max(ranks for ranks in range(1, 6 // each + 1) if allowed_microbatches(schedule, each * ranks, microbatches))
    named_alone = {"schedules": (schedule,), "microbatches": (microbatches,), "searches": ("exact",)}
    asked = request(folder, **named_alone, budget_seconds=1.0)
    choice = Planner().plan(asked)
    for row in choice.considered:
        assert row.priced.problem.max_stages == most
        if row.result is not None:
            assert row.candidates, f"{row.search}: no {schedule} of {row.result.plan}"
    assert "none fits" not in choice_to_dict(choice)["reason"]


def test_what_no_schedule_can_run_is_not_said_to_need_memory(folder: Path) -> None:
    few = Workload.model_validate(WORKLOAD | {"model_options": {"num_blocks": 1, "width": 64, "num_heads": 4}})
    asked = request(folder, workload=few, schedules=("interleaved_1f1b_4",), searches=("exact",), budget_seconds=1.0)
    wanted = "interleaved_1f1b_4 wants 4 stages on 1 pipeline rank; the model has 3 layers"
    with pytest.raises(NoPlanError, match=wanted):
        Planner().plan(asked)


@pytest.mark.parametrize("seed", range(20))
def test_of_plans_that_tie_the_simplest_is_chosen_in_any_order(choice: Choice, seed: int) -> None:
    random = np.random.default_rng(seed)
    pool: list[Candidate] = []
    for k, one in enumerate(dict.fromkeys(one for row in choice.considered for one in row.candidates)):
        slower = (1.0, 1.0 + 1e-6)[k % 2]
        made = replace(one, simulation=SimpleNamespace(step_seconds=slower * (1 + 0.9 * TIE * random.random())))
        vars(made)["fits"] = k % 5 > 0
        pool.append(made)
    tied = [one for k, one in enumerate(pool) if k % 2 == 0 and one.fits]
    order = list(SCHEDULES)
    simplest = min((len(one.plan.stages), one.num_devices, order.index(one.plan.schedule)) for one in tied)
    first = ranked(pool)[0]
    assert (len(first.plan.stages), first.num_devices, order.index(first.plan.schedule)) == simplest
    for _ in range(10):
        found = ranked([pool[k] for k in random.permutation(len(pool))])
        assert found[0] is first
        assert sorted(map(id, found)) == sorted(map(id, pool))
        fits = [one.fits for one in found]
        assert fits == sorted(fits, reverse=True)


def test_no_cut_can_be_moved_to_a_faster_place(choice: Choice) -> None:
    for cut in range(len(choice.plan.cuts)):
        for move in (-1, 1):
            moved = moved_cut(choice.plan, cut, move)
            if moved is not None and (made := choice.candidate(moved)).fits:
                assert made.simulated_seconds >= choice.simulated_seconds * (1 - 1e-6)


def test_baselines_are_all_there_and_the_gain_is_over_the_best(choice: Choice) -> None:
    assert tuple(choice.baselines) == BASELINES
    fastest = min(row.best.step_seconds for row in choice.baselines.values() if row.best)
    assert choice.speedup == pytest.approx(fastest / choice.step_seconds)
    assert choice.speedup >= 1.0


def over_slow_links(model: str, nodes: int, gbits: int, microbatches: int, folder: Path) -> Choice:
    """Return a choice of baselines alone on nodes of eight GPUs."""
    path = folder / "cluster.yaml"
    group = (
        "{name: a, count: %d, devices: {type: A100-SXM4-80GB, count: 8}, link: {bandwidth: 300 GB/s, latency: 4 us}}"
    )
    slow = f"{{default: {{bandwidth: {gbits} Gbit/s, latency: 5 us}}}}"
    path.write_text(f"name: slow\nnodes: [{group % nodes}]\nlinks: {slow}\n")
    asked = PlanRequest(
        *(load_workload(model), load_cluster(path), folder),
        searches=("uniform",),
        microbatches=(microbatches,),
        budget_seconds=0.0,
    )
    return Planner().plan(asked)


@pytest.mark.parametrize("nodes", [12, 32])
def test_over_slow_links_no_even_split_near_the_cheapest_is_simulated_faster(nodes: int, tmp_path: Path) -> None:
    found = over_slow_links("llama3-8b", nodes, 25, 32, tmp_path)
    row = found.baselines["uniform"]
    assert row.best is not None and row.result is not None
    problem, cheapest = row.priced.problem, found.uniform_step_seconds
    assert row.result.step_seconds == price(problem, row.result.plan).step_seconds
    assert cheapest is not None and row.result.step_seconds > cheapest  # by the formula another is better
    first = next(one for one in found.considered if one.search == "uniform")
    assert first.result is not None and first.result.near and first.result.plan != row.result.plan
    for other in (first.result.plan, *first.result.near):
        assert row.best.simulated_seconds <= simulate_plan(row.priced, other).step_seconds * (1 + TIE)


def test_cuts_of_the_next_best_plans_are_moved_too(tmp_path: Path) -> None:
    found = over_slow_links("llama3-70b", 128, 100, 64, tmp_path)
    plans = [row.best for row in found.considered if row.best is not None]
    for one in ranked(plans)[:3]:
        assert found.chosen.simulated_seconds <= found.simulator.polished(one).simulated_seconds * (1 + TIE)


def test_the_table_and_the_sentence_mean_the_same_fullest_device(folder: Path) -> None:
    """Of devices of two kinds the fullest need not be the one with the least memory free."""
    mixed = load_cluster(ROOT / "examples/clusters/h100-and-l4.yaml")
    asked = request(folder, cluster=mixed, microbatches=(8,), searches=("pipedream",), budget_seconds=0.5)
    choice = Planner().plan(asked)
    random, differs = np.random.default_rng(0), 0
    pairs = [(row, one) for row in choice.considered for one in row.candidates if one.fits]
    for origin, one in (pair for pair in pairs for _ in range(3)):
        capacities = [mixed.device_types[stage.configuration.device_type].memory_bytes for stage in one.plan.stages]
        shares = random.uniform(0.1, 0.9, len(capacities)) / len(capacities)
        chosen = replace(one)
        vars(chosen).update(fits=True, price=SimpleNamespace(peak_bytes=shares * capacities))
        found = replace(choice, origin=origin, chosen=chosen)
        held, capacity = found.fullest
        table = considered_table(found)
        names, free = ([str(cell) for cell in table.columns[k].cells] for k in (0, -1))
        assert [cell for name, cell in zip(names, free, strict=True) if "✔" in name] == [format_bytes(capacity - held)]
        assert f"of {format_bytes(capacity)} on the fullest device" in what_is_likely(found)
        ranks = found.held(chosen)
        assert held / capacity == max(one / most for one, most in ranks)
        differs += capacity - held > min(most - one for one, most in ranks)
    assert differs


def test_a_plan_with_moved_cuts_is_not_called_the_baseline(choice: Choice) -> None:
    row = next(row for row in choice.baselines.values() if row.best is not None and row.best.plan.cuts)
    own = row.best
    assert own is not None
    moves = [moved_cut(own.plan, cut, move) for cut in range(len(own.plan.cuts)) for move in (-1, 1)]
    moved = choice.candidate(next(plan for plan in moves if plan is not None))
    for chosen, is_moved in ((own, False), (moved, True)):
        found = replace(choice, origin=row, chosen=chosen)
        names = [str(name) for name in considered_table(found).columns[0].cells]
        assert [name.endswith(", cuts moved") for name in names if name.startswith("✔")] == [is_moved]
        assert choice_to_dict(found)["cuts_moved"] == is_moved


def test_every_stage_says_what_it_needs(choice: Choice) -> None:
    found = choice_to_dict(choice)
    assert set(found) >= KEYS
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    layers = [name for stage in found["stages"] for name in stage["layers"]["names"]]
    assert layers == ["embedding", "block0", "block1", "block2", "block3", "head"]
    for stage in found["stages"]:
        assert 0 < stage["peak_bytes"] <= stage["capacity_bytes"]
        assert stage["seconds"] > 0
        assert stage["device_type"] == stage["configuration"]["device_type"]
        assert stage["layers"]["stop"] - stage["layers"]["start"] == len(stage["layers"]["names"])
    chosen = [row for row in found["considered"] if row["chosen"]]
    fitting = [row for row in found["considered"] if row["fits"]]
    assert len(chosen) == 1
    least = min(row["simulated_step_seconds"] for row in fitting)
    assert least <= chosen[0]["simulated_step_seconds"] <= least * (1 + TIE)
    assert chosen[0]["simulated_step_seconds"] == found["simulated_step_seconds"]
    assert set(found["baselines"]) == set(BASELINES)
    for row in found["considered"]:
        assert set(row) >= {"search", "microbatches", "step_seconds", "lower_bound_seconds", "simulated_step_seconds"}
        # Nothing is proved of plans in both directions or in slices.
        if (bound := row["simulated_lower_bound_seconds"]) is not None:
            assert bound <= (row["simulated_step_seconds"] or float("inf"))
        else:
            assert row["search"] in OTHER_WAYS


def test_the_schedules_are_those_that_fit_the_fastest_first(choice: Choice) -> None:
    assert choice.plan in [one.plan for one in choice.schedules]
    seconds = [one.simulated_seconds for one in choice.schedules]
    assert seconds == sorted(seconds)
    rows = choice_to_dict(choice)["schedules"]
    assert [row["simulated_step_seconds"] for row in rows] == seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_is_named_is_the_one_that_is_chosen(folder: Path, schedule: str) -> None:
    """Never another one in silence."""
    found = Planner().plan(request(folder, schedules=(schedule,), microbatches=(8,), budget_seconds=2.0))
    assert found.plan.schedule == schedule
    assert found.chosen.fits
    assert {one.plan.schedule for row in found.considered for one in row.candidates} == {schedule}


@pytest.mark.parametrize("width", [20, 80, 100])
def test_no_number_of_a_table_is_cut_off(choice: Choice, width: int) -> None:
    """However long the schedules' names are."""
    long = replace(choice.chosen, plan=replace(choice.plan, schedule="interleaved_zero_bubble"))
    vars(long).update(fits=True, price=choice.chosen.price)
    row = replace(choice.origin, candidates=(long,))
    found = replace(choice, considered=(*choice.considered, row))
    for table in (considered_table(found), stages_table(found)):
        said = io.StringIO()
        print_whole(Console(width=width, file=said), table)
        assert "…" not in said.getvalue().replace(" … ", "")
        for column in table.columns:
            assert not column.no_wrap or all(str(cell) in said.getvalue() for cell in column.cells)


def test_it_reads_like_a_sentence(choice: Choice, capsys: pytest.CaptureFixture[str]) -> None:
    print_choice(choice)
    printed = " ".join(capsys.readouterr().out.split())
    assert "✔" in printed
    assert "predicted step" in printed
    assert "Proved: no plan" in printed
    assert "best baseline" in printed
    assert "of 7 devices" in printed


def test_a_proof_names_no_limit_of_several_devices_where_there_is_one(folder: Path) -> None:
    """Replicas and shards that the cluster has no devices for are nobody's to leave out."""
    (folder / "one.yaml").write_text("nodes: [{name: a, count: 1, devices: {type: V100-SXM2-16GB, count: 1}}]")
    asked = replace(request(folder), cluster=load_cluster(folder / "one.yaml"), parallelism=Parallelism())
    said = what_is_proved(Planner().plan(asked))
    assert said.startswith("Proved: no plan") and not any(word in said for word in ("replicas", "shards", "ZeRO"))


@pytest.mark.parametrize("below", [0.0, 1e-9, 1e-5, 9e-4, 2e-3, 0.1, 1.0])
def test_no_more_is_said_to_be_proved_than_is(choice: Choice, below: float) -> None:
    """A bound a little below the chosen step leaves room for a plan there."""
    bound = (1 - below) * choice.simulated_seconds
    bounds = {place: replace(one, seconds=bound) for place, one in choice.simulated_bounds.items()}
    found = replace(choice, simulated_bounds=bounds)
    assert found.gap == (pytest.approx(below, abs=1e-12) if below < 1 else None)
    said = what_is_proved(found)
    assert ("is simulated faster" in said) == (below < 1e-6)
    assert ("0.1% shorter" in said) == (1e-6 < below < 1e-3)
    assert (f"{below:.1%} less" in said) == (1e-3 < below < 1)
    assert (f"below {format_bound(bound)}" in said) == (1e-3 < below < 1)


@pytest.mark.parametrize("number", [0.0999951, 0.9999, 0.12345, 1.0, 9.999, 99.96, 123.4, 999.9, 123456.0])
def test_a_short_number_has_three_digits(number: float) -> None:
    said = short(number)
    assert float(said.replace(",", "")) == float(f"{number:.3g}")
    assert len(said.replace(",", "").replace(".", "").lstrip("0")) == max(3, len(str(int(number + 0.5))))


def test_more_may_be_done_and_is_never_slower(folder: Path, choice: Choice) -> None:
    """One device a stage is among what may be done."""
    alone = Planner().plan(request(folder, parallelism=Parallelism.one_device()))
    assert all(stage.configuration.num_devices == 1 for stage in alone.plan.stages)
    assert choice.simulated_lower_bound_seconds <= alone.simulated_seconds


def test_searches_that_are_named_are_asked_and_no_other(folder: Path) -> None:
    found = Planner().plan(request(folder, searches=("mcmc", "exact"), microbatches=(8,)))
    beside = {"bound", "slow links", "one node", *OTHER_WAYS}  # slow links and one node by the same searches
    assert {row.search for row in found.considered} - beside == {"mcmc", "exact", *BASELINES}


@pytest.mark.parametrize("planner", [Planner(num_workers=1), Planner(num_workers=2, forks=True)])
def test_equal_requests_get_equal_answers(planner: Planner, folder: Path, choice: Choice) -> None:
    again = planner.plan(request(folder))
    assert again.plan == choice.plan
    assert {(row.search, row.priced.problem.num_microbatches) for row in again.considered} == {
        (row.search, row.priced.problem.num_microbatches) for row in choice.considered
    }


def test_too_little_memory_is_proved_and_said_with_what_would_do(folder: Path) -> None:
    huge = workload().model_copy(
        update={
            "model_options": {"num_blocks": 2, "width": 16384, "num_heads": 4},
            "batch_size": 2,
            "num_microbatches": 2,
        }
    )
    asked = request(folder, workload=huge, microbatches=(2,), parallelism=Parallelism.one_device())
    with pytest.raises(NoPlanError, match=r"in 2 microbatches: no plan fits.*bytes") as refused:
        Planner().plan(asked)
    assert isinstance(refused.value.answer, Infeasible)


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_a_budget_that_is_none_is_refused(folder: Path, seconds: float) -> None:
    with pytest.raises(InputError, match=f"budget_seconds is {seconds}; wanted a number from 0 on"):
        replace(request(folder), budget_seconds=seconds)


class Given(Prices):
    """A problem that is priced already."""

    def __init__(self, request: PlanRequest, given: PricedProblem) -> None:
        super().__init__(request)
        self._posed[given.problem.num_microbatches, (), (), 0] = given


def as_request(folder: Path, given: PricedProblem, **changes: Any) -> PlanRequest:
    """The request as if it had led to this problem: its graph only names what was trained before."""
    batch = workload().model_copy(update={"batch_size": 24})
    counts = (given.problem.num_microbatches,)
    return request(folder, workload=batch, microbatches=counts, budget_seconds=2.0, **changes)


def answer(asked: PlanRequest, given: PricedProblem) -> Choice:
    """The planner's, to a problem under the memory rule that the searches would take."""
    problem = replace(given.problem, schedule=asked.searched_schedule)
    return Planner().plan(asked, Given(asked, replace(given, problem=problem)))


def tight_by_hand(capacity: float) -> PricedProblem:
    """Layers of 4, 3, 2 and 1 bytes on two devices: of 5 bytes only the outer and the inner two fit together."""
    ones, zeros = np.ones((1, 4)), np.zeros((1, 4))
    costs = AdditiveCosts(
        ones, zeros, np.zeros(1), np.array([[4.0, 3.0, 2.0, 1.0]]), zeros, zeros, np.full(1, capacity)
    )
    nothing = np.zeros((1, 1))
    problem = Problem(
        tuple("abcd"), (StageConfiguration("T4"),), {"T4": 2}, costs, np.zeros(5), nothing, nothing, "1f1b", 4
    )
    return PricedProblem(problem, ones / 3, 2 * ones / 3)


def test_a_plan_that_only_two_stages_on_a_rank_allow_is_found(folder: Path) -> None:
    given = tight_by_hand(5.0)
    asked = as_request(folder, given)
    assert isinstance(named(SEARCHES, PROVER)().run(given.problem, budget_seconds=2.0), Infeasible)
    found = answer(asked, given)
    assert named(SCHEDULES, found.plan.schedule).placement == "v" and found.plan.cuts == (1, 2, 3)
    assert found.gap == pytest.approx(0.0, abs=1e-3)
    assert found.simulated_bound_seconds(4) == pytest.approx(found.simulated_seconds, rel=1e-5)  # one cut is apart
    json.dumps(choice_to_dict(found), allow_nan=False)
    print_choice(found)
    for schedules in (("1f1b",), ("1f1b", "gpipe")):
        one_stage = as_request(folder, given, schedules=schedules)
        with pytest.raises(NoPlanError) as refused:
            answer(one_stage, given)
        assert isinstance(refused.value.answer, Infeasible)


def only_in_both_directions(capacity: float) -> PricedProblem:
    """Four stages on four devices fit in 11 bytes if the first and the last share a device, and the inner two.

    The first holds 4 bytes of each microbatch in flight, of which 1F1B has more. The layers' even cut, which is all
    that is tried of both directions, is another.
    """
    forward = np.array([[10.0, 10.0, 10.0, 6.0, 6.0]])
    held = np.array([[0.0, 0.0, 6.0, 4.0, 1.0]]), np.array([[4.0, 0.0, 0.0, 0.0, 1.0]])
    zeros, nothing = np.zeros((1, 5)), np.zeros((1, 1))
    costs = AdditiveCosts(3 * forward, zeros, np.zeros(1), *held, zeros, np.full(1, capacity))
    problem = Problem(
        tuple("abcde"), (StageConfiguration("T4"),), {"T4": 4}, costs, np.zeros(6), nothing, nothing, "1f1b", 4
    )
    return PricedProblem(problem, forward, 2 * forward)


@pytest.mark.parametrize(("capacity", "outcome"), [(11.0, NotFound), (5.0, Infeasible)])
def test_no_plan_is_proved_only_where_none_of_both_directions_can_fit(
    folder: Path, capacity: float, outcome: type
) -> None:
    given = only_in_both_directions(capacity)
    ends = itertools.pairwise((0, 2, 3, 4, 5))
    both_ways = Plan(tuple(Stage(a, b, StageConfiguration("T4")) for a, b in ends), "1f1b", 4, both_ways=True)
    assert fits(given, both_ways, simulate_plan(given, both_ways)) == (outcome is NotFound)
    with pytest.raises(NoPlanError) as refused:
        answer(as_request(folder, given, schedules=("1f1b", "chimera")), given)
    assert isinstance(refused.value.answer, outcome)


@pytest.mark.parametrize("schedules", [("1f1b",), ("1f1b", "chimera"), ("chimera",)], ids="-".join)
@pytest.mark.parametrize("searches", [(name,) for name in SEARCHES] + [("exact", "mcmc"), ()], ids="-".join)
def test_where_no_plan_fits_what_the_searches_said_is_why(
    folder: Path, searches: tuple[str, ...], schedules: tuple[str, ...]
) -> None:
    """Also where only baselines are asked, and where plans of both directions were tried, which no search looks for."""
    given = only_in_both_directions(11.0)
    asked = as_request(folder, given, schedules=schedules, searches=searches)
    with pytest.raises(NoPlanError) as refused:
        answer(asked, given)
    answers = [named(SEARCHES, name)().run(given.problem) for name in searches or (PROVER,)]
    assert not any(isinstance(one, SearchResult) for one in answers)
    proofs = [one for one in answers if isinstance(one, Infeasible)]
    if isinstance(refused.value.answer, Infeasible):  # said by the search that proves, whoever was asked
        assert proofs
        return
    begins = {re.sub(r" in .*", "", str(one), flags=re.S) for one in proofs or answers}  # what follows may be a time
    assert any(begin in str(refused.value) for begin in begins), refused.value


def tight_request(seed: int, folder: Path) -> tuple[PlanRequest, Callable[[float], Cluster]]:
    """A small model on devices that it may not fit on, and the cluster with so many bytes on each of them at least."""
    drawn = Random(seed)
    counts = [(drawn.choice((1, 2, 4)), drawn.choice((1, 1, 2))) for _ in range(drawn.choice((1, 1, 2)))]
    sizes = [drawn.uniform(2, 50) * 2**20 for _ in counts]
    blocks, width, batch = drawn.choice((2, 3)), drawn.choice((128, 256)), drawn.choice((1, 2, 4))
    options = {"num_blocks": blocks, "width": width, "num_heads": 4}
    asked = Workload.model_validate({**WORKLOAD, "model_options": options, "batch_size": batch, "num_microbatches": 1})

    def cluster(least: float = 0.0) -> Cluster:
        lines = ["nodes:"]
        for g, (devices, nodes) in enumerate(counts):
            link = "link: {bandwidth: 50 GB/s, latency: 5 us}"
            lines.append(f"  - {{name: g{g}, devices: {{type: D{g}, count: {devices}}}, count: {nodes}, {link}}}")
        lines += ["links: {default: {bandwidth: 10 Gbit/s, latency: 20 us}}", "devices:"]
        for g, size in enumerate(sizes):
            rates = f"bandwidth: {300 * (g + 1)} GB/s, float32: {10 * (g + 1)} TFLOP/s"
            lines.append(f"  D{g}: {{kind: cuda, memory: {max(round(size), round(least))} B, {rates}}}")
        (folder / "tight.yaml").write_text("\n".join(lines) + "\n")
        return load_cluster(folder / "tight.yaml")

    microbatches = (drawn.choice([count for count in (1, 2) if batch % count == 0]),)
    one_each = Parallelism(1, 1) if drawn.random() < 0.5 else None
    made = PlanRequest(asked, cluster(), folder / "rows", one_each, ("exact",), ("1f1b",), microbatches, 2.0)
    return made, cluster


def test_what_no_plan_would_need_is_enough_for_one(tmp_path: Path) -> None:
    """Memory on every device, or microbatches that the batch divides into: the whole request has a plan then."""
    done = {"memory": 0, "microbatches": 0}
    for seed in (6, 10, 23, 43, 47):  # some of those without a plan
        asked, cluster = tight_request(seed, tmp_path)
        with pytest.raises(NoPlanError) as refused:
            Planner().plan(asked)
        said = str(refused.value)
        if size := re.search(r"([\d,]+) bytes\)? on every device would do", said):
            number = float(size[1].replace(",", ""))
            Planner().plan(replace(asked, cluster=cluster(number)))
            done["memory"] += 1
        if stages := re.search(r"--microbatches sets it of a batch_size that divides so; (\d+) or more would do", said):
            least, batch = int(stages[1]), asked.workload.batch_size
            for count in (n for n in range(least, batch + 1) if batch % n == 0):
                Planner().plan(replace(asked, microbatches=(count,)))
                done["microbatches"] += 1
    assert min(done.values()) > 2, done


@pytest.mark.parametrize("schedules", [("1f1b", "gpipe"), ("zbv",), ("1f1b", "zbv"), ("1f1b", "chimera")], ids="-".join)
def test_what_one_stage_on_each_rank_would_need_is_told_as_that(schedules: tuple[str, ...], tmp_path: Path) -> None:
    """Of 36.6 MiB that "would do" no plan was found under `zbv`, which puts two stages on a rank."""
    proved = 0
    for seed in (6, 10, 23, 43, 47):
        asked, cluster = tight_request(seed, tmp_path)
        asked = replace(asked, schedules=schedules)
        with pytest.raises(NoPlanError) as refused:
            Planner().plan(asked)
        said, can_run = str(refused.value), "1f1b" in schedules
        if isinstance(refused.value.answer, Infeasible):
            proved += 1
            assert all((part in said) != can_run for part in ONE_STAGE_ALONE)
            if can_run and (size := re.search(r"([\d,]+) bytes\)? on every device would do", said)):
                Planner().plan(replace(asked, cluster=cluster(float(size[1].replace(",", "")))))
    assert proved > 2


TIGHT = [(0.5, tuple(SCHEDULES)), (0.25, tuple(SCHEDULES)), (0.3, ("zbv", "1f1b"))]
TIGHT += [(0.3, ("interleaved_1f1b",)), (0.4, ("gpipe",))]


@draws(range(5000, 5001), range(5001, 5060))
@pytest.mark.parametrize("tight", some(TIGHT, TIGHT[1:3]), ids=range(len(TIGHT)))
def test_what_is_said_of_tight_problems_is_so_under_every_schedule(
    folder: Path, tight: tuple[float, tuple[str, ...]], seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against every plan under every schedule: one is found where there is one; else that is proved."""
    share, schedules = tight
    monkeypatch.setattr(Simulator, "bound", lambda _, candidate: candidate)  # no cluster has a drawn problem's links
    for seed in seeds:
        loose = small_priced(seed)
        if count(loose, MOST_PLANS + 1) > MOST_PLANS:
            continue
        given = with_memory(loose, share)
        least = min(least_by_schedule(given)[name] for name in schedules)
        asked = replace(as_request(folder, given, schedules=schedules), budget_seconds=10.0)  # of ten schedules
        try:
            found = answer(asked, given)
            assert found.simulated_lower_bound_seconds <= least <= found.simulated_seconds * (1 + 1e-9)
        except NoPlanError as refused:
            assert isinstance(refused.answer, Infeasible) and least == float("inf"), (seed, schedules)


def with_memory(priced: PricedProblem, share: float) -> PricedProblem:
    """The same problem with a share of what one device would need for everything."""
    costs = priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    needed = costs.fixed_bytes_CL.max(axis=0).sum() + costs.activation_bytes_CL.max(axis=0).sum()
    costs = replace(costs, capacity_bytes_C=np.full_like(costs.capacity_bytes_C, share * needed))
    return replace(priced, problem=replace(priced.problem, costs=costs))


def test_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _with_json_target(["plan", "--json"]) == ["plan", "--json", "-"]
    assert _with_json_target(["plan", "--json", "--seed", "3"]) == ["plan", "--json", "-", "--seed", "3"]
    assert _with_json_target(["plan", "--json", "x.json"]) == ["plan", "--json", "x.json"]
    assert whole_numbers("--microbatches", "16, 8,8") == (8, 16)
    monkeypatch.chdir(ROOT)
    cluster = Path("examples/clusters/4x8-v100.yaml")
    assert read_what_if(cluster, "t5-11b", None)[1].model_options["feedforward"] == 65536
    for name in ("gpt", "llama", "mixtral", "bert", "t5", "moe", "cnn", "mlp", "vgg", "wide_resnet"):
        assert read_what_if(cluster, name, None)[1].model == name


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows", "plan", "--cluster", str(folder / "cluster.yaml"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)


def test_the_command_from_end_to_end(folder: Path) -> None:
    words = ("--workload", str(folder / "mine.yaml"), "--microbatches", "4,8", "--tensor-parallel", "1", "--json")
    words += ("--budget-seconds", "1")
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= KEYS
    assert all(stage["configuration"]["tensor_parallel"] == 1 for stage in found["stages"])
    assert "prefect" not in done.stderr.lower()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model", "nothing"), "unknown model 'nothing'"),
        (("--model", "gpt", "--workload", "x.yaml"), "wanted one of them"),
        (("--microbatches", "0"), "whole numbers from 1 to"),
        (("--search", "exat"), "did you mean 'exact'?"),
        (("--schedule", "1f2b"), "unknown schedule '1f2b'"),
        (("--schedule", "zbv,1f2b"), "unknown schedule '1f2b'"),
        (("--microbatches", "7"), "does not divide into 7"),
        (("--workload", "nowhere.yaml"), "nowhere.yaml"),
        (("--workload", "{folder}"), "{folder} is a folder; wanted a workload file"),
        (("--model", "{folder}"), "{folder} is a folder; wanted a workload file"),
        (("--cluster", "{folder}"), "--cluster {folder} is a folder; wanted a cluster file"),
        (("--json", "{folder}"), "--json {folder} is a folder; wanted a file"),
        (("--json", "{folder}/none/x.json"), "there is no folder {folder}/none"),
        (("--json", "{folder}/read-only/x.json"), "no permission to write there"),
        (("--database", "{folder}/none"), "--database {folder}/none: there is no such folder"),
        (("--database", "{folder}"), "--database {folder} is no cost database; wanted one of `dejavu profile` or"),
    ],
)
def test_mistakes_are_sentences(
    folder: Path,
    words: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flows.__main__ import main
    from flows.endings import INPUT_ERROR

    def searched(planner: Planner, request: PlanRequest) -> None:
        raise AssertionError("searched before the mistake was said")

    if "read-only" in "".join(words):
        monkeypatch.setattr("os.access", lambda path, mode: "read-only" not in str(path))
        (folder / "read-only").mkdir()
    if "divide" not in sentence:
        monkeypatch.setattr(Planner, "plan", searched)
    given = [word.format(folder=folder) for word in words]
    where = [] if "--cluster" in words else ["--cluster", str(folder / "cluster.yaml")]
    monkeypatch.setattr(sys, "argv", ["dejavu", "plan", *where, *given])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == INPUT_ERROR
    assert sentence.format(folder=folder) in capsys.readouterr().err


def test_nothing_heavy_is_needed() -> None:
    """Neither Prefect, MLflow, Dask nor matplotlib is imported to plan."""
    code = (
        "import sys, flows.__main__, flows.inputs, dejavu.planning; "
        "print([n for n in ('prefect', 'mlflow', 'distributed', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def of_nodes(nodes: Sequence[int], folder: Path) -> Cluster:
    """Nodes with so many V100 each."""
    rows = (
        f"  - {{name: n{k}, count: 1, devices: {{type: V100-SXM2-16GB, count: {count}}}, "
        "link: {bandwidth: 150 GB/s, latency: 5 us}}"
        for k, count in enumerate(nodes)
    )
    path = folder / f"{'-'.join(map(str, nodes))}.yaml"
    path.write_text("\n".join(("nodes:", *rows, "links: {default: {bandwidth: 25 Gbit/s, latency: 25 us}}")))
    return load_cluster(path)


MORE_AND_FEWER = [
    ((8, 1), (8,)),
    ((3, 3), (2, 2)),
    ((7, 7), (6, 6)),
    ((5, 5), (4, 4)),
    ((4, 4, 3), (4, 4)),
    ((7,), (4,)),
    ((4, 2, 2), (4,)),
]


@pytest.mark.parametrize(("more", "fewer"), MORE_AND_FEWER, ids=str)
def test_more_devices_are_no_slower_and_every_plan_is_placed(
    more: tuple[int, ...], fewer: tuple[int, ...], folder: Path
) -> None:
    """Nodes of odd or unequal numbers allow whatever some of their devices allow."""
    wide = workload().model_copy(
        update={
            "model_options": {"num_blocks": 3, "width": 4096, "num_heads": 16},
            "batch_size": 16,
            "sequence_length": 512,
        }
    )
    many, few = (
        Planner().plan(request(folder, workload=wide, cluster=of_nodes(nodes, folder), schedules=("1f1b",)))
        for nodes in (more, fewer)
    )
    assert many.simulated_seconds <= few.simulated_seconds * (1 + 1e-3)
    assert 0 < many.simulated_lower_bound_seconds <= many.simulated_seconds
    for row in many.considered:
        for one in row.candidates if row.search != REMEMBERED else ():
            if one.fits:
                bound = bind(one.priced.problem, one.plan, many.request.cluster)
                assert len({row.device for row in bound.placements}) == one.num_devices
                assert choice_bound(many, one) <= one.simulated_seconds * (1 + 1e-9)
    again = many.candidate(many.plan)
    assert again.simulated_seconds == many.simulated_seconds
    written = choice_to_dict(many)
    assert {row["most_devices"] for row in written["considered"]} >= {
        sum(many.problems[0].problem.device_counts.values())
    }
    assert all((row["devices"] or 0) <= row["most_devices"] <= sum(more) for row in written["considered"])
    json.dumps(written, allow_nan=False)


@pytest.mark.parametrize("nodes", [(3, 2, 1), (3, 3)], ids=str)
def test_why_there_is_no_plan_is_said_of_each_way_to_take_devices(nodes: tuple[int, ...], folder: Path) -> None:
    """A layer that fits no stage of one device fits one of two, which other plans have."""
    cluster, layers_said = of_nodes(nodes, folder), Counter[bool]()
    for size in (2_000_000, 12_000_000):
        tight = {name: replace(one, memory_bytes=size) for name, one in cluster.device_types.items()}
        few = {"microbatches": (2,), "schedules": ("1f1b",), "searches": ("exact",), "budget_seconds": 1.0}
        prices = Prices(request(folder, cluster=replace(cluster, device_types=tight), **few))
        with pytest.raises(NoPlanError) as refused:
            Planner().plan(prices.request, prices)
        problems, said = prices.problems(2), str(refused.value)
        assert said.count("where the stages") == len(problems) > 1
        for priced in problems:
            widths, reason = prices.widths_of(priced), str(named(SEARCHES, PROVER)().run(priced.problem))
            assert f"where {widths}, {reason.partition(';')[0]}" in said
            own = {one.devices_per_node for one in priced.problem.configurations}
            numbers = {int(word) for word in re.findall(r"\d+", widths.partition(" of a node")[0])}
            assert own <= numbers and numbers in [set(share.widths) for part in prices.parts for share in part.values()]
            layers_said["fits in no stage" in reason] += 1
    assert min(layers_said[True], layers_said[False]) > 0


def choice_bound(choice: Choice, one: Candidate) -> float:
    """What is proved of plans with as many microbatches."""
    return choice.simulated_bound_seconds(one.plan.num_microbatches)


@pytest.mark.parametrize("seed", range(20))
def test_an_even_cut_is_the_best_of_all_where_some_layers_cannot_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    S, L = int(rng.integers(1, 5)), int(rng.integers(4, 9))
    seconds_SL = rng.integers(1, 9, (S, L)).astype(float)
    seconds_SL[rng.random((S, L)) < 0.2 * (seed % 3)] = np.inf
    devices = [StageConfiguration(f"device{s}") for s in range(S)]
    priced: Any = SimpleNamespace(
        forward_seconds_CL=seconds_SL / 4,
        backward_seconds_CL=3 * seconds_SL / 4,
        problem=SimpleNamespace(index=devices.index),
    )

    def slowest(cuts: Sequence[int]) -> float:
        spans = itertools.pairwise((0, *cuts, L))
        return max(float(seconds_SL[s, start:stop].sum()) for s, (start, stop) in enumerate(spans))

    best = min(map(slowest, itertools.combinations(range(1, L), S - 1)))
    if best == np.inf:
        with pytest.raises(InputError, match="layers that its devices can run"):
            cut_evenly(priced, devices)
        return
    found = cut_evenly(priced, devices)
    assert [stage.configuration for stage in found] == devices and (found[0].start, found[-1].stop) == (0, L)
    assert slowest([stage.start for stage in found[1:]]) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_schedule_is_said_to_run_is_accepted_before_a_launch(
    schedule: str, choice: Choice, folder: Path
) -> None:
    """Of one rank in every way that is considered: ZeRO 2 and 3 were planned where no rank would have run them."""
    asked, priced, refused = request(folder), choice.priced, set[str]()
    num_layers = len(layers_of(asked.workload))
    for configuration in priced.problem.configurations:
        if configuration.device_type not in asked.cluster.device_counts:
            continue
        try:
            plan = under(
                priced, Plan((Stage(0, num_layers, configuration),), "1f1b", choice.plan.num_microbatches), schedule
            )
        except InputError as error:
            refused.add(str(error))
            continue
        binding = bind_in_order(plan, asked.cluster)
        job = TrainingJob(as_planned(asked.workload, plan), binding, Draw(), None, 0, 1, folder="")
        check_plan(job)
        check_spreading(job)
    parts = [one for one in priced.problem.configurations if not one.runs_in_parts]
    assert any(one.reduces_in_passes for one in parts)
    assert any("in two parts" in said for said in refused) == SCHEDULES[schedule].splits_backward


@pytest.mark.parametrize("schedule", [name for name, one in SCHEDULES.items() if one.splits_backward])
def test_searches_look_for_what_such_a_schedule_can_run(schedule: str, folder: Path) -> None:
    asked = request(folder, schedules=(schedule,))
    assert asked.spread.zero_levels == (0, 1)
    both = request(folder, schedules=(schedule, "1f1b"))
    assert both.spread.zero_levels == (0, 1, 2, 3)
