"""A model's operators as arrays: they add up to its layers, and cross between them what the layers give each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dejavu.cluster import DeviceType, load_cluster
from dejavu.cost.sources.predicted import Predicted, layer_kernels
from dejavu.foundation.errors import InputError
from dejavu.foundation.tracing import FakeMode, fake_tensors
from dejavu.graphs.layer_trace import CaptureError
from dejavu.operator_cuts import CutProblem, Found, LabelProgram, Servers, coarsen, joined
from dejavu.operator_cuts.captured import CapturedOperators, captured_operators
from dejavu.operator_cuts.dataflow import trace_flow
from dejavu.profiles import ProfileDatabase
from dejavu.workload import Workload
from tests.conftest import spread

ROOT = Path(__file__).resolve().parents[1]
TEXT: dict[str, Any] = {"synthetic": {"num_classes": 40}, "sequence_length": 12}
IMAGES: dict[str, Any] = {"synthetic": {"num_classes": 10, "image_shape": (3, 32, 32)}}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"model_options": {"num_blocks": 2, "width": 32, "num_heads": 2}, **TEXT},
    "gpt": {"model_options": {"num_blocks": 2, "width": 32, "num_heads": 2}, **TEXT},
    "t5": {
        "model_options": {"num_blocks": 1, "width": 32, "num_heads": 2, "head_width": 16, "feedforward": 64},
        **TEXT,
    },
    "vgg": {"model_options": {"hidden": 64}, **IMAGES},
}
REPLICAS = 4


def workload(model: str, **fields: Any) -> Workload:
    return Workload(model=model, data="synthetic", batch_size=16, num_microbatches=2, **MODELS[model], **fields)


def device() -> DeviceType:
    return load_cluster(ROOT / "examples/clusters/4x8-v100.yaml").device_types["V100-SXM2-16GB"]


def captured(model: str, tmp_path: Path) -> CapturedOperators:
    return captured_operators(workload(model), device(), tmp_path, REPLICAS)


@pytest.mark.parametrize("model", spread(MODELS, 2))
def test_operators_add_up_to_the_captured_layers(model: str, tmp_path: Path) -> None:
    found = captured(model, tmp_path)
    layers, graph = joined(found.arrays, list(found.layer_ends)), found.graph
    assert graph.microbatch_size == 2 and len(layers) == len(graph.layers) == len(found.layer_names)
    assert layers.weight_bytes_P.tolist() == [layer.parameter_bytes for layer in graph.layers]
    assert layers.held_bytes_P.tolist() == [REPLICAS * layer.activation_bytes for layer in graph.layers]
    given = [REPLICAS * layer.output_bytes for layer in graph.layers[:-1]]
    assert layers.crossing_bytes_P.tolist() == [*given, 0.0]
    settings = workload(model).optimizer
    predicted = Predicted(ProfileDatabase(tmp_path), settings)
    for p, layer in enumerate(graph.layers):
        kernels = [one for way in ("forward", "backward") for one in layer_kernels(layer, way, graph.dtype, settings)]
        seconds = float(predicted.prices(kernels, device()).seconds_K.sum())
        assert layers.compute_seconds_P[p] == pytest.approx(REPLICAS * seconds)


@pytest.mark.parametrize("layer", range(3))
def test_a_layer_that_computes_without_gradients_is_captured(layer: int, tmp_path: Path) -> None:
    options = {"layer": layer}
    asked = Workload(
        model="tests.own_models:on_fixed", model_options=options, data="digits", batch_size=8, num_microbatches=2
    )
    found = captured_operators(asked, device(), tmp_path)
    assert len(found.arrays) == sum(
        len([op for op in one.operators if op.direction == "forward"]) for one in found.graph.layers
    )


def test_gradients_belong_to_the_operators_that_they_are_of() -> None:
    with fake_tensors(FakeMode(allow_non_fake_inputs=False)):
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softmax(dim=-1))
        flow, output = trace_flow(module, torch.empty(2, 8), None)
    assert flow.kinds == ("aten.addmm", "aten.relu", "aten.addmm", "aten._softmax") and output.shape == (2, 4)
    # Backward goes from the last to the first; of a linear layer: input's and weight's gradient, and the bias's sum.
    assert flow.backward_of == (3, 2, 2, 2, 1, 0, 0, 0)
    assert flow.weight_bytes == (4 * 9 * 16, 0, 4 * 17 * 4, 0)
    assert flow.crossing_bytes == (4 * 32, 4 * 32, 4 * 8, 4 * 8)


def test_weights_that_no_operator_reads_are_named() -> None:
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(1, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own.expand(len(x), -1)

    with fake_tensors(FakeMode(allow_non_fake_inputs=False)):
        with pytest.raises(CaptureError, match="read by no operator that computes something; wanted one or more"):
            trace_flow(Expands(), torch.empty(2, 8), None)
        assert trace_flow(nn.Flatten(), torch.empty(2, 8), None)[0].kinds == ()


def test_what_crosses_inside_a_block_is_the_stream_and_what_is_under_way(tmp_path: Path) -> None:
    found = captured("bert", tmp_path)
    start, end = found.layer_ends[1], found.layer_ends[2]
    names = [name.split(": ")[1] for name in found.arrays.names[start:end]]
    inside = found.arrays.crossing_bytes_P[start:end]
    stream = inside[-1]
    assert inside[names.index("aten.addmm")] == 4 * stream  # query, key and value, and what is added to the result
    assert inside[names.index("aten.gelu")] == 5 * stream  # four times the width, and the stream
    assert inside.min() == stream


def test_cut_where_operators_allow_it_is_never_dearer_than_between_layers(tmp_path: Path) -> None:
    found = captured("t5", tmp_path)
    servers = Servers(2, 2)
    steps = [
        LabelProgram().run(CutProblem(arrays, servers, servers.everywhere))
        for arrays in (found.arrays, joined(found.arrays, list(found.layer_ends)))
    ]
    assert isinstance(steps[0], Found) and isinstance(steps[1], Found)
    assert steps[0].step_seconds <= steps[1].step_seconds * (1 + 1e-9)
    assert len(coarsen(found.arrays, 32)) == 32


def test_a_microbatch_that_does_not_divide_is_answered(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found 3 for a microbatch of 8"):
        captured_operators(workload("bert"), device(), tmp_path, 3)
