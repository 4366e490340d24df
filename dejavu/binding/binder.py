"""Binding a plan to devices: kinds of devices and their order are chosen together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dejavu.binding.binding import Binding, Placement
from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.draws import random_places
from dejavu.binding.exact_labels import FEW_EXTENSIONS, LEAST_GAIN, MOST_EXTENSIONS, best_places, bounds
from dejavu.binding.local import improved
from dejavu.binding.placing import assigned, computing_bound, in_order
from dejavu.binding.reasons import reasons
from dejavu.binding.site import Ints, Place, Site
from dejavu.cluster import Cluster
from dejavu.plans import Plan, Problem, StageConfiguration

RANDOM_BINDINGS = 1_000  # to compare with, as papers do
LEAST_RANDOM = 10
MOST_DRAWS = 200_000_000  # pools looked at for all blocks of all random bindings: about a second


def bind(
    problem: Problem,
    plan: Plan,
    cluster: Cluster,
    *,
    seed: int = 0,
    runs: int = 1,
    compares: bool = True,
    moves: bool = True,
) -> Binding:
    """Assign devices to every pipeline rank so that the step is shortest, by the searches' cost model.

    A rank may move to another kind of device than the plan says, with the same mesh and degrees, where it fits in
    memory. All bindings are compared where few enough of them differ (`exact_labels`); otherwise the best of the plan's
    order, a bottleneck assignment to kinds, random bindings and the most promising partial ones is improved until no
    single change helps, and `lower_bound_seconds` bounds how far it is from the best. Never worse than the plan's order
    or any of the random bindings.

    Args:
        problem: that the plan was searched for; its costs on every kind of device.
        seed: of the random bindings, and of the sampled changes where there are too many.
        runs: of the schedule in a step, which the problem's prices count all.
        compares: with random bindings, and says why; False: not where the plan's order is the best of all anyway, and
            fewer partial bindings are looked at where there are very many, so that `lower_bound_seconds` may be less.
        moves: ranks to other kinds of devices, too; False: each stays on the kind that the plan names.

    Raises:
        BindError: the cluster has too few devices of a kind, or a rank does not fit their memory.

    Example:
        >>> import dejavu
        >>> choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact",), microbatches=(8,))
        >>> binding = dejavu.bind(choice.priced.problem, choice.plan, choice.request.cluster)
        >>> binding.plan.cuts == choice.plan.cuts
        True
    """
    site = Site.of(cluster)
    pricing = BindingPrices(problem, plan, site, runs, moves=moves)
    order = in_order(pricing.configurations, site)
    pricing.check_memory()
    bound = bounds(pricing, *computing_bound(pricing))
    seconds = _seconds(pricing, _padded(order))
    if not compares and seconds <= bound.step_seconds * (1.0 + LEAST_GAIN):
        placements = _placements(pricing.configurations, site, _padded(order))
        return Binding(plan, placements, seconds, seconds, random_drawn=0, lower_bound_seconds=seconds)
    drawn = min(RANDOM_BINDINGS, max(LEAST_RANDOM, MOST_DRAWS // int(pricing.blocks_R.sum() * len(site))))
    drawn_NRW, holds_N = random_places(pricing, drawn, seed)
    drawn_NRW = drawn_NRW[holds_N]
    random_seconds = pricing.step_seconds_N(drawn_NRW)

    starts = [_padded(order), _padded(assigned(pricing, order))]
    if len(drawn_NRW):
        starts.append(drawn_NRW[random_seconds.argmin()])
    best = _best(pricing, starts)
    best = _best(pricing, [*starts, improved(pricing, starts[0], seed), improved(pricing, best, seed)])
    most = MOST_EXTENSIONS if compares else FEW_EXTENSIONS
    found, complete = best_places(pricing, bound, _seconds(pricing, best), most)
    best = best if found is None else _padded(found)
    if not complete:
        best = improved(pricing, best, seed)

    seconds = _seconds(pricing, best)
    return Binding(
        plan=_on_kinds(pricing, best),
        placements=_placements(pricing.configurations, pricing.site, best),
        step_seconds=seconds,
        order_step_seconds=_seconds(pricing, starts[0]),
        random_best_step_seconds=float(random_seconds.min()) if len(random_seconds) else None,
        random_mean_step_seconds=float(random_seconds.mean()) if len(random_seconds) else None,
        random_drawn=drawn,
        random_refused=drawn - len(random_seconds),
        lower_bound_seconds=seconds if complete else min(seconds, bound.step_seconds),
        reasons=reasons(pricing, best, starts[0], seed),
    )


def _padded(places: Sequence[Place]) -> Ints:
    """Return places as (R, W): a rank of fewer blocks repeats its first."""
    most = max(map(len, places))
    return np.array([place + place[:1] * (most - len(place)) for place in places])


def _seconds(pricing: BindingPrices, places_RW: Ints) -> float:
    return float(pricing.step_seconds_N(places_RW[None])[0])


def _best(pricing: BindingPrices, candidates: Sequence[Ints]) -> Ints:
    """Return the candidate with the shortest step; the first of those that differ only by rounding."""
    seconds = pricing.step_seconds_N(np.stack(candidates))
    return candidates[int((seconds <= seconds.min() * (1.0 + LEAST_GAIN)).argmax())]


def _on_kinds(pricing: BindingPrices, places_RW: Ints) -> Plan:
    """Return the plan with the kinds of devices that its ranks were assigned."""
    plan, kinds = pricing.plan, pricing.site.kind_P[places_RW[:, 0]]
    stages = list(plan.stages)
    for rank, of_rank in enumerate(plan.ranks):
        for s in of_rank:
            stages[s] = replace(stages[s], configuration=pricing.configuration(rank, int(kinds[rank])))
    return replace(plan, stages=tuple(stages))


def bind_in_order(plan: Plan, cluster: Cluster) -> Binding:
    """Give each pipeline rank the next devices of its kind, in the cluster's order; nothing is compared or priced.

    Raises:
        BindError: the cluster has too few devices of a kind.
    """
    configurations, site = [plan.rank_configuration(rank) for rank in range(len(plan.ranks))], Site.of(cluster)
    return Binding(plan, _placements(configurations, site, _padded(in_order(configurations, site))), 0.0, 0.0)


def _placements(configurations: Sequence[StageConfiguration], site: Site, places_RW: Ints) -> tuple[Placement, ...]:
    """Assign each pool's devices in order; a rank's nodes are in the cluster's order."""
    free = [list(devices) for devices in site.devices]
    placements = []
    for rank, configuration in enumerate(configurations):
        blocks = sorted(int(pool) for pool in places_RW[rank, : configuration.num_nodes])
        devices = [free[pool].pop(0) for pool in blocks for _ in range(configuration.devices_per_node)]
        for i, device in enumerate(devices):
            replica, shard = divmod(i, configuration.tensor_parallel)
            placements.append(Placement(rank, replica, shard, device))
    return tuple(placements)
