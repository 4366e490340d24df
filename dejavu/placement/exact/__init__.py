"""The fastest of all schedules of a small graph, by branch and bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dejavu.placement._base import Incumbent, Placer
from dejavu.placement.exact.tree import expand_root, explore, open_bound, tree_of
from dejavu.placement.problem import PlacementProblem
from dejavu.placement.shared.bound import ends, work_prices
from dejavu.placement.shared.orders import by_rank, by_start, fill_by_rank, upward_ranks
from dejavu.placement.shared.timeline import empty_state

_NODES_PER_CALL = 100_000  # of the tree, between two looks at the clock


@dataclass(frozen=True)
class Exact(Placer):
    """Branch and bound over devices and orders, operation by operation in the order of their starts.

    Exact over everything that the simulation can price: all placements of groups that fit, with all orders of each
    device's operations. Messages have the simulation's order, and no operation runs twice or is interrupted. For graphs
    of up to some 15 operations; stopped early, it has the best found and what the open branches prove.
    """

    name: ClassVar[str] = "exact"

    def _place(self, problem: PlacementProblem, best: Incumbent, seed: int) -> None:
        self._offer_list_schedule(problem, best)
        if best.is_done:
            return
        tree = tree_of(problem, ends(problem), work_prices(problem))
        # the best seconds so far, and the bound at the root
        limits_2 = np.array([best.seconds, best.bound.seconds], dtype=np.float64)
        depth = expand_root(problem.arrays, tree, limits_2)
        while depth >= 0:
            before = limits_2[0]
            depth = explore(problem.arrays, tree, limits_2, depth, _NODES_PER_CALL)
            if limits_2[0] < before:
                best.offer(tree.best_device_G, tree.best_N)
            if depth >= 0 and best.remaining_seconds < 0:
                best.proved(open_bound(tree, limits_2, depth), "search")
                return
        if best.placement is None:
            best.proved_none("every way to share the groups out over the devices was tried, and none fits their memory")
        else:
            best.proved(best.seconds, "search")

    def _offer_list_schedule(self, problem: PlacementProblem, best: Incumbent) -> None:
        state, rank_N = empty_state(problem.arrays), upward_ranks(problem)
        device_G, held_D = np.full(problem.num_groups, -1, dtype=np.int64), np.zeros(problem.num_devices)
        if np.isfinite(fill_by_rank(problem.arrays, state, rank_N, by_rank(problem, rank_N), device_G, held_D, True)):
            best.offer(device_G, by_start(problem, state.start_N))
