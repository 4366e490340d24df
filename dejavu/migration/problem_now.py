"""The running problem, written anew for the cluster as it is now, at the running problem's own prices.

Nothing is captured or priced anew: rows of devices that are slower are multiplied, those of devices that are gone are
left out. So a training is re-planned in milliseconds, and two plans differ by what changed alone.

Shape suffixes: C = stage configurations, L = layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dejavu.binding import Binding
from dejavu.cluster import Cluster, Device, NodeGroup
from dejavu.cluster.islands import Island
from dejavu.cluster.meshes import most_placed, on_nodes
from dejavu.cost.collectives.transfer import TransferCost, fastest_link
from dejavu.cost.priced_problem import Transfers, links_between
from dejavu.foundation.errors import InputError
from dejavu.migration.changes import ClusterNow, Seat
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.plans import Infeasible, NoPlanError, Plan, StageConfiguration
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.watching.links import slower_links
from dejavu.workload import Workload


@dataclass(frozen=True, eq=False)
class RunningProblem:
    """What the running plan was chosen from.

    Attributes:
        cluster: with every host that may come.
        schedules: that a plan may use.
        transfers: (sender's type, receiver's type) -> the cost of a message.
    """

    priced: PricedProblem
    cluster: Cluster
    schedules: tuple[str, ...]
    transfers: Transfers

    @classmethod
    def of(
        cls, prices: Prices, num_microbatches: int, used: AbstractSet[StageConfiguration] = frozenset()
    ) -> RunningProblem:
        """Take the problem of a request, at the microbatches of the plan that was chosen.

        Args:
            used: the plan's configurations; of several problems that with all of them is taken, if there is one.
        """
        request, problems = prices.request, prices.problems(num_microbatches)
        priced = next((one for one in problems if used <= set(one.problem.configurations)), problems[0])
        return cls(priced, request.cluster, request.listed_schedules, prices.transfers)

    @classmethod
    def of_plan(cls, plan: Plan, workload: Workload, cluster: Cluster, database: Path) -> RunningProblem:
        """Price the problem of a plan that was chosen earlier, at its own microbatches.

        Raises:
            InputError: the plan spreads stages in a way that is not considered on this cluster.
            CostError: a price is missing; it names layer and device.
        """
        wanted = {stage.configuration for stage in plan.stages}
        usual = Parallelism.usual(cluster, replicas=workload.gradients.gathers)
        for spread in (usual, Parallelism(), Parallelism(also_unsplit=True)):
            request = PlanRequest(workload, cluster, database, spread, microbatches=(plan.num_microbatches,))
            found = cls.of(Prices(request), plan.num_microbatches, wanted)
            if wanted <= set(found.priced.problem.configurations):
                return found
        odd = next(iter(wanted - set(found.priced.problem.configurations)))
        raise InputError(f"the plan has a stage on {odd}; wanted one of the ways considered on {cluster.name}")


@dataclass(frozen=True)
class Kind:
    """Devices that are alike now.

    Attributes:
        name: the type's own where nothing is different.
        type_name: as the cluster's file calls them.
        slowness, link_slowness: see `ClusterNow`.
    """

    name: str
    type_name: str
    slowness: float = 1.0
    link_slowness: float = 1.0


@dataclass(frozen=True, eq=False)
class ProblemNow:
    """The problem on the cluster as it is now, of kinds of devices that are alike now.

    Attributes:
        devices: by host and index, the devices that are there; each of its kind, with its own index on its host.
        origin: of the devices of `cluster`, which are numbered anew on each host: those of `devices`.
        priced: what searches are asked: the configurations that fit what is there.
        every: to price running plans with: all configurations on each kind of device, also where they are too few,
            because some of a stage's devices may have become slower than the others.
        transfers: as of `RunningProblem`, between kinds.
    """

    priced: PricedProblem
    every: PricedProblem
    cluster: Cluster
    kinds: Mapping[str, Kind]
    devices: Mapping[Seat, Device]
    origin: Mapping[Seat, Device]
    schedules: tuple[str, ...]
    transfers: Transfers

    def slowest(self, names: Iterable[str]) -> Kind:
        """Return the slowest of these kinds."""
        return max((self.kinds[name] for name in names), key=lambda kind: (kind.slowness, kind.link_slowness))

    def usual(self, binding: Binding) -> Binding:
        """Return a binding with devices called by their own type, but for those that are slower.

        So what a training remembers of its stages is filed under the devices' type, and never from slower ones.
        """

        def name(kind: str) -> str:
            return kind if self.kinds[kind].slowness != 1 else self.kinds[kind].type_name

        plan = binding.plan
        stages = [
            replace(
                stage, configuration=replace(stage.configuration, device_type=name(stage.configuration.device_type))
            )
            for stage in plan.stages
        ]
        placements = [
            replace(placed, device=replace(placed.device, type_name=name(placed.device.type_name)))
            for placed in binding.placements
        ]
        return replace(binding, plan=replace(plan, stages=tuple(stages)), placements=tuple(placements))

    def restored(self, binding: Binding) -> Binding:
        """Return a binding on `cluster` with the devices' own indices."""
        placements = (
            replace(placed, device=self.origin[placed.device.host, placed.device.index])
            for placed in binding.placements
        )
        return replace(binding, placements=tuple(placements))


