"""Which workers a Dask cluster has now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
