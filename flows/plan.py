"""Search in parallel for the best plan, simulate it, bind it to devices."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

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
    from flows.planned import Planned
else:
    Planned = Any  # Prefect resolves every annotation, and this one's import takes seconds


SIDE_BY_SIDE: Any = ThreadPoolTaskRunner(max_workers=len(os.sched_getaffinity(0)))


@flow(name="plan", flow_run_name="{workload.model} on {cluster}", task_runner=SIDE_BY_SIDE)
def plan(
    workload: WorkloadParameter = Workload(),  # noqa: B008
    cluster: ClusterFile = "cluster.yaml",
    searches: Searches = None,
    schedules: Schedules = None,
    microbatches: Microbatches = None,
    parallelism: WaysOfStages | None = None,
    budget_seconds: BudgetSeconds = BUDGET_SECONDS,
    dask: DaskWorkers = "",
    measure: bool = False,
) -> Planned:
    """Run searches in parallel, simulate what they find, take the fastest that fits, and bind it to devices.

    Args:
        workload: its fields; or a file of the project, such as examples/workloads/digits.yaml, or the name of an
            example or a model.
        cluster: the cluster file, relative to the project folder.
        searches: which to run; empty: those that prove or are quick, and others where they leave a gap.
        schedules: which the plan may use; empty: the workload's own, where `auto` means all.
        microbatches: numbers of microbatches per step to try; empty: powers of two, and the workload's own.
        parallelism: how stages may be spread over devices; None: any way, on CPUs one core for each stage.
        budget_seconds: for all searches together.
        dask: address of a Dask scheduler whose workers run the searches, or `slurm`, `pbs` or `4xslurm`, whose jobs do;
            empty: threads of this process.
        measure: if costs of the chosen plan were only predicted, measure them and choose again.
    """
    with gc_frozen():  # imports of seconds: the run is Running before them
        from dejavu.watching import Notes
        from flows.planned import planned, request_of
        from flows.session import session

    with session(workload, cluster, measures=measure, dask=dask) as here:
        request = request_of(here, workload, searches, schedules, microbatches, parallelism, budget_seconds)
        found = planned(request, here, measure=measure)
        notes = Notes(here.work, workload, here.file, dask)
        notes.keep(here.cluster, found.choice.plan, found.choice.step_seconds, str(flow_run.id))
        return found
