"""Plans by the nodes that their ranks are on: what messages that have to leave a node take.

A problem's messages take the fastest link that two stages may have, which is mostly one inside a node; but a node has
only so many devices. So configurations are told apart by how far a rank is on its way over nodes, and only messages
between ranks that can be on one node take its links. Not all of what that takes is told, and what is left out makes
plans only faster: bounds on such a problem hold for the problem that it is made of, and its plans are that one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island, told_apart_in
from dejavu.cost.priced_problem import Transfers, links_between
from dejavu.foundation.registry import named
from dejavu.plans import Plan, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.simulation.bound import RankChoices

MOST_CONFIGURATIONS = 600  # told apart, about: tables grow with them
MOST_MESSAGES = 4_000_000  # that cost something of their own: cuts × kinds of neighbours
NEVER = 1e3  # times the passes of all layers one after the other: what no plan takes

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class PlacedConfiguration(StageConfiguration):
    """A configuration of a rank that is so far on the way over nodes; unequal to the same one elsewhere.

    Attributes:
        place: how much of its node the rank and those before it take, in units of one or several devices.
        is_first: of the pipeline's first rank, to which messages of looped schedules come back from the last one.
    """

    place: int = 0
    is_first: bool = False


class OverNodes(NamedTuple):
    """A problem with configurations told apart.

    Attributes:
        choices: what its plans' ranks may have; None: any.
    """

    priced: PricedProblem
    choices: RankChoices | None


def as_plain(plan: Plan) -> Plan:
    """Return a plan with the problem's own configurations."""
    stages = [replace(one, configuration=StageConfiguration(**_content(one.configuration))) for one in plan.stages]
    return replace(plan, stages=tuple(stages))


def _content(one: StageConfiguration) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(StageConfiguration)}


class Family(NamedTuple):
    """Kinds of devices that share nodes.

    Attributes:
        most_devices: of these kinds together, on one node.
    """

    number: int
    most_devices: int


def _nodes(cluster: Cluster, configurations: Iterable[StageConfiguration]) -> list[dict[str, int]]:
    """Return how many devices of each kind a node of each group has."""
    kinds = told_apart_in(cluster, (Island.of(one) for one in configurations))
    return [{str(kind): kind.on(group) for kind in kinds if kind.on(group)} for group in cluster.groups]


def _families(nodes: Sequence[Mapping[str, int]]) -> dict[str, Family]:
    """Return the family of each kind of devices."""
    number_of = {name: k for k, name in enumerate(dict.fromkeys(name for node in nodes for name in node))}
    for node in nodes:
        shared = {number_of[name] for name in node}
        number_of = {name: min(shared) if number in shared else number for name, number in number_of.items()}
    return {
        name: Family(number, max(sum(node.values()) for node in nodes if {number_of[one] for one in node} == {number}))
        for name, number in number_of.items()
    }


def has_several(cluster: Cluster) -> bool:
    """Return whether messages may have to leave a node."""
    return sum(group.count for group in cluster.groups) > 1


def between_nodes(priced: PricedProblem, cluster: Cluster, transfers: Transfers) -> PricedProblem:
    """Return the problem as if every message between two stages left its node, where there is another to go to."""
    problem = priced.problem
    links = priced.accumulate * links_between(cluster, transfers, problem.configurations, apart=True)
    apart = replace(
        problem, link_latency_seconds_CC=links[:, :, 0].copy(), link_seconds_per_byte_CC=links[:, :, 1].copy()
    )
    return replace(priced, problem=apart)


