"""Check that a project's folder has room for what a run writes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import format_bytes

SHARED_MEMORY, LEAST_SHARED_BYTES = Path("/dev/shm"), 2**20  # locks of Dask's workers, a page each
SHARED_REMEDY = f"mount -o remount,size=1G {SHARED_MEMORY}, or --shm-size=1g where a container is started"
LEAST_FREE_BYTES = 100 * 2**20  # a first run of the default GPT leaves 66 MiB: databases, trials, checkpoints, a page


def check_room(project: Path) -> None:
    """Check that a run can write into the folder, before it starts servers there.

    Raises:
        InputError: it cannot be written, or it or the machine's shared memory has less free than any run needs.
    """
    state = project.resolve() / ".dejavu"
    try:
        state.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=state):
            pass
    except OSError as error:
        raise InputError(f"{state} cannot be written: {error.strerror}; wanted a project folder that can") from error
    free_bytes = shutil.disk_usage(state).free
    if free_bytes < LEAST_FREE_BYTES:
        raise InputError(
            f"{state} is on a disk with {format_bytes(free_bytes)} free; wanted {format_bytes(LEAST_FREE_BYTES)} "
            "or more for logs, databases and checkpoints"
        )
    if SHARED_MEMORY.is_dir() and (shared_bytes := shutil.disk_usage(SHARED_MEMORY).free) < LEAST_SHARED_BYTES:
        raise InputError(
            f"{SHARED_MEMORY} has {format_bytes(shared_bytes)} free; wanted {format_bytes(LEAST_SHARED_BYTES)} or "
            f"more: {SHARED_REMEDY}"
        )
