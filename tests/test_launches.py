"""The host's launches: counted alike where they are measured and priced, and felt only where a GPU works faster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dejavu
from dejavu.cluster import catalogue
from dejavu.cluster.loader import load_cluster
from dejavu.cost.estimates import MEASURED, PASSES, CostTable, Estimate, EstimateGrid
from dejavu.cost.parts import LayerPart, PartPrices, PricedParts
from dejavu.cost.sources.assumed_hosts import assumed_host
from dejavu.cost.sources.launches import (
    ADDED,
    HOST,
    KNOWN,
    Pace,
    launching_seconds,
    no_faster,
    num_weights,
    pace_of,
    units_of,
)
from dejavu.cost.sources.predicted import Predicted, layer_kernels, summed
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph, Layer
from dejavu.graphs.kernels import kernel_of
from dejavu.planning.planner import PlanOptions
from dejavu.planning.sentences import reason, what_hosts_are_assumed
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, default_schedules
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiling import launches
from dejavu.profiling.launches import BACKWARD_UNITS, FORWARD_UNITS, WEIGHTS
from dejavu.workload import OptimizerSettings, Workload
from tests.conftest import some

H100 = catalogue()["H100-SXM5-80GB"]
GPUS = [name for name, device in catalogue().items() if device.kind != "cpu"]
MODELS = {
    "gpt": {"num_blocks": 2, "width": 64, "num_heads": 4},
    "llama": {"num_blocks": 2, "width": 64, "num_heads": 4, "num_kv_heads": 2, "feedforward": 128},
    "cnn": {"num_blocks": 2, "width": 16},
}


def graph_of(model: str, microbatch_size: int = 2) -> Graph:
    synthetic = {"num_classes": 10, "image_shape": (3, 16, 16)} if model == "cnn" else {"num_classes": 50}
    more = {} if model == "cnn" else {"sequence_length": 32}
    workload = Workload(
        model=model, model_options=MODELS[model], data="synthetic", synthetic=synthetic,
        batch_size=2 * microbatch_size, num_microbatches=2, **more,
    )  # fmt: skip
    return capture(workload, "cuda")


def table_of(graph: Graph, source: str) -> CostTable:
    shape = (len(graph.layers), 1)
    zeros = np.zeros(shape)
    grid = EstimateGrid(zeros, zeros, zeros, np.full(shape, source))
    return CostTable(tuple(layer.name for layer in graph.layers), (H100.name,), grid, grid, grid)


def measured(database: ProfileDatabase, seconds: dict[str, float]) -> None:
    database.append(
        Measurement(
            kind="launch", subject=subject, name=subject, device_type=H100.name, dtype="float32", seconds=taken,
            repeats=9, host_fingerprint="none", torch_version="none", source="measured", how="made up",
            measured_at=datetime(2026, 1, 1, tzinfo=UTC),
        )
        for subject, taken in seconds.items()
    )  # fmt: skip


def blocks_and_a_head() -> nn.Sequential:
    return nn.Sequential(*launches.blocks(), nn.Flatten(), nn.Linear(launches.ROWS * launches.WIDTH, 2))


def test_the_block_that_measures_is_counted_as_layers_are() -> None:
    """Its constants are what capturing it and counting it as any layer gives."""
    workload = Workload(
        model=f"{__name__}:blocks_and_a_head", data="synthetic", batch_size=2, num_microbatches=2,
        synthetic={"num_classes": 2, "image_shape": (1, launches.ROWS, launches.WIDTH)},
    )  # fmt: skip
    block = capture(workload, "cuda").layers[1]
    forward, backward = (layer_kernels(block, way, "float32", OptimizerSettings()) for way in PASSES[:2])
    assert units_of(forward, "forward") == pytest.approx(FORWARD_UNITS)
    assert num_weights(block) == WEIGHTS == len(list(launches.Block().parameters()))
    assert units_of(backward, "backward") + ADDED * WEIGHTS == pytest.approx(BACKWARD_UNITS)


def test_measuring_gives_three_figures_of_a_host() -> None:
    found = launches.launches(torch.device("cpu"))
    assert set(found) == {"forward", "backward", "optimizer"}
    assert all(len(seconds) == launches.REPEATS and min(seconds) > 0 for seconds in found.values())


@pytest.mark.integration
def test_its_process_gives_rows_that_the_database_takes(tmp_path: Path) -> None:
    database = ProfileDatabase(tmp_path)
    rows = list(launches.measure_launches("cpu"))
    database.append(rows)
    assert {row.subject for row in rows} == {"forward", "backward", "optimizer"}
    assert database.check() == []


@pytest.mark.parametrize("model", MODELS)
def test_a_pass_takes_its_launches_where_they_take_longer(model: str, tmp_path: Path) -> None:
    """Of tiny layers the host's time, of its operators and weights; the known host's where none was measured."""
    graph, plain = graph_of(model), Predicted(ProfileDatabase(tmp_path / "none"), OptimizerSettings())
    database = ProfileDatabase(tmp_path / "some")
    measured(database, {"forward": 1e-5, "backward": 2e-5, "optimizer": 3e-5})
    slow = Predicted(database, OptimizerSettings())
    pace = pace_of(database, H100)
    assert pace and pace.is_measured and pace_of(plain.database, H100) == KNOWN
    for name, own in (("forward", 1e-5), ("backward", 2e-5), ("weight", 3e-5)):
        assert getattr(pace, f"{name}_seconds") ** 2 == pytest.approx(own * getattr(KNOWN, f"{name}_seconds"))
    for layer in graph.layers:
        for way in PASSES:
            kernels = layer_kernels(layer, way, "float32", OptimizerSettings())
            host = launching_seconds(layer, way, kernels, pace)
            before = summed(zip(kernels, repeat(1.0), plain.prices(kernels, H100).prices()))
            other, after = (one.estimate(layer, way, graph, H100) for one in (plain, slow))
            assert after and other
            assert other.seconds == pytest.approx(max(before.seconds, launching_seconds(layer, way, kernels, KNOWN)))
            if host > before.seconds:  # somebody else's host says less
                assert other.high_seconds / other.seconds > after.high_seconds / after.seconds
            assert after.seconds == pytest.approx(max(before.seconds, host))
            assert after.low_seconds <= after.seconds <= after.high_seconds
            assert (after.source == HOST) == (host > before.seconds)
            assert slow.estimate(layer, way, graph, H100) == slow.estimate(replace(layer, name="x"), way, graph, H100)


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_counted_as_the_module_has_them(model: str) -> None:
    layers: tuple[Layer, ...] = graph_of(model).layers
    built = {"gpt": (2, 12, 2), "llama": (1, 9, 2), "cnn": (4, 4, 2)}[model]  # first, middle and last layer's tensors
    assert (num_weights(layers[0]), num_weights(layers[1]), num_weights(layers[-1])) == pytest.approx(built, abs=1)


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_part_of_a_layer_is_launched_as_often(model: str, degree: int, tmp_path: Path) -> None:
    """Tensor parallelism makes kernels smaller, not fewer: a host that is slow stays what is waited for."""
    cluster = load_cluster(Path(__file__).parents[1] / "examples" / "clusters" / "h100-and-l4.yaml")
    graph = graph_of(model)
    database = ProfileDatabase(tmp_path / "db")
    measured(database, {"forward": 1e-4, "backward": 1e-4, "optimizer": 1e-4})
    pace = pace_of(database, H100)
    assert pace
    parts = PartPrices(cluster, lambda size: PricedParts(graph, None), Predicted(database, OptimizerSettings()))  # type: ignore[arg-type]
    found = parts.prediction(LayerPart(H100.name, graph.microbatch_size, degree))
    for k, layer in enumerate(graph.layers):
        for way, seconds_L in zip(PASSES, found, strict=True):
            kernels = layer_kernels(layer, way, "float32", OptimizerSettings())
            assert seconds_L[k] >= 0.9 * launching_seconds(layer, way, kernels, pace)


def test_of_compiled_layers_and_cores_nothing_is_known(tmp_path: Path) -> None:
    layer = graph_of("gpt").layers[1].compiled()
    kernels = [kernel for one in layer.operators if (kernel := kernel_of(one))]
    pace = Pace(1.0, 1.0, 1.0)
    assert (
        launching_seconds(layer, "forward", kernels, pace) == launching_seconds(layer, "backward", kernels, pace) == 0
    )
    measured(ProfileDatabase(tmp_path), {"forward": 1e-5, "backward": 2e-5, "optimizer": 3e-5})
    assert pace_of(ProfileDatabase(tmp_path), replace(H100, kind="cpu")) is None


@pytest.mark.parametrize("name", some(GPUS, ["T4", "H100-SXM5-80GB", "MI300X"]))
def test_every_gpu_waits_for_its_host(name: str, tmp_path: Path) -> None:
    """Whose it is, AMD's as well: the same host launches through the same torch."""
    graph, device = graph_of("gpt"), catalogue()[name]
    predicted = Predicted(ProfileDatabase(tmp_path), OptimizerSettings())
    for way in PASSES:
        kernels = layer_kernels(graph.layers[1], way, graph.dtype, OptimizerSettings())
        found = predicted.estimate(graph.layers[1], way, graph, device)
        assert found is not None and found.seconds >= launching_seconds(graph.layers[1], way, kernels, KNOWN)


