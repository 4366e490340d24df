"""Stage configurations and their costs: against what is known of one device, of memory, and of meshes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost.stage_memory import StagePlace, stage_memory
from dejavu.cluster import Cluster, DeviceType, Link, NodeGroup, catalogue
from dejavu.cluster.islands import Island
from dejavu.cost import CostTable, TransferCosts, cost_table, sources
from dejavu.cost.collectives.beside import BUCKET_BYTES, SLOWED, StepLine, once_a_step, side_by_side
from dejavu.cost.collectives.inside_stages import BACKWARD, FORWARD, Neighbours, StageCollectives, stage_transfer
from dejavu.cost.estimates import MEASURED, EstimateGrid
from dejavu.cost.kernels.sharding import layer_kernels, most_tensor_parallel, sequence_length, split_loss
from dejavu.cost.memory import example_bytes
from dejavu.cost.parallel import ParallelPrices
from dejavu.cost.parts import PricedParts
from dejavu.cost.priced_problem import microbatch_choices, price_problem, split_into
from dejavu.cost.sources.predicted import Predicted
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.graphs.kernels import kernel_of
from dejavu.graphs.split_loss import CROSS_ENTROPY
from dejavu.parallelism import Parallelism
from dejavu.plans import Plan, Problem, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.pricing import price
from dejavu.plans.stage_costs import PlanError
from dejavu.profiles import ProfileDatabase
from dejavu.simulation import simulate_plan
from dejavu.workload import Workload

NAME = "V100-SXM2-16GB"
TEXT = {"data": "synthetic", "synthetic": {"num_classes": 512}, "sequence_length": 64}
WORKLOADS = {
    "gpt": {"model": "gpt", "model_options": {"num_blocks": 3, "width": 128, "num_heads": 8}, **TEXT},
    "t5": {
        "model": "t5",
        "model_options": {"num_blocks": 2, "width": 64, "num_heads": 8, "head_width": 16, "feedforward": 256},
        **TEXT,
    },
    "moe": {"model": "moe", "model_options": {"num_blocks": 2, "width": 64, "num_heads": 4, "num_experts": 4}, **TEXT},
    "llama": {"model": "llama", "model_options": {"num_blocks": 2, "width": 64, "num_kv_heads": 4}, **TEXT},
    "mixtral": {"model": "mixtral", "model_options": {"num_blocks": 2, "width": 64, "num_kv_heads": 4}, **TEXT},
    "cnn": {"model": "cnn", "model_options": {"num_blocks": 3, "width": 16}, "data": "digits"},
}
every_workload = pytest.mark.parametrize("name", ["gpt", "t5", "cnn"])


def cluster_of(*nodes: tuple[int, int], device_type: str = NAME) -> Cluster:
    """Groups of (nodes, devices per node) of one type."""
    groups = tuple(
        NodeGroup(f"g{i}", count, (), ((device_type, each),), Link(150e9, 5e-6))
        for i, (count, each) in enumerate(nodes)
    )
    between = {(a.name, b.name): Link(3e9, 25e-6) for a in groups for b in groups if a.name <= b.name}
    return Cluster("test", groups, {device_type: catalogue()[device_type]}, between)


CLUSTER = cluster_of((3, 4))


@cache
def workload_of(name: str) -> Workload:
    return Workload.model_validate({**WORKLOADS[name], "batch_size": 32, "num_microbatches": 4, "trials": {"count": 0}})


@cache
def graph_of(name: str, microbatch_size: int) -> Graph:
    return capture(split_into(workload_of(name), 32 // microbatch_size), "cuda")


@pytest.fixture
def empty(tmp_path: Path) -> ProfileDatabase:
    return ProfileDatabase(tmp_path / "profiles_db")


def table_of(name: str, microbatch_size: int, cluster: Cluster, database: ProfileDatabase) -> CostTable:
    known = sources(database, workload_of(name).optimizer)
    return cost_table(graph_of(name, microbatch_size), cluster, known)


def prices_of(name: str, cluster: Cluster, database: ProfileDatabase) -> ParallelPrices:
    return ParallelPrices(
        cluster,
        lambda size: PricedParts(graph_of(name, size), table_of(name, size, cluster, database)),
        Predicted(database, workload_of(name).optimizer),
        StageCollectives(cluster, database, "float32"),
    )


EVERYTHING = Parallelism()


def priced_of(
    name: str, database: ProfileDatabase, parallelism: Parallelism = EVERYTHING, cluster: Cluster = CLUSTER
) -> PricedProblem:
    workload = workload_of(name)
    return price_problem(
        prices_of(name, cluster, database), cluster, workload, TransferCosts(cluster, database), parallelism
    )


def assert_equal_columns(found: Problem, c: int, wanted: Problem, d: int) -> None:
    for name, value in vars(wanted.costs).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(getattr(found.costs, name)[c], value[d], rtol=1e-12, err_msg=name)


@every_workload
def test_one_device_costs_what_the_table_says_whatever_else_is_allowed(name: str, empty: ProfileDatabase) -> None:
    table, workload = table_of(name, 8, CLUSTER, empty), workload_of(name)
    priced, many = priced_of(name, empty, Parallelism.one_device()), priced_of(name, empty).problem
    one = priced.problem
    assert one.configurations == (StageConfiguration(NAME),)
    np.testing.assert_array_equal(priced.forward_seconds_CL, table.forward.seconds_LD.T)
    np.testing.assert_array_equal(priced.backward_seconds_CL, table.backward.seconds_LD.T)
    np.testing.assert_array_equal(one.costs.per_step_seconds_CL, table.optimizer.seconds_LD.T)
    first, transfer = many.index(StageConfiguration(NAME)), TransferCosts(CLUSTER, empty)[Island(NAME), Island(NAME)]
    assert_equal_columns(many, first, one, 0)
    for links, wanted in (
        ("link_latency_seconds_CC", transfer.latency_seconds),
        ("link_seconds_per_byte_CC", transfer.seconds_per_byte),
    ):
        assert getattr(many, links)[first, first] == getattr(one, links)[0, 0] == wanted
    count = workload.num_microbatches
    assert (one.max_stages, one.schedule, one.num_microbatches) == (count, workload.searched_schedule, count)


@every_workload
def test_parts_add_up(name: str, empty: ProfileDatabase) -> None:
    priced = priced_of(name, empty)
    np.testing.assert_allclose(priced.forward_seconds_CL + priced.backward_seconds_CL, priced.problem.costs.seconds_CL)
    assert (priced.problem.costs.seconds_CL >= 0).all()


@every_workload
def test_what_may_be_done_is_done_and_nothing_else(name: str) -> None:
    most = most_tensor_parallel(graph_of(name, 8))
    found = Parallelism().configurations(CLUSTER, 8, most)
    assert len(set(found)) == len(found)
    assert {configuration.tensor_parallel for configuration in found} == {t for t in (1, 2, 4) if most % t == 0}
    for configuration in found:
        assert 8 % configuration.data_parallel == 0
        assert configuration.devices_per_node % configuration.tensor_parallel == 0
        assert configuration.zero_level == 0 or configuration.data_parallel > 1
    capped = Parallelism(max_data_parallel=2, max_tensor_parallel=2, recompute=(False,), zero_levels=(0,))
    few = capped.configurations(CLUSTER, 8, most)
    assert set(few) == {
        h for h in found if max(h.data_parallel, h.tensor_parallel) <= 2 and not h.recompute and not h.zero_level
    }


@every_workload
@pytest.mark.parametrize("runs", [2, 3])
def test_several_runs_of_a_schedule_take_so_many_times_as_long(name: str, runs: int, empty: ProfileDatabase) -> None:
    """But for what is done once a step; and they hold no more than one run and the whole step's examples."""
    one = workload_of(name)
    many = one.model_copy(update={"accumulate": runs, "batch_size": runs * one.batch_size})
    prices, transfers = prices_of(name, CLUSTER, empty), TransferCosts(CLUSTER, empty)
    once, often = (price_problem(prices, CLUSTER, w, transfers, EVERYTHING) for w in (one, many))
    count, rng = one.num_microbatches, np.random.default_rng(runs)
    assert (often.problem.num_microbatches, often.accumulate, many.microbatch_size) == (
        count,
        runs,
        one.microbatch_size,
    )
    L, configurations = once.problem.num_layers, once.problem.configurations
    assert often.problem.configurations == configurations
    small = [configuration for configuration in configurations if configuration.num_devices <= 6]
    more = example_bytes(many) - example_bytes(one)
    for _ in range(20):
        cut = int(rng.integers(1, L))
        ends = [small[int(rng.integers(len(small)))] for _ in range(2)]
        plan = Plan((Stage(0, cut, ends[0]), Stage(cut, L, ends[1])), "1f1b", count)
        short, long = (simulate_plan(priced, plan) for priced in (once, often))
        updates = [
            once.problem.costs.per_step_seconds(stage.start, stage.stop, once.problem.index(stage.configuration))
            for stage in plan.stages
        ]
        assert runs * short.step_seconds - (runs - 1) * max(updates) <= long.step_seconds * (1 + 1e-9)
        assert long.step_seconds <= (runs * short.step_seconds - (runs - 1) * min(updates)) * (1 + 1e-9)
        held = zip(*(price(priced.problem, plan).peak_bytes for priced in (once, often)), strict=True)
        for (before, after), end in zip(held, ends, strict=True):
            assert before < after <= (before + more / end.example_parts) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "length"), [("gpt", 64), ("llama", 64), ("mixtral", 64), ("t5", 0), ("moe", 0), ("cnn", 0)]
)
def test_a_sequence_is_split_where_all_layers_can(name: str, length: int) -> None:
    graph = graph_of(name, 8)
    assert sequence_length(graph) == length
    most = most_tensor_parallel(graph)
    found = Parallelism().configurations(CLUSTER, 8, most, length)
    plain = [configuration for configuration in found if not configuration.sequence_parallel]
    assert set(plain) == set(Parallelism().configurations(CLUSTER, 8, most))
    split = {configuration for configuration in found if configuration.sequence_parallel}
    assert split == {replace(p, sequence_parallel=True) for p in plain if length and p.tensor_parallel > 1}
    odd = Parallelism().configurations(CLUSTER, 8, most, 63)
    assert not any(configuration.sequence_parallel for configuration in odd)
    with pytest.raises(PlanError, match="wanted more than one"):
        StageConfiguration(NAME, sequence_parallel=True)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_split_sequence_holds_less_and_sends_the_same(name: str, empty: ProfileDatabase) -> None:
    both = priced_of(name, empty, Parallelism(also_unsplit=True))
    costs, problem = both.problem.costs, both.problem
    collectives, layers = StageCollectives(CLUSTER, empty, "float32"), graph_of(name, 8).layers
    prices = prices_of(name, CLUSTER, empty)
    pairs = [
        (c, problem.index(replace(configuration, sequence_parallel=False)))
        for c, configuration in enumerate(problem.configurations)
        if configuration.sequence_parallel
    ]
    assert pairs
    for split, whole in pairs:
        t = problem.configurations[split].tensor_parallel
        for table in ("message_bytes_CL1", "fixed_bytes_CL", "step_bytes_CL"):
            assert (getattr(costs, table)[split] <= getattr(costs, table)[whole]).all()
        held, held_whole = (costs.activation_bytes_CL[c] for c in (split, whole))
        most, most_whole = (held + costs.temporary_bytes_CL[split], held_whole + costs.temporary_bytes_CL[whole])
        assert (held[:-1] < held_whole[:-1]).all() and (held >= held_whole / t).all() and (most <= most_whole).all()
        configuration = problem.configurations[split]
        if configuration.data_parallel == 1 and not configuration.recompute:
            # Norms and additions are of the own tokens, or of all.
            own, all_ = (prices.computing.passes(problem.configurations[c], 8) for c in (split, whole))
            longer = costs.seconds_CL[split] - costs.seconds_CL[whole]
            longer -= own.forward_L + own.backward_L - all_.forward_L - all_.backward_L
            for k, layer in enumerate(layers):
                shares = (*layer.tensor_parallel.forward_sums, *layer.tensor_parallel.backward_sums)
                sizes = [share * layer.output_bytes for share in shares]
                parts, sums = (
                    sum(collectives.tensor_seconds(configuration, sizes, one) for one in names)
                    for names in (("reduce_scatter", "all_gather"), ("all_reduce",))
                )
                assert longer[k] == pytest.approx(parts - sums, abs=1e-12)
    only = priced_of(name, empty, Parallelism(sequence_parallel=(False,)))
    for c, configuration in enumerate(only.problem.configurations):
        assert (only.problem.costs.seconds_CL[c] == costs.seconds_CL[problem.index(configuration)]).all()
    offered = set(priced_of(name, empty).problem.configurations)
    assert offered <= set(problem.configurations)
    assert all(replace(c, sequence_parallel=True) in offered for c in offered if c.tensor_parallel > 1)


