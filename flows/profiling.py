"""Measure on this machine what the cost database lacks."""

from __future__ import annotations

from prefect import flow

from dejavu.cost.priced_problem import split_into
from dejavu.profiling.profiler import MeasureResult
from dejavu.workload import Workload
from flows.session import session
from tasks.pricing import capture_model, measure_what_is_missing
from tasks.recording import record_measured


@flow(name="profile", flow_run_name="profile {workload.model} on {cluster}")
def profile(
    workload: Workload = Workload(),  # noqa: B008
    cluster: str = "cluster.yaml",
    microbatches: list[int] | None = None,
) -> list[MeasureResult]:
    """Measure layers, transfers and passes that the database lacks; what it already knows is reused.

    Args:
        workload: whose layers to measure.
        cluster: the cluster file, relative to the project folder; devices that are not here are skipped.
        microbatches: numbers of microbatches per step, each with its own layer sizes; empty: the workload's number.
    """
    with session(workload, cluster, measures=True) as here:
        measured = []
        for count in microbatches or [workload.num_microbatches]:
            one = split_into(workload, count)
            graph = capture_model(one, here.cluster)
            measured.append(measure_what_is_missing(graph, one, here.cluster, here.database))
        record_measured(here.run, measured)
        return measured
