"""Arguments of torchrun: for this machine, or for each of several hosts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dejavu.binding.binding import Binding
from dejavu.launch.rendezvous import Host
from dejavu.runtime.process import rank_settings
from dejavu.runtime.process.own_rank import HOST, ranks_on

MOST_RESTARTS = 3
MONITOR_SECONDS = 0.2
JOIN_SECONDS = 120.0  # for the rendezvous of all hosts' agents, also when they restart their ranks


@dataclass(frozen=True)
class Rendezvous:
    """How one of several hosts' agents finds the others.

    Attributes:
        endpoint: address and port of the rendezvous.
        is_here: this host serves the rendezvous.
        address: this host's own.
    """

    id: str
    num_hosts: int
    endpoint: str
    is_here: bool
    address: str

    @property
    def words(self) -> list[str]:
        return [
            f"--nnodes={self.num_hosts}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf=is_host={int(self.is_here)},join_timeout={JOIN_SECONDS:g}",
            f"--local-addr={self.address}",
            f"--rdzv-id={self.id}",
        ]


def several_hosts_settings(host: str, interface: str = "") -> dict[str, str]:
    """Return the environment variables of the ranks on one of several hosts: its name in the plan among them."""
    of_nccl = {"NCCL_SOCKET_IFNAME": interface} if interface else {}
    return {HOST: host, **rank_settings(interface), **of_nccl}


def assignments(settings: Mapping[str, str]) -> list[str]:
    """Return the words that a shell sets environment variables with, before a command."""
    return [f"{name}={value}" for name, value in settings.items()]


def torchrun_words(
    num_ranks: int, *arguments: Path, meeting: Rendezvous | None = None, restarts: int = MOST_RESTARTS
) -> list[str]:
    """Return torchrun's arguments on one host.

    Args:
        num_ranks: on that host.
        restarts: of all ranks after one failed. torchrun's own agents number them differently on several hosts, and
            the ranks would not find each other (`runtime.process.attempt_number`): there 0, unless they are ours.
        meeting: the rendezvous with other hosts' agents; None: there are none, and it takes a free port on loopback.
    """
    alone = ["--rdzv-endpoint=localhost:0", "--local-addr=localhost", f"--rdzv-id={_new_id()}"]
    return [
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        *(meeting.words if meeting else alone),
        f"--max-restarts={restarts}",
        f"--monitor-interval={MONITOR_SECONDS}",
        "-m",
        "dejavu.runtime.worker",
        *map(str, arguments),
    ]


def words_by_host(binding: Binding, hosts: Sequence[Host], *arguments: Path) -> dict[Host, list[str]]:
    """Return torchrun's arguments on each of several hosts; the first serves the rendezvous."""
    first, launch_id = hosts[0], _new_id()
    endpoint = f"{first.address}:{first.free_port}"
    return {
        host: torchrun_words(
            len(ranks_on(binding, host.name)),
            *arguments,
            meeting=Rendezvous(launch_id, len(hosts), endpoint, host is first, host.address),
        )
        for host in hosts
    }


def _new_id() -> str:
    return uuid.uuid4().hex[:12]