@pytest.mark.parametrize("name", ["gpt", "t5", "cnn"])
def test_memory_is_never_less_than_the_stage_s(name: str, empty: ProfileDatabase) -> None:
    workload, rng = workload_of(name), np.random.default_rng(0)
    problem = priced_of(name, empty).problem
    for _ in range(300):
        c = int(rng.integers(len(problem.configurations)))
        configuration = problem.configurations[c]
        layers = graph_of(name, 8 // configuration.data_parallel).layers
        start, stop = sorted(rng.choice(len(layers) + 1, 2, replace=False).tolist())
        held = int(rng.integers(1, workload.num_microbatches + 1))
        exact = stage_memory(
            layers[start:stop],
            configuration,
            StagePlace(
                microbatches_in_flight=held,
                num_microbatches=workload.num_microbatches,
                is_first=start == 0,
                is_last=stop == len(layers),
                example_bytes=example_bytes(workload) / configuration.data_parallel,
            ),
            workload.optimizer,
            foreach=True,
        ).peak_bytes
        assert problem.costs.peak_bytes(start, stop, c, held) >= exact * (1 - 1e-9), (
            str(configuration),
            start,
            stop,
            held,
        )


@every_workload
def test_more_replicas_never_hold_more_activations(name: str, empty: ProfileDatabase) -> None:
    problem = priced_of(name, empty).problem
    for a, configuration in enumerate(problem.configurations):
        for b, other in enumerate(problem.configurations):
            ways = [(one.tensor_parallel, one.recompute, one.sequence_parallel) for one in (configuration, other)]
            if ways[0] == ways[1] and configuration.data_parallel < other.data_parallel:
                held = problem.costs.activation_bytes_CL
                assert (held[b] <= held[a]).all()


def test_zero_shards_state_and_the_optimizer(empty: ProfileDatabase) -> None:
    problem = priced_of("gpt", empty).problem
    levels = [problem.index(StageConfiguration(NAME, 1, 4, 4, 1, False, level)) for level in range(4)]
    fixed = problem.costs.fixed_bytes_CL[levels].sum(axis=1)
    assert (np.diff(fixed) < 0).all()
    weights = float(sum(layer.parameter_bytes for layer in graph_of("gpt", 2).layers))
    # At levels 1 and 2 a device has its shard of the weights beside the gathered ones, a fourth more.
    assert fixed.tolist() == pytest.approx([4 * weights, 2.75 * weights, 2 * weights, weights])
    busy = problem.costs.seconds_CL[levels].sum(axis=1)
    assert busy[0] == busy[1] < busy[2] < busy[3]  # gathers and scatters in every microbatch from level 2 on


def test_sums_inside_a_node_make_tensor_parallel_dearer_than_its_computing(empty: ProfileDatabase) -> None:
    slow = replace(CLUSTER, groups=(replace(CLUSTER.groups[0], link=Link(1e9, 5e-6)),))
    configuration = StageConfiguration(NAME, 1, 4, 1, 4)
    fast, dear = (priced_of("gpt", empty, cluster=cluster).problem for cluster in (CLUSTER, slow))
    assert fast.costs.stage_seconds(0, 5, fast.index(configuration)) < dear.costs.stage_seconds(
        0, 5, dear.index(configuration)
    )


def test_a_line_stands_for_the_replicas_sum() -> None:
    """Once a step, as layers that add up: near the collective's own price over the range of sizes."""
    collectives = StageCollectives(CLUSTER, None, "float32")
    for configuration in (StageConfiguration(NAME, 1, 4, 4), StageConfiguration(NAME, 3, 4, 3, 4)):
        layers = [64 * 2**20] * 24
        ((latency, per_byte, *_),) = collectives.per_step_lines(configuration, layers)
        for count in (1, 6, 24):
            size = sum(layers[:count])
            assert latency + per_byte * size == pytest.approx(
                collectives.data_seconds(configuration, ("all_reduce",), size), rel=0.25
            )


def test_measured_microbatches_stay_measured(empty: ProfileDatabase) -> None:
    """Half of a measured microbatch: measured × what predictions say of the ratio."""
    plain = prices_of("gpt", CLUSTER, empty)

    def doubled(size: int) -> PricedParts:
        graph, table = plain.at(size)
        if size != 8:
            return PricedParts(graph, table)
        grid = table.forward
        measured = EstimateGrid(
            2 * grid.seconds_LD, grid.low_seconds_LD, grid.high_seconds_LD, np.full(grid.source_LD.shape, MEASURED)
        )
        return PricedParts(graph, replace(table, forward=measured))

    seen = ParallelPrices(CLUSTER, doubled, Predicted(empty, workload_of("gpt").optimizer), plain._collectives)
    hows = [StageConfiguration(NAME, 1, r * t, r, t) for r, t in ((1, 1), (2, 1), (1, 2), (2, 2))]
    known, guessed = (prices.costs(hows, workload_of("gpt")) for prices in (seen, plain))
    table = plain.at(8).table
    computing = table.forward.seconds_LD[:, 0]
    assert known.forward_seconds_CL[0] == pytest.approx(2 * computing)
    assert known.forward_seconds_CL[1] == pytest.approx(2 * guessed.forward_seconds_CL[1], rel=1e-6)
    np.testing.assert_allclose(known.backward_seconds_CL, guessed.backward_seconds_CL)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["gpt", "t5", "moe", "llama", "mixtral"])
