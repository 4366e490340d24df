"""What a rule of combining gradients is priced at, which stages may have it, and plans that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dejavu.cluster import load_cluster, this_machine
from dejavu.cost import TransferCosts
from dejavu.cost.collectives.inside_stages import COMPARED_BACKWARD, StageCollectives
from dejavu.cost.gradients import NUMBERS_MOVED, adding_seconds, combining_seconds, gathered_bytes
from dejavu.cost.memory import configuration_memory
from dejavu.cost.parallel import ParallelPrices
from dejavu.cost.priced_problem import price_problem
from dejavu.foundation.errors import InputError
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest
from dejavu.plans import StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.profiles import ProfileDatabase
from dejavu.workload import GradientSettings, Workload
from dejavu.workload.loader import load_workload
from tests.test_problem import CLUSTER, NAME, graph_of, prices_of, workload_of

MEAN, ROBUST = GradientSettings(), [GradientSettings(rule=rule) for rule in ("suspicion", "median", "krum")]
FIVE = StageConfiguration(NAME, 1, 4, 4)


def with_rule(settings: GradientSettings) -> Workload:
    return workload_of("gpt").model_copy(update={"gradients": settings})


def priced(settings: GradientSettings, folder: Path, parallelism: Parallelism) -> PricedProblem:
    database = ProfileDatabase(folder)
    prices: ParallelPrices = prices_of("gpt", CLUSTER, database)
    return price_problem(prices, CLUSTER, with_rule(settings), TransferCosts(CLUSTER, database), parallelism)


@pytest.mark.parametrize("count", [3, 4, 8, 64])
def test_a_rule_moves_more_the_more_it_compares(count: int) -> None:
    moved = {rule: numbers(count) for rule, numbers in NUMBERS_MOVED.items()}
    assert moved["mean"] == 0 < moved["suspicion"] < moved["krum"] and moved["suspicion"] < moved["median"]
    assert moved["median"] == moved["trimmed_mean"]


@pytest.mark.parametrize("settings", ROBUST, ids=lambda one: one.rule)
def test_gathering_is_priced_in_place_of_the_sum(settings: GradientSettings) -> None:
    """An all-gather of all replicas' gradients, at whose size its line is fitted."""
    collectives, layers = StageCollectives(CLUSTER, None, "float32"), [64.0 * 2**20] * 12
    for configuration in (FIVE, StageConfiguration(NAME, 3, 4, 12), StageConfiguration(NAME, 3, 4, 3, 4)):
        count = configuration.data_parallel
        ((latency, per_byte, *_),) = collectives.per_step_lines(configuration, layers, 2.0, gathers=True)
        (summed,) = collectives.per_step_lines(configuration, layers, 2.0)
        for size in (layers[0], sum(layers)):
            gathered = collectives.data_seconds(configuration, ("all_gather",), 2.0 * count * size)
            assert latency + per_byte * size == pytest.approx(gathered, rel=0.25)
            assert latency + per_byte * size > summed[0] + summed[1] * size


@pytest.mark.parametrize("level", [1, 2, 3])
def test_shards_are_exchanged_in_place_of_their_sums(level: int) -> None:
    """An all-to-all moves the bytes of a reduce-scatter: once at the end of a step, or in every microbatch."""
    collectives, layers = StageCollectives(CLUSTER, None, "float32"), [64.0 * 2**20] * 12
    configuration = StageConfiguration(NAME, 3, 4, 12, zero_level=level)
    lines = collectives.per_step_lines(configuration, layers, 2.0, gathers=True)
    plain = collectives.per_step_lines(configuration, layers, 2.0)
    weights = [line for line in plain if line.is_before]
    assert [line for line in lines if line.is_before] == weights
    exchanged = [line for line in lines if not line.is_before]
    assert len(exchanged) == (level == 1) and not any(line.hides for line in exchanged)
    assert ("all_to_all" in COMPARED_BACKWARD[level]) == (level > 1)
    size = layers[0]
    seconds = collectives.data_seconds(configuration, ("all_to_all",), size, 2.0)
    links = StageConfiguration(NAME, 3, 4, 12, zero_level=level)
    assert seconds == collectives.seconds(NAME, "all_to_all", (tuple(range(12)),), (3, 4), 12 * 2.0 * size)
    assert collectives.agreeing_seconds(links) > 0 == collectives.agreeing_seconds(replace(links, zero_level=0))
    for line in exchanged:
        assert line.latency_seconds + line.seconds_per_byte * size == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("settings", ROBUST, ids=lambda one: one.rule)
