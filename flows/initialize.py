"""Try initial weights in parallel by successive halving, and keep the best."""

from __future__ import annotations

from prefect import flow

from dejavu.trials import Trials
from dejavu.workload import Workload
from flows.session import session
from tasks.training import try_initializations


@flow(name="initialize", flow_run_name="initialize {workload.model}")
def initialize(
    workload: Workload = Workload(),  # noqa: B008
    cluster: str = "cluster.yaml",
    dask: str = "",
) -> Trials | None:
    """Draw initial weights and train them by successive halving; keep the best. Trials that ran before are reused.

    Args:
        workload: its `trials` say how many, which and for how many steps; a count of 0: none.
        cluster: the cluster file; one worker for each of its devices that is here.
        dask: address of a Dask scheduler whose workers share this folder; empty: workers on this machine.
    """
    with session(workload, cluster, measures=True, trains=True, dask=dask) as here:
        return try_initializations(workload, here.cluster, here.work / "trials", here.run, dask)
