"""From a request to the searches' problems: every layer priced in every way it may be spread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island, told_apart
from dejavu.cluster.meshes import AnyShare, Part, Share, every_part, on_nodes, parts_of, widths_left_out
from dejavu.cost import CostTable, TransferCosts, cost_table, is_prediction, remember_stages, sources
from dejavu.cost.collectives.inside_stages import StageCollectives
from dejavu.cost.memory.layers import ForEachByte
from dejavu.cost.parallel import ParallelPrices
from dejavu.cost.parts import PricedParts
from dejavu.cost.pass_overhead import backward_parts, pass_cost
from dejavu.cost.priced_problem import links_between, price_problem
from dejavu.cost.ranges import PriceErrors
from dejavu.cost.sources.assumed_hosts import AssumedHost, assumed_host
from dejavu.cost.sources.predicted import Predicted
from dejavu.cost.sources.scaled import scaled
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import CaptureError, capture
from dejavu.graphs.graph import Graph
from dejavu.graphs.kept_layers import KeptInUserCache
from dejavu.parallelism import Parallelism
from dejavu.planning.request import PlanRequest
from dejavu.planning.schedules import most_ranks
from dejavu.planning.ways.nodes import OverNodes, between_nodes, has_several, inside_one, over_nodes
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.stage_costs import Floats
from dejavu.profiles import ProfileDatabase
from dejavu.workload import Workload
from dejavu.workload.slices import slice_lengths

if TYPE_CHECKING:
    from dejavu.planning.shardings import FoundSplits


class Prices:
    """The problems of a request, one for each number of microbatches; each is computed once.

    Args:
        remembers: correct prices by what earlier trainings measured.
        graph_at: a microbatch size -> the captured model; None: captured here.
        num_forks: in so many forked processes splits of layers that declare none are looked for; see `Planner.forks`.
        sends_beside_products: as of `ParallelPrices`, of plans that other software runs.

    Attributes:
        rows: the measurements, as they were when they were first asked for.
        transfers: (sender's devices, receiver's) -> the cost of a message.
        errors: how far the price of a plan may be off.
    """

    def __init__(
        self,
        request: PlanRequest,
        *,
        remembers: bool = True,
        graph_at: Callable[[int], Graph] | None = None,
        num_forks: int = 1,
        sends_beside_products: bool = False,
    ) -> None:
        self._sends_beside_products = sends_beside_products
        self.request, self._remembers, self._num_forks = request, remembers, num_forks
        self.rows = ProfileDatabase(request.database).snapshot()
        self._graphs, self._posed = dict[int, Graph](), dict[Any, PricedProblem]()
        self._undeclared = dict[int, Graph]()
        self._graph_at = graph_at or self._with_splits
        workload = request.workload
        self._predicted = Predicted(self.rows, workload.optimizer)
        collectives = StageCollectives(request.cluster, self.rows, workload.dtype)
        self._parallel = ParallelPrices(
            request.cluster,
            self._priced,
            self._predicted,
            collectives,
            sends_beside_products=sends_beside_products,
        )
        self.errors = PriceErrors(self._parallel, collectives, workload.run_size)
        self._sources = sources(self.rows, workload.optimizer)
        self.transfers = TransferCosts(request.cluster, self.rows)
        self.corrections = list[str]()  # of layers, by earlier trainings; sentences

    @property
    def fresh(self) -> Prices:
        """Return the same prices, as if no training had ever been remembered."""
        return Prices(
            self.request,
            remembers=False,
            graph_at=self.graph,
            sends_beside_products=self._sends_beside_products,
        )

    def graph(self, microbatch_size: int) -> Graph:
        """Return the model as layers, without weights.

        Raises:
            InputError: it cannot be captured.
        """
        if microbatch_size not in self._graphs:
            self._graphs[microbatch_size] = self._graph_at(microbatch_size)
        return self._graphs[microbatch_size]

    def graph_of(self, num_microbatches: int) -> Graph:
        """Return the model at the microbatch size that follows from their number."""
        return self.graph(self.request.workload.run_size // num_microbatches)

    def table_of(self, num_microbatches: int) -> CostTable:
        """Return what each whole layer costs on each type of device at that microbatch size."""
        return self._parallel.at(self.request.workload.run_size // num_microbatches).table

    def in_one_node(self, priced: PricedProblem) -> list[PricedProblem]:
        """Return the problem on each kind of node alone, where there are several nodes."""
        return inside_one(priced, self.request.cluster) if has_several(self.request.cluster) else []

    def over_nodes(self, priced: PricedProblem, schedules: Sequence[str]) -> OverNodes | None:
        """Return `over_nodes` of a problem; None where there is one node."""
        cluster = self.request.cluster
        if not has_several(cluster):
            return None
        return over_nodes(priced, between_nodes(priced, cluster, self.transfers), cluster, schedules)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The ways in which plans may take devices of the cluster; one, where a stage is one device."""
        parts = parts_of(self.request.cluster)
        if self.request.workload.replan.action == "migrate":  # to nodes of other groups
            parts = tuple(part for part in parts if not any(island.groups for island in part))
        return parts[:1] if self._is_one_device else parts

    @property
    def islands(self) -> tuple[Island, ...]:
        """Groups of nodes on which stages may stay, of types that have several such; none where stages are named."""
        parts = () if self.request.spread.only else self.parts
        return tuple(dict.fromkeys(island for part in parts for island in part if island.groups))

    @property
    def widths_left_out(self) -> str:
        """How stages may take devices of a node, where not every power of two is considered; else ""."""
        return "" if self._is_one_device else widths_left_out(self.parts, self.request.cluster)

    def widths_of(self, priced: PricedProblem) -> str:
        """How stages of this problem's plans may take devices, where not on every node and in every power of two."""
        if self._is_one_device or self.request.spread.only:
            return self.widths_left_out
        part = self.parts[next(part for (*_, part), one in self._posed.items() if one is priced)]
        islands = [str(island) for island in part if island.groups]
        said = [f"each stage is on one of {', '.join(islands)}"] if islands else []
        widths = widths_left_out(self.parts, self.request.cluster, part)
        return " and ".join([*said, *([widths] if widths else [])])

    @property
    def _is_one_device(self) -> bool:
        spread = self.request.spread
        return spread.max_data_parallel == 1 and spread.max_tensor_parallel == 1

    def problems(self, num_microbatches: int) -> tuple[PricedProblem, ...]:
        """Return the problems with so many microbatches, one for each part of the cluster with stages of its own.

        Raises:
            CostError: a number is missing; it names layer and device.
            InputError: no part has a stage as it is wanted.
        """
        if self.request.spread.only:
            return (self.priced(num_microbatches),)
        found, errors = list[PricedProblem](), list[InputError]()
        for part in range(len(self.parts)):
            try:
                one = self.priced(num_microbatches, part=part)
            except InputError as error:
                errors.append(error)
                continue
            if not any(_has_all_of(other, one) for other in found):
                found.append(one)
        if not found:
            raise errors[0]
        return tuple(found)

    def priced(
        self,
        num_microbatches: int,
        slices: tuple[int, ...] = (),
        only: tuple[StageConfiguration, ...] = (),
        part: int = 0,
    ) -> PricedProblem:
        """Return the problem with so many microbatches, and what simulating its plans needs besides.

        Args:
            slices: positions of each slice of a sequence; empty: as the workload says.
            only: these configurations alone; empty: as the request says.
            part: of the cluster, whose devices stages take, unless they are named.

        Raises:
            CostError: a number is missing; it names layer and device.
        """
        key = num_microbatches, slices or slice_lengths(self.request.workload), only, part
        if key not in self._posed:
            taken = None if only or self.request.spread.only else self.parts[part]
            self._posed[key] = self._problem(num_microbatches, slices, only, taken)
        return self._posed[key]

    def of_all_parts(self, num_microbatches: int) -> PricedProblem | None:
        """Return a problem that has the plans of every part, and more, to prove what holds for all of these.

        A stage on one node is on one of its type's islands there, and messages between islands take their links. Not
        all of its plans can be placed, and searches do not know how its devices are counted (`AnyShare`).

        Returns:
            None where types have no islands, or a part has stages that this has not.
        """
        if not self.islands:
            return None
        every, problems = every_part(self.request.cluster), self.problems(num_microbatches)
        joint = self._problem(num_microbatches, (), (), every)
        known, nodes = set(joint.problem.configurations), self.request.cluster.groups
        for one in (one for priced in problems for one in priced.problem.configurations if one not in known):
            islands = [i for i in every if i.device_type == one.device_type and one.num_nodes == 1]
            wide = [i for i in islands if i.groups and max(map(i.on, nodes)) >= one.devices_per_node]
            if not wide or not all(replace(one, groups=island.groups) in known for island in wide):
                return None
        return self._with_links_of_spread(joint)

    def _with_links_of_spread(self, joint: PricedProblem) -> PricedProblem:
        """Return the problem with the links that stages have which are on several islands of their type.

        A stage on the whole type is, unless it has room on one: there it is no better than the island's own.
        """
        problem, cluster = joint.problem, self.request.cluster
        known, spread, every = set(problem.configurations), set[StageConfiguration](), told_apart(cluster)
        for one in (one for one in known if one.num_nodes > 1 and not one.groups):
            islands = [island for island in every if island.device_type == one.device_type]
            roomy = [replace(one, groups=i.groups) for i in islands if _has_room(on_nodes(cluster, i), one)]
            if len(islands) > 1 and known.issuperset(roomy):
                spread.add(one)
        links = joint.accumulate * links_between(cluster, self.transfers, problem.configurations, spread=spread)
        latency_CC, per_byte_CC = links[:, :, 0].copy(), links[:, :, 1].copy()
        raised = replace(problem, link_latency_seconds_CC=latency_CC, link_seconds_per_byte_CC=per_byte_CC)
        return replace(joint, problem=raised)

    def _problem(
        self,
        num_microbatches: int,
        slices: tuple[int, ...],
        only: tuple[StageConfiguration, ...],
        part: Mapping[Island, Share | AnyShare] | None,
    ) -> PricedProblem:
        request = self.request
        graph, types = self.graph_of(num_microbatches), request.cluster.device_counts
        priced = price_problem(
            self._parallel,
            request.cluster,
            request.split(num_microbatches, slices),
            self.transfers,
            replace(request.spread, only=only, also_unsplit=True) if only else request.spread,
            {name: pass_cost(self.rows, name) for name in types},
            {name: backward_parts(self.rows, graph, name) for name in types},
            part,
        )
        most = most_ranks(priced.problem, request.allowed_schedules)
        return replace(priced, problem=replace(priced.problem, max_stages=most))

    def priced_for(self, plan: Plan) -> PricedProblem:
        """Return the problem of a plan; of one whose slices the planner found, with its configurations alone.

        Raises:
            CostError: a number is missing; it names layer and device.
        """
        used = {stage.configuration: None for stage in plan.stages}
        if plan.slices == slice_lengths(self.request.workload):
            problems = self.problems(plan.num_microbatches)
            return next((one for one in problems if used.keys() <= set(one.problem.configurations)), problems[0])
        return self.priced(plan.num_microbatches, plan.slices, tuple(used))

    def assumed_host(self, plan: Plan, step_seconds: float) -> AssumedHost | None:
        """Return the host that was not measured and that launches for most of a plan's step; None: there is none."""
        graph, table = self.graph_of(plan.num_microbatches), self.table_of(plan.num_microbatches)
        types, runs = self.request.cluster.device_types, self.request.workload.accumulate
        found = assumed_host(plan, graph, table, types, self._predicted, runs)
        return found if found is not None and found.is_most_of(step_seconds) else None

    def slice_seconds(self, configuration: StageConfiguration, num_microbatches: int, num_units: int) -> Floats:
        """Return what slices take through all layers, forward and backward, communication left out.

        Returns:
            (U, U): [j − 1, i]: a slice of j units after a context of i, as `plans.slicing.best_slices` wants it.
        """
        size = self.request.workload.run_size // num_microbatches
        return self._parallel.computing.slice_seconds(configuration, size, num_units)

    def sum_seconds(self, stage: Stage, microbatch_size: int, *, at_the_end: bool = False) -> float:
        """Return what is priced for summing a stage's gradients over its replicas, once a step.

        Args:
            at_the_end: what it would be if nothing of it went beside computing.
        """
        span, each_byte = slice(stage.start, stage.stop), ForEachByte.of(self.request.workload.optimizer)
        return self._parallel.sum_seconds(
            stage.configuration, span, microbatch_size, each_byte.gradient_bytes, at_the_end=at_the_end
        )

    def _with_splits(self, microbatch_size: int) -> Graph:
        graph = self._captured(microbatch_size)
        return graph if all(layer.keeps_its_split for layer in graph.layers) else self._splits.added(graph)

    @cached_property
    def _splits(self) -> FoundSplits:
        from dejavu.planning.shardings import FoundSplits  # with torch's own rules: a second to import

        found = FoundSplits(self.request, self.rows, self._captured)
        if self._num_forks > 1:
            found.search([self.request.workload.run_size // count for count in self.request.counts], self._num_forks)
        return found

    def _captured(self, microbatch_size: int) -> Graph:
        if microbatch_size not in self._undeclared:
            self._undeclared[microbatch_size] = self._capture(microbatch_size)
        return self._undeclared[microbatch_size]

    def _capture(self, microbatch_size: int) -> Graph:
        workload = self.request.workload
        one = workload.model_copy(update={"num_microbatches": workload.run_size // microbatch_size})
        try:
            return capture(one, self.request.cluster.kind, kept=KeptInUserCache())
        except CaptureError as error:
            raise InputError(str(error), ("model",)) from error

    def _priced(self, microbatch_size: int) -> PricedParts:
        graph = self.graph(microbatch_size)
        table = cost_table(graph, self.request.cluster, self._sources)
        own = self.request.workload.microbatch_size
        if microbatch_size != own and any(is_prediction(str(source)) for source in table.sources):
            measured = cost_table(self.graph(own), self.request.cluster, self._sources)
            table = scaled(table, graph, measured, self.graph(own), self.request.cluster, self._predicted)
        if self._remembers:
            table, found = remember_stages(table, graph, self.rows, self.request.workload.optimizer)
            self.corrections += [str(one) for one in found if str(one) not in self.corrections]
        return PricedParts(graph, table)


def _has_all_of(one: PricedProblem, other: PricedProblem) -> bool:
    """Return whether every plan of the other problem is one of this."""
    ours, theirs = one.problem, other.problem
    return set(theirs.configurations) <= set(ours.configurations) and all(
        count <= ours.device_counts.get(name, 0) for name, count in theirs.device_counts.items()
    )


def under_gpipe_memory(priced: PricedProblem) -> PricedProblem:
    """Return the problem with all of a step's microbatches in flight, as under no schedule there are more."""
    return replace(priced, problem=replace(priced.problem, schedule="gpipe"))


def price_workload(workload: Workload, cluster: Cluster, database: Path, parallelism: Parallelism) -> PricedProblem:
    """Price one workload at its own number of microbatches.

    Raises:
        CostError: a number is missing; it names layer and device.
    """
    return Prices(PlanRequest(workload, cluster, database, parallelism)).priced(workload.num_microbatches)


def _has_room(nodes: Sequence[int], one: StageConfiguration) -> bool:
    """Return whether nodes with so many devices have room for a stage; blocks of it may share one."""
    return sum(count // one.devices_per_node for count in nodes) >= one.num_nodes
