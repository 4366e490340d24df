"""Improve a binding on the simulated step: which devices, of the same types.

The formula that bindings are compared by has one value for many whose simulated steps differ: it counts what all
messages of a microbatch take, and the busiest rank or link, not between which ranks they are; and no sums over two
copies of the model.

Shape suffixes: N = bindings, R = pipeline ranks, W = the most blocks of a rank, Q = messages and sums of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.draws import random_places
from dejavu.binding.exact_labels import LEAST_GAIN
from dejavu.binding.link_prices import SeatLinks
from dejavu.binding.local import changed, changes
from dejavu.binding.site import Ints, Place, Site, padded
from dejavu.plans import Plan
from dejavu.plans.stage_costs import Floats

MOST_SIMULATIONS = 100  # for one plan
MOST_ACTIONS = 60_000  # the same, counted in simulated passes: about a tenth of a second
MOST_PLACES = 40_000  # of ranks' blocks in all changes of one binding; a tenth of that in random ones
MOST_BINDINGS = 2_000  # that are listed; of a plan with more only some are looked at
CLOSE = 1e-3  # over the fastest links: not worth another simulation

SecondsOf = Callable[[tuple[float, ...], tuple[float, ...]], float]


@dataclass(frozen=True, eq=False)
class SimulatedSteps:
    """How a plan's step is simulated with the links of its devices.

    Attributes:
        of: a plan -> its step, from what its messages and sums take (`message_seconds`, `sum_seconds`).
        num_actions: that are simulated for one step.
        gradient_bytes_L: as of `sum_seconds`.
    """

    of: Callable[[Plan], SecondsOf]
    num_actions: int
    gradient_bytes_L: Floats


def improved_by_steps(
    pricing: BindingPrices,
    links: SeatLinks,
    places_RW: Ints,
    every_NRW: Ints | None,
    steps: SimulatedSteps,
    seed: int,
) -> Ints:
    """Try other places of the same kinds, the likeliest by the formula first, and keep what makes the step shorter.

    None is simulated in which no message takes less than in another one that was no better, as none does where devices
    are alike. Ends after a number of simulations, not after some time.

    Args:
        every_NRW: those to try; None: those after a single change of the best so far, and random ones.
    """
    left = min(MOST_SIMULATIONS, MOST_ACTIONS // max(1, steps.num_actions)) - 2
    if left <= 0:
        return places_RW
    tried_TQ, rng = links.seconds_NQ(places_RW[None]), np.random.default_rng(seed)
    seconds_of, drawn_NRW = steps.of(pricing.plan), _drawn(pricing, seed) if every_NRW is None else every_NRW
    least, seconds = (seconds_of(*links.of_seats(row)) for row in (links.least_seconds_Q(), tried_TQ[0]))
    goes_on = True
    while goes_on:
        goes_on, near_NRW = False, drawn_NRW
        if every_NRW is None:
            near_NRW = np.concatenate([_changed(pricing, places_RW, rng), drawn_NRW])
        near_NQ = links.seconds_NQ(near_NRW)
        likely_N = pricing.step_seconds_N(near_NRW) + links.longest_sum_N(near_NQ)
        for n in likely_N.argsort(kind="stable"):
            row = near_NQ[n]
            if not np.isfinite(row).all() or (tried_TQ <= row * (1.0 + LEAST_GAIN)).all(axis=1).any():
                continue
            if left <= 0 or seconds <= least * (1.0 + CLOSE):
                return places_RW
            left, tried_TQ = left - 1, np.concatenate([tried_TQ, row[None]])
            found = seconds_of(*links.of_seats(row))
            if found < seconds * (1.0 - LEAST_GAIN):
                places_RW, seconds, goes_on = near_NRW[n], found, every_NRW is None
            if goes_on:
                break
    return places_RW


def _changed(pricing: BindingPrices, places_RW: Ints, rng: np.random.Generator) -> Ints:
    """Return the binding after each change that leaves all ranks on their kinds."""
    rows, most = changes(pricing, places_RW), max(1, MOST_PLACES // places_RW.size)
    rows = rows if len(rows) <= most else rows[np.sort(rng.choice(len(rows), most, replace=False))]
    near_NRW = changed(pricing, places_RW, rows)
    stays_N: NDArray[np.bool_] = (pricing.kinds_NR(near_NRW) == pricing.kinds_NR(places_RW[None])).all(axis=1)
    return near_NRW[stays_N]


def _drawn(pricing: BindingPrices, seed: int) -> Ints:
    """Return random bindings, fewer of many blocks."""
    places_NRW, holds_N = random_places(pricing, MOST_PLACES // (10 * int(pricing.blocks_R.sum())), seed)
    return places_NRW[holds_N]


def every_place(pricing: BindingPrices) -> Ints | None:
    """Return all bindings on the plan's kinds, of those that differ by equal nodes few; None: there are too many."""
    site = pricing.site
    found = [(list[Place](), tuple(site.size_P.tolist()))]
    for rank, configuration in enumerate(pricing.configurations):
        blocks, width = configuration.num_nodes, configuration.devices_per_node
        own = np.flatnonzero(pricing.is_own_RK[rank, site.kind_P]).tolist()
        longer = list[tuple[list[Place], tuple[int, ...]]]()
        for places, free in found:
            pools = list(_unlike(site, free, [pool for pool in own if free[pool] >= width], blocks))
            if len(longer) + comb(len(pools) + blocks - 1, blocks) > MOST_BINDINGS:
                return None
            for place in combinations_with_replacement(pools, blocks):
                left = list(free)
                for pool in place:
                    left[pool] -= width
                if min(left) >= 0:
                    longer.append(([*places, place], tuple(left)))
        found = longer
    return np.array([padded(places) for places, _ in found])


def _unlike(site: Site, free: Sequence[int], pools: Sequence[int], blocks: int) -> Iterator[int]:
    """Leave out pools on nodes of which nothing is taken, but for as many of a group as there are blocks to place.

    All nodes of a group are equal, so on another one it would be the same binding.
    """
    nodes, groups = site.node_P.tolist(), site.group_P.tolist()
    touched = {node for node, size, left in zip(nodes, site.size_P.tolist(), free, strict=True) if left < size}
    others = defaultdict[int, set[int]](set)
    for pool in pools:
        node, seen = nodes[pool], others[groups[pool]]
        if node not in touched and node not in seen:
            if len(seen) == blocks:
                continue
            seen.add(node)
        yield pool
