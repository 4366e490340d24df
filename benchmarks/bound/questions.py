"""Questions as people ask them: a workload's layers on a cluster, split into some number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dejavu import strict_yaml
from dejavu.cluster import load_cluster
from dejavu.cost import transfer_costs
from dejavu.errors import DejavuError
from dejavu.parallelism import Parallelism
from dejavu.plan import Plan
from dejavu.planning.prices import parallel_prices, pose_workload
from dejavu.planning.schedules import fits, under_schedules
from dejavu.problem import Posed, pose_parallel, split_into
from dejavu.profiles import ProfileDatabase
from dejavu.search import search_named
from dejavu.simulate import play_posed
from dejavu.workload import AUTO, Workload

WORKLOADS, CLUSTERS = Path("examples/workloads"), Path("examples/clusters")
DATABASE = Path("profiles_db")


@dataclass(frozen=True)
class Question:
    """A model, where it is to be trained, and into how many microbatches a step is split."""

    workload: str
    cluster: str
    microbatches: tuple[int, ...]

    def posed(self) -> Iterator[Posed]:
        """The problem of each number of microbatches."""
        cluster = load_cluster(CLUSTERS / f"{self.cluster}.yaml")
        workload = strict_yaml.load(WORKLOADS / f"{self.workload}.yaml", Workload).value
        if cluster.kind == "cpu":  # with what passes and messages take of a core
            for count in self.microbatches:
                yield pose_workload(split_into(workload, count), cluster, DATABASE, Parallelism.usual(cluster), {})
            return
        prices = parallel_prices(workload, cluster, DATABASE)
        transfers = transfer_costs(cluster, ProfileDatabase(DATABASE))
        for count in self.microbatches:
            yield pose_parallel(prices, cluster, split_into(workload, count), transfers, Parallelism.usual(cluster))


QUESTIONS = (
    Question("gpt", "this-machine", (8, 16)),
    Question("t5-11b", "4x8-v100", (32, 128)),
    Question("t5-11b", "a100-and-t4", (32, 64)),
    Question("gpt3-175b", "8x8-h200", (64,)),
)
QUICK = QUESTIONS[:1]


def best_of_exact(posed: Posed, budget_seconds: float) -> tuple[float, Plan] | None:
    """The exact search's plan under the schedule that is fastest as simulated, of those that fit; None if none."""
    try:
        result = search_named("exact")().run(posed.problem, budget_seconds=budget_seconds, seed=0)
    except DejavuError:
        return None
    played = [(play_posed(posed, plan), plan) for plan in under_schedules(posed, result.plan, AUTO)]
    fitting = [(simulation.step_seconds, plan) for simulation, plan in played if fits(posed, plan, simulation)]
    return min(fitting, key=lambda pair: pair[0], default=None)