def test_a_replica_combines_its_shard(settings: GradientSettings, level: int) -> None:
    """An N-th of what whole gradients take; from level 2 on all replicas' are held from the first microbatch on."""
    graph, device = graph_of("gpt", 2), CLUSTER.device_types[NAME]
    sharded = replace(FIVE, zero_level=level)
    weights_L = np.array([float(layer.parameter_bytes) for layer in graph.layers])
    whole_L, shard_L = (gathered_bytes(settings, one, weights_L) for one in (FIVE, sharded))
    np.testing.assert_allclose(4 * shard_L, whole_L)
    mean, rule = (configuration_memory(sharded, graph, with_rule(one), device, 0.0) for one in (MEAN, settings))
    more_L = rule.fixed_bytes_L - mean.fixed_bytes_L
    np.testing.assert_allclose(more_L, weights_L if level > 1 else 0.0)
    assert (more_L + rule.step_bytes_L >= shard_L - 1e-6).all()
    seconds_L = [combining_seconds(settings, one, weights_L, device) for one in (FIVE, sharded)]
    added_L = adding_seconds(settings, replace(FIVE, zero_level=2), weights_L, device)
    np.testing.assert_allclose(4 * (seconds_L[1] - added_L * (level == 1)), seconds_L[0])
    assert (adding_seconds(settings, sharded, weights_L, device) == added_L * (level > 1)).all()


def test_a_stage_holds_the_gathered_gradients_beside_its_own() -> None:
    graph, device = graph_of("gpt", 2), CLUSTER.device_types[NAME]
    memories = [configuration_memory(FIVE, graph, with_rule(one), device, 0.0) for one in (MEAN, *ROBUST)]
    weights_L = np.array([float(layer.parameter_bytes) for layer in graph.layers])
    for found, settings in zip(memories[1:], ROBUST, strict=True):
        assert (found.step_bytes_L == gathered_bytes(settings, FIVE, weights_L)).all()
        assert (found.step_bytes_L == 7 * weights_L).all() and (found.step_bytes_L > memories[0].step_bytes_L)[:1].all()
        assert (found.fixed_bytes_L == memories[0].fixed_bytes_L).all()
        for level, held in ((0, 9), (1, 7 / 4)):  # gloo's all-gather has room of its own for what arrives
            one = replace(FIVE, zero_level=level)
            np.testing.assert_allclose(gathered_bytes(settings, one, weights_L, on_cpu=True), held * weights_L)


def test_a_step_is_longer_by_gathering_and_combining(tmp_path: Path) -> None:
    only = Parallelism(only=(FIVE,))
    mean, robust = (priced(one, tmp_path, only).problem.costs for one in (MEAN, ROBUST[0]))
    weights_L = np.array([float(layer.parameter_bytes) for layer in graph_of("gpt", 2).layers])
    arithmetic_L = combining_seconds(ROBUST[0], FIVE, weights_L, CLUSTER.device_types[NAME])
    longer_L = robust.per_step_seconds_CL[0] - mean.per_step_seconds_CL[0]
    assert (longer_L[weights_L > 0] > arithmetic_L[weights_L > 0]).all()
    assert (robust.seconds_CL == mean.seconds_CL).all()


def test_only_stages_that_can_combine_are_considered(tmp_path: Path) -> None:
    found = priced(ROBUST[0], tmp_path, Parallelism()).problem
    assert found.configurations
    assert all(one.data_parallel >= 3 for one in found.configurations)
    assert {one.zero_level for one in found.configurations} == {0, 1, 2, 3}
    assert priced(GradientSettings(rule="zeno"), tmp_path, Parallelism()).problem.max_stages == 1
    with pytest.raises(InputError, match=r"krum with num_suspected 5 is for 13 replicas or more .* has 8; wanted"):
        priced(GradientSettings(rule="krum", num_suspected=5), tmp_path, Parallelism())
    with pytest.raises(InputError, match="2 replicas share theirs; wanted context_parallel 1"):
        priced(ROBUST[0], tmp_path, Parallelism(only=(replace(FIVE, context_parallel=2),)))


def test_a_plan_with_a_rule_has_replicas_in_every_stage() -> None:
    cluster = load_cluster(Path(__file__).resolve().parents[1] / "examples" / "clusters" / "8x8-h200.yaml")
    mlp, steps = load_workload("mlp"), {}
    for settings in (MEAN, ROBUST[0]):
        workload = mlp.model_copy(update={"gradients": settings})
        request = PlanRequest(workload, cluster, searches=("pipedream",), schedules=("1f1b",), microbatches=(8,))
        choice = Planner().plan(replace(request, budget_seconds=1.0))
        steps[settings.rule] = choice.simulated_seconds
        if settings.gathers:
            assert all(stage.configuration.data_parallel >= 3 for stage in choice.plan.stages)
    assert steps["mean"] <= 1.05 * steps["suspicion"]  # within what a second of searching leaves open


def test_cores_are_planned_with_replicas_where_a_rule_wants_them() -> None:
    cluster = this_machine()
    plain, replicated = Parallelism.usual(cluster), Parallelism.usual(cluster, replicas=True)
    assert plain.max_data_parallel == (1 if cluster.kind == "cpu" else None)
    assert replicated == replace(plain, max_data_parallel=None)
