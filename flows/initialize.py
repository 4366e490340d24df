"""Try initial weights in parallel by successive halving, and keep the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import flow

from dejavu.foundation.gc_frozen import gc_frozen
from dejavu.workload.settings import Workload
from flows.parameters import ClusterFile, DaskWorkers, WorkloadParameter

if TYPE_CHECKING:
    from dejavu.trials import Trials
else:
    Trials = Any  # Prefect resolves every annotation, and this one's import takes seconds


@flow(name="initialize", flow_run_name="{workload.model}")
def initialize(
    workload: WorkloadParameter = Workload(),  # noqa: B008
    cluster: ClusterFile = "cluster.yaml",
    dask: DaskWorkers = "",
) -> Trials | None:
    """Draw initial weights and train them by successive halving; keep the best. Trials that ran before are reused.

    Args:
        workload: its `trials` say how many, which and for how many steps; a count of 0: none.
        cluster: the cluster file; one worker for each of its devices that is here.
        dask: address of a Dask scheduler whose workers share this folder, or `slurm`, `pbs` or `4xslurm`, whose jobs
            are then its workers; empty: workers on this machine.
    """
    with gc_frozen():  # imports of seconds: the run is Running before them
        from flows.session import session
        from tasks.training import try_initializations

    with session(workload, cluster, measures=True, trains=True, dask=dask) as here:
        return try_initializations(workload, here.cluster, here.work / "trials", here.run, here.dask, here.log)
