"""Which workers a Dask cluster has now, and whether what is said to them is encrypted.

Dask runs what it receives, so whoever can write to a connection can run code on both ends.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dejavu.foundation.errors import InputError

ENCRYPTED = ("tls", "wss")
ALLOW_PLAIN = "DEJAVU_ALLOW_PLAIN_DASK"


def check_encrypted(address: str) -> None:
    """Check that a scheduler or worker on another host is spoken to by TLS; on loopback nothing is asked for.

    An empty address is that of no scheduler.

    Where the network is closed to others, DEJAVU_ALLOW_PLAIN_DASK=1 in the environment says so.

    Raises:
        InputError: the address is of another host, and not `tls://`.
    """
    if not address:
        return  # this machine's own workers
    found = urlsplit(address if "://" in address else f"tcp://{address}")
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
