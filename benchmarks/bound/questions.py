"""Questions as people ask them: a workload's layers on a cluster, split into some number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dejavu.cluster import load_cluster
from dejavu.foundation import strict_yaml
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.planning import PlanRequest, Prices
from dejavu.planning.schedules import fits, under
from dejavu.plans import Plan, SearchResult
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.search import SEARCHES
from dejavu.simulation import simulate_plan
from dejavu.workload import Workload

WORKLOADS, CLUSTERS = Path("examples/workloads"), Path("examples/clusters")
DATABASE = Path("profiles_db")


@dataclass(frozen=True)
class Question:
    """A model, where it is to be trained, and into how many microbatches a step is split."""

    workload: str
    cluster: str
    microbatches: tuple[int, ...]

    def priced(self) -> Iterator[PricedProblem]:
        """The problem of each number of microbatches."""
        cluster = load_cluster(CLUSTERS / f"{self.cluster}.yaml")
        workload = strict_yaml.load(WORKLOADS / f"{self.workload}.yaml", Workload).value
        asked = PlanRequest(workload, cluster, DATABASE, schedules=tuple(SCHEDULES), microbatches=self.microbatches)
        yield from map(Prices(asked).priced, self.microbatches)


QUESTIONS = (
    Question("gpt", "this-machine", (8, 16)),
    Question("t5-11b", "4x8-v100", (32, 128)),
    Question("t5-11b", "a100-and-t4", (32, 64)),
    Question("gpt3-175b", "8x8-h200", (64,)),
)
QUICK = QUESTIONS[:1]


def best_of_exact(priced: PricedProblem, budget_seconds: float) -> tuple[float, Plan] | None:
    """The exact search's plan under the schedule that is fastest as simulated, of those that fit; None if none."""
    found = named(SEARCHES, "exact")().run(priced.problem, budget_seconds=budget_seconds, seed=0)
    if not isinstance(found, SearchResult):
        return None
    fitting = []
    for name in SCHEDULES:
        with suppress(InputError):  # too few layers or microbatches for it
            plan = under(priced, found.plan, name)
            simulated = simulate_plan(priced, plan)
            if fits(priced, plan, simulated):
                fitting.append((simulated.step_seconds, plan))
    return min(fitting, key=lambda pair: pair[0], default=None)
