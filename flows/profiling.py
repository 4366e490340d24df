"""Measure on this machine what the cost database lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import flow

from dejavu.foundation.gc_frozen import gc_frozen
from dejavu.workload.settings import Workload
from flows.parameters import ClusterFile, Microbatches, WorkloadParameter

if TYPE_CHECKING:
    from dejavu.profiling.profiler import MeasureResult
else:
    MeasureResult = Any  # Prefect resolves every annotation, and this one's import takes seconds


@flow(name="profile", flow_run_name="{workload.model} on {cluster}")
def profile(
    workload: WorkloadParameter = Workload(),  # noqa: B008
    cluster: ClusterFile = "cluster.yaml",
    microbatches: Microbatches = None,
) -> list[MeasureResult]:
    """Measure layers, transfers and passes that the database lacks; what it already knows is reused.

    Args:
        workload: whose layers to measure.
        cluster: the cluster file, relative to the project folder; devices that are not here are skipped.
        microbatches: numbers of microbatches per step, each with its own layer sizes; empty: the workload's number.
    """
    with gc_frozen():  # imports of seconds: the run is Running before them
        from dejavu.cost.priced_problem import split_into
        from flows.session import session
        from tasks.pricing import capture_model, measure_what_is_missing
        from tasks.recording import record_measured

    with session(workload, cluster, measures=True) as here:
        measured = []
        for count in microbatches or [workload.num_microbatches]:
            one = split_into(workload, count)
            graph = capture_model(one, here.cluster)
            measured.append(measure_what_is_missing(graph, one, here.cluster, here.database, log=here.log))
        record_measured(here.run, measured)
        return measured