def problem_now(running: RunningProblem, now: ClusterNow) -> ProblemNow:
    """Pose the running problem for the cluster as it is now.

    A device that is slower, behind a slower link or on a host that lost another one becomes a kind of its own, because
    searches know devices and links by kinds. So no stage spans such a device and others.

    Raises:
        NoPlanError: no device is left.
    """
    if not now.hosts:
        raise NoPlanError(Infeasible("replan", f"no device of cluster {now.cluster.name} is left", 0.0))
    groups: list[NodeGroup] = []
    kinds: dict[str, Kind] = {}
    devices: dict[Seat, Device] = {}
    origin: dict[Seat, Device] = {}
    links: dict[str, tuple[str, float]] = {}  # of each group: the group it was part of, and how slow its links are
    for group in now.cluster.groups:
        for host, left in _hosts_left(now, group).items():
            link_slowness = now.link_slowness.get(host, 1.0)
            entire = len(left) == group.devices_per_node and link_slowness == 1.0
            of_device = [
                _kind(device, now.slowness.get((host, device.index), 1.0), link_slowness, entire) for device in left
            ]
            whole = all(kind.name == kind.type_name for kind in of_device)
            name = group.name if whole else f"{group.name} ({host})"
            kinds |= {kind.name: kind for kind in of_device}
            links[name] = (group.name, link_slowness)
            # A node's devices are numbered kind by kind: those of a kind have to follow one another.
            names = sorted(
                dict.fromkeys(kind.name for kind in of_device), key=lambda name: name != kinds[name].type_name
            )
            ordered = sorted(zip(of_device, left, strict=True), key=lambda both: names.index(both[0].name))
            node_index = _join(groups, name, host, [kind.name for kind, _ in ordered], group)
            for index, (kind, device) in enumerate(ordered):
                own = replace(device, type_name=kind.name, group=name, node_index=node_index)
                devices[host, device.index] = origin[host, index] = own
    cluster = Cluster(
        name=now.cluster.name,
        groups=tuple(groups),
        device_types={k.name: replace(now.cluster.device_types[k.type_name], name=k.name) for k in kinds.values()},
        links_between=slower_links(now.cluster, links),
    )
    prices = _Prices(running, cluster, kinds)
    search, every = prices.priced(fitting=True), prices.priced(fitting=False)
    return ProblemNow(search, every, cluster, kinds, devices, origin, running.schedules, prices.transfers)


def _hosts_left(now: ClusterNow, group: NodeGroup) -> dict[str, list[Device]]:
    found: dict[str, list[Device]] = {}
    for device in now.cluster.devices():
        if device.group == group.name and (device.host, device.index) not in now.absent:
            found.setdefault(device.host, []).append(device)
    return found


