"""The searches' problem: stage configurations, priced from costs, links and memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island, told_apart_in
from dejavu.cluster.meshes import AnyShare, Share, counts_of, on_nodes
from dejavu.cost import TransferCost
from dejavu.cost.collectives.inside_stages import Neighbours, stage_transfer
from dejavu.cost.kernels.experts import experts_to_share
from dejavu.cost.kernels.sequence import context_length
from dejavu.cost.kernels.sharding import most_tensor_parallel, sequence_length
from dejavu.cost.memory.layers import ForEachByte
from dejavu.cost.parallel import ParallelPrices
from dejavu.foundation.errors import InputError
from dejavu.parallelism import OFFLOADS, Parallelism
from dejavu.plans import Offload, Plan, Problem, StageConfiguration
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.workload import Workload
from dejavu.workload.slices import slice_lengths

# Collectives and small kernels are not predicted more closely than this; within it, the less memory counts.
SPLIT_MARGIN = 0.05
Transfers = dict[tuple[Island, Island], TransferCost]


def price_problem(
    prices: ParallelPrices,
    cluster: Cluster,
    workload: Workload,
    transfers: Transfers,
    parallelism: Parallelism,
    pass_costs: Mapping[str, PassCost] | None = None,
    backward_parts_L2: Mapping[str, Floats] | None = None,
    part: Mapping[Island, Share | AnyShare] | None = None,
) -> PricedProblem:
    """Price the problem of cutting the layers into stages that may take several devices each.

    A plan has at most as many stages as microbatches: torch's pipeline schedules reject fewer microbatches than stages.
    Of sequences in slices these count.

    Of several runs of the schedule in a step, each waits for the one before: what a run repeats is counted so often.

    Args:
        transfers: (sender's devices, receiver's) -> the cost of a message, for every two of the cluster's types and
            the islands that they fall into.
        part: of the cluster, whose devices stages take; None: all, of every part's meshes.

    Raises:
        CostError: a number is missing; it names layer and device.
        InputError: no stage can combine its replicas' gradients as the workload wants it.
    """
    graph, runs = prices.at(workload.microbatch_size).graph, workload.accumulate
    configurations = parallelism.configurations(
        cluster,
        workload.microbatch_size,
        most_tensor_parallel(graph),
        0 if workload.in_slices else sequence_length(graph),  # slices go whole through all devices of a stage
        0 if workload.compile else experts_to_share(graph),  # their numbers of rows are known as they come
        0 if workload.compile or workload.in_slices else context_length(graph),
        part,
    )
    if not configurations:
        raise _none_possible(cluster, parallelism, most_tensor_parallel(graph))
    configurations = _that_can_combine(configurations, workload, parallelism)
    device_counts = counts_of(part) if part else _counts_by(configurations, cluster)
    if slice_lengths(workload):  # splits that were found work on whole sequences
        found_at = {split.degree for layer in graph.layers for split in layer.found}
        configurations = tuple(one for one in configurations if one.tensor_parallel not in found_at)
    if not parallelism.also_unsplit:
        configurations = _worth_pricing(prices, configurations, workload.microbatch_size)
    found = prices.costs(configurations, workload)
    if not parallelism.only and any(one.offload for one in configurations):
        kept = _worth_keeping_away(configurations, found.costs, workload.num_microbatches)
        if parallelism.offload == OFFLOADS:
            kept = _fetching_where_needed(kept, configurations, found.costs, device_counts, workload)
        configurations, found = tuple(configurations[c] for c in kept), found.of(kept)
    if not parallelism.also_unsplit:
        kept = _worth_considering(configurations, found.costs.seconds_CL)
        configurations, found = tuple(configurations[c] for c in kept), found.of(kept)
    links, n = runs * links_between(cluster, transfers, configurations), max(1, len(slice_lengths(workload)))
    return PricedProblem(
        Problem(
            layers=tuple(layer.name for layer in graph.layers),
            configurations=configurations,
            device_counts=device_counts,
            costs=replace(found.costs, seconds_CL=runs * found.costs.seconds_CL),
            cut_bytes_L1=graph.cut_bytes_L1 / n,
            link_latency_seconds_CC=links[:, :, 0].copy(),
            link_seconds_per_byte_CC=links[:, :, 1].copy(),
            schedule=workload.searched_schedule,
            num_microbatches=n * workload.num_microbatches,
            max_stages=_most_stages(workload),
            num_slices=n,
            measured_links=_measured_links(transfers),
        ),
        runs * found.forward_seconds_CL,
        runs * found.backward_seconds_CL,
        {name: cost.times(runs) for name, cost in (pass_costs or {}).items()},
        dict(backward_parts_L2 or {}),
        runs,
        found.on_disk,
        runs * found.unshared_seconds_CL3,
        found.slices and found.slices.times(runs),
        ForEachByte.of(workload.optimizer).gradient_bytes * np.array([layer.trained_bytes for layer in graph.layers]),
    )


def _measured_links(transfers: Transfers) -> dict[tuple[str, str], tuple[float, float]]:
    return {
        (a.device_type, b.device_type): cost.measured_inside
        for (a, b), cost in transfers.items()
        if cost.measured_inside
    }


def _counts_by(configurations: Sequence[StageConfiguration], cluster: Cluster) -> dict[str, int]:
    """Return how many devices there are of each type, or of each island where configurations name some."""
    islands = told_apart_in(cluster, (Island.of(one) for one in configurations))
    return {str(one): sum(on_nodes(cluster, one)) for one in islands}


def _none_possible(cluster: Cluster, parallelism: Parallelism, most: int) -> InputError:
    widest = max(group.devices_per_node for group in cluster.groups)
    return InputError(
        f"no stage can have {parallelism.min_tensor_parallel} tensor-parallel devices or more: the nodes have up "
        f"to {widest}, and the model splits over up to {most}; wanted a lower min_tensor_parallel"
    )


def _that_can_combine(
    configurations: Sequence[StageConfiguration], workload: Workload, parallelism: Parallelism
) -> tuple[StageConfiguration, ...]:
    """Return the configurations whose replicas' gradients the workload's rule can combine.

    Raises:
        InputError: one of a given plan's cannot, or none can.
    """
    misfits = {one: workload.gradients.misfit(one) for one in configurations}
    kept = tuple(one for one, misfit in misfits.items() if not misfit)
    if parallelism.only and len(kept) < len(misfits):
        raise InputError(next(misfit for misfit in misfits.values() if misfit))
    if configurations and not kept:
        most = max(configurations, key=lambda one: (one.data_parallel, -one.zero_level, -one.context_parallel))
        raise InputError(f"no stage that is considered can combine gradients as wanted: {misfits[most]}")
    return kept


def _worth_keeping_away(
    configurations: Sequence[StageConfiguration], costs: AdditiveCosts, num_microbatches: int
) -> list[int]:
    """Return the configurations but those that keep something away, or farther away, for nothing.

    Where the same devices, with less away, have room for the whole model with all microbatches in flight, every stage
    fits there under every schedule; it is for nothing if no stage takes longer there. Where the node's memory has room
    for what any stage keeps that fits the devices, its disks are not needed.
    """
    place = {configuration: c for c, configuration in enumerate(configurations)}
    kept = []
    for c, one in enumerate(configurations):
        less = set(_with_less_away(one.offload))
        nearer = [place.get(replace(one, offload=other)) for other in less - {one.offload}]
        needless = any(
            other is not None and holds_all(costs, other, num_microbatches) and no_slower(costs, other, c)
            for other in nearer
        )
        if one.offload.optimizer == "nvme":
            other = place.get(replace(one, offload=replace(one.offload, optimizer="host")))
            needless |= (
                other is not None and node_holds_all(costs, other, num_microbatches) and no_slower(costs, other, c)
            )
        if not needless:
            kept.append(c)
    return kept


def _most_stages(workload: Workload) -> int:
    if workload.gradients.rule == "zeno":
        return 1
    return workload.num_microbatches * max(1, len(slice_lengths(workload)))


def _fetching_where_needed(
    kept: list[int],
    configurations: Sequence[StageConfiguration],
    costs: AdditiveCosts,
    device_counts: Mapping[str, int],
    workload: Workload,
) -> list[int]:
    """Return the kept configurations but those that fetch weights where stages alike have room without.

    With few microbatches a plan that fetches could be the faster one even so; to consider it everywhere would take the
    searches up to half as long again. State on disks does not count: whether these have room is the planner's to check.
    """
    others = [c for c in kept if not configurations[c].offload.parameters]
    if len(others) == len(kept):
        return kept
    in_flight = SCHEDULES[workload.searched_schedule].in_flight
    for c in reversed(others):  # those that keep the most away come last
        one = configurations[c]
        if one.offload.optimizer == "nvme":
            continue
        most = min(device_counts[one.kind] // one.num_devices, _most_stages(workload))
        if fits_alone(costs, c, most, in_flight, workload.num_microbatches):
            return others
    return kept


def _with_less_away(offload: Offload) -> Iterator[Offload]:
    """Yield the same with some of it on the device."""
    for activations in {None, offload.activations}:
        yield Offload(activations)
        yield Offload(activations, offload.optimizer)
        yield Offload(activations, offload.optimizer, offload.parameters)


def fits_alone(
    costs: AdditiveCosts, c: int, most_stages: int, in_flight: Callable[[int, int, int], int], num_microbatches: int
) -> bool:
    """Return whether so many stages of this configuration alone have room for the model.

    From the last layer on each stage takes as many layers as fit; fewer layers in one need no fewer stages.

    Args:
        in_flight: as of a schedule.
    """
    stop = costs.num_layers
    for stage in reversed(range(most_stages)):
        held, start = in_flight(stage, most_stages, num_microbatches), stop
        while start and costs.max_in_flight(start - 1, stop, c) >= held:
            start -= 1
        if start in (0, stop):
            return start == 0
        stop = start
    return False


def no_slower(costs: AdditiveCosts, c: int, than: int) -> bool:
    """Return whether no stage takes longer with one configuration than with another, whatever else is in the plan.

    What is done once a step follows the passes of a microbatch, so it may take longer by what one of these takes less.
    """
    passes_CL, latency_C = costs.seconds_CL, costs.per_step_latency_seconds_C
    step_CL = passes_CL + costs.per_step_seconds_CL
    no_longer = (passes_CL[c] <= passes_CL[than]) & (step_CL[c] <= step_CL[than])
    return bool(no_longer.all() and latency_C[c] <= latency_C[than])


def holds_all(costs: AdditiveCosts, c: int, num_microbatches: int) -> bool:
    """Return whether any stages of the model fit together, with all microbatches in flight in each.

    Scratch, messages and the optimizer's temporaries are counted for every layer: there may be as many stages.
    """
    tables = (costs.fixed_bytes_CL, costs.temporary_bytes_CL, costs.step_bytes_CL)
    needed = sum(float(table[c].sum()) for table in tables)
    in_flight = (costs.activation_bytes_CL, costs.retained_bytes_CL, costs.waiting_bytes_CL)
    needed += num_microbatches * float(np.maximum.reduce([table[c] for table in in_flight]).sum())
    needed += 2 * float(costs.message_bytes_CL1[c].sum())
    in_node = costs.host_share(0, costs.num_layers, c, num_microbatches)
    return needed <= float(costs.capacity_bytes_C[c]) and in_node <= 1


def node_holds_all(costs: AdditiveCosts, c: int, num_microbatches: int) -> bool:
    """Return whether the node's memory has room for what any stages keep there that fit a device.

    These hold at most the model's state, and at most as often the device's memory as a layer has more of it in the node
    than on the device.
    """
    on_device, in_node = costs.fixed_bytes_CL[c], costs.host_fixed_bytes_CL[c]
    most = float((in_node[in_node > 0] / on_device[in_node > 0]).max(initial=0.0)) * float(costs.room_bytes_C[c])
    kept = min(most, float(in_node.sum())) + num_microbatches * float(costs.host_activation_bytes_CL[c].sum())
    return kept <= float(costs.host_capacity_bytes_C[c])


def _worth_pricing(
    prices: ParallelPrices, configurations: Sequence[StageConfiguration], microbatch_size: int
) -> tuple[StageConfiguration, ...]:
    """Return the configurations but those whose whole experts compute hardly less: both ways send the same bytes.

    Computing is compared with the sequence split, where what experts do not change is least. So none is left out that
    `_worth_considering` would keep, and most are never priced.
    """
    known = set(configurations)
    pairs = {one: replace(one, expert_parallel=False) for one in configurations if one.expert_parallel}
    pairs = {whole: parts for whole, parts in pairs.items() if parts in known}
    alike = {one: replace(one, sequence_parallel=True, zero_level=0) for pair in pairs.items() for one in pair}
    asked = tuple(dict.fromkeys(alike.values()))
    seconds = dict(zip(asked, prices.computing.seconds(asked, microbatch_size), strict=True))
    slow = {
        whole for whole, parts in pairs.items() if seconds[alike[parts]] <= seconds[alike[whole]] * (1 + SPLIT_MARGIN)
    }
    return tuple(one for one in configurations if one not in slow)


def _worth_considering(configurations: Sequence[StageConfiguration], seconds_CL: Floats) -> list[int]:
    """Return the configurations but those that take hardly less time than with the sequence split, or parts of experts.

    Whole experts may be sent more rows than parts of each have, up to all, and are as fast only if the router spreads
    them. Whether the sequence is split or not, both send the same bytes: an all-reduce is a reduce-scatter and an
    all-gather, with one more start. The split holds less, and spares each device the additions and norms of the others'
    tokens (`cost.kernels.sharding`). To consider both everywhere would take the searches and bounds half as long again.
    """
    place, total_C = {configuration: c for c, configuration in enumerate(configurations)}, seconds_CL.sum(axis=1)
    kept = []
    for c, configuration in enumerate(configurations):
        can = configuration.tensor_parallel > 1 and not configuration.sequence_parallel
        other = place.get(replace(configuration, sequence_parallel=True)) if can else None
        parts = place.get(replace(configuration, expert_parallel=False)) if configuration.expert_parallel else None
        if all(one is None or total_C[one] > total_C[c] * (1 + SPLIT_MARGIN) for one in (other, parts)):
            kept.append(c)
    return kept


def microbatch_choices(workload: Workload) -> tuple[int, ...]:
    """Return the numbers of microbatches to try: powers of two that divide a run's part, and the workload's."""
    powers = {2**k for k in range(workload.run_size.bit_length()) if workload.run_size % 2**k == 0}
    return tuple(sorted(powers | {workload.num_microbatches}))


def split_into(workload: Workload, num_microbatches: int) -> Workload:
    """Return the workload with its step split into so many microbatches (gradient accumulation).

    Raises:
        InputError: the batch does not divide into them.
    """
    if num_microbatches < 1 or workload.run_size % num_microbatches:
        batch = f"batch_size {workload.batch_size}" + (
            f" / {workload.accumulate} runs" if workload.accumulate > 1 else ""
        )
        raise InputError(
            f"{batch} does not divide into {num_microbatches} equal microbatches; wanted "
            f"one of its divisors, such as {', '.join(map(str, microbatch_choices(workload)))}"
        )
    return workload.model_copy(update={"num_microbatches": num_microbatches})


def as_planned(workload: Workload, plan: Plan) -> Workload:
    """Return the workload as the plan trains it: in so many microbatches, perhaps in slices, or in both directions.

    Raises:
        InputError: the batch does not divide into the microbatches.
    """
    one_way = {"schedule": plan.schedule} if workload.schedule == CHIMERA and not plan.both_ways else {}
    ways = {"slices": plan.slices or 1, "both_ways": plan.both_ways}
    return split_into(workload, plan.num_microbatches).model_copy(update=ways | one_way)


def links_between(
    cluster: Cluster,
    transfers: Transfers,
    configurations: Sequence[StageConfiguration],
    *,
    apart: bool = False,
    spread: Collection[StageConfiguration] = (),
) -> Floats:
    """Return (latency, seconds per byte) between all configurations; computed once for equal layouts on nodes.

    Args:
        apart: never in one node, where two nodes have their types.
        spread: which have nodes of several of their type's islands.
    """
    sits = [
        (Island.of(one), one.num_devices, one.num_nodes, one.data_parallel, one.senders_per_node, one in spread)
        for one in configurations
    ]
    alike = dict(zip(reversed(sits), reversed(configurations), strict=True))  # one of each
    place = {key: k for k, key in enumerate(alike)}
    pairs = list(product(dict.fromkeys(map(Island.of, configurations)), repeat=2))
    types = {pair: Neighbours.of(cluster, transfers, *pair) for pair in pairs}
    of_several = {pair: types[pair].of_several_islands(cluster, *pair) for pair in pairs if spread}

    def between(a: StageConfiguration, b: StageConfiguration) -> tuple[float, float]:
        pair = Island.of(a), Island.of(b)
        if a.device_type == b.device_type and (a in spread or b in spread):
            return stage_transfer(cluster, of_several[pair], a, b, apart=True)
        return stage_transfer(cluster, types[pair], a, b, apart=apart)

    links = np.array([[between(a, b) for b in alike.values()] for a in alike.values()])
    index = [place[key] for key in sits]
    return links[np.ix_(index, index)]
