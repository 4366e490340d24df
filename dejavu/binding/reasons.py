"""Explain each pipeline rank's placement in a sentence that a person can check."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.exact_labels import LEAST_GAIN
from dejavu.binding.local import EXCHANGE, TURN, changed, changes, subsample
from dejavu.binding.site import Ints
from dejavu.cluster.islands import Island
from dejavu.foundation.units import format_bytes, format_seconds
from dejavu.plans.stage_costs import Floats


def reasons(pricing: BindingPrices, places_RW: Ints, order_RW: Ints, seed: int) -> tuple[str, ...]:
    """Say how busy each rank is, its kind of device, the links it uses, and what its next best place would cost.

    Args:
        order_RW: the plan's order, to compare the links with.
    """
    next_best = _next_best(pricing, places_RW, seed)
    now, before = (pricing.transfer_seconds_NQ(places[None])[0] for places in (places_RW, order_RW))
    return tuple(
        f"rank {rank} "
        + "; ".join((*_kind(pricing, places_RW, rank), *_links(pricing, places_RW, rank, now, before), next_best[rank]))
        for rank in range(pricing.num_ranks)
    )


def _kind(pricing: BindingPrices, places_RW: Ints, rank: int) -> Iterator[str]:
    site, ranks = pricing.site, np.arange(pricing.num_ranks)
    kinds = site.kind_P[places_RW[:, 0]]
    kind, loads = kinds[rank], pricing.load_seconds_RK[ranks, kinds]
    seconds_K = (pricing.repeats + 1) * pricing.seconds_RK[rank]
    took = f"its passes take {format_seconds(seconds_K[kind])} a step"
    share = loads[rank] / loads.max() if loads.max() > 0 else 1.0
    yield f"is the busiest ({took})" if share == 1.0 else f"is {share:.0%} as busy as the busiest ({took})"
    name, fastest = site.kinds[kind], int(seconds_K.argmin())
    said = Island.of(pricing.configurations[rank])
    moved = f" instead of the plan's {said}" if said != name else ""
    if len(site.kinds) > 1 and np.isfinite(seconds_K).sum() == 1:
        yield f"of the cluster's kinds it can only be on {name}"
    elif seconds_K[kind] <= seconds_K[fastest] and len(site.kinds) > 1:
        yield f"it takes the kind that is fastest for it, {name}{moved}"
    elif len(site.kinds) > 1:
        yield f"it takes {name}{moved}; {site.kinds[fastest]} would take {format_seconds(seconds_K[fastest])}"


def _links(pricing: BindingPrices, places_RW: Ints, rank: int, now: Floats, before: Floats) -> Iterator[str]:
    nodes_RW = pricing.site.node_P[places_RW]
    loads = pricing.load_seconds_RK[np.arange(pricing.num_ranks), pricing.site.kind_P[places_RW[:, 0]]]
    for q, exchange in enumerate(pricing.exchanges):
        if exchange.a != rank:
            continue
        together = len(set(nodes_RW[rank]) | set(nodes_RW[exchange.b])) == 1
        where = "on one node" if together else "between nodes"
        text = f"it exchanges {format_bytes(exchange.size_bytes)} each way a microbatch with rank {exchange.b} {where}"
        change = before[q] - now[q]
        if abs(change) > LEAST_GAIN * before[q]:
            text += f", {format_seconds(abs(change))} {'less' if change > 0 else 'more'} than in the plan's order"
        if pricing.repeats * now[q] > loads.max() and now[q] == now.max():
            text += ", which bounds the step"
        yield text


def _next_best(pricing: BindingPrices, places_RW: Ints, seed: int) -> list[str]:
    """Say for each rank which swap or move of it would cost least, and how much."""
    rows = changes(pricing, places_RW)
    rows = subsample(rows[rows[:, 0] != TURN], pricing, np.random.default_rng(seed))
    now = float(pricing.step_seconds_N(places_RW[None])[0])
    found_N = pricing.step_seconds_N(changed(pricing, places_RW, rows))
    said = []
    for rank in range(pricing.num_ranks):
        involved = (rows[:, 1] == rank) | ((rows[:, 0] == EXCHANGE) & (rows[:, 2] == rank))
        (ours,) = np.nonzero(involved & np.isfinite(found_N))
        if not len(ours):
            said.append("there is no other place for it")
            continue
        best = ours[found_N[ours].argmin()]
        what, a, b, pool = (int(value) for value in rows[best])
        other = f"that of rank {b if a == rank else a}" if what == EXCHANGE else _host(pricing, pool)
        longer = float(found_N[best]) - now
        cost = f"costs {format_seconds(abs(longer))} {'more' if longer > 0 else 'less'} a step by this estimate"
        cost = "is as good" if abs(longer) <= LEAST_GAIN * now else cost
        said.append(f"its next best place, {other}, {cost}")
    return said


def _host(pricing: BindingPrices, pool: int) -> str:
    device = pricing.site.devices[pool][0]
    return f"an idle {device.type_name} of {device.host}"
