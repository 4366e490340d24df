"""What all ranks of a job compute alike, computed once in the process that they are forked from."""

from __future__ import annotations

from pathlib import Path

from dejavu.runtime.job import TrainingJob
from dejavu.runtime.shapes import boundaries
from dejavu.workload.data import dataset_of


def prepare(job: str) -> None:
    """Read the job's data and find the shapes at its cuts; both are kept in this process."""
    workload = TrainingJob.read(Path(job)).workload
    boundaries(workload)
    dataset_of(workload).batch(0, workload.batch_size, seed=workload.seed)
