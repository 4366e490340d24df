"""Which run a person means by `last`, where not every run has what is wanted of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from dejavu.track import RunSummary, find_run
from dejavu.track.reading import LAST


def run_named(project: Path, name: str, may_be_last: Callable[[RunSummary], bool], does: str) -> RunSummary:
    """Find a run as `find_run` does; where `last` is not the last of all, say which it is on standard error.

    Args:
        does: what the runs do that may be the last, as "trains".
    """
    found = find_run(project, name, may_be_last)
    if name == LAST and (latest := find_run(project, LAST)).run_id != found.run_id:
        said = f"the last that {does} is {found.run_id[:8]} ({found.name}); after it came {latest.run_id[:8]}"
        print(f"{said} ({latest.name})", file=sys.stderr)
    return found
