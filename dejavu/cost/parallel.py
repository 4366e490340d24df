"""Costs of each layer under each stage configuration: at a replica's microbatch, on a tensor-parallel part.

All stages see the same B microbatches of m examples; a stage with r replicas splits each over them (Alpa, Zheng et al.,
OSDI 2022), so its layers are captured and priced at m / r examples.

Shape suffixes: L = layers, L1 = L + 1 cut positions, C = stage configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dejavu.cluster import Cluster, HostMemory, Nvme
from dejavu.cost.collectives.beside import beside_products, once_a_step, side_by_side
from dejavu.cost.collectives.inside_stages import BACKWARD, COMPARED_BACKWARD, FORWARD, StageCollectives
from dejavu.cost.collectives.of_layers import layer_moves
from dejavu.cost.estimates import CostError
from dejavu.cost.gradients import adding_seconds, combining_seconds, held_out_share
from dejavu.cost.kernels.sequence import SliceOfTokens, gathers_output, keys_and_values_bytes
from dejavu.cost.kernels.sharding import degree_of, has_split_loss, trained_bytes, weight_bytes
from dejavu.cost.memory import ConfigurationMemory, configuration_memory, example_bytes
from dejavu.cost.memory.layers import ForEachByte
from dejavu.cost.offload.updates import Stepped, disk_seconds, staging_bytes, update_seconds
from dejavu.cost.offload.weights import arriving_bytes, fetching_seconds, summing_seconds
from dejavu.cost.parts import Passes, PricedParts, StagePasses, ratio
from dejavu.cost.sources.predicted import Predicted
from dejavu.graphs.graph import Graph, Layer
from dejavu.plans import StageConfiguration
from dejavu.plans.priced_problem import OnDisk, SlicePrices
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.workload import Workload
from dejavu.workload.slices import slice_lengths, slice_spans

_SMALL_BYTES = 1.0  # of a message whose latency is all that counts


class _Column(NamedTuple):
    """All costs of one configuration."""

    forward_L: Floats
    backward_L: Floats
    once_L: Floats
    once_latency_seconds: float
    memory: ConfigurationMemory
    slices: tuple[tuple[Floats, Floats], ...]
    host_capacity_bytes: float
    disk_capacity_bytes: float
    unshared_L3: Floats


@dataclass(frozen=True, eq=False)
class ConfigurationCosts:
    """Additive costs, and their forward and backward parts separately, for simulating a schedule; of the mean slice.

    Attributes:
        unshared_seconds_CL3: as of a `PricedProblem`.
    """

    costs: AdditiveCosts
    forward_seconds_CL: Floats
    backward_seconds_CL: Floats
    on_disk: OnDisk
    unshared_seconds_CL3: Floats
    slices: SlicePrices | None = None

    def of(self, rows: Sequence[int]) -> ConfigurationCosts:
        """Return those of some of the configurations."""
        return ConfigurationCosts(
            self.costs.of(rows),
            self.forward_seconds_CL[rows],
            self.backward_seconds_CL[rows],
            self.on_disk.of(rows),
            self.unshared_seconds_CL3[rows],
            self.slices and self.slices.of(rows),
        )


class ParallelPrices:
    """Prices a workload's layers under any stage configuration; every number is computed once.

    Args:
        at: a microbatch size -> the model captured and priced at it.
        predicted: prices parts of layers.
        sends_beside_products: devices that split weights and the sequence send beside their products, as other
            software does (`beside_products`).

    Attributes:
        computing: what of it is no communication, and no copying.
    """

    def __init__(
        self,
        cluster: Cluster,
        at: Callable[[int], PricedParts],
        predicted: Predicted,
        collectives: StageCollectives,
        *,
        sends_beside_products: bool = False,
    ) -> None:
        self._cluster, self._collectives = cluster, collectives
        self._sends_beside_products = sends_beside_products
        self.computing = StagePasses(cluster, at, predicted)

    def at(self, microbatch_size: int) -> PricedParts:
        """Return the model, captured and priced at a microbatch size."""
        return self.computing.at(microbatch_size)

    def costs(self, configurations: Sequence[StageConfiguration], workload: Workload) -> ConfigurationCosts:
        """Price every layer under every configuration; of a workload's slices, the mean one.

        Raises:
            InputError: the slices are not those of its sequences.
            CostError: parts of layers are needed on a device type for which only whole layers' measurements are known.
        """
        lengths = slice_lengths(workload)
        slices = [SliceOfTokens(*span) for span in slice_spans(lengths)]
        self.computing.ask(configurations, workload.microbatch_size, slices)
        columns = [self._column(configuration, workload, slices) for configuration in configurations]
        memories = [column.memory for column in columns]
        on_disk_C1 = np.array([[one.offload.optimizer == "nvme"] for one in configurations])
        state_CL = np.array([memory.state_away_bytes_L for memory in memories])
        forward, backward = (np.array([getattr(c, name) for c in columns]) for name in ("forward_L", "backward_L"))
        return ConfigurationCosts(
            costs=AdditiveCosts(
                seconds_CL=forward + backward,
                per_step_seconds_CL=np.array([column.once_L for column in columns]),
                per_step_latency_seconds_C=np.array([column.once_latency_seconds for column in columns]),
                fixed_bytes_CL=np.array([memory.fixed_bytes_L for memory in memories]),
                activation_bytes_CL=np.array([memory.activation_bytes_L for memory in memories]),
                temporary_bytes_CL=np.array([memory.temporary_bytes_L for memory in memories]),
                capacity_bytes_C=np.array([memory.capacity_bytes for memory in memories]),
                message_bytes_CL1=np.array([memory.message_bytes_L1 for memory in memories]),
                step_bytes_CL=np.array([memory.step_bytes_L for memory in memories]),
                retained_bytes_CL=np.array([memory.retained_bytes_L for memory in memories]),
                waiting_bytes_CL=np.array([memory.waiting_bytes_L for memory in memories]),
                in_parts_bytes_CL=np.array([memory.in_parts_bytes_L for memory in memories]),
                host_fixed_bytes_CL=np.where(on_disk_C1, 0.0, state_CL),
                host_activation_bytes_CL=np.array([memory.offloaded_bytes_L for memory in memories]),
                host_capacity_bytes_C=np.array([column.host_capacity_bytes for column in columns]),
            ),
            forward_seconds_CL=forward,
            backward_seconds_CL=backward,
            on_disk=OnDisk(
                np.where(on_disk_C1, state_CL, 0.0), np.array([column.disk_capacity_bytes for column in columns])
            ),
            unshared_seconds_CL3=np.array([column.unshared_L3 for column in columns]),
            slices=_slice_prices(lengths, columns),
        )

    def _host_memory(self, configuration: StageConfiguration) -> HostMemory:
        """Return a device's part of its node's memory; where the cluster file says nothing of it, none.

        Raises:
            CostError: something is to be kept there.
        """
        found = self._cluster.host_memory_of(configuration.device_type)
        if found is None and configuration.offload:
            raise CostError(
                f"{configuration}: the cluster file does not say of every such node how large and fast its memory is; "
                "wanted host_memory: {size: …, bandwidth: …}"
            )
        return found or HostMemory(0, 1.0, 1.0)

    def _nvme(self, configuration: StageConfiguration) -> Nvme:
        """Return a device's part of its node's disks; where the cluster file says nothing of them, none.

        Raises:
            CostError: something is to be kept there.
        """
        found = self._cluster.nvme_of(configuration.device_type)
        if found is None and configuration.offload.optimizer == "nvme":
            raise CostError(
                f"{configuration}: the cluster file does not say of every such node how large and fast its disks are; "
                "wanted nvme: {size: …, read: …, write: …}"
            )
        return found or Nvme(0, 1.0, 1.0)

    def _column(
        self, configuration: StageConfiguration, workload: Workload, slices: Sequence[SliceOfTokens]
    ) -> _Column:
        m, n, examples = workload.microbatch_size, max(1, len(slices)), float(example_bytes(workload))
        graph = self.at(m // configuration.example_parts).graph
        kinds, kind_L = graph.kinds
        weights_L = np.array([weight_bytes(layer, configuration.tensor_parallel) for layer in kinds])[kind_L]
        trained_L = np.array([trained_bytes(layer, configuration.tensor_parallel) for layer in kinds])[kind_L]
        each = [self.computing.passes(configuration, m, own) for own in slices or (None,)]
        passes, again = Passes.mean(each), [0.0 * one.forward_L for one in each]
        gradient, unshared_L3 = ForEachByte.of(workload.optimizer).gradient_bytes, np.zeros((len(weights_L), 3))
        forward = passes.forward_L + self._inside_layers(configuration, m, "forward", n)
        backward = passes.backward_L + self._inside_layers(configuration, m, "backward", n)
        if configuration.recompute:  # sums inside layers are repeated
            whole_L, again_L = (
                self.computing.passes(configuration, m).forward_L,
                self.computing.recomputed(configuration, m),
            )
            again = [again_L * ratio(one.forward_L, whole_L) for one in each]
            sums_L = self._inside_layers(configuration, m, "forward", n, again=True)
            repeated_L = np.mean(again, axis=0) + sums_L
            # The weights' part computes nothing again. What cannot run has no parts.
            unshared_L3[:, :2] = np.where(np.isfinite(repeated_L), repeated_L, 0.0)[:, None]
            backward = backward + repeated_L
        device, rule = self._cluster.device_types[configuration.device_type], workload.gradients
        ways = (FORWARD, COMPARED_BACKWARD if rule.gathers else BACKWARD)
        moved = (self._gathers(configuration, weights_L, gradient, names) for names in ways)
        forward, backward = (
            side_by_side(computed, sent, overlaps=device.kind != "cpu")
            for computed, sent in zip((forward, backward), moved, strict=True)
        )
        latency, told_L = self._told(configuration, graph, gradient, passes, gathers=rule.gathers)
        if rule.gathers:
            latency += self._collectives.agreeing_seconds(configuration)
        if configuration.sequence_parallel:
            # Of the few weights outside the products each device has its positions' gradients, summed once a step.
            latency += self._collectives.tensor_seconds(configuration, [_SMALL_BYTES])
        memory = configuration_memory(configuration, graph, workload, device, examples)
        host, nvme = self._host_memory(configuration), self._nvme(configuration)
        copied = memory.offloaded_bytes_L / n / host.bytes_per_second
        forward, backward = forward + copied, backward + copied  # one stream computes and copies
        tied = np.array([self._collectives.tied_seconds(device.name, gradient * layer.tied_bytes) for layer in kinds])
        once_L = passes.optimizer_L + told_L + tied[kind_L]
        once_L = once_L + combining_seconds(rule, configuration, gradient * trained_L, device)
        backward = backward + adding_seconds(rule, configuration, gradient * trained_L, device)
        if share := held_out_share(rule, configuration):
            # Each replica computes them alone, with weights that are gathered for it.
            gathered = ((), ("all_gather",), ("all_gather",), ("all_gather",) * 2)
            came_L = self._gathers(configuration, weights_L, gradient, dict(enumerate(gathered)))
            once_L = once_L + share * (passes.forward_L + passes.backward_L) + came_L / rule.held_out_every
        staged, away = 0.0, configuration.offload
        if away.optimizer:
            stepped = Stepped.of(configuration, workload)
            own_L = stepped.ratio * trained_L / (configuration.data_parallel if configuration.zero_level else 1)
            once_L = once_L + update_seconds(
                own_L, stepped.settings, stepped.dtype, host,
                is_fused=device.kind != "cpu", with_copies=away.parameters is None,
            )  # fmt: skip
            largest = max(layer.footprint.largest_parameter_bytes for layer in kinds)
            staged = staging_bytes(stepped.ratio * largest, stepped.settings)
        if away.parameters:
            fetched = fetching_seconds(weights_L, workload.optimizer, host)
            forward, backward = forward + fetched.forward_L, backward + fetched.backward_L
            unshared_L3 = unshared_L3 + np.stack(fetched[1:], axis=1)
            if configuration.data_parallel > 1 and device.kind != "cpu":  # ranks on CPUs send them from where they are
                once_L = once_L + summing_seconds(trained_L, workload.optimizer, host)
            staged += arriving_bytes(float(weights_L.max()), workload.optimizer)
        if configuration.offload.optimizer == "nvme":
            once_L = once_L + disk_seconds(memory.state_away_bytes_L, nvme)
        room = max(host.size_bytes - staged, 0.0)
        # What is not computed is of a slice as of the mean one.
        besides = forward - passes.forward_L, backward - passes.backward_L - np.mean(again, axis=0)
        by_slice = tuple(
            (besides[0] + one.forward_L, besides[1] + one.backward_L + repeated)
            for one, repeated in zip(each, again, strict=True)
        )
        return _Column(forward, backward, once_L, latency, memory, by_slice, room, float(nvme.size_bytes), unshared_L3)

    def sum_seconds(
        self,
        configuration: StageConfiguration,
        span: slice,
        microbatch_size: int,
        gradient_bytes: float,
        *,
        at_the_end: bool = False,
    ) -> float:
        """Return what is priced for summing the gradients of some layers over a stage's replicas, once a step.

        Args:
            gradient_bytes: of a gradient, for each byte of its weight (`ForEachByte`).
            at_the_end: nothing of it goes beside computing.
        """
        graph = self.at(microbatch_size // configuration.example_parts).graph
        passes = self.computing.passes(configuration, microbatch_size)
        latency, told_L = self._told(configuration, graph, gradient_bytes, passes, hides=not at_the_end)
        return latency + float(told_L[span].sum())

    def _told(
        self,
        configuration: StageConfiguration,
        graph: Graph,
        gradient_bytes: float,
        passes: Passes,
        *,
        gathers: bool = False,
        hides: bool = True,
    ) -> tuple[float, Floats]:
        """Price what replicas tell each other once a step: seconds besides layers, and of each layer."""
        told_of = weight_bytes if configuration.zero_level else trained_bytes  # what is sharded is gathered whole
        kinds, kind_L = graph.kinds
        weights_L = np.array([told_of(layer, configuration.tensor_parallel) for layer in kinds])[kind_L]
        sizes = [float(size) for size in weights_L]
        lines = self._collectives.per_step_lines(configuration, sizes, gradient_bytes, gathers=gathers)
        overlaps = hides and self._cluster.device_types[configuration.device_type].kind != "cpu"
        return once_a_step(lines, weights_L, passes.forward_L, passes.backward_L, overlaps=overlaps)

    def _gathers(
        self,
        configuration: StageConfiguration,
        weights_L: Floats,
        gradient_bytes: float,
        names: Mapping[int, tuple[str, ...]],
    ) -> Floats:
        """Price what replicas say of each layer in every microbatch, `FORWARD` or `BACKWARD`."""
        asked = names[configuration.zero_level] if configuration.data_parallel > 1 else ()
        sizes = set(weights_L.tolist())
        known = {size: self._collectives.data_seconds(configuration, asked, size, gradient_bytes) for size in sizes}
        return np.array([known[size] for size in weights_L.tolist()])

    def _inside_layers(
        self,
        configuration: StageConfiguration,
        microbatch_size: int,
        direction: str,
        num_slices: int = 1,
        *,
        again: bool = False,
    ) -> Floats:
        """Price tensor-parallel sums, and of a split sequence keys, values and perhaps what comes out of the model."""
        graph = self.at(microbatch_size // configuration.example_parts).graph
        sums_L = self._tensor_sums(configuration, graph, direction, num_slices, again=again)
        if self._sends_beside_products and configuration.sequence_parallel:
            whole_L, in_parts_L = self.computing.products(configuration, microbatch_size, direction)
            sums_L = beside_products(
                sums_L, whole_L / num_slices, in_parts_L / num_slices, configuration.tensor_parallel
            )
        if configuration.context_parallel == 1:
            return sums_L
        name = "all_gather" if direction == "forward" else "reduce_scatter"
        kinds, kind_L = graph.kinds

        def seconds(layer: Layer) -> float:
            degree = degree_of(layer, configuration.tensor_parallel)
            sizes = [size / degree for size in keys_and_values_bytes(layer)]
            return self._collectives.context_seconds(configuration, sizes, name)

        found_L: Floats = sums_L + np.array([seconds(layer) for layer in kinds])[kind_L]
        if direction == "forward" and not again and gathers_output(graph.layers[-1]):
            parts = (
                configuration.tensor_parallel if has_split_loss(graph.layers[-1], configuration.tensor_parallel) else 1
            )
            output = [graph.layers[-1].output_bytes / parts]
            found_L[-1] += self._collectives.context_seconds(configuration, output, name)
        return found_L

    def _tensor_sums(
        self, configuration: StageConfiguration, graph: Graph, direction: str, num_slices: int, *, again: bool = False
    ) -> Floats:
        kinds, kind_L = graph.kinds
        last = kind_L[-1] if gathers_output(graph.layers[-1]) else -1

        def seconds(kind: int, layer: Layer) -> float:
            moves = layer_moves(layer, direction, configuration, has_loss=kind == last, again=again)
            told = ((name, size / num_slices) for name, size in moves)
            return sum(self._collectives.tensor_seconds(configuration, [size], name) for name, size in told)

        return np.array([seconds(kind, layer) for kind, layer in enumerate(kinds)])[kind_L]


def _slice_prices(lengths: tuple[int, ...], columns: Sequence[_Column]) -> SlicePrices | None:
    if not lengths:
        return None
    both = (np.array([[one.slices[k][way] for one in columns] for k in range(len(lengths))]) for way in range(2))
    return SlicePrices(lengths, *both)
