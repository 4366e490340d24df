"""Which device runs which stage: the plan, and the actual devices of the cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations, product
from math import perm, prod
from typing import Any

from dejavu.cluster import Cluster, Device
from dejavu.errors import DejavuError
from dejavu.plan import Plan
from dejavu.stage_costs import Floats

MOST_ORDERS = 20_000  # beyond this many ways to place the stages, neighbours are improved two at a time


class BindError(DejavuError):
    """The cluster lacks devices that the plan asks for."""


@dataclass(frozen=True)
class Placement:
    """One rank: which stage it runs, which of the stage's replicas it is, and where."""

    stage: int
    replica: int
    device: Device


@dataclass(frozen=True)
class Binding:
    """The plan and its devices; a rank's number is its place in `placements`.

    Attributes:
        transfer_seconds: of one microbatch across all cuts, both ways, with this placement.
        order_transfer_seconds: the same if stages took devices in the order of the cluster file.
    """

    plan: Plan
    placements: tuple[Placement, ...]
    transfer_seconds: float
    order_transfer_seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict(),
            "placements": [asdict(placement) for placement in self.placements],
            "transfer_seconds": self.transfer_seconds,
            "order_transfer_seconds": self.order_transfer_seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Binding:
        placements = (Placement(row["stage"], row["replica"], Device(**row["device"])) for row in data["placements"])
        return cls(
            Plan.from_dict(data["plan"]),
            tuple(placements),
            data["transfer_seconds"],
            data["order_transfer_seconds"],
        )


def bind(plan: Plan, cluster: Cluster, cut_bytes: Floats) -> Binding:
    """Give every stage its devices so that the links between neighbours cost least.

    Every device of a kind is as fast as another of its kind, so only the links tell placements apart. All placements
    are tried where they are few; otherwise stages exchange devices while that helps, and those that are idle in the
    order of the cluster file stay so. Never worse than that order.

    Args:
        cut_bytes: (L + 1,) what crosses each cut, one microbatch, forward.

    Raises:
        BindError: the cluster has too few devices of a type.
    """
    units = _units(plan, cluster)
    first = _in_order(plan, units)

    def cost(choice: Sequence[tuple[Device, ...]]) -> float:
        return _transfer_seconds(plan, cluster, choice, cut_bytes)

    needed = Counter(_key(plan, s) for s in range(len(plan.stages)))
    ways = prod(perm(len(units[key]), count) for key, count in needed.items())
    best = min(_every_choice(plan, units), key=cost) if ways <= MOST_ORDERS else _improved(list(first), plan, cost)
    if cost(best) >= cost(first):
        best = first
    placements = tuple(
        Placement(s, replica, device) for s, devices in enumerate(best) for replica, device in enumerate(devices)
    )
    return Binding(plan, placements, cost(best), cost(first))


Units = dict[tuple[str, int], list[tuple[Device, ...]]]  # (device type, devices in the stage) -> groups of devices


def _units(plan: Plan, cluster: Cluster) -> Units:
    """The cluster's devices cut into groups of the sizes that the plan's stages need, larger stages first."""
    free: dict[str, list[Device]] = defaultdict(list)
    for device in cluster.devices():
        free[device.type_name].append(device)
    units: Units = defaultdict(list)
    wanted = sorted((stage.configuration for stage in plan.stages), key=lambda c: -c.num_devices)
    for configuration in wanted:
        pool, size = free[configuration.device_type], configuration.num_devices
        if len(pool) < size:
            raise BindError(f"the plan asks for {size} more × {configuration.device_type}; {len(pool)} are left")
        units[configuration.device_type, size].append(tuple(pool[:size]))
        del pool[:size]
    for (name, size), groups in units.items():  # devices that the plan leaves idle may still be the better ones
        pool = free[name]
        while size == 1 and pool:
            groups.append((pool.pop(0),))
    return dict(units)


def _key(plan: Plan, s: int) -> tuple[str, int]:
    configuration = plan.stages[s].configuration
    return configuration.device_type, configuration.num_devices


def _in_order(plan: Plan, units: Units) -> tuple[tuple[Device, ...], ...]:
    queues = {key: iter(groups) for key, groups in units.items()}
    return tuple(next(queues[_key(plan, s)]) for s in range(len(plan.stages)))


def _every_choice(plan: Plan, units: Units) -> Iterator[tuple[tuple[Device, ...], ...]]:
    keys = list(units)
    needed = {key: sum(_key(plan, s) == key for s in range(len(plan.stages))) for key in keys}
    for choice in product(*(permutations(units[key], needed[key]) for key in keys)):
        yield _in_order(plan, {key: list(groups) for key, groups in zip(keys, choice, strict=True)})


def _improved(choice: list[tuple[Device, ...]], plan: Plan, cost: Any) -> tuple[tuple[Device, ...], ...]:
    best, improved = cost(choice), True
    while improved:
        improved = False
        for a in range(len(choice)):
            for b in range(a + 1, len(choice)):
                if _key(plan, a) != _key(plan, b):
                    continue
                choice[a], choice[b] = choice[b], choice[a]
                if (now := cost(choice)) < best:
                    best, improved = now, True
                else:
                    choice[a], choice[b] = choice[b], choice[a]
    return tuple(choice)


def _transfer_seconds(plan: Plan, cluster: Cluster, choice: Sequence[tuple[Device, ...]], cut_bytes: Floats) -> float:
    """Both ways across every cut, one microbatch, over the slowest link between the two stages' devices."""
    total = 0.0
    for s, cut in enumerate(plan.cuts):
        slowest = max(
            (cluster.link(a, b).transfer_seconds(cut_bytes[cut]) for a, b in product(choice[s], choice[s + 1])),
        )
        total += 2.0 * slowest
    return total
