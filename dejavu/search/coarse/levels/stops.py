"""Which stages fit from which level, whatever the limit: found out for one level after the other, when it is needed."""

from __future__ import annotations

from threading import Event, Lock

import numpy as np
from numpy.typing import NDArray

from dejavu.search.coarse.levels import counted
from dejavu.search.coarse.levels.minima import Stops
from dejavu.search.coarse.windows import Costs

_SHORT = 2**16  # layers, from which on a stop takes four bytes


def bytes_of_a_stop(num_layers: int) -> int:
    return 2 if num_layers < _SHORT else 4


class FittingStops:
    """The last stop of a stage from each cut on, under each configuration, that has room on each level.

    May be asked from any thread. There is room for as many levels as will ever be asked for; memory is taken as they
    are filled.
    """

    def __init__(self, costs: Costs, need_N1: NDArray[np.int64]) -> None:
        """`need_N1`: microbatches that a stage holds on each level."""
        C, L = costs.scratch_CL.shape
        self._costs, self._need_N1 = costs, need_N1
        shape, is_short = (len(need_N1), C, L), bytes_of_a_stop(L) == 2
        self._found_N1CL: Stops = np.empty(shape, np.uint16) if is_short else np.empty(shape, np.int32)
        self._num, self._lock = 0, Lock()

    @property
    def most_levels(self) -> int:
        return len(self._need_N1)

    def upto(self, num_levels: int, until: Event | None = None) -> Stops:
        """Return [level − 1, c, start], see `counted.fitting_stops`; of fewer levels where `until` is set meanwhile."""
        num_levels = min(num_levels, self.most_levels)
        while self._num < num_levels and not (until is not None and until.is_set()):
            with self._lock:
                n = self._num
                if n < num_levels:
                    counted.fitting_stops(self._need_N1[n : n + 1], self._costs, self._found_N1CL[n : n + 1])
                    self._num = n + 1
        return self._found_N1CL[: min(num_levels, self._num)]
