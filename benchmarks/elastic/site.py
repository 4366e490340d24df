"""Emulated hosts: a network namespace and a share of a core each, and one more from which they are launched."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.pipeline.emulation import (
    BURST,
    CABLE,
    CPU_V1,
    NETWORK,
    PERIOD_MICROSECONDS,
    QUEUE,
    Emulation,
    apart,
    enter,
    own_name,
    slowed,
)
from dejavu.launch.warm import LocalHost
from dejavu.launch.warm.hosts import Agent

LAUNCHER = "launcher"
HOSTS = ("alpha", "beta", "gamma", "delta")
SHARE = 0.4  # of a core for each host; two of them share one, and the launcher has what is left
BITS_PER_SECOND = 200e6
_SITE = "DEJAVU_ELASTIC_SITE"


@dataclass(frozen=True)
class Site:
    """Emulated hosts.

    Attributes:
        namespaces: by host, the launcher's among them.
        quotas: the control group of each host.
        switch: the namespace of the bridge between them.
    """

    namespaces: Mapping[str, str]
    quotas: Mapping[str, Path]
    switch: str

    @property
    def emulation(self) -> Emulation:
        """The same for ranks that are trained in turn."""
        return Emulation({(host, 0): group for host, group in self.quotas.items()}, dict(self.namespaces))

    @staticmethod
    def address(host: str) -> str:
        return f"{NETWORK}.{1 + (LAUNCHER, *HOSTS).index(host)}"

    def inside(self, host: str, words: Sequence[str]) -> list[str]:
        """Put a command on a host; `ip netns exec` would hide the control groups from it."""
        return ["nsenter", f"--net=/run/netns/{self.namespaces[host]}", *words]

    def limit_link(self, host: str, share: float) -> None:
        """Let a host's link pass this share of what it usually does, both ways."""
        rate = ("rate", f"{BITS_PER_SECOND * share:.0f}bit", "burst", BURST, "latency", QUEUE)
        for namespace, device in ((self.namespaces[host], CABLE), (self.switch, host)):
            words = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate]
            subprocess.run(words, check=True, capture_output=True)

    def limit_core(self, host: str, share: float) -> None:
        """Give a host this share of what it usually has of a core."""
        quota = round(SHARE * share * PERIOD_MICROSECONDS)
        group = self.quotas[host]
        if CPU_V1.is_dir():
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")

    def as_usual(self) -> None:
        """Take all limits back."""
        for host in HOSTS:
            self.limit_link(host, 1.0)
            self.limit_core(host, 1.0)

    def to_environment(self) -> dict[str, str]:
        quotas = {host: str(group) for host, group in self.quotas.items()}
        return {_SITE: json.dumps([dict(self.namespaces), quotas, self.switch])}

    @classmethod
    def from_environment(cls) -> Site:
        namespaces, quotas, switch = json.loads(os.environ[_SITE])
        return cls(namespaces, {host: Path(group) for host, group in quotas.items()}, switch)


def is_inside() -> bool:
    """Return whether this process is on the launcher's host."""
    return _SITE in os.environ


@contextmanager
def emulated() -> Iterator[Site]:
    """Set all hosts up.

    Raises:
        EmulationError: this machine does not permit it.
    """
    with ExitStack() as stack:
        quotas = {host: stack.enter_context(slowed(host, SHARE)) for host in HOSTS}
        namespaces = stack.enter_context(apart((LAUNCHER, *HOSTS), BITS_PER_SECOND))
        yield Site(namespaces, quotas, own_name("switch"))


@dataclass
class EmulatedHost:
    """A host on which an agent is started."""

    site: Site
    name: str
    processes: list[psutil.Process] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.site.address(self.name)

    def start(self, environment: Mapping[str, str], log: Path) -> Agent:
        """Start the agent on a whole core: until `throttle`, which makes the host as slow as it is."""
        agent = LocalHost(self.address, CABLE, self.site.inside(self.name, ())).start(environment, log)
        self.processes.append(psutil.Process(agent.process.pid))  # type: ignore[attr-defined]
        return agent

    @property
    def tree(self) -> list[psutil.Process]:
        """All processes on the host."""
        alive = [process for process in self.processes if process.is_running()]
        return [*alive, *(child for process in alive for child in process.children(recursive=True))]

    def throttle(self) -> None:
        for process in self.tree:
            enter(self.site.quotas[self.name], process.pid)

    def kill(self) -> None:
        """End all processes on the host at once."""
        for process in self.tree:
            process.kill()

    def kill_rank(self) -> None:
        next(process for process in self.tree if process.name().startswith("rank ")).kill()