def test_parts_of_a_layer_make_the_whole(name: str, degree: int) -> None:
    """All devices together do the layer's work, and no more than padding on top."""
    for layer in graph_of(name, 8).layers:
        for direction in ("forward", "backward"):
            whole = list(layer_kernels(layer, direction))
            parts = list(layer_kernels(layer, direction, degree))
            if loss := split_loss(layer, direction, degree):  # it has kernels of its own
                own = {kernel_of(one) for one in layer.operators if one.kind in CROSS_ENTROPY}
                whole = [kernel for kernel in whole if kernel not in own]
                parts = parts[len(list(loss.kernels(direction))) :]
            assert [k.name for k in parts] == [k.name for k in whole]
            for part, kernel in zip(parts, whole, strict=True):
                assert kernel.flops * (1 - 1e-9) <= degree * part.flops <= kernel.flops * 1.2 + 1
                assert part.read_bytes <= kernel.read_bytes
                assert part.written_bytes <= kernel.written_bytes


def test_a_layer_that_cannot_be_split_is_whole_on_each() -> None:
    layer = graph_of("cnn", 8).layers[1]
    assert list(layer_kernels(layer, "forward", 4)) == list(layer_kernels(layer, "forward"))
    assert most_tensor_parallel(graph_of("cnn", 8)) == 1


