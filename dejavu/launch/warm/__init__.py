"""Hosts that stay warm: one agent on each, which starts, ends and restarts ranks of any plan as the launcher orders.

Torch's elastic agents want the same number of ranks on a host for ever, meet again for every attempt, and wait for
hosts that are gone. Here the launcher knows which hosts there are and says who runs what.

board.py   what launcher and agents tell each other, through the launcher's store
agent.py   the agent: a zygote that forks ranks, the host's memory, a watchdog
hosts.py   all agents, as the launcher sees them
dask.py    a host with a Dask worker
"""

from dejavu.launch.warm.board import Run
from dejavu.launch.warm.hosts import LocalHost, StartsAgent, WarmHosts

__all__ = ["LocalHost", "Run", "StartsAgent", "WarmHosts"]
