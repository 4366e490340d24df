"""Check that a project's folder has room for what a run writes, and that only its user can read it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.foundation.errors import InputError
from dejavu.foundation.processes.files import largest_file_bytes
from dejavu.foundation.units import format_bytes, plural

if TYPE_CHECKING:
    from dejavu.graphs.graph import Graph
    from dejavu.workload import Workload

SHARED_MEMORY, LEAST_SHARED_BYTES = Path("/dev/shm"), 2**20  # locks of Dask's workers, a page each
SHARED_REMEDY = f"mount -o remount,size=1G {SHARED_MEMORY}, or --shm-size=1g where a container is started"
LEAST_FREE_BYTES = 100 * 2**20  # a first run of the default GPT leaves 66 MiB: databases, trials, checkpoints, a page
LEAST_FILE_BYTES = 16 * 2**20  # the page of that run has 5 MiB, and databases grow
PRIVATE_UMASK = 0o077  # of whatever writes here
FOLDERS = ("logs", "prefect", "runs", "watch")  # of .dejavu, in which servers and runs make files
STATE = (".dejavu", "profiles_db", "mlartifacts", "mlflow.db")  # what is kept in a project's folder
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_to_others(project: Path) -> list[Path]:
    """Return what of the project's state other users of the machine may read, enter or write."""
    kept = [project / name for name in STATE if (project / name).exists()]
    return [path for path in kept if path.stat().st_mode & OTHERS]


def keep_private(project: Path) -> None:
    """Take from other users what they may do with the project's state; what is another user's own is left.

    Files within private folders cannot be reached, whatever their own modes are.
    """
    for path in open_to_others(project):
        with contextlib.suppress(PermissionError):
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)


def check_room(project: Path) -> None:
    """Check that a run can write into the folder, before it starts servers there; keep what is there private.

    Raises:
        InputError: it cannot be written, a file is where one of its folders belongs, no database can be in it, it or
            the machine's shared memory has less free than any run needs, or files may not be as large.
    """
    state = project.resolve() / ".dejavu"
    if "?" in str(state):
        raise InputError(
            f"the project's folder is {project.resolve()}, and the addresses of its databases end at a question mark; "
            "wanted a folder without one in its path"
        )
    try:
        state.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        with tempfile.TemporaryFile(dir=state):
            pass
    except OSError as error:
        raise InputError(f"{state} cannot be written: {error.strerror}; wanted a project folder that can") from error
    for path in (state / name for name in FOLDERS):
        if os.path.lexists(path) and not path.is_dir():
            raise InputError(f"{path} is {_kind(path)}; wanted a folder, or nothing, which is made one")
    keep_private(project)
    free_bytes = shutil.disk_usage(state).free
    if free_bytes < LEAST_FREE_BYTES:
        raise InputError(
            f"{state} is on a disk with {format_bytes(free_bytes)} free; wanted {format_bytes(LEAST_FREE_BYTES)} "
            "or more for logs, databases and checkpoints"
        )
    if (file_bytes := largest_file_bytes()) is not None and file_bytes < LEAST_FILE_BYTES:
        raise InputError(
            f"no file of this process may be larger than {format_bytes(file_bytes)}; wanted "
            f"{format_bytes(LEAST_FILE_BYTES)} or more for databases and pages, and for what a checkpoint has of a "
            "stage: `ulimit -f unlimited`"
        )
    if SHARED_MEMORY.is_dir() and (shared_bytes := shutil.disk_usage(SHARED_MEMORY).free) < LEAST_SHARED_BYTES:
        raise InputError(
            f"{SHARED_MEMORY} has {format_bytes(shared_bytes)} free; wanted {format_bytes(LEAST_SHARED_BYTES)} or "
            f"more: {SHARED_REMEDY}"
        )


def _kind(path: Path) -> str:
    return "a file" if path.exists() else f"a link to {path.readlink()}, which is not there"


def check_room_for_checkpoints(workload: Workload, graph: Graph, project: Path) -> None:
    """Check that the training's checkpoints find room, before anything is measured for it.

    Raises:
        InputError: the disk has less than as many checkpoints take as are there at once.
    """
    from dejavu.cost.memory.layers import ForEachByte
    from dejavu.runtime.job.saving import FEWEST_STEPS
    from dejavu.runtime.state import KEPT

    one = graph.parameter_bytes * (1 + ForEachByte.of(workload.optimizer).optimizer_bytes)
    kept = KEPT + 1 if workload.evaluate_every else KEPT  # the best one, too
    every = FEWEST_STEPS if workload.checkpoint_every == "auto" else workload.checkpoint_every
    most = min(kept + 1, math.ceil(workload.num_steps / every))  # an old one goes after the new one
    free_bytes = shutil.disk_usage(project).free
    if free_bytes < most * one:
        raise InputError(
            f"{project.resolve()} is on a disk with {format_bytes(free_bytes)} free; wanted {format_bytes(most * one)} "
            f"for {plural(most, 'checkpoint')} of {format_bytes(one)}, as many as are kept and one more"
        )
