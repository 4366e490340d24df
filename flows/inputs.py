"""What a person wrote, read and checked as a whole before anything starts."""

from __future__ import annotations

from pathlib import Path

from dejavu import strict_yaml
from dejavu.cluster import Cluster, load_cluster
from dejavu.data import dataset_of
from dejavu.errors import InputError
from dejavu.graph import CaptureError, capture
from dejavu.init import proposer_named
from dejavu.runtime.launcher import refuse_cluster
from dejavu.workload import Workload


def read_inputs(cluster: Path, workload: Path | None, *, train: bool) -> tuple[Cluster, Workload]:
    """The cluster and the workload (None: the default one), both known to be usable.

    Raises:
        InputError: a mistake, with file, line and column.
    """
    if not cluster.is_file():
        raise InputError(f"there is no {cluster} in {Path.cwd()}; wanted the project's folder, or --cluster FILE")
    machines = load_cluster(cluster)
    if train:
        refuse_cluster(machines)
    if workload is None:
        return machines, Workload()
    document = strict_yaml.load(workload, Workload)
    try:
        check(document.value)
    except InputError as error:
        raise document.error(error.field, str(error)) from error
    return machines, document.value


def at_microbatches(workload: Workload, sizes: str) -> list[Workload]:
    """The workload with microbatches of each of these sizes, written with commas; empty: as it is.

    Raises:
        InputError: a size that is no whole number ≥ 1.
    """
    if not sizes:
        return [workload]
    wrong = [size for size in sizes.split(",") if not size.strip().isdecimal() or int(size) < 1]
    if wrong:
        raise InputError(f"--microbatches {sizes}: {wrong[0]!r} is no microbatch size; wanted whole numbers, as 1,4,16")
    batch = {int(size): int(size) * workload.num_microbatches for size in sizes.split(",")}
    return [workload.model_copy(update={"batch_size": examples}) for _, examples in sorted(batch.items())]


def check(workload: Workload) -> None:
    """That the model and the data exist and fit each other, and that the trials can be proposed.

    Raises:
        InputError: they do not.
    """
    dataset_of(workload).batch(0, 1, seed=workload.seed)
    proposer_named(workload.trials.proposer)
    try:
        capture(workload)
    except CaptureError as error:
        raise InputError(str(error), ("model",)) from error