def test_messages_between_stages_of_several_devices(empty: ProfileDatabase) -> None:
    transfers = TransferCosts(CLUSTER, empty)
    inside, between = CLUSTER.groups[0].link, CLUSTER.links_between["g0", "g0"]

    def per_byte(a: StageConfiguration, b: StageConfiguration) -> float:
        return stage_transfer(CLUSTER, Neighbours.of(CLUSTER, transfers, Island(NAME), Island(NAME)), a, b)[1]

    one, pair, two, three = (
        StageConfiguration(NAME),
        StageConfiguration(NAME, 1, 2, 2),
        StageConfiguration(NAME, 2, 4, 8),
        StageConfiguration(NAME, 3, 4, 3, 4),
    )
    assert per_byte(one, pair) == pytest.approx(0.5 / inside.bytes_per_second)  # two links at once
    assert per_byte(pair, pair) == pytest.approx(0.5 / inside.bytes_per_second)
    shards = StageConfiguration(NAME, 1, 2, 1, 2)
    in_parts = replace(shards, sequence_parallel=True)
    assert per_byte(shards, shards) == pytest.approx(1 / inside.bytes_per_second)  # each has all of it
    assert per_byte(in_parts, in_parts) == pytest.approx(0.5 / inside.bytes_per_second)
    assert per_byte(in_parts, shards) == per_byte(one, in_parts) == pytest.approx(1 / inside.bytes_per_second)
    assert per_byte(two, pair) == per_byte(pair, two) == pytest.approx(1 / between.bytes_per_second)
    assert per_byte(two, three) == pytest.approx(0.5 / between.bytes_per_second)  # two cards on the side with fewer


