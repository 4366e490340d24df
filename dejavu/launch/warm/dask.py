"""A host with a Dask worker: its agent is a task there, which takes one of the worker's threads until it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.foundation.dask_workers import workers_of
from dejavu.launch.rendezvous import WORKERS_SECONDS, Host, Pulse, run_agent
from dejavu.launch.warm.hosts import AGENT, Agent


@dataclass(frozen=True)
class DaskHost:
    """A host that a Dask client reaches.

    Attributes:
        client: a `distributed.Client`.
        pulse: of the launch; without it the agent ends.
    """

    client: Any
    host: Host
    pulse: Pulse

    @property
    def address(self) -> str:
        return self.host.address

    def start(self, environment: Mapping[str, str], log: Path) -> Agent:
        number = time.monotonic_ns()  # a host that was lost may come again
        future = self.client.submit(
            run_agent,
            [],
            dict(environment),
            self.host.interface,
            str(log),
            str(self.pulse.folder / f"{self.host.name}-{number}"),
            AGENT[-1],
            key=f"warm-agent-{self.host.name}-{number}",
            workers=[self.host.worker],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )
        return _DaskAgent(self.client, self.host, future)


class _DaskAgent:
    def __init__(self, client: Any, host: Host, future: Any) -> None:
        self._client, self._host, self._future = client, host, future
        self._asked, self._has_gone = time.monotonic(), False

    def poll(self) -> int | None:
        if self._future.status == "finished":
            return int(self._future.result())
        if self._future.status in ("error", "cancelled", "lost") or self._has_gone:
            return 1
        if time.monotonic() - self._asked > WORKERS_SECONDS:
            self._asked = time.monotonic()
            try:
                self._has_gone = self._host.worker not in workers_of(self._client)
            except OSError:  # the scheduler does not answer, which says nothing about the worker
                return None
        return None

    def end(self) -> None:
        """The launcher's last order has ended it; Dask forgets it."""
        self._client.cancel([self._future], force=True)
