"""Check that a project's folder has room for what a run writes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import format_bytes

LEAST_FREE_BYTES = 100 * 2**20  # a first run of the default GPT leaves 66 MiB: databases, trials, checkpoints, a page


def check_room(project: Path) -> None:
    """Check that a run can write into the folder, before it starts servers there.

    Raises:
        InputError: it cannot be written, or has less free space than any run needs.
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