def test_numbers_of_microbatches() -> None:
    workload = Workload(batch_size=48, num_microbatches=12)
    assert microbatch_choices(workload) == (1, 2, 4, 8, 12, 16)
    assert split_into(workload, 3).microbatch_size == 16
    with pytest.raises(InputError, match="batch_size 48 does not divide into 5"):
        split_into(workload, 5)


def test_what_parallelism_refuses() -> None:
    with pytest.raises(InputError, match="max_data_parallel is 0"):
        Parallelism(max_data_parallel=0)
    with pytest.raises(InputError, match="zero_levels"):
        Parallelism(zero_levels=(4,))


def test_a_device_without_peaks_cannot_hold_parts(empty: ProfileDatabase) -> None:
    unknown: DeviceType = replace(catalogue()[NAME], peak_flops_per_second={})
    cluster = replace(CLUSTER, device_types={NAME: unknown})
    prices = prices_of("gpt", CLUSTER, empty)
    blind = ParallelPrices(cluster, prices.at, Predicted(empty, workload_of("gpt").optimizer), prices._collectives)
    with pytest.raises(Exception, match="parts of layers on 'V100-SXM2-16GB' cannot be priced"):
        blind.costs([StageConfiguration(NAME, 1, 2, 1, 2)], workload_of("gpt"))


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_beside_computing_takes_no_less_than_either_and_no_more_than_both(seed: int) -> None:
    rng = np.random.default_rng(seed)
    computed, sent = rng.exponential(1.0, 50), rng.exponential(1.0, 50) * rng.integers(0, 2, 50)
    both = side_by_side(computed, sent, overlaps=True)
    assert (both >= np.maximum(computed, sent)).all() and (both <= computed + sent).all()
    assert (both[sent == 0] == computed[sent == 0]).all()
    assert (side_by_side(computed, sent, overlaps=False) == computed + sent).all()