def test_an_estimate_is_moved_up_only() -> None:
    estimate = Estimate(2.0, 1.0, 3.0, "learned")
    assert no_faster(estimate, 0.0) is estimate
    assert no_faster(estimate, 1.0) == Estimate(2.0, 1.0, 3.0, "learned")
    higher = no_faster(estimate, 4.0)
    assert higher.seconds == 4.0 and higher.source == HOST and higher.low_seconds < 4.0 < higher.high_seconds


@pytest.mark.parametrize("schedule", default_schedules())
def test_a_plan_says_what_hosts_launch_that_were_not_measured(schedule: str, tmp_path: Path) -> None:
    """Every rank's launches, by hand, under every schedule; nothing where the pace was measured, or the layers were."""
    graph, types, settings = graph_of("gpt", 1), {H100.name: H100}, OptimizerSettings()
    database = ProfileDatabase(tmp_path)
    L, num_stages = len(graph.layers), 2 * SCHEDULES[schedule].stages_per_rank
    bounds = [L * s // num_stages for s in range(num_stages + 1)]
    one = StageConfiguration(device_type=H100.name)
    stages = tuple(Stage(a, b, one) for a, b in pairwise(bounds))
    plan = Plan(stages=stages, num_microbatches=4, schedule=schedule)
    table, predicted = table_of(graph, "roofline"), Predicted(database, settings)
    found = assumed_host(plan, graph, table, types, predicted)
    assert found is not None and found.device_type == H100.name

    def seconds(k: int) -> float:
        passes = {name: layer_kernels(graph.layers[k], name, graph.dtype, settings) for name in PASSES}
        each = {name: launching_seconds(graph.layers[k], name, kernels, KNOWN) for name, kernels in passes.items()}
        return 4 * (each["forward"] + each["backward"]) + each["optimizer"]

    ranks = [sum(seconds(k) for s in own for k in range(bounds[s], bounds[s + 1])) for own in plan.ranks]
    assert found.launching_seconds == pytest.approx(max(ranks), rel=1e-12)
    assert assumed_host(plan, graph, table_of(graph, MEASURED), types, predicted) is None
    measured(database, {"forward": 1e-6, "backward": 1e-6, "optimizer": 1e-6})
    assert assumed_host(plan, graph, table, types, Predicted(database, settings)) is None


def test_small_models_wait_for_hosts_wherever_they_are_planned() -> None:
    """A small model's step is launching, and the sentence says whose; a large model's is not, and nothing is said."""
    cluster = "examples/clusters/8x8-h200.yaml"
    asked: PlanOptions = {"searches": ("uniform",), "microbatches": (1,), "budget_seconds": 0.5}
    small = dejavu.plan("llama", cluster, **asked)
    assert small.assumed_host is not None
    assert small.step_seconds >= small.assumed_host.launching_seconds > small.step_seconds / 2
    assert small.range_seconds.low < small.step_seconds < small.range_seconds.high
    assert "launch as fast as an H200's" in what_hosts_are_assumed(small) in reason(small)
    large = Workload(
        model="llama", model_options={"num_blocks": 4, "width": 8192, "num_heads": 64}, data="synthetic",
        synthetic={"num_classes": 32000}, sequence_length=4096, batch_size=64, num_microbatches=1, dtype="bfloat16",
    )  # fmt: skip
    assert (
        dejavu.plan(large, cluster, searches=("uniform",), microbatches=(1,), budget_seconds=0.5).assumed_host is None
    )
