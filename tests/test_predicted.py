"""Layers as sums of kernels: which source each number takes, and what calibration changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dejavu.cluster import DeviceType, catalogue, this_machine
from dejavu.cost.kernels.calibration import calibration_kernels
from dejavu.cost.sources.launches import launching_seconds
from dejavu.cost.sources.predicted import KernelPrices, Predicted, layer_kernels, optimizer_kernels, summed
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.graphs.kernels import kernel_of
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.workload import OptimizerSettings, Workload
from tests.rows import row

ADAM = OptimizerSettings()
GPUS = ["P100-SXM2-16GB", "V100-SXM2-16GB", "T4", "L4", "A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "MI210"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    options = {"num_blocks": 2, "width": 256, "num_heads": 4}
    return capture(Workload(model_options=options, sequence_length=128, batch_size=16, num_microbatches=4), "cuda")


@pytest.fixture
def database(tmp_path: Path) -> ProfileDatabase:
    return ProfileDatabase(tmp_path / "profiles_db")


def row_of(kernel: Kernel, device: DeviceType, seconds: float, source: str = "measured") -> Measurement:
    return row(
        kind="operator",
        subject=kernel.subject,
        name=f"{kernel.family} {kernel.name}",
        device_type=device.name,
        dtype=kernel.dtype,
        seconds=seconds,
        source=source,
        extra=kernel.to_json(),
    )


def kernels(graph: Graph, direction: str = "forward") -> list[Kernel]:
    found = (kernel_of(op) for layer in graph.layers for op in layer.operators if op.direction == direction)
    return [kernel for kernel in found if kernel is not None]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("direction", ["forward", "backward", "optimizer"])
def test_every_gpu_of_the_catalogue_has_a_price_and_an_interval(
    name: str, direction: str, graph: Graph, database: ProfileDatabase
) -> None:
    for layer in graph.layers:
        found = Predicted(database, ADAM).estimate(layer, direction, graph, catalogue()[name])
        assert found is not None and 0 < found.low_seconds < found.seconds < found.high_seconds < 100 * found.seconds
        peak = catalogue()[name].peak_flops_per_second["float32"]
        assert found.seconds >= layer.flops(direction) / peak


def test_single_precision_is_learned_and_matrix_units_follow_the_roofline(database: ProfileDatabase) -> None:
    workload = Workload(model_options={"num_blocks": 1, "width": 512, "num_heads": 8})
    device = catalogue()["A100-SXM4-80GB"]
    for dtype, wanted in (("float32", {"learned"}), ("bfloat16", {"roofline"})):
        graph = capture(workload.model_copy(update={"dtype": dtype}), "cuda")
        products = [kernel for kernel in kernels(graph) if kernel.family == "matmul"]
        assert set(Predicted(database, ADAM).prices(products, device).source_K) == wanted


def test_a_layer_is_the_sum_of_its_kernels_or_of_their_launches(graph: Graph, database: ProfileDatabase) -> None:
    predicted, device = Predicted(database, ADAM), catalogue()["V100-SXM2-16GB"]
    total, pace = 0.0, predicted.pace(device)
    assert pace is not None
    for layer in graph.layers:
        own = layer_kernels(layer, "forward", graph.dtype, ADAM)
        alone = predicted.prices(own, device).seconds_K.sum()
        found = predicted.estimate(layer, "forward", graph, device)
        assert found is not None
        assert found.seconds == pytest.approx(max(alone, launching_seconds(layer, "forward", own, pace)))
        total += alone
    assert total == pytest.approx(predicted.prices(kernels(graph), device).seconds_K.sum())


def test_a_measured_kernel_is_taken_as_it_is(graph: Graph, database: ProfileDatabase) -> None:
    device = catalogue()["T4"]
    database.append([row_of(kernel, device, 1e-4, "import:somebody") for kernel in set(kernels(graph))])
    found = Predicted(database, ADAM).estimate(graph.layers[0], "forward", graph, device)
    count = sum(kernel_of(op) is not None for op in graph.layers[0].operators if op.direction == "forward")
    assert found is not None and found.source == "measured kernels"
    assert found.seconds == pytest.approx(1e-4 * count)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_few_measured_kernels_move_all_the_others(factor: float, graph: Graph, database: ProfileDatabase) -> None:
    """A device that is twice as fast or slow as thought, everywhere: so are kernels that were not measured."""
    for device in (catalogue()["A100-SXM4-80GB"], next(iter(this_machine().device_types.values()))):
        predicted, probes = Predicted(database, ADAM), calibration_kernels(device)
        products = [kernel for kernel in kernels(graph) if kernel.family == "matmul"]
        before = predicted.prices(products, device).seconds_K
        seconds = predicted.prices(probes, device).seconds_K
        database.append([row_of(kernel, device, factor * s) for kernel, s in zip(probes, seconds, strict=True)])
        moved = predicted.prices(products, device).seconds_K / before
        assert (moved < 0.8).all() if factor < 1 else (moved > 1.25).all()


def test_what_only_the_roofline_knows_is_listed(graph: Graph, database: ProfileDatabase) -> None:
    for name in ("V100-SXM2-16GB", "H100-SXM5-80GB"):
        listed = Predicted(database, ADAM).fallbacks(graph, catalogue()[name])
        assert any("attention" in fallback.kind for fallback in listed)
        assert all(0 <= fallback.share <= 1 and fallback.num_operators > 0 for fallback in listed)
        assert f"on {name}: roofline only" in str(listed[0])
    core = next(iter(this_machine().device_types.values()))
    assert Predicted(database, ADAM).fallbacks(graph, core) == ()  # there the roofline is what is meant


def test_a_dtype_without_a_peak_has_no_price(database: ProfileDatabase) -> None:
    graph = capture(Workload(dtype="bfloat16"), "cuda")
    assert Predicted(database, ADAM).estimate(graph.layers[0], "forward", graph, catalogue()["V100-SXM2-16GB"]) is None


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_optimizer_passes_over_all_weights(name: str, dtype: str, item_bytes: int) -> None:
    passes = optimizer_kernels(1000 * item_bytes, OptimizerSettings(name=name), dtype)  # type: ignore[arg-type]
    assert passes and all(kernel.m == 1000 and kernel.written_bytes == 1000 * item_bytes for kernel in passes)
    assert optimizer_kernels(0, ADAM, dtype) == []
    assert np.sum([kernel.read_bytes for kernel in passes]) >= 2000 * item_bytes


def prices(shared_log: float, count: int = 2) -> KernelPrices:
    """Kernels of 1 s, between half and twice that."""
    one = np.ones(count)
    return KernelPrices(one, one / 2, one * 2, np.full(count, "learned", object), np.full(count, shared_log))


@pytest.mark.parametrize("shared_log", [0.0, 0.1, 0.5, np.inf])
def test_an_interval_is_its_two_parts(shared_log: float) -> None:
    (price, _) = prices(shared_log).prices()
    for below, above in ((price.below_shared, price.above_shared), (price.below_own, price.above_own)):
        assert np.log1p(above) == pytest.approx(-np.log1p(-below))
    assert np.hypot(np.log1p(price.above_shared), np.log1p(price.above_own)) == pytest.approx(np.log(2))
    assert np.log1p(price.above_shared) == pytest.approx(min(shared_log, np.log(2)))


@pytest.mark.parametrize("shared_log", [0.0, 0.3, np.inf])
def test_what_kernels_share_adds_up_and_what_is_their_own_evens_out(shared_log: float) -> None:
    one, other = (Kernel(family="softmax", name=str(k), dtype="float32", m=8, n=8) for k in range(2))
    elsewhere = Kernel(family="matmul", name="mm", dtype="float32", m=8, n=8, k=8)
    price, _ = prices(shared_log).prices()
    same = summed([(one, 1.0, price), (one, 1.0, price)])
    assert same == summed([(one, 2.0, price)])
    different = summed([(one, 1.0, price), (other, 1.0, price)])
    apart = summed([(one, 1.0, price), (elsewhere, 1.0, price)])
    assert apart.high_seconds <= different.high_seconds + 1e-12 <= same.high_seconds + 2e-12
    shared, own = price.above_shared, price.above_own
    assert different.high_seconds == pytest.approx(2 + np.hypot(2 * shared, np.sqrt(2) * own))
    assert apart.high_seconds == pytest.approx(2 + np.sqrt(2) * np.hypot(shared, own))
    assert 0 <= same.low_seconds <= different.low_seconds <= apart.low_seconds + 1e-12