def over_nodes(priced: PricedProblem, apart: PricedProblem, cluster: Cluster, schedules: Sequence[str]) -> OverNodes:
    """Tell apart how many devices of its node a rank and those before it take.

    A rank either joins the one before it, on devices that are left on the node, or begins another node, and the message
    between the two leaves its node. Forgotten is that a node which was left may not be filled up later, that there are
    only so many nodes, with so many devices of each type, and what ranks take next to one that spans nodes, or to one
    of a type that shares no node with theirs: they begin anew at the problem's own price. So it is with messages from
    the last rank to the first.

    Where there were too many configurations, devices count in units of several, and fewer than one as nothing.

    Args:
        apart: the problem as if every message left its node.
        schedules: of the plans.
    """
    problem = priced.problem
    families = _families(_nodes(cluster, problem.configurations))
    returns = any(named(SCHEDULES, name).stages_per_rank > 1 for name in schedules)
    unit = gcd(*(one.devices_per_node for one in problem.configurations))
    rows = list(_fillings(problem.configurations, families, unit, returns=returns))
    most_devices = max(family.most_devices for family in families.values())
    while unit < most_devices and not _is_little([one for _, one in rows], problem.num_layers):
        unit *= 2
        rows = list(_fillings(problem.configurations, families, unit, returns=returns))
    ones = [one for _, one in rows]
    place_C = np.array([one.place for one in ones])
    takes_C = np.array([one.devices_per_node // unit for one in ones])
    family_C = np.array([-1 if one.num_nodes > 1 else families[one.kind].number for one in ones])
    is_first = np.array([one.is_first for one in ones])
    begins = (place_C == takes_C) & ~is_first
    alike = (family_C[:, None] == family_C[None, :]) & (family_C >= 0)[None, :]
    follows = (place_C[None, :] == place_C[:, None] + takes_C[None, :]) & ~is_first[None, :]
    joins = np.where(alike, follows, begins[None, :]) | is_first[None, :]
    told = _told_apart(priced, apart, rows, joins, alike & begins[None, :] & ~joins)
    return OverNodes(told, RankChoices(is_first, ~is_first, ~is_first, is_first) if returns else None)


def _is_little(ones: Sequence[PlacedConfiguration], num_layers: int) -> bool:
    """Return whether tables of so many configurations are small enough."""
    kinds = {(one.kind, one.num_nodes, one.num_devices, one.data_parallel, one.senders_per_node) for one in ones}
    places = {(one.place, one.is_first) for one in ones}
    messages = (num_layers + 1) * (len(kinds) * len(places)) ** 2
    return len(ones) <= MOST_CONFIGURATIONS and messages <= MOST_MESSAGES


def _fillings(
    own: Sequence[StageConfiguration], families: Mapping[str, Family], unit: int, *, returns: bool
) -> Iterator[tuple[int, PlacedConfiguration]]:
    """Yield each configuration's number with each place that it may have."""
    for c, one in enumerate(own):
        takes = one.devices_per_node // unit
        upto = takes if one.num_nodes > 1 else max(takes, families[one.kind].most_devices // unit)
        for place in range(takes, upto + 1):
            yield c, PlacedConfiguration(**_content(one), place=place)
        if returns:
            yield c, PlacedConfiguration(**_content(one), place=takes, is_first=True)


def inside_one(priced: PricedProblem, cluster: Cluster) -> list[PricedProblem]:
    """Return the problem on the devices of each kind of node that no other has all of."""
    problem, found = priced.problem, list[dict[str, int]]()
    for node in sorted(_nodes(cluster, problem.configurations), key=lambda one: -sum(one.values())):
        counts = {name: min(count, node.get(name, 0)) for name, count in problem.device_counts.items()}
        if not any(all(counts[name] <= other[name] for name in counts) for other in found):
            found.append(counts)
    rows = [c for c, one in enumerate(problem.configurations) if one.num_nodes == 1]
    alone = priced.of(rows) if rows else priced
    return [replace(alone, problem=replace(alone.problem, device_counts=counts)) for counts in found]


def _told_apart(
    priced: PricedProblem,
    apart: PricedProblem,
    rows: Sequence[tuple[int, PlacedConfiguration]],
    joins: Mask,
    leaves: Mask,
) -> PricedProblem:
    """Return the problem with these configurations, messages as they have to go, and none where they can go no way."""
    which, B = [c for c, _ in rows], priced.problem.num_microbatches
    told, far = priced.of(which), apart.of(which).problem
    passes_CL = told.forward_seconds_CL + told.backward_seconds_CL
    all_layers_seconds = float(np.where(np.isfinite(passes_CL), passes_CL, 0.0).max(axis=0).sum())
    never_seconds = NEVER * B * max(all_layers_seconds, 1e-9)
    latency_CC = np.where(leaves, far.link_latency_seconds_CC, told.problem.link_latency_seconds_CC)
    per_byte_CC = np.where(leaves, far.link_seconds_per_byte_CC, told.problem.link_seconds_per_byte_CC)
    problem = replace(
        told.problem,
        configurations=tuple(one for _, one in rows),
        link_latency_seconds_CC=np.where(joins | leaves, latency_CC, never_seconds),
        link_seconds_per_byte_CC=per_byte_CC,
    )
    return replace(told, problem=problem)
