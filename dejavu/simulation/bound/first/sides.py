"""Which configurations can be in one plan within a limit, and prices of their devices.

Letters: C = configurations, G = classes of them whose messages cost the same, L = layers, T = kinds of devices, V =
prices.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.sparse.csgraph import connected_components

from dejavu.simulation._action_table import Integers
from dejavu.simulation.bound._prefix_sums import BoundProblem
from dejavu.simulation.bound.first.sums import ROUNDING, Mask, Paid, Times


class Reached:
    """Which configurations can be in one plan within a limit, and what they pay for devices.

    A plan's ranks are a chain, and each link of it has to be fast enough for all its messages: so all of them are on
    one side of those that are not. Two sites with a slow line between are then two clusters, of which a plan has one;
    devices' prices alone allow half of a plan here, and half of one there.
    """

    def __init__(self, problem: BoundProblem, times: Times, *, by_work: bool) -> None:
        self._problem, self._times, self._by_work = problem, times, by_work
        self._paid_on = dict[bytes, Paid]()

    def within(self, limit: float) -> Iterator[tuple[Mask, Paid]]:
        """Yield the configurations of each side, with their prices."""
        times = self._times
        is_fast_GG = times.num_microbatches * times.least_GG <= limit * (1.0 + ROUNDING)
        num_sides, side_G = connected_components(is_fast_GG, directed=False)
        for side in range(num_sides):
            inside_C = side_G[times.class_C] == side
            key = inside_C.tobytes()
            if key not in self._paid_on:
                self._paid_on[key] = _paid(self._problem, times, inside_C, by_work=self._by_work)
            yield inside_C, self._paid_on[key]


def _paid(problem: BoundProblem, times: Times, inside_C: Mask, *, by_work: bool) -> Paid:
    """Prices for these configurations: shares of each kind's devices; shares of the work that they could do."""
    kinds = _scarce(problem.prices.use_CT[inside_C], problem.prices.count_T)
    use_CT, count_T = problem.prices.use_CT[:, kinds].astype(float), problem.prices.count_T[kinds]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares_T = np.where(count_T > 0, 1.0 / count_T, 1.0)
    worth = [shares_T]
    if len(kinds) > 1:
        work_CL = np.diff(times.work_CL1, axis=1)
        taken_CL = np.where(problem.possible_CL & inside_C[:, None], work_CL, np.inf)
        speeds_T = np.zeros(len(kinds))
        for kind in range(len(kinds)):
            uses = use_CT[:, kind]
            least_L = (taken_CL[uses > 0] * uses[uses > 0, None]).min(axis=0, initial=np.inf)
            speeds_T[kind] = np.isfinite(least_L).sum() / max(float(least_L[np.isfinite(least_L)].sum()), 1e-300)
        worth.append(speeds_T)
        worth += list(np.diag(shares_T))
    worth_VT = np.array(worth)
    return Paid(worth_VT @ use_CT.T, worth_VT @ count_T, by_work)


def _scarce(use_CT: Integers, count_T: Integers) -> Integers:
    """Return the kinds of devices but those of which there is enough wherever there is enough of another."""
    kept = list(range(len(count_T)))
    for kind in range(len(count_T)):
        others = [other for other in kept if other != kind and count_T[other] <= count_T[kind]]
        if any((use_CT[:, kind] <= use_CT[:, other]).all() for other in others):
            kept.remove(kind)
    return np.array(kept)
