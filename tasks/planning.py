"""From prices to a plan on devices: search, bind, simulate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dejavu.bind import Binding, bind
from dejavu.cluster import Cluster
from dejavu.cost import CostTable
from dejavu.cost.parts import Priced
from dejavu.graph import Graph
from dejavu.parallelism import Parallelism
from dejavu.plan import InfeasibleError, Plan, Price, Problem, SearchResult
from dejavu.planning.prices import pose_workload
from dejavu.planning.schedules import fits, under_schedules
from dejavu.problem import Posed
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.feedback import remembered_plans, remembered_step_seconds, step_factor
from dejavu.search import search_named
from dejavu.simulate import Simulation, play_posed, price_played
from dejavu.stage_costs import PlanError
from dejavu.track import Run
from dejavu.workload import AUTO, Workload
from tasks.recording import record_search

UNTRIED = 1.03  # a plan that was never trained has to promise so much more: predictions err, and steps vary by that
SEARCH_BUDGET_SECONDS = 60.0  # Prefect cannot interrupt a computing thread, so a search has a budget of its own


@task(name="search", task_run_name="search-{search}", cache_policy=NO_CACHE)
def search_plan(problem: Problem, search: str, seed: int, record: Run) -> SearchResult:
    """Run one search; it prices its plan like every other."""
    result = search_named(search)().run(problem, budget_seconds=SEARCH_BUDGET_SECONDS, seed=seed)
    with record.child(f"search: {search}") as run:
        record_search(run, result)
    proved = f"proved within {result.gap:.1%} of the best" if result.lower_bound_seconds else "no bound"
    get_run_logger().info(
        "%s: %d stages cut before layers %s, predicted step %.1f ms, %s, in %.2f s",
        search,
        len(result.plan.stages),
        list(result.plan.cuts),
        result.step_seconds * 1e3,
        proved,
        result.seconds,
    )
    return result


@task(name="search", task_run_name="search-uniform", cache_policy=NO_CACHE)
def split_evenly(problem: Problem, seed: int, record: Run) -> SearchResult | None:
    """What a person would do by hand, to compare with; None where no even split fits, which the log says."""
    try:
        return search_plan.fn(problem, "uniform", seed, record)
    except InfeasibleError as error:
        get_run_logger().warning("the even split does not fit: %s", error)
        return None


@task(name="bind", cache_policy=NO_CACHE)
def bind_stages(problem: Problem, plan: Plan, cluster: Cluster) -> Binding:
    """Stages to actual devices; the log says why each is where it is."""
    binding = bind(problem, plan, cluster)
    get_run_logger().info("bound to devices: %s", "; ".join(binding.reasons))
    return binding


class Played(NamedTuple):
    """A plan, its price part by part, and one step played by torch's own order of actions.

    Attributes:
        step_factor: what remembered steps of such plans took, over what was played of them.
        is_remembered: this very plan was trained before.
    """

    plan: Plan
    price: Price
    simulation: Simulation
    step_factor: float
    is_remembered: bool

    @property
    def step_seconds(self) -> float:
        return self.simulation.step_seconds * self.step_factor


@task(name="simulate", cache_policy=NO_CACHE)
def play_candidates(
    posed: Posed, found: Mapping[str, SearchResult], workload: Workload, graph: Graph, database: Path
) -> dict[str, Played]:
    """What each search found, played, the fastest first: the searches' formula decides less than what will run.

    Under the schedule that the workload names, or each under the one that makes it fastest; the even split stays under
    the one that a person would take. Plans that were trained before are candidates too.
    """
    played = {}
    for name, result in found.items():
        wanted = result.plan.schedule if (name, workload.schedule) == ("uniform", AUTO) else workload.schedule
        candidates = [
            play_plan.fn(posed, plan, graph, database) for plan in under_schedules(posed, result.plan, wanted)
        ]
        if name != "uniform":
            candidates += _trained_before(posed, workload, graph, database)
        holding = [one for one in candidates if fits(posed, one.plan, one.simulation)] or candidates[:1]
        played[name] = min(holding, key=lambda one: one.step_seconds * (1.0 if one.is_remembered else UNTRIED))
        times = ", ".join(f"{one.plan.schedule} {one.step_seconds * 1e3:.1f} ms" for one in candidates)
        get_run_logger().info("%s, played: %s", name, times)
    return dict(sorted(played.items(), key=lambda item: item[1].step_seconds))


def _trained_before(posed: Posed, workload: Workload, graph: Graph, database: Path) -> list[Played]:
    """Remembered plans that answer today's question."""
    found = []
    for plan in remembered_plans(graph, ProfileDatabase(database)):
        if plan.num_microbatches != workload.num_microbatches or workload.schedule not in (AUTO, plan.schedule):
            continue
        needed: Counter[str] = Counter()
        for how in map(plan.rank_configuration, range(len(plan.ranks))):
            needed[how.device_type] += how.num_devices
        if not needed <= Counter(posed.problem.device_counts):
            continue
        try:
            found.append(play_plan.fn(posed, plan, graph, database))
        except PlanError:  # of devices that are not there today
            continue
    return found


@task(name="simulate", cache_policy=NO_CACHE)
def play_plan(posed: Posed, plan: Plan, graph: Graph, database: Path) -> Played:
    """One plan, played; binding may have moved stages to other kinds of devices than a search named."""
    simulation = play_posed(posed, plan)
    rows = ProfileDatabase(database)
    factor = step_factor(graph, plan, rows, lambda other: play_posed(posed, other).step_seconds)
    known = remembered_step_seconds(graph, plan, rows) is not None
    return Played(plan, price_played(posed, plan, simulation), simulation, factor.factor, known)


@task(name="simulate", task_run_name="simulate-without-memory", cache_policy=NO_CACHE)
def play_without_memory(
    plan: Plan,
    graph: Graph,
    table: CostTable,
    cluster: Cluster,
    workload: Workload,
    database: Path,
    parallelism: Parallelism,
) -> float:
    """The step that would be predicted if no training had ever been remembered, in seconds."""
    known = {workload.microbatch_size: Priced(graph, table)}
    return play_posed(pose_workload(workload, cluster, database, parallelism, known), plan).step_seconds
