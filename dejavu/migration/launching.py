"""Launch a training that follows its cluster: on this machine, or on hosts with Dask workers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dejavu.foundation.dask_workers import workers_of
from dejavu.launch.launcher import OnLoss, remove_unfinished
from dejavu.launch.preflight import check_devices, check_hosts
from dejavu.launch.rendezvous import Host, Pulse, is_here, look_at_host, look_at_hosts, look_here, match_workers
from dejavu.launch.warm import LocalHost, StartsAgent, WarmHosts
from dejavu.launch.warm.dask import DaskHost
from dejavu.launch.watchdog import STALL_SECONDS
from dejavu.migration.changes import ClusterNow, HostLost
from dejavu.migration.problem_now import RunningProblem
from dejavu.migration.replanning import Decision
from dejavu.migration.training import ChangingTraining
from dejavu.runtime.job import TrainingJob, TrainingResult


def launch_changing(
    job: TrainingJob,
    running: RunningProblem,
    client: Any = None,
    *,
    stall_seconds: float = STALL_SECONDS,
    needed_bytes: Sequence[float] | None = None,
    on_step: OnLoss = lambda step, loss: None,
    on_evaluation: OnLoss = lambda step, loss: None,
    on_decision: Callable[[Decision], None] = lambda decision: None,
) -> TrainingResult:
    """Train the job's steps on its cluster, under whatever plan is best for what the cluster is at the time.

    Args:
        running: the problem that the job's plan was chosen from.
        client: a `distributed.Client` with a worker on every host of the plan, and on others that may be used; not
            needed where all is on this machine.
        stall_seconds, needed_bytes, on_step, on_evaluation: as in `dejavu.launch.launcher.launch`.
        on_decision: called with every decision, also where the running plan stays.

    Raises:
        InputError: a host cannot be reached.
        LaunchError: the plan cannot run here, or ranks failed again and again.
        NoPlanError: no plan fits what is left of the cluster.
    """
    names = list(dict.fromkeys(placed.device.host for placed in job.binding.placements))
    local = client is None or all(map(is_here, names))
    if local:
        check_hosts(names)
    folder = Path(job.folder)
    pulse = Pulse(folder)
    try:
        ask = {"gpu_memory": needed_bytes is not None}
        seen = look_here(names, pulse.folder, **ask) if local else look_at_hosts(client, names, pulse.folder, **ask)
        check_devices(job, seen, needed_bytes)
        address = "127.0.0.1" if local else _own_address(seen)
        warm = WarmHosts(folder, address, stall_seconds)
        reach = _Reach(running, warm, None if local else client, pulse)
        now = ClusterNow(running.cluster)
        absent = [HostLost(host) for host in now.hosts if host not in names]
        training = ChangingTraining(
            job,
            running,
            warm,
            now.after(*absent),
            on_step=on_step,
            on_evaluation=on_evaluation,
            on_decision=on_decision,
            come=reach.come,
        )
        try:
            warm.add({host.name: reach.starts(host) for host in seen})
            return training.run()
        finally:
            warm.close()
            remove_unfinished(job)
    finally:
        pulse.end()


def _own_address(hosts: Sequence[Host]) -> str:
    """Return the address of this machine by which the hosts reach it: that of the way to the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((hosts[0].address, 9))  # sends nothing
        address: str = way.getsockname()[0]
    return address


class _Reach:
    """The hosts of a cluster that can be reached; `client` is None where they are this machine."""

    def __init__(self, running: RunningProblem, warm: WarmHosts, client: Any, pulse: Pulse) -> None:
        self._names = dict.fromkeys(device.host for device in running.cluster.devices())
        self._warm, self._client, self._pulse = warm, client, pulse
        self._machines: dict[str, str] = {}  # of the workers that were seen

    def starts(self, host: Host) -> StartsAgent:
        return LocalHost() if self._client is None else DaskHost(self._client, host, self._pulse)

    def come(self) -> Mapping[str, StartsAgent]:
        """Return the cluster's hosts that have a worker now, and no agent yet."""
        found: dict[str, StartsAgent] = {}
        if self._client is None:
            return found
        try:
            workers = workers_of(self._client)
            if new := [worker for worker in workers if worker not in self._machines]:
                self._machines |= self._client.run(socket.gethostname, workers=new)
        except OSError:
            return found
        have = match_workers(self._names, workers, {worker: self._machines[worker] for worker in workers})
        for name, worker in have.items():
            if name not in self._warm.names:
                place = name, worker, str(workers[worker]["host"]), self._pulse.folder
                try:
                    host = look_at_host(self._client, *place, gpu_memory=False)
                except Exception:  # it has gone again, or cannot be used: no reason to end what trains without it
                    continue
                if host.sees_folder:
                    found[name] = DaskHost(self._client, host, self._pulse)
        return found
