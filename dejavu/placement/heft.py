"""List scheduling by upward ranks, with insertion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dejavu.placement._base import Incumbent, Placer
from dejavu.placement.problem import PlacementProblem
from dejavu.placement.shared.orders import by_rank, by_start, fill_by_rank, upward_ranks
from dejavu.placement.shared.room import roomy
from dejavu.placement.shared.timeline import empty_state


@dataclass(frozen=True)
class HEFT(Placer):
    """Each operation, the one with the longest way to the end first, goes to the device where it ends first.

    It may fill a gap between operations that are placed already. Milliseconds; looks at no operation twice, so it pays
    for messages that a look ahead would have saved. Where memory binds and it gets stuck, groups are first put where
    they fit, the largest first, and only the order is its own.
    See [Topcuoglu et al., IEEE TPDS 2002](https://doi.org/10.1109/71.993206).
    """

    name: ClassVar[str] = "heft"

    def _place(self, problem: PlacementProblem, best: Incumbent, seed: int) -> None:
        arrays, state, rank_N = problem.arrays, empty_state(problem.arrays), upward_ranks(problem)
        order_N = by_rank(problem, rank_N)
        for device_G in (np.full(problem.num_groups, -1, dtype=np.int64), roomy(problem)):
            if device_G is None:
                return
            held_D = np.bincount(
                device_G[device_G >= 0], weights=arrays.memory_G[device_G >= 0], minlength=problem.num_devices
            )
            if np.isfinite(fill_by_rank(arrays, state, rank_N, order_N, device_G, held_D.astype(np.float64), True)):
                best.offer(device_G, by_start(problem, state.start_N))
                return
