"""From prices to a plan on devices: search, bind, simulate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dejavu.bind import Binding, bind
from dejavu.cluster import Cluster
from dejavu.cost import CostTable, transfer_costs
from dejavu.graph import Graph
from dejavu.plan import InfeasibleError, Plan, Price, Problem, SearchResult, price
from dejavu.problem import pose
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.feedback import step_factor
from dejavu.search import search_named
from dejavu.simulate import Simulation, play
from dejavu.track import Run
from dejavu.workload import Workload
from tasks.recording import record_search

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
def bind_stages(plan: Plan, cluster: Cluster, table: CostTable) -> Binding:
    """Stages to actual devices."""
    return bind(plan, cluster, table.cut_bytes_L1)


class Played(NamedTuple):
    """A plan, its price part by part, and one step played by torch's own order of actions.

    Attributes:
        step_factor: what remembered steps of such plans took, over what was played of them.
    """

    plan: Plan
    price: Price
    simulation: Simulation
    step_factor: float

    @property
    def step_seconds(self) -> float:
        return self.simulation.step_seconds * self.step_factor


@task(name="simulate", cache_policy=NO_CACHE)
def play_candidates(
    problem: Problem, table: CostTable, found: Mapping[str, SearchResult], graph: Graph, database: Path
) -> dict[str, Played]:
    """What each search found, played, the fastest first: the searches' formula decides less than what will run."""
    rows = ProfileDatabase(database)
    played = {}
    for name, result in found.items():
        simulation = play(problem, table, result.plan)
        factor = step_factor(graph, result.plan, rows, lambda plan: play(problem, table, plan).step_seconds)
        played[name] = Played(result.plan, price(problem, result.plan), simulation, factor)
    return dict(sorted(played.items(), key=lambda item: item[1].step_seconds))


@task(name="simulate", task_run_name="simulate-without-memory", cache_policy=NO_CACHE)
def play_without_memory(plan: Plan, table: CostTable, cluster: Cluster, workload: Workload, database: Path) -> float:
    """The step that would be predicted if no training had ever been remembered, in seconds."""
    problem = pose(table, cluster, workload, transfer_costs(cluster, ProfileDatabase(database)))
    return play(problem, table, plan).step_seconds
