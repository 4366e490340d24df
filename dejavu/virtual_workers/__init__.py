"""Virtual workers: pipelines of their own on different devices, with parts of every batch as large as suits each.

divisions.py  ways to divide a cluster's devices, and a worker's part as a cluster
shares.py     how many microbatches each worker gets
sums.py       what it takes to sum the gradients of all
planning.py   quick plans for every division, whole ones for the best
team.py       the workers that were chosen, and what they are compared with
table.py      the same for terminals
"""

from dejavu.virtual_workers.divisions import Division, WorkerDevices, divisions
from dejavu.virtual_workers.planning import NoTeam, Teams
from dejavu.virtual_workers.shares import balanced
from dejavu.virtual_workers.sums import SharedSums
from dejavu.virtual_workers.table import team_tables, what_a_team_yields
from dejavu.virtual_workers.team import Team, TeamWorker, Tried

__all__ = [
    "Division",
    "NoTeam",
    "SharedSums",
    "Team",
    "TeamWorker",
    "Teams",
    "Tried",
    "WorkerDevices",
    "balanced",
    "divisions",
    "team_tables",
    "what_a_team_yields",
]
