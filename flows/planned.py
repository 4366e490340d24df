"""A plan on its devices, and how a flow comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster, this_machine
from dejavu.cost.priced_problem import as_planned
from dejavu.foundation.errors import InputError
from dejavu.launch.comparison import Comparison
from dejavu.parallelism import Parallelism
from dejavu.planning import Candidate, Choice, PlanRequest
from dejavu.planning.sentences import NAMES
from dejavu.report import ReportData
from dejavu.runtime.job import TrainingJob
from dejavu.workload import Workload
from flows.session import Session
from tasks.planning import bind_stages, choose_plan, say_choice, without_memory
from tasks.pricing import capture_model, measure_what_is_missing
from tasks.recording import record_choice
from tasks.shown import show_choice
from tasks.training import BoundBaseline, measure_against_baseline

MOST_MEASURED = 2  # further microbatch sizes in one run


def request_of(
    here: Session,
    workload: Workload,
    searches: Sequence[str] | None,
    schedules: Sequence[str] | None,
    microbatches: Sequence[int] | None,
    parallelism: Parallelism | None,
    budget_seconds: float,
) -> PlanRequest:
    """Return the question that a flow's parameters ask.

    Raises:
        InputError: they contradict each other, or the workload.
    """
    return PlanRequest(
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


class Planned(NamedTuple):
    """A plan on its devices.

    Attributes:
        workload: with the plan's number of microbatches.
        bound: the plan on these devices, simulated.
        baseline: the best plan that people make without a planner, on its devices; None where none fits.
        step_seconds_without_feedback: the prediction without measurements of earlier trainings.
    """

    choice: Choice
    binding: Binding
    bound: Candidate
    workload: Workload
    baseline: BoundBaseline | None
    step_seconds_without_feedback: float

    def report(self, cluster: Cluster, comparison: Comparison | None) -> ReportData:
        """Return what the page shows of it."""
        return ReportData(
            workload=self.workload,
            cluster=cluster,
            choice=self.choice,
            binding=self.binding,
            bound=self.bound,
            step_seconds_without_feedback=self.step_seconds_without_feedback,
            comparison=comparison,
        )

    def with_baseline(self) -> Planned:
        """Return the baseline in the plan's place, where it was measured to be faster."""
        assert self.baseline is not None
        return self._replace(
            binding=self.baseline.binding,
            bound=self.baseline.bound,
            workload=self.baseline.workload,
            step_seconds_without_feedback=without_memory(self.choice, self.baseline.binding),
        )

    def with_trained(self, job: TrainingJob) -> Planned:
        """Return the plan that a training ran under in the plan's place.

        Raises:
            InputError: the cluster has not all of its devices any more.
        """
        gone = {placed.device for placed in job.binding.placements} - set(self.choice.request.cluster.devices())
        if gone:
            hosts = ", ".join(sorted({device.host for device in gone}))
            raise InputError(
                f"{job.folder} was trained on devices of {hosts} that the cluster file does not have; its page is made "
                "with a file that has them"
            )
        return self._replace(
            binding=job.binding,
            bound=self.choice.candidate_on(job.binding),
            workload=job.workload,
            step_seconds_without_feedback=without_memory(self.choice, job.binding),
        )


def planned(request: PlanRequest, here: Session, *, measure: bool) -> Planned:
    """Choose a plan on its devices, and record all of it."""
    choice = _measured_choice(request, here) if measure else choose_plan(request, here.dask)
    say_choice(choice, here.log)
    show_choice(choice)
    binding = bind_stages(choice)
    record_choice(here.run, choice, binding, choice.chosen)
    return Planned(
        choice=choice,
        binding=binding,
        bound=choice.chosen,
        workload=as_planned(request.workload, choice.plan),
        baseline=_bound_baseline(choice, request.workload),
        step_seconds_without_feedback=without_memory(choice, binding),
    )


def against_baseline(found: Planned, here: Session) -> tuple[Planned, Comparison | None]:
    """Measure the plan beside the best baseline, which takes its place where it is faster; None: not measured."""
    seconds, folder = found.bound.step_seconds, here.work / "comparisons"
    comparison = measure_against_baseline(found.workload, found.binding, seconds, found.baseline, folder)
    if comparison is not None and comparison.is_slower:
        return found.with_baseline(), comparison
    return found, comparison


def _bound_baseline(choice: Choice, workload: Workload) -> BoundBaseline | None:
    """Return the best baseline on its devices."""
    row = choice.best_baseline
    if row is None or row.best is None or row.best.binding is None:
        return None
    return BoundBaseline(NAMES[row.search], as_planned(workload, row.best.plan), row.best, row.best.binding)


def _measured_choice(request: PlanRequest, here: Session) -> Choice:
    """Choose on measured costs: measure layers not yet measured at the chosen microbatch size, then choose again.

    After `MOST_MEASURED` sizes, choose among the measured ones, even if predictions promise more of others.
    """
    measured = {request.workload.num_microbatches}
    for _ in range(MOST_MEASURED):
        choice = choose_plan(request, here.dask)
        wanted = choice.unmeasured(this_machine())
        if wanted is None or wanted.num_microbatches in measured:
            return choice
        measured.add(wanted.num_microbatches)
        graph = capture_model(wanted, here.cluster)
        measure_what_is_missing(graph, wanted, here.cluster, here.database, ("layers",), here.log)
    return choose_plan(replace(request, microbatches=tuple(sorted(measured & set(request.counts)))), here.dask)
