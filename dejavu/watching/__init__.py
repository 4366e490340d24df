"""Is the cluster still the one that the last plan is for, and if not: what changed, and is another plan worth a move?

present.py   what is there now: the cluster file, and the Dask workers on its hosts
links.py     whose links are slower than they were, by messages between the workers
changes.py   two clusters compared, as sentences
notes.py     what the last plan was made for, what was decided since; files of the project's folder
decision.py  the plan that is there against a new one
"""

from dejavu.watching.changes import differences
from dejavu.watching.decision import Decided, Decision, decide
from dejavu.watching.links import fastest, slow_links, try_links, with_slow_links
from dejavu.watching.notes import Notes, Planned, changed_since
from dejavu.watching.present import WorkerDevices, as_present, look_at_workers, workers_by_host

__all__ = [
    "Decided",
    "Decision",
    "Notes",
    "Planned",
    "WorkerDevices",
    "as_present",
    "changed_since",
    "decide",
    "differences",
    "fastest",
    "look_at_workers",
    "slow_links",
    "try_links",
    "with_slow_links",
    "workers_by_host",
]
