"""Local search on a binding: swap two ranks, reverse a range of ranks, move a block.

Shape suffixes: N = bindings, R = pipeline ranks, W = the most blocks of a rank, P = pools.
"""

from __future__ import annotations

import numpy as np

from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.exact_labels import LEAST_GAIN
from dejavu.binding.site import Ints

MOST_PLACES = 400_000  # of all ranks in all neighbours of one binding: 64 ranks have about 4,000 neighbours
MOST_BLOCKS = 1_000_000  # likewise, where ranks have hundreds of nodes
MOST_ROUNDS = 50  # of pricing all changes of one binding; 64 ranks need about 15
MOST_TRIED = 100  # of the changes of one round
EXCHANGE, TURN, MOVE = range(3)


def improved(pricing: BindingPrices, places_RW: Ints, seed: int) -> Ints:
    """Price all changes, apply the best ones while they improve, and repeat until none does.

    No single change improves the result (of those sampled, where there are very many), but several at once may.
    """
    rng = np.random.default_rng(seed)
    seconds = float(pricing.step_seconds_N(places_RW[None])[0])
    for _ in range(MOST_ROUNDS):
        rows = subsample(changes(pricing, places_RW), pricing, rng)
        found_N = pricing.step_seconds_N(changed(pricing, places_RW, rows))
        better = np.flatnonzero(found_N < seconds * (1.0 - LEAST_GAIN))
        if not len(better):
            break
        better = better[found_N[better].argsort()]
        rest = better[1 : MOST_TRIED + 1]
        for n in (better[0], *rest[rows[rest, 0] != MOVE]):  # idle devices may be taken by now
            candidate = changed(pricing, places_RW, rows[n : n + 1])
            found = float(pricing.step_seconds_N(candidate)[0])
            if found < seconds * (1.0 - LEAST_GAIN):
                places_RW, seconds = candidate[0], found
    return places_RW


def changes(pricing: BindingPrices, places_RW: Ints) -> Ints:
    """Return (N, 4): the kind of change; ranks a and b that swap or end a reversed range; or rank, block, pool.

    Only ranks with meshes of one shape swap. A rank of several blocks moves on its own kind only.
    """
    site, rows = pricing.site, []
    shapes = np.column_stack([pricing.blocks_R, pricing.width_R])
    a, b = np.triu_indices(pricing.num_ranks, 1)
    alike = (shapes[a] == shapes[b]).all(axis=1) & (places_RW[a] != places_RW[b]).any(axis=1)
    runs = np.cumsum(np.r_[0, (shapes[1:] != shapes[:-1]).any(axis=1)])
    turns = (runs[a] == runs[b]) & (b > a + 1)  # of two ranks: an exchange
    for what, these in ((EXCHANGE, alike), (TURN, turns)):
        rows.append(np.column_stack([np.full(these.sum(), what), a[these], b[these], np.zeros(these.sum(), int)]))
    free_P = site.size_P.copy()
    for rank, configuration in enumerate(pricing.configurations):
        np.subtract.at(free_P, places_RW[rank, : configuration.num_nodes], configuration.devices_per_node)
    for rank, configuration in enumerate(pricing.configurations):
        room_P = (free_P >= configuration.devices_per_node) & np.isfinite(pricing.seconds_RK[rank])[site.kind_P]
        if configuration.num_nodes > 1:
            room_P &= site.kind_P == site.kind_P[places_RW[rank, 0]]
        for block, own in enumerate(places_RW[rank, : configuration.num_nodes]):
            pools = np.flatnonzero(room_P & (np.arange(len(site)) != own))
            rows.append(np.column_stack([np.full((len(pools), 3), (MOVE, rank, block)), pools]))
    return np.concatenate(rows)


def subsample(changes_N4: Ints, pricing: BindingPrices, rng: np.random.Generator) -> Ints:
    """Return as many changes as can be priced at once, drawn at random where there are more."""
    most = max(1, min(MOST_PLACES, MOST_BLOCKS // int(pricing.blocks_R.max())) // pricing.num_ranks)
    return changes_N4 if len(changes_N4) <= most else changes_N4[rng.choice(len(changes_N4), most, replace=False)]


def changed(pricing: BindingPrices, places_RW: Ints, changes_N4: Ints) -> Ints:
    """Return (N, R, W): the binding after each of the changes."""
    what, a, b, pool = (changes_N4[:, i, None] for i in range(4))
    at = np.arange(len(places_RW))
    exchanged = np.where(at == a, b, np.where(at == b, a, at))
    turned = np.where((at >= a) & (at <= b), a + b - at, at)
    places_NRW = places_RW[np.where(what == EXCHANGE, exchanged, np.where(what == TURN, turned, at))]
    (moves,) = np.nonzero(what[:, 0] == MOVE)
    rank, block, column = a[moves], b[moves], np.arange(places_RW.shape[1])
    padding = (block == 0) & (column >= pricing.blocks_R[rank])  # repeats the first block
    places_NRW[moves, rank[:, 0]] = np.where((column == block) | padding, pool[moves], places_RW[rank[:, 0]])
    return places_NRW
