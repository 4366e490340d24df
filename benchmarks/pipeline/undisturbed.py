"""Which steps of a training nobody outside this machine disturbed: every core is looked at before and after each."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from dejavu.timing.interference import InterferenceProbe, sample_seconds

SETTLE_SECONDS = 0.002  # until the other ranks of a core wait in the exchange


class Cores:
    """The cores that ranks sit on, rank r on core r mod their number; all ranks know the same of all."""

    def __init__(self) -> None:
        self._cores = [InterferenceProbe() for _ in range(os.cpu_count() or 1)]

    def sample(self) -> list[float]:
        """Of each core the slower look of now and the last call; all ranks of the group call this together."""
        count = min(len(self._cores), dist.get_world_size())
        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        own = sample_seconds() if dist.get_rank() < count else None
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return [core.sample(seconds) for core, seconds in zip(self._cores, everyone[:count], strict=False)]

    def slowdowns(self, steps: list[list[float]]) -> list[float]:
        """Of steps with these looks, on the core where each was disturbed most."""
        return [max(core.slowdown(one) for one, core in zip(looks, self._cores, strict=False)) for looks in steps]
