"""Launch a prepared pipeline training, and remember what it measured."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prefect import flow
from prefect.runtime import flow_run

from dejavu.foundation.gc_frozen import gc_frozen
from flows.parameters import ClusterFile, DaskWorkers

if TYPE_CHECKING:
    from dejavu.graphs.graph import Graph
    from dejavu.report import ReportData
    from dejavu.runtime.job import TrainingJob, TrainingResult
    from dejavu.trials import Trials
    from flows.planned import Planned
    from flows.session import Session


class Trained(NamedTuple):
    """A training's result.

    Attributes:
        reference_difference: how far its first losses are from single-process training; None: not compared.
        graph: of its layers.
    """

    job: TrainingJob
    result: TrainingResult
    reference_difference: float | None
    graph: Graph

    def on_page(self, planned: ReportData, tried: Trials | None, dask: str) -> ReportData:
        """Return what the page shows of the plan, of the trials and of this training."""
        from dejavu.launch.launcher import torchrun_line

        return replace(
            planned,
            workload=self.job.workload,
            tried=tried,
            training=self.result.of_its_plan,
            migrations=self.result.migrations,
            torchrun_line="" if dask else torchrun_line(self.job),
            reference_difference=self.reference_difference,
        )


def _run_name() -> str:
    """Name the model, and the folder by the beginning of its name, which is a run's id."""
    folder = Path(flow_run.parameters["folder"])
    with suppress(OSError, ValueError, LookupError):  # the flow itself says what is wrong with the job
        return f"{json.loads((folder / 'job.json').read_text())['workload']['model']} in {folder.name[:8]}"
    return folder.name


@flow(name="train", flow_run_name=_run_name)
def train(
    folder: str,
    cluster: ClusterFile = "cluster.yaml",
    dask: DaskWorkers = "",
    needed_bytes: list[float] | None = None,
    remembers: bool = True,
) -> Trained:
    """Train the job of a run's folder on its devices, from its last checkpoint if it has one, and remember its times.

    Args:
        folder: of the run, relative to the project folder, such as .dejavu/runs/…; it holds job.json.
        cluster: the cluster file, relative to the project folder.
        dask: address of a Dask scheduler with a worker on every host, or `slurm` or `pbs`, whose jobs are then started
            as workers, one for each node; empty: all devices are on this machine.
        needed_bytes: what each rank is predicted to hold; more than is free is an error. None: not checked.
        remembers: its times become rows of the cost database. False: later, by the caller, whose page is to have the
            prediction as it was without them.

    Raises:
        InputError: there is no such job, or its training is complete and has its result.
    """
    with gc_frozen():  # imports of seconds: the run is Running before them
        from dejavu.foundation.errors import InputError
        from dejavu.launch.training_lock import record_training
        from dejavu.runtime.job.resume import earlier_training
        from flows.endings import trains_in
        from flows.session import session
        from tasks.pricing import capture_model
        from tasks.training import compare_with_one_process, read_job, remember_times, train_pipeline

    job = read_job(Path(folder))
    if job.result_path.is_file() and (earlier := earlier_training(Path(folder), job.workload)).is_complete:
        raise InputError(str(earlier))  # launched again, it would write a result without the times that were measured
    with session(job.workload, cluster, measures=True, trains=True, dask=dask) as here:
        trains_in(Path(job.folder))
        record_training(here.project, Path(job.folder))
        graph = capture_model(job.workload, here.cluster)
        if here.jobs is not None:
            here.jobs.wait_for_all(here.log.info)
        result = train_pipeline(job, graph, here.cluster, here.database, here.run, needed_bytes, here.dask, here.log)
        trained = Trained(job, result, compare_with_one_process(job, result, here.work / "trials"), graph)
        if remembers:
            remember_times(job, result, graph, here.database, here.cluster)
        return trained


def record_complete(job: TrainingJob, here: Session) -> Trained:
    """Record a training that has its result, as `train` would have: its run ended before."""
    from dejavu.launch.training_lock import record_training
    from flows.endings import trains_in
    from tasks.pricing import capture_model
    from tasks.recording import record_trained
    from tasks.training import compare_with_one_process

    here.log.info("%s is complete; what its run did not record is recorded now", job.folder)
    trains_in(Path(job.folder))
    record_training(here.project, Path(job.folder))
    result = record_trained(here.run, job, here.log)
    difference = compare_with_one_process(job, result, here.work / "trials")
    return Trained(job, result, difference, capture_model(job.workload, here.cluster))


def train_planned(
    planned: Planned, tried: Trials | None, resume: str, cluster: str, dask: str, here: Session
) -> Trained:
    """Train what is planned in the run's own folder, from the winning trial; or go on with the training to resume."""
    from dejavu.runtime.job.resume import tell_of_page
    from tasks.training import needed_bytes, prepare_training, resume_training

    if resume:
        job = resume_training(planned.workload, planned.binding, here.project / resume)
    else:
        job = prepare_training(planned.workload, planned.binding, tried, here.work / "runs" / str(flow_run.id))
    tell_of_page(job.folder, is_due=True)
    needed = needed_bytes(job.workload, planned.binding, planned.bound.price)
    return train(job.folder, cluster, dask, needed, remembers=False)
