"""Devices by lot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dejavu.placement._base import Incumbent, Placer
from dejavu.placement.problem import PlacementProblem
from dejavu.placement.shared.orders import dispatch, upward_ranks
from dejavu.placement.shared.room import fits
from dejavu.placement.shared.timeline import empty_state


@dataclass(frozen=True)
class RandomDraws(Placer):
    """The best of some placements that are drawn: every group on a device by lot, list scheduling on them.

    To compare with. Where memory binds, draws that do not fit are dropped, and it may find nothing.
    """

    name: ClassVar[str] = "random"
    num_draws: int = 100

    def _place(self, problem: PlacementProblem, best: Incumbent, seed: int) -> None:
        draws, state, rank_N = np.random.default_rng(seed), empty_state(problem.arrays), upward_ranks(problem)
        order_N = np.empty(len(problem.operations), dtype=np.int64)
        for _ in range(self.num_draws):
            device_G = draws.integers(problem.num_devices, size=problem.num_groups)
            if fits(problem, device_G):
                dispatch(problem.arrays, state, device_G, rank_N, order_N)
                best.offer(device_G, order_N)
            if best.remaining_seconds < 0:
                return
