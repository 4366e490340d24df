"""What `--dask` names, which workers a Dask cluster has now, and whether what is said to them is encrypted.

Dask runs what it receives, so whoever can write to a connection can run code on both ends.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import did_you_mean

ENCRYPTED = ("tls", "wss")
ALLOW_PLAIN = "DEJAVU_ALLOW_PLAIN_DASK"
SYSTEMS = ("slurm", "pbs")
AN_ADDRESS = "tls://10.0.0.1:8786"


@dataclass(frozen=True)
class Queue:
    """A batch system whose jobs are a run's Dask workers.

    Attributes:
        system: one of `SYSTEMS`.
        num_jobs: None: one for each node of the cluster.
    """

    system: str
    num_jobs: int | None = None

    def __str__(self) -> str:
        return f"{'' if self.num_jobs is None else f'{self.num_jobs}x'}{self.system}"


def queue_of(dask: str) -> Queue | None:
    """Read a batch system, as `slurm`, or `4xpbs` for four jobs; None: a scheduler's address, or nothing.

    Raises:
        InputError: a word that is neither, or no jobs at all.
    """
    found = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w-]*)", dask)
    if found is None:
        return None
    count, system = found.groups()
    if system not in SYSTEMS:
        raise InputError(
            f"Dask at {dask} is neither a scheduler's address nor a batch system; wanted {' or '.join(SYSTEMS)}, a "
            f"number of jobs as 4x{SYSTEMS[0]}, or an address as {AN_ADDRESS}{did_you_mean(system, SYSTEMS)}"
        )
    if count is not None and int(count) < 1:
        raise InputError(f"Dask at {dask} is {int(count)} jobs; wanted 1 or more, as 4x{system}")
    return Queue(system, None if count is None else int(count))


def check_encrypted(address: str) -> None:
    """Check that a scheduler or worker on another host is spoken to by TLS; on loopback nothing is asked for.

    An empty address is that of no scheduler.

    Where the network is closed to others, DEJAVU_ALLOW_PLAIN_DASK=1 in the environment says so.

    Raises:
        InputError: the address is of another host, and not `tls://`; or it is none.
    """
    if not address:
        return  # this machine's own workers
    found = _split(address)
    if (
        found.scheme in (*ENCRYPTED, "inproc")
        or _is_loopback(found.hostname or "")
        or os.environ.get(ALLOW_PLAIN) == "1"
    ):
        return
    raise InputError(
        f"Dask at {address} is on another host and not encrypted: whoever can reach the connection can run code there "
        f"and here. Wanted tls://{found.netloc} (docs/own-cluster.md), or {ALLOW_PLAIN}=1 in the environment where "
        "nobody else can reach that network"
    )


def _split(address: str) -> SplitResult:
    """Take a scheduler's or a worker's address apart.

    Raises:
        InputError: it has no host, or no port, without which Dask's client knows nothing to connect to.
    """
    try:
        found = urlsplit(address if "://" in address else f"tcp://{address}")
        is_whole = found.scheme == "inproc" or bool(found.hostname and found.port)
    except ValueError:  # urllib's, of brackets and ports
        is_whole = False
    if not is_whole:
        raise InputError(f"Dask at {address} is no scheduler's address; wanted a host and a port, as {AN_ADDRESS}")
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def workers_of(client: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return every worker that the scheduler knows, by address: its name, host, resources ….

    Not `client.scheduler_info`, which gives back the client's own copy: a timer of the client's overwrites that with
    one without workers, perhaps between asking and reading (distributed 2026.8).

    Args:
        client: a synchronous `distributed.Client`.

    Raises:
        OSError: the scheduler does not answer.
    """
    found: Mapping[str, Mapping[str, Any]] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return found
