"""Predicted memory: against the real allocator, formulas, and the sums that plans are priced with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.cost._memory_rank import allocator_peak_bytes
from benchmarks.cost.memory import Case, case_rows, planned_costs
from benchmarks.cost.stage_memory import StageMemory, StagePlace, fixed_bytes, stage_memory
from benchmarks.pipeline.plans import one_device
from dejavu.cost.memory import example_bytes
from dejavu.cost.memory.layers import ForEachByte, cast_bytes, layer_activation_bytes
from dejavu.foundation.registry import named
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import DTYPES, Graph, Layer
from dejavu.graphs.liveness import ARRIVING, INPUT, OUTPUT
from dejavu.init import Draw
from dejavu.plans import StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.training import build_layers
from dejavu.workload import OptimizerSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of
from tests.conftest import some

ADAM, SGD = OptimizerSettings(), OptimizerSettings(name="sgd")
MASTERS = OptimizerSettings(master_weights=True)


def small(model: str, options: dict[str, Any], **fields: Any) -> Workload:
    return Workload(model=model, model_options=options, batch_size=24, num_microbatches=6, **fields)


TRANSFORMER = {"num_blocks": 3, "width": 48, "num_heads": 4}
IMAGES = {"data": "synthetic", "synthetic": {"num_classes": 10, "image_shape": (3, 32, 32)}}
WORKLOADS = {
    "gpt": small("gpt", TRANSFORMER, sequence_length=32),
    "bert": small("bert", TRANSFORMER, sequence_length=32),
    "t5": small("t5", {**TRANSFORMER, "head_width": 12, "feedforward": 96, "encoder_length": 16}, sequence_length=32),
    "cnn": small("cnn", {"num_blocks": 3, "width": 20}, data="digits"),
    "vgg": small("vgg", {"convolutions": [1, 1, 2, 1, 1], "width": 8, "hidden": 32}, **IMAGES),
    "mlp": small("tests.test_memory:perceptron", {}, data="digits"),
    "wide": small("tests.test_memory:wide", {}, data="digits"),
    "tied": small("tests.test_memory:tied", {}, data="digits"),
    "first of many": small("tests.test_memory:first_of_many", {}, data="digits"),
    **{
        f"frozen {layers}": small("tests.test_memory:fine_tuned", {"frozen": layers}, data="digits")
        for layers in ([1], [1, 2], [2])
    },
    "masters": small("gpt", TRANSFORMER, sequence_length=32, dtype="bfloat16", optimizer=MASTERS),
    "wide, masters": small(
        "tests.test_memory:wide", {}, data="digits", dtype="bfloat16", optimizer={"name": "sgd", "master_weights": True}
    ),
}
every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
both_ways = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


def perceptron() -> nn.Sequential:
    """Layers that hold their input (linear), their output (ReLU), and nothing (flatten)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 10))


def wide() -> nn.Sequential:
    """So many weights for so few examples that the optimizer's step needs most."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2000), nn.Linear(2000, 10))


class First(nn.Module):
    """Gives the first of many positions, as a classifier reads it: a view, which keeps all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def first_of_many() -> nn.Sequential:
    many = nn.Sequential(nn.Unflatten(1, (8, 12)), nn.Linear(12, 400), First())
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), many, nn.Linear(400, 10))


def tied() -> nn.Sequential:
    linear = nn.Linear(64, 64)
    inner = nn.Sequential(linear, nn.ReLU(), linear)
    return nn.Sequential(nn.Flatten(), inner, nn.Linear(64, 10))


def fine_tuned(*, frozen: list[int]) -> nn.Sequential:
    """Wide layers, of which these are not trained."""
    chain = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 300))
    for number in frozen:
        chain[number].requires_grad_(False)
    return chain


@cache
def graph_of(name: str) -> Graph:
    return capture(WORKLOADS[name])


def graphs() -> Iterator[tuple[str, tuple[Layer, ...]]]:
    for name in WORKLOADS:
        yield name, graph_of(name).layers