@pytest.mark.parametrize("seed", range(20))
def test_what_replicas_say_once_a_step_hides_behind_one_pass_and_its_last_message_behind_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    L = int(rng.integers(1, 257))
    weights = rng.integers(1, 2**28, L) * rng.integers(0, 2, L).astype(float)
    forward, backward = rng.exponential(0.05, L), rng.exponential(0.1, L)
    per_byte, latency = 10.0 ** rng.uniform(-11, -8), rng.exponential(1e-4)
    for is_before, computed in ((False, backward), (True, forward)):
        line = StepLine(latency, per_byte, is_before)
        at_the_end = once_a_step([line], weights, forward, backward, overlaps=False)
        beside = once_a_step([line], weights, forward, backward, overlaps=True)
        sent = per_byte * weights
        assert at_the_end[0] == latency and at_the_end[1] == pytest.approx(sent)
        assert beside[0] == pytest.approx(latency + per_byte * min(weights.mean(), BUCKET_BYTES))
        assert (beside[1] <= sent * (1 + 1e-9)).all() and (
            beside[1] >= SLOWED * np.minimum(sent, computed) * 0.999
        ).all()
        assert (computed + beside[1] >= np.maximum(computed, sent) * 0.999).all()
        # A rule compares gradients when all are there; a pass that takes no time hides nothing.
        compared = once_a_step([line._replace(hides=False)], weights, forward, backward, overlaps=True)
        assert compared[0] == latency and compared[1] == pytest.approx(sent)
        alone = once_a_step([line], weights, 0 * forward, 0 * backward, overlaps=True)
        assert alone[1] == pytest.approx(sent)


