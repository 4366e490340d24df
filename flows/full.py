"""The full flow: from a model and a cluster to a tracked pipeline training that starts from the best of N draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Completed

from dejavu.foundation.gc_frozen import gc_frozen
from dejavu.plans.answers import BUDGET_SECONDS
from dejavu.workload.settings import Workload
from flows.parameters import (
    BudgetSeconds,
    ClusterFile,
    DaskWorkers,
    Microbatches,
    Schedules,
    Searches,
    WaysOfStages,
    WorkloadParameter,
)

if TYPE_CHECKING:
    from dejavu.report import ReportData


class Outcome(NamedTuple):
    """What a flow found, and where its records are."""

    report: ReportData
    artifacts: Path | None
    tracking_uri: str


def _takes_its_own(resume: str, workload: Workload) -> bool:
    """Whether the training to resume says what is trained: a deployment's form has the default where none is typed."""
    return bool(resume and deployment.id) and workload == Workload()


def _begun(resume: str) -> str:
    """Return the training to resume: its own, where this run is started again, as by Prefect's page."""
    if resume:
        return resume
    own = Path(".dejavu") / "runs" / str(flow_run.id)
    return str(own) if (own / "job.json").is_file() else ""


def _run_name() -> str:
    """Name the model; where the training to resume says which, the training."""
    given = flow_run.parameters
    its_own = _takes_its_own(given["resume"], given["workload"])
    return f"{Path(given['resume']).name if its_own else given['workload'].model} on {given['cluster']}"


@flow(name="dejavu", flow_run_name=_run_name, validate_parameters=True)
def dejavu(
    workload: WorkloadParameter = Workload(),  # noqa: B008
    cluster: ClusterFile = "cluster.yaml",
    train: bool = True,
    searches: Searches = None,
    schedules: Schedules = None,
    microbatches: Microbatches = None,
    parallelism: WaysOfStages | None = None,
    budget_seconds: BudgetSeconds = BUDGET_SECONDS,
    dask: DaskWorkers = "",
    resume: str = "",
    wait: bool = False,
) -> Outcome | State[Any]:
    """Profile, plan, try initializations, train; each is a flow of its own.

    Args:
        workload: its fields; or a file of the project, such as examples/workloads/digits.yaml, or the name of an
            example or a model.
        cluster: the cluster file, relative to the project folder.
        train: False stops after planning.
        searches: which to run; empty: those that prove or are quick, and others where they leave a gap.
        schedules: which the plan may use; empty: the workload's own, where `auto` means all.
        microbatches: numbers of microbatches per step to try; empty: powers of two, and the workload's own.
        parallelism: how stages may be spread over devices; None: any way, on CPUs one core for each stage.
        budget_seconds: for all searches together.
        dask: address of a Dask scheduler with a worker on every host of the cluster, or `slurm` or `pbs`, whose jobs
            are then started as workers, one for each node (`4xslurm`: four); empty: this machine only.
        resume: the folder of an earlier training (.dejavu/runs/…), or `last`, to continue from its last checkpoint,
            under today's plan; of its own workload, where none is given here.
        wait: for another run that measures or trains in this folder to end, instead of raising an error.

    Returns:
        The outcome; or, at once, a state saying that the training to resume is already complete.

    Raises:
        InputError: the folder to resume has no training, or one of another model, data, batch or optimizer.
    """
    # Imports of seconds stand here, so that a run is Running before them.
    with gc_frozen():
        from dejavu.runtime.job.resume import job_to_record, tell_of_page
        from dejavu.workload.pretrained import check_pretrained
        from flows.initialize import initialize
        from flows.inputs import local_training, read_resume, workload_of
        from flows.plan import plan
        from flows.planned import against_baseline, request_of
        from flows.profiling import profile
        from flows.session import session
        from flows.train import record_complete, train_planned
        from tasks.recording import record_report
        from tasks.shown import show_tracked
        from tasks.training import remember_times

    resume = local_training(_begun(resume) if train else resume, train=train)
    if _takes_its_own(resume, workload):
        workload = workload_of(resume)
    earlier = read_resume(resume, workload)
    if earlier is not None and earlier.has_nothing_left:
        return Completed(message=str(earlier))
    if train and not resume:
        check_pretrained(workload)
    with session(workload, cluster, measures=True, trains=train, dask=dask, wait=wait) as here:
        request_of(here, workload, searches, schedules, microbatches, parallelism, budget_seconds)  # before minutes
        profile(workload, cluster)
        planned = plan(
            workload, cluster, searches, schedules, microbatches, parallelism, budget_seconds, dask, measure=True
        )
        complete = job_to_record(earlier)
        if complete is not None:
            planned = planned.with_trained(complete)
        comparison = None
        if train and not resume and not dask:
            planned, comparison = against_baseline(planned, here)
        found = planned.report(here.cluster, comparison)
        if not train:
            record_report(here.run, found)
        else:
            tried = None if resume else initialize(workload, cluster, dask)  # independent of the plan, so reusable
            if complete is not None:
                trained = record_complete(complete, here)
            else:
                trained = train_planned(planned, tried, resume, cluster, dask, here)
            found = trained.on_page(found, tried, dask)
            record_report(here.run, found)
            remember_times(trained.job, trained.result, trained.graph, here.database, here.cluster)
            tell_of_page(trained.job.folder, is_due=False)
        show_tracked(here.run)
        return Outcome(found, here.run.artifact_folder, here.run.address)
