"""Read and check everything the user wrote before anything starts."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.cluster import Cluster, load_cluster
from dejavu.foundation import strict_yaml
from dejavu.foundation.dask_workers import check_encrypted, queue_of
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.graphs.capture import CaptureError, capture
from dejavu.graphs.graph import Graph
from dejavu.graphs.kept_layers import KeptInUserCache
from dejavu.init import PROPOSERS, space_of
from dejavu.launch.preflight import check_cluster
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest
from dejavu.plans.schedule import CHIMERA
from dejavu.profiles.files import has_costs, is_of_others
from dejavu.workload import Workload
from dejavu.workload.data import check_data, dataset_of
from dejavu.workload.loader import load_workload
from dejavu.workload.pretrained import check_pretrained
from flows.room import check_room_for_checkpoints

if TYPE_CHECKING:
    from dejavu.runtime.job.resume import EarlierTraining


DATABASE = Path("profiles_db")
LAST = "last"  # of `--resume`: the folder's last training


def load_cluster_file(cluster: Path) -> Cluster:
    """Load the cluster file.

    Raises:
        InputError: there is none, or it has a mistake.
    """
    if cluster.is_dir():
        raise InputError(f"--cluster {cluster} is a folder; wanted a cluster file")
    if not cluster.exists():
        raise InputError(f"there is no {cluster} in {Path.cwd()}; wanted the project's folder, or --cluster FILE")
    return load_cluster(cluster)


def measured_costs(database: Path | None) -> Path:
    """Return the folder of measured costs to read; None: the default one, which need not be there.

    One that is named and empty, as a new database is, is told on standard error: all costs are predicted.

    Raises:
        InputError: one is named that is not there, or is a folder of something else.
    """
    if database is not None and not database.is_dir():
        raise InputError(
            f"--database {database}: there is no such folder; wanted one of `dejavu profile` or `dejavu import`"
        )
    if database is not None and is_of_others(database):
        raise InputError(
            f"--database {database} is no cost database; wanted one of `dejavu profile` or `dejavu import`"
        )
    if database is not None and not has_costs(database):
        print(f"--database {database} has no measured costs: all costs are predicted", file=sys.stderr)
    return database or DATABASE


def check_costs(database: Path) -> None:
    """Check that measured costs may be written into a folder, which need not be there yet.

    Raises:
        InputError: rows would come to lie among files of something else.
    """
    if is_of_others(database):
        raise InputError(
            f"--database {database} is no cost database; wanted one of `dejavu profile` or `dejavu import`, or a new "
            "folder"
        )


def read_inputs(cluster: Path, workload: Path | None, *, train: bool, starts: bool = False) -> tuple[Cluster, Workload]:
    """Return the cluster and the workload (None: the default one), both checked.

    Args:
        starts: a training begins, so the weights that it starts from have to be there.

    Raises:
        InputError: a mistake, with file, line and column.
    """
    machines = load_cluster_file(cluster)
    if train:
        check_cluster(machines)
    if workload is None:
        return machines, Workload()
    document = strict_yaml.load(workload, Workload)
    try:
        graph = check(document.value)
        if starts:
            check_pretrained(document.value)
            if document.value.checkpoints:
                from dejavu.runtime.job.copies import check_copies  # with torch's checkpoints: half a second to import

                check_copies(document.value.checkpoints)
            check_room_for_checkpoints(document.value, graph, Path.cwd())
    except InputError as error:
        raise document.error(error.field, str(error)) from error
    return machines, document.value


def read_what_if(cluster: Path, model: str | None, workload: Path | None) -> tuple[Cluster, Workload]:
    """Return the cluster and the workload to plan; `model` is a file, an example's name, or a model's.

    Raises:
        InputError: a mistake, with file, line and column where it stands in a file.
    """
    if model is not None and workload is not None:
        raise InputError(f"--model {model} and --workload {workload} both say what to plan; wanted one of them")
    named = model if model is not None else workload
    return load_cluster_file(cluster), Workload() if named is None else load_workload(named)


def check_dask(dask: str, cluster: Cluster, *, train: bool) -> None:
    """Check that a scheduler's address is of an encrypted one, or that a batch system's jobs can be submitted.

    Raises:
        InputError: what is missing.
    """
    queue = queue_of(dask)
    if queue is None:
        check_encrypted(dask)
    else:
        from dejavu.trials import check_queue  # with Dask's scheduler

        check_queue(queue, cluster, trains=train)


def check_dask_address(dask: str) -> None:
    """Check that this is the address of a scheduler whose workers come and go by themselves, encrypted, or nothing.

    Raises:
        InputError: it is another's, or a batch system, whose jobs would be those of one look.
    """
    if queue_of(dask) is not None:
        raise InputError(f"--dask {dask} starts workers, and a watch looks at those that are there; wanted an address")
    check_encrypted(dask)


def read_resume(resume: str, workload: Workload) -> EarlierTraining | None:
    """Return the earlier training that `--resume` names, relative to the project's folder; None: start a new one.

    Raises:
        InputError: the folder has none, its model, data, batch or optimizer differ from the workload's, or its last
            checkpoint is damaged or of another model.
    """
    if not resume:
        return None
    # With torch's checkpoints: half a second to import.
    from dejavu.runtime.job.resume import check_checkpoint, earlier_training

    earlier = earlier_training(Path(resume), workload)
    if not earlier.is_complete:
        check_checkpoint(Path(resume), workload)
    return earlier


def workload_of(resume: str) -> Workload:
    """Return what the training in this folder trains: its command need not name the workload again.

    Slices and directions, which the plan chose, are open again.

    Raises:
        InputError: there is no training, or it cannot be read.
    """
    from dejavu.runtime.job import job_to_resume  # with torch

    trained = job_to_resume(Path(resume)).workload
    ways = {"slices": Workload.model_fields["slices"].default, "both_ways": trained.schedule == CHIMERA}
    return trained.model_copy(update=ways)


def local_training(resume: str, *, train: bool = True) -> str:
    """Return the folder of the training to resume; of a URL, its job and last checkpoint are fetched to here.

    Args:
        resume: a folder, a URL, or `last`.

    Raises:
        InputError: there is no such training, or nothing is to be trained.
    """
    if resume and not train:
        raise InputError(
            f"--resume {resume} goes on with a training, and --no-train trains nothing; wanted one of them"
        )
    if resume == LAST and not (Path(resume) / "job.json").is_file():
        return _last_training(Path.cwd())
    if "://" not in resume:
        return resume
    from dejavu.runtime.job.copies import fetch

    return str(fetch(resume, Path(".dejavu") / "runs"))


def _last_training(project: Path) -> str:
    from dejavu.launch.running import status_of

    status = status_of(project)
    if status.unread:  # what goes on is the last one, or none
        raise InputError(f"--resume {LAST}: {status.unread}")
    if (found := status.training) is None:
        raise InputError(f"--resume {LAST}: no training is kept in {project}; `dejavu run` starts one")
    return os.path.relpath(found.folder, project)


def at_microbatches(workload: Workload, sizes: str) -> list[Workload]:
    """Return the workload with microbatches of each of these comma-separated sizes; empty: as it is.

    Raises:
        InputError: a size is not a whole number ≥ 1.
    """
    if not sizes:
        return [workload]
    wrong = [size for size in sizes.split(",") if not size.strip().isdecimal() or int(size) < 1]
    if wrong:
        raise InputError(f"--microbatches {sizes}: {wrong[0]!r} is no microbatch size; wanted whole numbers, as 1,4,16")
    batch = {int(size): int(size) * workload.microbatches_in_a_step for size in sizes.split(",")}
    return [workload.model_copy(update={"batch_size": examples}) for _, examples in sorted(batch.items())]


@dataclass(frozen=True)
class TypedQuestion:
    """The planner's options as typed; the same for `plan` and `run`.

    Attributes:
        searches, schedules: comma-separated names; empty: not given.
        microbatches: comma-separated whole numbers, likewise.
        data_parallel, tensor_parallel: the highest degrees; None: not given.
    """

    searches: str
    schedules: str
    microbatches: str
    data_parallel: int | None
    tensor_parallel: int | None
    budget_seconds: float

    def request(self, workload: Workload, cluster: Cluster, database: Path = DATABASE, seed: int = 0) -> PlanRequest:
        """Return the planner's request.

        Raises:
            InputError: an unknown search or schedule, or microbatches that do not divide the batch.
        """
        unsaid = self.data_parallel is None and self.tensor_parallel is None
        return PlanRequest(
            workload=workload,
            cluster=cluster,
            database=database,
            parallelism=None if unsaid else Parallelism(self.data_parallel, self.tensor_parallel),
            searches=_names("--search", self.searches),
            schedules=_names("--schedule", self.schedules),
            microbatches=whole_numbers("--microbatches", self.microbatches),
            budget_seconds=self.budget_seconds,
            seed=seed,
        )


def _names(option: str, text: str) -> tuple[str, ...]:
    """Split `exact, mcmc` into names; empty text: none.

    Raises:
        InputError: there is text, and no name in it.
    """
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if text and not found:
        raise InputError(f"{option} {text[:40]!r} names nothing; wanted names, separated by commas")
    return found


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse `8,16`; empty text: no numbers.

    Raises:
        InputError: one is not a whole number ≥ 1.
    """
    words = text.split(",") if text else []
    wrong = [word for word in words if not re.fullmatch(r"\s*0*[1-9][0-9]{0,8}\s*", word)]
    if wrong:
        raise InputError(
            f"{option} {text[:40]}: found {wrong[0][:40]!r}; wanted whole numbers from 1 to 999,999,999, as 8,16"
        )
    return tuple(sorted({int(word) for word in words}))


def check(workload: Workload) -> Graph:
    """Check that the model and the data exist and fit each other, and that the trials can be proposed.

    Returns:
        The model, captured.

    Raises:
        InputError: they do not.
    """
    check_data(workload)
    dataset_of(workload).batch(0, 1, seed=workload.seed)
    named(PROPOSERS, workload.trials.proposer)
    if workload.num_trials:
        space_of(workload)
    try:
        return capture(workload, kept=KeptInUserCache())
    except CaptureError as error:
        raise InputError(str(error), ("model",)) from error
