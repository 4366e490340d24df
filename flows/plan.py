"""Search in parallel for the best plan, simulate it, bind it to devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster, this_machine
from dejavu.cost.priced_problem import split_into
from dejavu.parallelism import Parallelism
from dejavu.planning import BUDGET_SECONDS, Candidate, Choice, PlanRequest
from dejavu.planning.questions import num_cores
from dejavu.planning.sentences import NAMES
from dejavu.workload import Workload
from flows.session import Session, session
from tasks.planning import bind_baseline, bind_stages, choose_plan, simulate_bound, without_memory
from tasks.pricing import capture_model, measure_what_is_missing
from tasks.recording import record_choice
from tasks.training import BoundBaseline


class Planned(NamedTuple):
    """A plan on its devices.

    Attributes:
        workload: with the plan's number of microbatches.
        bound: the plan as bound, simulated; binding may move stages to other kinds of devices.
        baseline: the best plan that people make without a planner, bound likewise; None where none fits.
        step_seconds_without_feedback: the prediction without measurements of earlier trainings.
    """

    choice: Choice
    binding: Binding
    bound: Candidate
    workload: Workload
    baseline: BoundBaseline | None
    step_seconds_without_feedback: float

    def with_baseline(self) -> Planned:
        """Return the baseline in the plan's place, where it was measured to be faster."""
        assert self.baseline is not None
        plan = self.baseline.binding.plan
        return self._replace(
            binding=self.baseline.binding,
            bound=self.choice.candidate(plan),
            workload=self.baseline.workload,
            step_seconds_without_feedback=without_memory(self.choice, plan),
        )


MOST_MEASURED = 2  # further microbatch sizes in one run
SIDE_BY_SIDE: Any = ThreadPoolTaskRunner(max_workers=num_cores())


@flow(name="plan", flow_run_name="plan {workload.model} on {cluster}", task_runner=SIDE_BY_SIDE)
def plan(
    workload: Workload = Workload(),  # noqa: B008
    cluster: str = "cluster.yaml",
    searches: list[str] | None = None,
    schedules: list[str] | None = None,
    microbatches: list[int] | None = None,
    parallelism: Parallelism | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    dask: str = "",
    measure: bool = False,
) -> Planned:
    """Run searches in parallel, simulate what they find, take the fastest that fits, and bind it to devices.

    Args:
        workload: what to train.
        cluster: the cluster file, relative to the project folder.
        searches: which to run; empty: those that prove or are quick, and others where they leave a gap.
        schedules: which the plan may use; empty: the workload's own, where `auto` means all.
        microbatches: numbers of microbatches per step to try; empty: powers of two, and the workload's own.
        parallelism: how stages may be spread over devices; None: any way, on CPUs one core for each stage.
        budget_seconds: for all searches together.
        dask: address of a Dask scheduler whose workers run the searches; empty: threads of this process.
        measure: if costs of the chosen plan were only predicted, measure them and choose again.
    """
    with session(workload, cluster, measures=measure, dask=dask) as here:
        request = PlanRequest(
            workload=workload,
            cluster=here.cluster,
            database=here.database,
            parallelism=parallelism,
            searches=tuple(searches or ()),
            schedules=tuple(schedules or ()),
            microbatches=tuple(microbatches or ()),
            budget_seconds=budget_seconds,
            seed=workload.seed,
        )
        choice = _measured_choice(request, here, dask) if measure else choose_plan(request, dask)
        binding = bind_stages(choice, choice.plan, here.cluster)
        bound = simulate_bound(choice, binding.plan)
        record_choice(here.run, choice, binding)
        return Planned(
            choice=choice,
            binding=binding,
            bound=bound,
            workload=split_into(workload, choice.plan.num_microbatches),
            baseline=_bound_baseline(choice, workload, here.cluster),
            step_seconds_without_feedback=without_memory(choice, bound.plan),
        )


def _bound_baseline(choice: Choice, workload: Workload, cluster: Cluster) -> BoundBaseline | None:
    """Bind the best baseline to devices."""
    row = choice.best_baseline
    if row is None or row.best is None:
        return None
    plan = row.best.plan
    binding = bind_baseline(row.priced.problem, plan, cluster)
    return BoundBaseline(NAMES[row.search], split_into(workload, plan.num_microbatches), binding, row.best.step_seconds)


def _measured_choice(request: PlanRequest, here: Session, dask: str) -> Choice:
    """Choose on measured costs: measure layers not yet measured at the chosen microbatch size, then choose again.

    After `MOST_MEASURED` sizes, choose among the measured ones, even if predictions promise more of others.
    """
    measured = {request.workload.num_microbatches}
    for _ in range(MOST_MEASURED):
        choice = choose_plan(request, dask)
        wanted = choice.unmeasured(this_machine())
        if wanted is None or wanted.num_microbatches in measured:
            return choice
        measured.add(wanted.num_microbatches)
        graph = capture_model(wanted, here.cluster)
        measure_what_is_missing(graph, wanted, here.cluster, here.database, ("layers",))
    return choose_plan(replace(request, microbatches=tuple(sorted(measured & set(request.counts)))), dask)
