"""Initial placements: in the order of the cluster file, and by bottleneck assignment of ranks to kinds.

Shape suffixes: R = pipeline ranks, K = kinds of devices, P = pools, S = places of one mesh's shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from dejavu.binding.binding import BindError
from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.site import Ints, Place, Site
from dejavu.cluster.islands import Island
from dejavu.plans import StageConfiguration
from dejavu.plans.stage_costs import Floats


def in_order(configurations: Sequence[StageConfiguration], site: Site) -> list[Place]:
    """Place each rank on its own kind: wide blocks first, each on the first node that has room.

    That packs whatever one part of `dejavu.cluster.meshes.parts_of` offers; widths that do not divide one another may
    need another order.

    Raises:
        BindError: too few devices of a kind, or none of its nodes has room for a block.
    """
    free_P, places = site.size_P.copy(), dict[int, Place]()

    def widest(rank: int) -> tuple[int, int]:
        return -configurations[rank].devices_per_node, -configurations[rank].num_devices

    for rank in sorted(range(len(configurations)), key=widest):
        configuration = configurations[rank]
        place = take_block(free_P, site, configuration) if Island.of(configuration) in site.kinds else None
        if place is None:
            is_its = [Island.of(configuration) == site.kinds[kind] for kind in site.kind_P]
            left = int(free_P[is_its].sum())
            raise BindError(
                f"pipeline rank {rank} wants {configuration.num_devices} more × {configuration.kind}"
                f" ({configuration.num_nodes} × {configuration.devices_per_node} on one node); {left} are left"
                + (", but not so many together" if left >= configuration.num_devices else "")
            )
        places[rank] = place
    return [places[rank] for rank in range(len(configurations))]


def take_block(free_P: Ints, site: Site, configuration: StageConfiguration) -> Place | None:
    """Take the first free blocks of the kind from `free_P`; None, and nothing taken, if there are too few."""
    is_its_P = site.kind_P == site.kinds.index(Island.of(configuration))
    rooms = np.where(is_its_P, free_P // configuration.devices_per_node, 0)
    place = np.repeat(np.arange(len(site)), rooms)[: configuration.num_nodes]
    if len(place) < configuration.num_nodes:
        return None
    np.subtract.at(free_P, place, configuration.devices_per_node)
    return tuple(map(int, place))


def assigned(pricing: BindingPrices, order: Sequence[Place]) -> list[Place]:
    """Assign ranks to kinds so that the busiest has least to do, then so that the total is least.

    One mesh shape after another, the large ones first: their ranks share the places that they have in `order` and those
    that idle devices have room for.
    """
    site, places = pricing.site, list(order)
    free_P = site.size_P.copy()
    shapes: dict[tuple[int, int], list[int]] = {}
    for rank, configuration in enumerate(pricing.configurations):
        shapes.setdefault((configuration.num_nodes, configuration.devices_per_node), []).append(rank)
        np.subtract.at(free_P, list(order[rank]), configuration.devices_per_node)
    for (_, width), ranks in sorted(shapes.items(), key=lambda item: -item[0][0] * item[0][1]):
        spare = [place for kind in range(len(site.kinds)) for place in _spare(pricing, ranks[0], kind, free_P)]
        choices = [order[rank] for rank in ranks] + spare[:]
        kinds = site.kind_P[[place[0] for place in choices]]
        load_RS = pricing.load_seconds_RK[ranks][:, kinds]
        most = bottleneck(load_RS)
        seconds_RS = np.where(load_RS <= most, pricing.seconds_RK[ranks][:, kinds], np.inf)
        for row, column in zip(*linear_sum_assignment(seconds_RS), strict=True):
            places[ranks[row]] = choices[column]
        for place in choices:
            np.add.at(free_P, list(place), width)
        for rank in ranks:
            np.subtract.at(free_P, list(places[rank]), width)
    return places


def _spare(pricing: BindingPrices, rank: int, kind: int, free_P: Ints) -> list[Place]:
    """Cut idle devices of a kind into meshes like the rank's, and take them from `free_P`."""
    found = []
    while (place := take_block(free_P, pricing.site, pricing.configuration(rank, kind))) is not None:
        found.append(place)
    return found


def bottleneck(load_RS: Floats) -> float:
    """Return the least possible largest load if each rank has a place of its own, by bisection over the loads.

    There must be an assignment of places to all ranks.
    """
    loads = np.unique(load_RS[np.isfinite(load_RS)])
    low, high = 0, len(loads) - 1
    while low < high:
        middle = (low + high) // 2
        matched = maximum_bipartite_matching(csr_array(load_RS <= loads[middle]), perm_type="column")
        low, high = (low, middle) if (matched >= 0).all() else (middle + 1, high)
    return float(loads[low])


def computing_bound(pricing: BindingPrices) -> tuple[float, float]:
    """Bound from below one microbatch's compute of all ranks together, and the busiest rank's load, in seconds.

    As if every rank took as few devices as the smallest, wherever they are; exact where all ranks and all nodes are
    equal.
    """
    least = min(configuration.num_devices for configuration in pricing.configurations)
    sizes_K = np.bincount(pricing.site.kind_P, weights=pricing.site.size_P).astype(int)
    kinds_S = np.repeat(np.arange(len(sizes_K)), np.minimum(sizes_K // least, pricing.num_ranks))
    seconds_RS = pricing.seconds_RK[:, kinds_S]
    rows, columns = linear_sum_assignment(seconds_RS)
    return float(seconds_RS[rows, columns].sum()), bottleneck(pricing.load_seconds_RK[:, kinds_S])