def memory(
    layers: tuple[Layer, ...],
    depth: int = 1,
    *,
    optimizer: OptimizerSettings = ADAM,
    foreach: bool = False,
    spread: Mapping[str, int] = MappingProxyType({}),
    recompute: bool = False,
    num_microbatches: int = 6,
    **place: Any,
) -> StageMemory:
    devices = spread.get("data_parallel", 1) * spread.get("tensor_parallel", 1)
    configuration = StageConfiguration("any", 1, devices, recompute=recompute, **spread)
    return stage_memory(layers, configuration, StagePlace(depth, num_microbatches, **place), optimizer, foreach=foreach)


@pytest.mark.parametrize("depth", some([1, 3], [3]))
@both_ways
@every_workload
def test_prediction_equals_the_real_allocator(workload: Workload, recompute: bool, depth: int) -> None:
    """One stage with the whole model, `depth` microbatches forward before each backward, in 1F1B's order."""
    inputs, targets = dataset_of(workload).batch(0, workload.batch_size, seed=0)
    inputs = inputs.to(DTYPES[workload.dtype]) if inputs.is_floating_point() else inputs
    pairs = list(zip(inputs.chunk(6), targets.chunk(6), strict=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # some kernels keep a copy for each thread

    def work() -> None:
        module = build_layers(workload, Draw(), torch.device("cpu"), recompute=recompute)
        optimizer, loss = make_optimizer(workload.optimizer, module.parameters()), model_of(workload).loss
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            held = []
            for forward in range(len(pairs) + depth - 1):
                if forward < len(pairs):
                    output = module(pairs[forward][0])
                    held.append((output, loss(output, pairs[forward][1])))
                    del output
                if forward >= depth - 1:
                    held[0][1].backward()
                    held.pop(0)
            optimizer.step()

    try:
        real = allocator_peak_bytes(work)
    finally:
        torch.set_num_threads(threads)
    layers = capture(workload).layers
    found = memory(layers, depth, optimizer=workload.optimizer, recompute=recompute, is_first=True, is_last=True)
    if workload.optimizer.master_weights:  # the referee counts the largest cast gradient in every layer's backward
        assert real * 0.99 <= found.peak_bytes <= real * 1.1
    else:
        assert found.peak_bytes == pytest.approx(real, rel=0.01)


@pytest.mark.slow
def test_prediction_equals_the_real_pipeline() -> None:
    """Four ranks of the runtime, torch's own 1F1B."""
    rows = case_rows(
        Case(
            "gpt",
            WORKLOADS["gpt"].model_copy(update={"batch_size": 48, "num_microbatches": 8}),
            one_device(recompute=True),
        )
    )
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert abs(row["moments_percent"]) < 1.0
        assert -0.1 < row["planned_percent"] < 25.0


def test_a_linear_layer_by_hand() -> None:
    """It holds its input; backward makes the gradients of weight and bias, and of its input, from one that arrives."""
    linear = graph_of("mlp").layers[4]
    alive = linear.footprint
    rows, width_in, width_out, size = 4, 96, 64, 4
    assert (alive.input_bytes, alive.output_bytes) == (rows * width_in * size, rows * width_out * size)
    assert (alive.holds_input, alive.holds_output, alive.passes_input) == (True, False, False)
    assert alive.largest_parameter_bytes == width_in * width_out * size
    scalar = 8  # the end from which backward starts
    assert alive.held_bytes <= scalar
    assert max(moment.own_bytes for moment in alive.forward) <= alive.output_bytes + scalar
    assert all(INPUT in moment.alive for moment in alive.forward)
    most = max(alive.backward, key=lambda moment: moment.own_bytes)
    gradients = rows * width_in * size + linear.parameter_bytes
    assert most.own_bytes == pytest.approx(gradients, abs=2 * scalar)
    assert any(ARRIVING in moment.alive for moment in alive.backward)


def test_who_holds_what() -> None:
    flatten, linear, relu, tanh = (layer.footprint for layer in graph_of("mlp").layers[:4])
    assert flatten.passes_input and not flatten.holds_input
    assert linear.holds_input and not linear.holds_output
    assert relu.holds_output and tanh.holds_output and not tanh.holds_input
    for name, layers in graphs():
        for layer in layers[:-1]:  # the last has the loss, which is not run again
            again = layer.recompute_footprint
            besides = 7 * again.output_bytes if name == "first of many" else 0  # the other positions
            assert again.holds_input == (layer.has_backward and not again.passes_input)
            assert again.held_bytes < 6000 + besides  # the random generator's state
            assert again.largest_parameter_bytes == layer.footprint.largest_parameter_bytes
            assert {name for m in layer.footprint.backward for name in m.alive} <= {INPUT, OUTPUT, ARRIVING}


def test_a_tensor_between_layers_counts_once() -> None:
    """A ReLU holds its output, and the linear layer after it the same tensor."""
    layers = graph_of("mlp").layers
    two = memory(layers[2:5], 2, is_last=True).activation_bytes - memory(layers[2:5], 1, is_last=True).activation_bytes
    assert two == pytest.approx(sum(layer.output_bytes for layer in layers[2:5]), abs=64)


@every_workload
def test_formulas(workload: Workload) -> None:
    layers = capture(workload).layers
    weights, trained = (sum(getattr(one, f"{how}_bytes") for one in layers) for how in ("parameter", "trained"))
    adam, sgd = memory(layers), memory(layers, optimizer=SGD)
    assert (adam.parameter_bytes, adam.gradient_bytes, adam.optimizer_bytes) == (weights, trained, 2 * trained)
    assert sgd.optimizer_bytes == 0
    assert (
        adam.parameter_bytes + adam.gradient_bytes + adam.optimizer_bytes
        == fixed_bytes(trained, ADAM) + weights - trained
    )
    at_once = memory(layers, foreach=True)
    assert at_once.peak_bytes >= weights + 4 * trained  # the optimizer's roots of all weights at once
    sharded = memory(layers, spread={"zero_level": 3, "data_parallel": 4})
    largest, most = (max(getattr(one, f"{how}_bytes") for one in layers) for how in ("parameter", "trained"))
    assert sharded.optimizer_bytes == trained / 2
    assert sharded.parameter_bytes == pytest.approx(weights / 4 + 0.75 * largest)
    assert sharded.gradient_bytes == pytest.approx(trained / 4 + 0.75 * most)


def test_bytes_a_parameter_by_source() -> None:
    """Megatron-LM's own count for mixed precision: 18 bytes, and 6 + 12 / replicas with a distributed optimizer."""
    half, count = 2, 1000
    each = ForEachByte.of(MASTERS)
    assert (half * each.gradient_bytes, half * each.optimizer_bytes) == (4, 12)
    assert fixed_bytes(half * count, MASTERS) == 18 * count
    assert fixed_bytes(half * count, ADAM) == 8 * count
    assert fixed_bytes(4 * count, ADAM) == 16 * count
    layers = capture(WORKLOADS["masters"]).layers
    parameters = sum(layer.parameter_bytes for layer in layers) / half
    for replicas in (1, 2, 8):
        found = memory(layers, optimizer=MASTERS, spread={"zero_level": 1, "data_parallel": replicas})
        held = found.parameter_bytes + found.gradient_bytes + found.optimizer_bytes
        assert held == pytest.approx((6 + 12 / replicas) * parameters)


@pytest.mark.parametrize("recompute", some([False, True], [True]))
@every_workload
def test_zero_levels_never_need_more(workload: Workload, recompute: bool) -> None:
    layers = capture(workload).layers
    for replicas in (1, 2, 4, 8):
        peaks = [
            memory(layers, 2, recompute=recompute, spread={"zero_level": level, "data_parallel": replicas}).peak_bytes
            for level in range(4)
        ]
        assert peaks == sorted(peaks, reverse=True)
        assert (replicas > 1) == (peaks[0] > peaks[3])
    divided = [memory(layers, 2, spread={"tensor_parallel": t}).peak_bytes for t in (1, 2, 4)]
    assert divided == sorted(divided, reverse=True)


def test_recompute_never_needs_more_of_a_deep_pipeline() -> None:
    """But for the state of the random generator, of which every layer keeps a copy for each microbatch."""
    for _, layers in graphs():
        for depth in (2, 3, 8):
            kept, again = (memory(layers, depth, recompute=recompute).peak_bytes for recompute in (False, True))
            assert again <= kept + (depth + 1) * len(layers) * 5056


def test_a_schedule_s_depth_is_what_memory_follows() -> None:
    """1F1B holds min(S − s, B) microbatches, GPipe all; each more adds the same bytes."""
    for _, layers in graphs():
        peaks = [memory(layers, depth, num_microbatches=32, foreach=False).activation_bytes for depth in range(1, 9)]
        assert np.allclose(np.diff(peaks), peaks[0])
        for stage in range(4):
            for batches in (4, 8):
                depths = [named(SCHEDULES, name).in_flight(stage, 4, batches) for name in ("1f1b", "gpipe")]
                one, all_ = (memory(layers, depth, num_microbatches=batches).activation_bytes for depth in depths)
                assert one <= all_
                assert one == min(4 - stage, batches) * peaks[0]


@both_ways
def test_no_part_is_negative(recompute: bool) -> None:
    for _, layers in graphs():
        for start in range(len(layers)):
            for stop in range(start + 1, len(layers) + 1):
                for depth in (1, 4):
                    found = memory(layers[start:stop], depth, recompute=recompute, is_last=stop == len(layers))
                    parts = list(vars(found).values())
                    assert min(parts) >= 0
                    assert found.peak_bytes == sum(parts)


@pytest.mark.parametrize("recompute", some([False, True], [True]))
@every_workload
def test_the_planner_s_sums_are_safe(workload: Workload, recompute: bool) -> None:
    """Adding layers up never says less than the stage's moments, whatever the cut, and as much where they agree."""
    graph = capture(workload)
    layers, costs = graph.layers, planned_costs(workload, graph, StageConfiguration("cpu", recompute=recompute))
    held = {"optimizer": workload.optimizer, "example_bytes": example_bytes(workload), "recompute": recompute}
    for start in range(len(layers)):
        for stop in range(start + 1, len(layers) + 1):
            stage, is_first, is_last = layers[start:stop], start == 0, stop == len(layers)
            for depth in (1, 2, 4):
                exact = memory(stage, depth, is_first=is_first, is_last=is_last, **held).peak_bytes
                planned = costs.peak_bytes(start, stop, 0, depth)
                assert planned >= exact
                one = sum(layer_activation_bytes(layer, recompute=recompute) for layer in stage)
                # At most: what layers after the worst one hold no longer, or none does while the optimizer steps.
                # With masters also the largest gradient's cast, which not every moment has.
                cast = cast_bytes(max(layer.footprint.largest_parameter_bytes for layer in stage), workload.optimizer)
                # All that a step sends counts all the time, also before it is made and while the optimizer steps.
                between = 0 if is_first or is_last else held["example_bytes"]  # plans count examples on every stage
                cuts = (0 if is_first else stage[0].footprint.input_bytes) + (0 if is_last else stage[-1].output_bytes)
                assert (
                    planned
                    <= exact
                    + between
                    + depth * one
                    + workload.num_microbatches * cuts
                    + 2 * stage[-1].output_bytes
                    + cast
                )


@pytest.mark.parametrize("seed", range(5))
def test_messages_and_the_optimizer_s_step_in_both_forms_of_costs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    C, L = 2, 5
    tables = {name: rng.integers(0, 9, (C, L)).astype(float) for name in ("fixed", "activation", "temporary", "step")}
    costs = AdditiveCosts(
        seconds_CL=np.ones((C, L)),
        per_step_seconds_CL=np.zeros((C, L)),
        per_step_latency_seconds_C=np.zeros(C),
        fixed_bytes_CL=tables["fixed"],
        activation_bytes_CL=tables["activation"],
        temporary_bytes_CL=tables["temporary"],
        capacity_bytes_C=np.array([40.0, 70.0]),
        message_bytes_CL1=rng.integers(0, 9, (C, L + 1)).astype(float),
        step_bytes_CL=tables["step"],
    )
    dense = costs.dense()
    for c in range(C):
        for start in range(L):
            for stop in range(start + 1, L + 1):
                fits = costs.max_in_flight(start, stop, c)
                assert dense.max_in_flight(start, stop, c) == fits
                capacity = costs.capacity_bytes_C[c]
                for depth in range(1, 8):
                    assert (costs.peak_bytes(start, stop, c, depth) <= capacity) == (depth <= fits)
