"""A running training follows its cluster: what changed, the plan for what is left, and the way there.

changes.py     what may happen to a cluster, and the cluster after it
problem_now.py the running problem, written anew for that cluster at the running problem's prices
placing.py     the same binding on the devices that already hold most of its state
options.py     plans to go on with: as it is, without what was lost, the best on what is left
replanning.py  the decision: the option with the least time for the steps that are left, moving included
watching.py    slower devices and links, seen in the ranks' own passes
starting.py    which snapshots there are, and which an attempt starts from
joint/         the plan improved by what the training measures of it, on a cluster that stays as it is
training.py    the training through all changes
launching.py   the same for a cluster of this machine, or of hosts with Dask workers
"""

from dejavu.migration.changes import (
    ClusterChange,
    ClusterNow,
    DeviceLost,
    DeviceSlowed,
    HostAdded,
    HostLost,
    LinkSlowed,
)
from dejavu.migration.problem_now import RunningProblem
from dejavu.migration.replanning import Decision, Remaining, replan

__all__ = [
    "ClusterChange",
    "ClusterNow",
    "Decision",
    "DeviceLost",
    "DeviceSlowed",
    "HostAdded",
    "HostLost",
    "LinkSlowed",
    "Remaining",
    "RunningProblem",
    "replan",
]
