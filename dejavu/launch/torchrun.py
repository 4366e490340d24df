"""Arguments of torchrun: for this machine, or for each of several hosts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dejavu.binding.binding import Binding
from dejavu.launch.rendezvous import Host
from dejavu.runtime.process.own_rank import ranks_on

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


def torchrun_words(num_ranks: int, *arguments: Path, meeting: Rendezvous | None = None) -> list[str]:
    """Return torchrun's arguments on one host.

    Args:
        num_ranks: on that host.
        meeting: the rendezvous with other hosts' agents; None: there are none, and it takes a free port on loopback.
    """
    alone = ["--rdzv-endpoint=localhost:0", "--local-addr=localhost", f"--rdzv-id={_new_id()}"]
    return [
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        *(meeting.words if meeting else alone),
        f"--max-restarts={MOST_RESTARTS}",
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
