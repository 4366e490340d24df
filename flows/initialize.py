"""Try initial weights in parallel, and keep the best."""

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
    """Draw initial weights, train each for some steps, halve their number, keep the best; what ran is remembered.

    Args:
        workload: whose `trials` say how many, which and for how long; a count of 0: none.
        cluster: the cluster file; one worker for each of its devices that is here.
        dask: address of a Dask scheduler whose workers share this folder; nothing: workers of this machine.
    """
    with session(workload, cluster, measures=True, trains=True, dask=dask) as here:
        return try_initializations(workload, here.cluster, here.work / "trials", here.run, dask)
