"""The host's launches: counted alike where they are measured and priced, and felt only where a GPU works faster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from torch import nn

from dejavu.cluster import catalogue
from dejavu.cluster.loader import load_cluster
from dejavu.cost.estimates import PASSES, Estimate
from dejavu.cost.parts import LayerPart, PartPrices, PricedParts
from dejavu.cost.sources.launches import (
    ADDED,
    HOST,
    Pace,
    launching_seconds,
    no_faster,
    num_weights,
    pace_of,
    units_of,
)
from dejavu.cost.sources.predicted import Predicted, layer_kernels
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph, Layer
from dejavu.graphs.kernels import kernel_of
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiling import launches
from dejavu.profiling.launches import BACKWARD_UNITS, FORWARD_UNITS, WEIGHTS
from dejavu.workload import OptimizerSettings, Workload

H100 = catalogue()["H100-SXM5-80GB"]
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
    """Of tiny layers the host's time, of its operators and weights; without a measured pace as before."""
    graph, plain = graph_of(model), Predicted(ProfileDatabase(tmp_path / "none"), OptimizerSettings())
    database = ProfileDatabase(tmp_path / "some")
    measured(database, {"forward": 1e-5, "backward": 2e-5, "optimizer": 3e-5})
    slow = Predicted(database, OptimizerSettings())
    pace = pace_of(database, H100)
    assert pace == Pace(1e-5, 2e-5, 3e-5) and pace_of(plain.database, H100) is None
    for layer in graph.layers:
        for way in PASSES:
            kernels = layer_kernels(layer, way, "float32", OptimizerSettings())
            host = launching_seconds(layer, way, kernels, pace)
            before, after = (one.estimate(layer, way, graph, H100) for one in (plain, slow))
            assert before and after and before.source != HOST
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


def test_an_estimate_is_moved_up_only() -> None:
    estimate = Estimate(2.0, 1.0, 3.0, "learned")
    assert no_faster(estimate, 0.0) is estimate
    assert no_faster(estimate, 1.0) == Estimate(2.0, 1.0, 3.0, "learned")
    higher = no_faster(estimate, 4.0)
    assert higher.seconds == 4.0 and higher.source == HOST and higher.low_seconds < 4.0 < higher.high_seconds
