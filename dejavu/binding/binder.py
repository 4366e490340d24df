"""Binding a plan to devices: kinds of devices and their order are chosen together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dejavu.binding.binding import Binding, Placement
from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.by_steps import SimulatedSteps, every_place, improved_by_steps
from dejavu.binding.draws import random_places
from dejavu.binding.exact_labels import FEW_EXTENSIONS, LEAST_GAIN, MOST_EXTENSIONS, best_places, bounds
from dejavu.binding.link_prices import SeatLinks
from dejavu.binding.local import improved
from dejavu.binding.placing import assigned, computing_bound, in_order
from dejavu.binding.reasons import reasons
from dejavu.binding.site import Ints, Site, padded
from dejavu.cluster import Cluster
from dejavu.plans import Plan, Problem, StageConfiguration
from dejavu.plans.stage_costs import Floats

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
    steps: SimulatedSteps | None = None,
) -> Binding:
    """Assign devices to every pipeline rank so that the step is shortest, by the searches' cost model.

    A rank may move to another kind of device than the plan says, with the same mesh and degrees, where it fits in
    memory. All bindings are compared where few enough of them differ (`exact_labels`); otherwise the best of the plan's
    order, a bottleneck assignment to kinds, random bindings and the most promising partial ones is improved until no
    single change helps, and `lower_bound_seconds` bounds how far it is from the best. Never worse than the plan's order
    or any of the random bindings. Many bindings are equally good by that model, whose simulated steps differ: `steps`
    chooses among those on the same kinds.

    Args:
        problem: that the plan was searched for; its costs on every kind of device.
        seed: of the random bindings, and of the sampled changes where there are too many.
        runs: of the schedule in a step, which the problem's prices count all.
        compares: with random bindings, and says why; False: not where the plan's order is the best of all anyway, and
            fewer partial bindings are looked at where there are very many, so that `lower_bound_seconds` may be less.
        moves: ranks to other kinds of devices, too; False: each stays on the kind that the plan names.
        steps: simulated, by which other devices of the same kinds are tried then (`by_steps`), so that it may be worse
            by the cost model; None: the best by that.

    Raises:
        BindError: the cluster has too few devices of a kind, or a rank does not fit their memory.

    Example:
        >>> import dejavu
        >>> choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact",), microbatches=(8,))
        >>> binding = dejavu.bind(choice.priced.problem, choice.plan, choice.request.cluster)
        >>> binding.plan.cuts == choice.plan.cuts
        True
    """
    pricing = BindingPrices(problem, plan, Site.of(cluster, problem.configurations), runs, moves=moves)
    found = _by_formula(pricing, seed, compares=compares)
    places_RW = found.places_RW if steps is None else _by_steps(pricing, found.places_RW, steps, seed)
    random_seconds = found.random_seconds_N
    return Binding(
        plan=_on_kinds(pricing, places_RW),
        placements=_placements(pricing.configurations, pricing.site, places_RW),
        step_seconds=_seconds(pricing, places_RW),
        order_step_seconds=_seconds(pricing, found.order_RW),
        random_best_step_seconds=float(random_seconds.min()) if len(random_seconds) else None,
        random_mean_step_seconds=float(random_seconds.mean()) if len(random_seconds) else None,
        random_drawn=found.num_drawn,
        random_refused=found.num_drawn - len(random_seconds),
        lower_bound_seconds=found.lower_bound_seconds,
        reasons=reasons(pricing, places_RW, found.order_RW, seed) if found.num_drawn else (),
    )


class _Found(NamedTuple):
    """The best binding by the cost model, the plan's order, the bound on all, and what random ones take that fit."""

    places_RW: Ints
    order_RW: Ints
    lower_bound_seconds: float
    num_drawn: int = 0
    random_seconds_N: Floats = np.empty(0)


def _by_formula(pricing: BindingPrices, seed: int, *, compares: bool) -> _Found:
    order = in_order(pricing.configurations, pricing.site)
    pricing.check_memory()
    bound, order_RW = bounds(pricing, *computing_bound(pricing)), padded(order)
    seconds = _seconds(pricing, order_RW)
    if not compares and seconds <= bound.step_seconds * (1.0 + LEAST_GAIN):
        return _Found(order_RW, order_RW, seconds)
    drawn = min(RANDOM_BINDINGS, max(LEAST_RANDOM, MOST_DRAWS // int(pricing.blocks_R.sum() * len(pricing.site))))
    drawn_NRW, holds_N = random_places(pricing, drawn, seed)
    drawn_NRW = drawn_NRW[holds_N]
    random_seconds = pricing.step_seconds_N(drawn_NRW)

    starts = [order_RW, padded(assigned(pricing, order))]
    if len(drawn_NRW):
        starts.append(drawn_NRW[random_seconds.argmin()])
    best = _best(pricing, starts)
    best = _best(pricing, [*starts, improved(pricing, order_RW, seed), improved(pricing, best, seed)])
    most = MOST_EXTENSIONS if compares else FEW_EXTENSIONS
    found, complete = best_places(pricing, bound, _seconds(pricing, best), most)
    best = best if found is None else padded(found)
    if not complete:
        best = improved(pricing, best, seed)
    seconds = _seconds(pricing, best)
    return _Found(best, order_RW, seconds if complete else min(seconds, bound.step_seconds), drawn, random_seconds)


def _by_steps(pricing: BindingPrices, places_RW: Ints, steps: SimulatedSteps, seed: int) -> Ints:
    """Return places of the same kinds that are better by simulated steps; the same ones where links are alike.

    Where there are too many, begins with the best by the cost model for the plan as it is bound, moving no rank to
    another kind: so a plan has the same devices, whether it was moved to their kinds or names them.
    """
    own = BindingPrices(pricing.problem, _on_kinds(pricing, places_RW), pricing.site, pricing.runs, moves=False)
    links = SeatLinks(own, steps.gradient_bytes_L)
    if (links.seconds_NQ(places_RW[None]) <= links.least_seconds_Q() * (1.0 + LEAST_GAIN)).all():
        return places_RW
    every_NRW = every_place(own)
    if every_NRW is None:
        places_RW = _best(own, [_by_formula(own, seed, compares=False).places_RW, places_RW])
    return improved_by_steps(own, links, places_RW, every_NRW, steps, seed)


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
    configurations = [plan.rank_configuration(rank) for rank in range(len(plan.ranks))]
    site = Site.of(cluster, configurations)
    return Binding(plan, _placements(configurations, site, padded(in_order(configurations, site))), 0.0, 0.0)


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
