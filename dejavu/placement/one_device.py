"""Everything on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dejavu.placement._base import Incumbent, Placer
from dejavu.placement.problem import PlacementProblem
from dejavu.placement.shared.room import fits


@dataclass(frozen=True)
class OneDevice(Placer):
    """All operations on the device where that is fastest: no messages, nothing side by side. To compare with."""

    name: ClassVar[str] = "one_device"

    def _place(self, problem: PlacementProblem, best: Incumbent, seed: int) -> None:
        for d in range(problem.num_devices):
            device_G = np.full(problem.num_groups, d, dtype=np.int64)
            if fits(problem, device_G):
                best.offer(device_G, problem.topological_N)
