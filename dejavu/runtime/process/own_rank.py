"""Which rank of the world this process is."""

from __future__ import annotations

import os

from dejavu.binding import Binding
from dejavu.foundation.errors import InputError

HOST = "DEJAVU_HOST"


def ranks_on(binding: Binding, host: str) -> list[int]:
    """Return the ranks of the world that are on the host, by their number there."""
    return [rank for rank, placement in enumerate(binding.placements) if placement.device.host == host]


def own_rank(binding: Binding) -> int:
    """Return this process's rank in the binding.

    torchrun numbers hosts in its own order, so with several hosts the rank follows from the host and the local rank.

    Raises:
        InputError: there are several hosts, and the environment does not say which this is.
    """
    host, local = os.environ.get(HOST), int(os.environ["LOCAL_RANK"])
    if host is not None:
        return ranks_on(binding, host)[local]
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise InputError(f"several hosts, and {HOST} is not set; wanted this host's name in the plan")
    return int(os.environ["RANK"])