def _kind(device: Device, slowness: float, link_slowness: float, entire: bool) -> Kind:
    said = [f"{slowness:.2g} × as slow"] if slowness != 1 else []
    said += [f"links {link_slowness:.2g} × as slow"] if link_slowness != 1 else []
    own = said or not entire
    name = f"{device.type_name} ({', '.join([f'of {device.host}', *said])})" if own else device.type_name
    return Kind(name, device.type_name, slowness, link_slowness)


def _join(groups: list[NodeGroup], name: str, host: str, kinds: list[str], like: NodeGroup) -> int:
    """Add a host to the group of this name, with links and network cards as another has them; return its number."""
    counts = tuple((kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
    for place, group in enumerate(groups):
        if group.name == name:
            groups[place] = replace(group, count=group.count + 1, hosts=(*group.hosts, host))
            return group.count
    groups.append(NodeGroup(name, 1, (host,), counts, like.link, cards=like.cards))
    return 0


class _Prices:
    """The rows of the running problem, for kinds of devices as they are now."""

    def __init__(self, running: RunningProblem, cluster: Cluster, kinds: Mapping[str, Kind]) -> None:
        self._running, self._cluster, self._kinds = running, cluster, kinds

    def priced(self, *, fitting: bool) -> PricedProblem:
        """Return the problem; `fitting`: with the configurations only that fit what is there."""
        before, problem = self._running.priced, self._running.priced.problem
        rows = self._rows(fitting)
        index = [c for _, c in rows]
        slow_C1 = np.array([self._kinds[one.device_type].slowness for one, _ in rows])[:, None]
        configurations = tuple(configuration for configuration, _ in rows)
        links_CC2 = before.accumulate * links_between(self._cluster, self.transfers, configurations)
        kinds = self._kinds.values()
        return replace(
            before,
            problem=replace(
                problem,
                configurations=configurations,
                device_counts=self._counts(configurations) if fitting else self._cluster.device_counts,
                costs=self._costs(index, configurations, slow_C1),
                link_latency_seconds_CC=links_CC2[:, :, 0].copy(),
                link_seconds_per_byte_CC=links_CC2[:, :, 1].copy(),
                measured_links=self._measured_links,
            ),
            forward_seconds_CL=self._passes(before.forward_seconds_CL, index, configurations, slow_C1),
            backward_seconds_CL=self._passes(before.backward_seconds_CL, index, configurations, slow_C1),
            on_disk=before.on_disk and before.on_disk.of(index),
            unshared_seconds_CL3=_scaled(before.unshared_seconds_CL3, index, slow_C1),
            slices=before.slices and before.slices.of(index).times(slow_C1),
            pass_costs={
                kind.name: _slower(before.pass_costs[kind.type_name], kind.slowness)
                for kind in kinds
                if kind.type_name in before.pass_costs
            },
            backward_parts_L2={
                kind.name: before.backward_parts_L2[kind.type_name]
                for kind in kinds
                if kind.type_name in before.backward_parts_L2
            },
        )

    def _counts(self, configurations: Sequence[StageConfiguration]) -> dict[str, int]:
        """Return how many devices of each kind stages may take together and can then be placed."""
        found = {}
        for name in self._cluster.device_counts:
            widths = {one.devices_per_node for one in configurations if one.device_type == name}
            found[name] = most_placed(widths or {1}, on_nodes(self._cluster, Island(name)))
        return found

    def _rows(self, fitting: bool) -> list[tuple[StageConfiguration, int]]:
        """Return configurations on each kind of device, with the running problem's rows of them."""
        found = []
        for kind in self._kinds.values():
            per_node = [count for group in self._cluster.groups if (count := dict(group.devices).get(kind.name, 0))]
            nodes = sum(group.count for group in self._cluster.groups if kind.name in dict(group.devices))
            for c, configuration in enumerate(self._running.priced.problem.configurations):
                fits = configuration.num_nodes <= nodes and configuration.devices_per_node <= max(per_node)
                if configuration.device_type == kind.type_name and (fits or not fitting):
                    found.append((replace(configuration, device_type=kind.name), c))
        return found

    def _costs(
        self, index: list[int], configurations: tuple[StageConfiguration, ...], slow_C1: np.ndarray
    ) -> AdditiveCosts:
        costs = self._running.priced.problem.costs
        assert isinstance(costs, AdditiveCosts), "a workload's problem has additive costs"
        per_step_CL = costs.per_step_seconds_CL[index] * slow_C1
        for c, configuration in enumerate(configurations):
            links = self._kinds[configuration.device_type].link_slowness
            if links != 1 and configuration.num_nodes > 1:  # the replicas' sums go over the links
                single = costs.per_step_seconds_CL[self._single(configuration)] * slow_C1[c]
                per_step_CL[c] += (links - 1) * np.maximum(per_step_CL[c] - single, 0.0)
        seconds_CL = self._passes(costs.seconds_CL, index, configurations, slow_C1)
        return replace(costs.of(index), seconds_CL=seconds_CL, per_step_seconds_CL=per_step_CL)

    def _passes(
        self,
        seconds_CL: Floats,
        index: list[int],
        configurations: tuple[StageConfiguration, ...],
        slow_C1: Floats,
    ) -> Floats:
        """Return what passes take now. What ZeRO's levels 2 and 3 send in them goes over links that may be slower."""
        found_CL, rows = seconds_CL[index] * slow_C1, self._running.priced.problem.configurations
        for c, configuration in enumerate(configurations):
            kind = self._kinds[configuration.device_type]
            quiet = replace(configuration, device_type=kind.type_name, zero_level=1)  # sends nothing in its passes
            is_slow = kind.link_slowness != 1 and configuration.num_nodes > 1 and configuration.zero_level > 1
            if is_slow and quiet in rows:
                sent_L = found_CL[c] - seconds_CL[rows.index(quiet)] * slow_C1[c]
                found_CL[c] += (kind.link_slowness - 1) * np.maximum(sent_L, 0.0)
        return found_CL

    def _single(self, configuration: StageConfiguration) -> int:
        """Return the running problem's row of one such device."""
        type_name = self._kinds[configuration.device_type].type_name
        return next(
            c
            for c, other in enumerate(self._running.priced.problem.configurations)
            if other.device_type == type_name and other.num_devices == 1
        )

    @cached_property
    def _measured_links(self) -> dict[tuple[str, str], tuple[float, float]]:
        """What was measured between devices of a node; only links between nodes are seen to become slower."""
        known, kinds = self._running.priced.problem.measured_links, self._kinds.values()
        pairs = {(a.name, b.name): (a.type_name, b.type_name) for a in kinds for b in kinds}
        return {names: known[types] for names, types in pairs.items() if types in known}

    @cached_property
    def transfers(self) -> Transfers:
        """What messages cost now: measured, times how much slower the link is, or as it is declared."""
        running, found = self._running, {}
        for a in self._kinds.values():
            for b in self._kinds.values():
                link = fastest_link(self._cluster, Island(a.name), Island(b.name))
                before = running.transfers[Island(a.type_name), Island(b.type_name)]
                usual = fastest_link(running.cluster, Island(a.type_name), Island(b.type_name))
                if link.assumed and usual.assumed:
                    per_byte = before.seconds_per_byte * usual.bytes_per_second / link.bytes_per_second
                    found[Island(a.name), Island(b.name)] = replace(before, seconds_per_byte=per_byte)
                else:
                    found[Island(a.name), Island(b.name)] = TransferCost(
                        link.latency_seconds, 1 / link.bytes_per_second, "declared"
                    )
        return found


def _scaled(fetched_CL3: Floats | None, index: list[int], slow_C1: Floats) -> Floats | None:
    """Return it of these configurations, slowed down as their passes are."""
    return None if fetched_CL3 is None else fetched_CL3[index] * slow_C1[:, :, None]


def _slower(cost: PassCost, slowness: float) -> PassCost:
    return PassCost(
        cost.pass_seconds * slowness, cost.message_seconds * slowness, cost.message_seconds_per_byte * slowness
    )