@every_workload
def test_sums_of_replicas_are_priced_alike_by_the_step_and_by_themselves(name: str, empty: ProfileDatabase) -> None:
    prices, workload = prices_of(name, CLUSTER, empty), workload_of(name)
    ways = [StageConfiguration(NAME, 1, 4, 4, 1, False, level) for level in (0, 1)]
    costs = prices.costs(ways, workload).costs
    for c, way in enumerate(ways):
        for span in (slice(0, 1), slice(1, 4), slice(0, len(graph_of(name, 2).layers))):
            rest = prices.computing.passes(way, workload.microbatch_size).optimizer_L[span].sum()
            own = costs.per_step_seconds_CL[c, span].sum() + costs.per_step_latency_seconds_C[c] - rest
            told = prices.sum_seconds(way, span, workload.microbatch_size, 1.0)
            assert told == pytest.approx(own, rel=1e-6, abs=1e-9)
            assert told <= prices.sum_seconds(way, span, workload.microbatch_size, 1.0, at_the_end=True) * 1.5


@every_workload
def test_gathers_of_replicas_go_beside_computing(name: str, empty: ProfileDatabase) -> None:
    priced, layers = priced_of(name, empty), graph_of(name, 2).layers
    plain = priced.problem.index(StageConfiguration(NAME, 1, 4, 4, 1))
    collectives = StageCollectives(CLUSTER, empty, "float32")
    for level in (1, 2, 3):
        configuration = StageConfiguration(NAME, 1, 4, 4, 1, False, level)
        c = priced.problem.index(configuration)
        for names, found in ((FORWARD, priced.forward_seconds_CL), (BACKWARD, priced.backward_seconds_CL)):
            sent = [collectives.data_seconds(configuration, names[level], layer.parameter_bytes) for layer in layers]
            np.testing.assert_allclose(found[c], side_by_side(found[plain], np.array(sent), overlaps=True), rtol=1e-9)


def test_lanes_are_cards_and_senders() -> None:
    way = StageConfiguration(NAME, 2, 8, 4, 4)
    assert way.senders_per_node == 2 and replace(way, sequence_parallel=True).senders_per_node == 8
    for cards, lanes in ((1 / 8, 2.0), (0.25, 4.0), (1.0, 4.0)):
        assert way.lanes(cards) == lanes
    assert replace(way, sequence_parallel=True).lanes(1.0) == 16.0


@pytest.mark.parametrize("name", ["gpt", "t5", "cnn"])
def test_what_is_recomputed_counts_in_the_first_part_of_a_backward_pass(name: str, empty: ProfileDatabase) -> None:
    priced = priced_of(name, empty, Parallelism(recompute=(False, True), also_unsplit=True))
    kept = [replace(one, recompute=False) for one in priced.problem.configurations]
    # Where weights are gathered beside computing, what is computed again hides some of it.
    pairs = [
        (c, kept[c]) for c, one in enumerate(priced.problem.configurations) if one.recompute and not one.zero_level
    ]
    pairs = [(c, priced.problem.index(other)) for c, other in pairs if other in priced.problem.configurations]
    assert pairs
    for c, other in pairs:
        again_L = priced.backward_seconds_CL[c] - priced.backward_seconds_CL[other]
        more_L2 = priced.parts_seconds_CL2[c] - priced.parts_seconds_CL2[other]
        runs_L = np.isfinite(again_L)
        assert (again_L[runs_L][1:-1] > 0).all()
        np.testing.assert_allclose(more_L2[runs_L, 0], again_L[runs_L], rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(more_L2[runs_L, 1], 0.0, atol=1e-12)
