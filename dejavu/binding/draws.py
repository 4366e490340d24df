"""Random bindings, thousands at once: what users get who leave the order of devices to chance.

Shape suffixes: N = bindings, R = pipeline ranks, W = the most blocks of a rank, P = pools, K = kinds of devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.site import Ints
from dejavu.plans.stage_costs import Floats


def random_places(pricing: BindingPrices, count: int, seed: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Draw (N, R, W) random places, and return which of the N bindings are valid.

    Ranks come in random order, large ones first, because small ones would fragment the nodes. Each takes one of the
    free meshes of its shape, uniformly over blocks, of any kind that it fits; if none is free, of any other kind, and
    the binding is invalid.
    """
    rng, site = np.random.default_rng(seed), pricing.site
    N, rows = count, np.arange(count)
    blocks_R, width_R = pricing.blocks_R, pricing.width_R
    shapes = np.column_stack([-blocks_R * width_R, blocks_R])
    _, shape_R = np.unique(shapes, axis=0, return_inverse=True)
    order_NR = np.argsort(shape_R.ravel() + rng.random((N, pricing.num_ranks)), axis=1)
    of_kind_PK = site.kind_P[:, None] == np.arange(len(site.kinds))
    possible_RK = np.isfinite(pricing.seconds_RK)
    free_NP = np.tile(site.size_P, (N, 1))
    places_NRW = np.zeros((N, pricing.num_ranks, int(blocks_R.max())), dtype=np.int64)
    holds_N = np.ones(N, dtype=bool)
    for ranks_N in order_NR.T:
        blocks, width = int(blocks_R[ranks_N[0]]), int(width_R[ranks_N[0]])  # the same in all N
        rooms_NP = free_NP // width
        rooms_NK = rooms_NP @ of_kind_PK
        enough_NK = rooms_NK >= blocks
        wanted_NK = enough_NK & possible_RK[ranks_N]
        held_N = wanted_NK.any(axis=1)
        holds_N &= held_N
        allowed_NK = np.where(held_N[:, None], wanted_NK, enough_NK)
        kind_N = _draw(rng, rooms_NK * allowed_NK)
        found_N = allowed_NK.any(axis=1)
        rooms_NP = rooms_NP * of_kind_PK.T[kind_N]
        for block in range(blocks):
            pool_N = _draw(rng, rooms_NP)
            places_NRW[rows, ranks_N, block] = pool_N
            rooms_NP[rows, pool_N] -= found_N
            free_NP[rows, pool_N] -= width * found_N
        places_NRW[rows, ranks_N, blocks:] = places_NRW[rows, ranks_N, 0][:, None]
    return places_NRW, holds_N


def _draw(rng: np.random.Generator, weights: NDArray[np.int64]) -> Ints:
    """Draw one column of each row, in proportion to the weights; the first where all are 0."""
    sums: Floats = np.cumsum(weights, axis=1, dtype=float)
    return np.asarray((sums > rng.random((len(sums), 1)) * sums[:, -1:]).argmax(axis=1))
