"""Clusters that this machine does not have: slower cores by a CPU quota, hosts apart as network namespaces.

Both need the rights of root on Linux; where they are not given, `EmulationError` has the reason. What is made is named
by this process, and removed again.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.cluster import Cluster, Device
from dejavu.foundation.errors import DejavuError
from dejavu.graphs.graph import Graph
from dejavu.launch.torchrun import Rendezvous
from dejavu.runtime.process.own_rank import HOST
from dejavu.workload import Workload

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

CPU_V1 = Path("/sys/fs/cgroup/cpu")
CPU_V2 = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 10_000  # much shorter, near the scheduler's tick of 4 ms, a process gets less than its share
LEAVING_SECONDS = 5.0  # for ended processes to leave their group
NETWORK = "10.78.0"  # only inside the namespaces
MEETING_PORT = 29400  # a namespace's ports are all free
CABLE = "cable"  # a host's network interface
BURST = "32kb"  # what a link passes at once
QUEUE = "400ms"  # what waits for a link; more is dropped
_QUOTAS = "DEJAVU_EMULATED_QUOTAS"
_WHOLE_CORE = ""


class EmulationError(DejavuError):
    """This machine does not permit it; the message has the reason."""


@dataclass(frozen=True)
class Emulation:
    """Where the devices of an emulated cluster are.

    Attributes:
        quotas: the CPU control group of a device, by host and index; a device without one is a whole core.
        namespaces: the network namespace of each host; empty: all are this machine.
    """

    quotas: Mapping[tuple[str, int], Path] = field(default_factory=dict)
    namespaces: Mapping[str, str] = field(default_factory=dict)

    def quota(self, device: Device) -> Path:
        """The control group that the device's process belongs in."""
        return self.quotas.get((device.host, device.index), own_group())

    def environment(self, host: str) -> dict[str, str]:
        """For the ranks on this host."""
        found = {HOST: host, "GLOO_SOCKET_IFNAME": CABLE} if self.namespaces else {}
        if self.quotas:
            quotas = {_seat(*seat): str(group) for seat, group in self.quotas.items()}
            found[_QUOTAS] = json.dumps({_WHOLE_CORE: str(own_group()), **quotas})
        return found

    def before(self, host: str) -> list[str]:
        """The words that put a command on this host; `ip netns exec` would hide the control groups from it."""
        return ["nsenter", f"--net=/run/netns/{self.namespaces[host]}"] if self.namespaces else []

    def meeting(self, host: str, hosts: Sequence[str]) -> list[str]:
        """For torchrun on one of these hosts, to find the others."""
        if not self.namespaces:
            return ["--standalone", "--local-addr=localhost"]
        addresses = dict(zip(self.namespaces, _addresses(), strict=False))
        endpoint = f"{addresses[hosts[0]]}:{MEETING_PORT}"
        meeting = Rendezvous("emulated", len(hosts), endpoint, host == hosts[0], addresses[host])
        return ["--rdzv-backend=c10d", *meeting.words]


NOTHING_EMULATED = Emulation()


def _seat(host: str, index: int) -> str:
    return f"{host} {index}"


def _addresses() -> Iterator[str]:
    return (f"{NETWORK}.{number}" for number in range(1, 255))


def take_seat(device: Device) -> None:
    """In a rank: run as fast as this device from now on."""
    if _QUOTAS in os.environ:
        quotas = json.loads(os.environ[_QUOTAS])
        enter(Path(quotas.get(_seat(device.host, device.index), quotas[_WHOLE_CORE])))


def enter(group: Path, process: int | None = None) -> None:
    """Move a process, by default this one, with all its threads into a control group."""
    (group / "cgroup.procs").write_text(str(process or os.getpid()))


def own_group() -> Path:
    """The CPU control group of this process."""
    rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if CPU_V1.is_dir():
        return CPU_V1 / next(path for _, names, path in rows if "cpu" in names.split(",")).lstrip("/")
    return CPU_V2 / next(path for _, names, path in rows if not names).lstrip("/")


def own_name(name: str) -> str:
    """Of what this process makes."""
    return f"dejavu-{os.getpid()}-{name}"


@contextmanager
def slowed(name: str, share: float) -> Iterator[Path]:
    """A control group whose processes together get this share of one core.

    Raises:
        EmulationError: control groups are not permitted here.
    """
    quota = round(share * PERIOD_MICROSECONDS)
    group = (CPU_V1 if CPU_V1.is_dir() else CPU_V2) / own_name(name)
    try:
        group.mkdir()
    except OSError as error:
        raise EmulationError(f"a CPU quota is not permitted here: {error}") from error
    try:
        try:
            if CPU_V1.is_dir():
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        except OSError as error:
            raise EmulationError(f"a CPU quota is not permitted here: {error}") from error
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + LEAVING_SECONDS
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def apart(hosts: Sequence[str], bits_per_second: float) -> Iterator[dict[str, str]]:
    """A network namespace for each host, joined by a bridge in one of its own; each sends at this rate at most.

    The machine's own network, its loopback included, is not touched.

    Raises:
        EmulationError: network namespaces, or limits of bandwidth, are not permitted here.
    """
    switch = own_name("switch")
    names = {host: own_name(host) for host in hosts}
    with ExitStack() as stack:
        for name in (switch, *names.values()):
            _run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for (host, name), address in zip(names.items(), _addresses(), strict=False):
            inside = partial(_run, "ip", "-n", name)
            inside("link", "add", CABLE, "type", "veth", "peer", "name", host, "netns", switch)
            _run("ip", "-n", switch, "link", "set", host, "master", "bridge", "up")
            inside("address", "add", f"{address}/24", "dev", CABLE)
            inside("link", "set", CABLE, "up")
            inside("link", "set", "lo", "up")
            limit = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", BURST, "latency", QUEUE)
            _run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", *limit)
        yield names


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise EmulationError(f"there is no command {words[0]!r} here; wanted iproute2") from error
    if done.returncode:
        raise EmulationError(f"`{' '.join(words)}` is not permitted here: {done.stderr.strip()}")


def measure_emulated(
    workload: Workload, graph: Graph, cluster: Cluster, emulation: Emulation, device_type: str
) -> list[Measurement]:
    """All layers on a device of this type, while every other device of the cluster is as busy."""
    # Ranks import this module, too, and with pyarrow's thread in it none could be forked.
    from dejavu.profiling.layers import Conditions, measure_layers

    devices = cluster.devices()
    own = next(place for place, device in enumerate(devices) if device.type_name == device_type)
    turned = (*devices[own:], *devices[:own])

    def place(number: int, process: int) -> None:
        enter(emulation.quota(turned[number]), process)

    signatures = list(dict.fromkeys(layer.signature for layer in graph.layers))
    in_slices = (turned[0].host, turned[0].index) in emulation.quotas
    return list(
        measure_layers(workload, graph, signatures, device_type, Conditions(len(devices), in_slices), on_start=place)
    )
