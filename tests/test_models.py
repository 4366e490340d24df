"""The zoo, its data, and what capture says of them, against real modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from dejavu.foundation import strict_yaml
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import CaptureError, capture
from dejavu.graphs.graph import Graph
from dejavu.testing import check_data_set
from dejavu.testing.models import CASES as EVERY_CASE
from dejavu.workload import Workload
from dejavu.workload.data import DATASETS, dataset_of
from dejavu.workload.models import MODELS, layers_of, model_of
from tests.conftest import spread


def small(model: str, options: dict, **fields: Any) -> Workload:
    return Workload(model=model, model_options=options, batch_size=4, num_microbatches=2, **fields)


IMAGES = {"data": "synthetic", "synthetic": {"num_classes": 10, "image_shape": (3, 32, 32)}}
TOKENS = {"data": "synthetic", "synthetic": {"num_classes": 50}, "sequence_length": 16}
EXAMPLES = sorted((Path(__file__).parents[1] / "examples" / "workloads").glob("*.yaml"))
HEADS = {"num_blocks": 2, "width": 32, "num_heads": 4}
ZOO = {
    "gpt": small("gpt", {"num_blocks": 2, "width": 32}, sequence_length=16),
    "bert": small("bert", HEADS, sequence_length=16),
    "t5": small("t5", {**HEADS, "head_width": 16, "feedforward": 48, "encoder_length": 10}, sequence_length=16),
    "t5_gated": small("t5", {**HEADS, "head_width": 8, "feedforward": 48, "gated": True}, **TOKENS),
    "llama": small("llama", {**HEADS, "num_kv_heads": 2, "feedforward": 48}, **TOKENS),
    "mixtral": small("mixtral", {**HEADS, "num_kv_heads": 2, "feedforward": 48, "num_experts": 4}, **TOKENS),
    "moe": small("moe", {**HEADS, "num_experts": 4, "feedforward_factor": 2}, **TOKENS),
    "cnn": small("cnn", {}, data="digits"),
    "cnn_plain": small("cnn", {"plain": True}, data="digits"),
    "mlp": small("mlp", {"num_blocks": 4, "width": 32}, data="digits"),
    "vgg": small("vgg", {"convolutions": [1, 1, 2, 1, 1], "width": 4, "hidden": 16}, **IMAGES),
    "wide_resnet": small("wide_resnet", {"blocks": [1, 2, 1, 1], "width": 4}, **IMAGES),
    "wide_resnet_alpa": small("wide_resnet", {"blocks": [1, 1, 1, 1], "width": 4, "widened": "output"}, **IMAGES),
    "user": small("tests.test_models:perceptron", {"depth": 3}, data="digits"),
    "user_chain": small("tests.test_models:Chain", {}, data="digits"),
    "user_residual": small("tests.test_models:Residual", {}, data="digits"),
    "user_tied": small("tests.test_models:tied", {}, data="digits"),
}


@cache
def graph_of(name: str) -> Graph:
    """A capture that several tests look at."""
    return capture(ZOO[name])


every_model = pytest.mark.parametrize("name", ZOO)


def perceptron(depth: int = 2) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(depth):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def one_relu_twice() -> nn.Sequential:
    relu = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), relu, nn.Linear(64, 10), relu)


def tied() -> nn.Sequential:
    linear = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), linear, nn.ReLU(), linear, nn.Linear(64, 10))


def failing() -> nn.Sequential:
    raise ValueError("no such size")


def not_a_module() -> int:
    return 3


class Chain(nn.Module):
    """Runs its children in turn, a list among them, and has one that it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64)])
        self.unused = nn.Identity()
        self.scores = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        for block in self.blocks:
            x = block(x)
        return self.scores(x)


class Residual(Chain):
    """Adds something between its children, which no chain of them would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        return self.scores(x + self.blocks[2](self.blocks[1](self.blocks[0](x))))


class InPlace(Chain):
    """The very tensors of a chain, but written to on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        for block in self.blocks:
            x = block(x)
        x += 1.0
        return self.scores(x)


class Backwards(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.blocks[0](self.blocks[1](self.blocks[2](self.flatten(x)))))


class OwnWeight(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


class Behind(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8)
        self.scores = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.cell(x.squeeze(1))[0][:, -1])


def test_the_zoo_is_covered() -> None:
    assert set(MODELS) <= set(ZOO)
    needs_files = {"cifar10", "tokens", "parquet", "image_folder", "examples"}  # tests/test_data*.py write some
    assert {workload.data for workload in ZOO.values()} == set(DATASETS) - needs_files


@pytest.mark.parametrize("name", spread(ZOO, 5))
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.__name__)
def test_every_model_is_what_capture_says(name: str, case: Callable[[Workload], None]) -> None:
    case(ZOO[name])


@every_model
def test_its_data_are_the_same_for_the_same_step(name: str) -> None:
    check_data_set(dataset_of(ZOO[name]))


@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "llama", "mixtral"])
def test_equal_blocks_share_a_signature(name: str) -> None:
    graph = graph_of(name)
    kinds = {layer.name.rstrip("0123456789") for layer in graph.layers}
    assert len({layer.signature for layer in graph.layers}) == len(kinds)


def test_activations_are_what_autograd_keeps() -> None:
    """A linear layer keeps its input; a ReLU its output; both known exactly."""
    graph = graph_of("user")
    width_bytes = 64 * 4 * ZOO["user"].microbatch_size
    linear, relu = graph.layers[1], graph.layers[2]
    assert linear.activation_bytes == width_bytes
    assert relu.activation_bytes == width_bytes
    assert linear.flops("forward") == 2 * 64 * 64 * ZOO["user"].microbatch_size
    assert linear.flops("backward") == 2 * linear.flops("forward")


def test_a_layer_that_does_not_fit_is_named() -> None:
    wrong = Workload(model="tests.test_models:perceptron", data="text", batch_size=8, num_microbatches=2)
    with pytest.raises(CaptureError, match="layer '1'"):
        capture(wrong)


class Counting(nn.Module):
    """Its work depends on what the numbers are, which nobody knows beforehand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(1) > 0] if x.sum().item() > 0 else x


def counting() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 10), Counting()))


def test_a_part_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(CaptureError, match=r"layer '1', in its '1' \(Counting\), cannot be traced on \(4, 64\)"):
        capture(Workload(model="tests.test_models:counting", data="digits"))


def test_text_is_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 8)
    for path in (tmp_path, tmp_path / "a.txt"):
        inputs, targets = dataset_of(Workload(text=path, sequence_length=8, batch_size=8)).batch(0, 4, seed=0)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert set(inputs.unique().tolist()) <= set(b"abcdefgh")
    with pytest.raises(InputError, match="64 bytes; wanted more than the sequence_length of 128"):
        dataset_of(Workload(text=tmp_path / "a.txt", sequence_length=128)).batch(0, 4, seed=0)


@pytest.mark.parametrize("shape", [None, (3, 8, 8)])
def test_random_examples_have_the_shape_they_say(shape: tuple | None) -> None:
    settings = {"num_classes": 7, "image_shape": shape}
    dataset = dataset_of(Workload(data="synthetic", synthetic=settings, sequence_length=24))
    inputs, targets = dataset.batch(3, 40, seed=1)
    assert (inputs.dtype, inputs.shape[1:]) == (dataset.shape.input_dtype, dataset.shape.input_shape)
    assert targets.shape[1:] == dataset.shape.target_shape
    assert set(targets.unique().tolist()) == set(range(7))
    if shape is None:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    other = dataset_of(Workload(data="synthetic", synthetic={**settings, "num_classes": 8}))
    assert other.fingerprint != dataset.fingerprint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": "synthetic"}, r"data is 'synthetic', but the key synthetic is missing; wanted the shape"),
        (
            {"data": "text", "synthetic": {"num_classes": 7}},
            r"synthetic is given, but data is 'text'; wanted data",
        ),
        ({"data": "synthetic", "synthetic": {"num_classes": 1}}, "greater than or equal to 2"),
        (
            {"data": "synthetic", "synthetic": {"num_classes": 7, "image_shape": (3, 0, 8)}},
            "greater than or equal to 1",
        ),
    ],
)
def test_random_examples_that_cannot_be_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Workload(**fields)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "examples" / "workloads").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_examples_can_be_read(path: Path) -> None:
    workload = strict_yaml.load(path, Workload).value
    assert len(layers_of(workload)) >= 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gtp"}, "did you mean 'gpt'"),
        ({"model_options": {"depth": 3}}, "does not take model_options 'depth'; did you mean 'width'?"),
        ({"model_options": {"xyz": 3}}, "does not take model_options 'xyz'; wanted one of num_blocks, "),
        ({"model_options": {"widht": 32}}, "does not take model_options 'widht'; did you mean 'width'?"),
        ({"model_options": {"width": 30, "num_heads": 4}}, "does not divide into num_heads"),
        ({"model_options": {"num_blocks": 0}}, "num_blocks is 0; wanted a whole number"),
        ({"data": "digits"}, "model gpt reads tokens"),
        ({"model": "cnn"}, "model cnn reads images"),
        ({"model": "mlp"}, "model mlp reads images"),
        ({"model": "mlp", "data": "digits", "model_options": {"width": 0}}, "width is 0; wanted a whole number"),
        ({"model": "no.such.module:thing"}, "wanted package.module:factory"),
        ({"model": "tests.test_models:not_a_module"}, "returns a int; wanted a module or a Model"),
        ({"model": "bert", "data": "digits"}, "model bert reads tokens"),
        ({"model": "bert", "sequence_length": 3}, "model bert needs at least 4 tokens; the data gives 3"),
        ({"model": "t5", "model_options": {"encoder_length": 128}}, "model t5 needs at least 129 tokens"),
        ({"model": "vgg", "data": "digits"}, "at least 32 × 32 pixels; the data gives 8 × 8"),
        ({"model": "vgg", "model_options": {"convolutions": [2, 2]}}, "wanted 5 whole numbers"),
        ({"model": "wide_resnet", "model_options": {"blocks": [3, 4, 0, 3]}}, "wanted 4 whole numbers"),
        ({"model": "wide_resnet", "model_options": {"widened": "some"}}, "wanted one of both, output"),
        ({"model": "llama", "data": "digits"}, "model llama reads tokens"),
        ({"model": "llama", "model_options": {"num_kv_heads": 3}}, "num_heads 4 does not divide into num_kv_heads 3"),
        ({"model": "llama", "model_options": {"width": 36}}, "a head is 9 wide .* wanted an even number"),
        ({"model": "llama", "model_options": {"rope_theta": 0.5}}, "rope_theta is 0.5; wanted a number > 1"),
        ({"model": "mixtral", "data": "digits"}, "model mixtral reads tokens"),
        ({"model": "mixtral", "model_options": {"num_choices": 9}}, "num_choices is 9; wanted at most num_experts, 8"),
        ({"model": "mixtral", "model_options": {"num_experts": 0}}, "num_experts is 0; wanted a whole number"),
        ({"model": "moe", "model_options": {"num_experts": 1}}, "num_experts is 1; wanted at least 2"),
        ({"model": "moe", "model_options": {"capacity_factor": -1.0}}, "capacity_factor is -1.0"),
        ({"model": "tests.test_models:failing", "data": "digits"}, "ValueError: no such size"),
    ],
)
def test_mistakes_are_named(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layers_of(Workload(**change))


@pytest.mark.parametrize(
    ("model", "layers", "note"),
    [
        ("Chain", ["flatten", "blocks_0-blocks_1", "blocks_2", "scores"], ""),
        ("Residual", ["blocks_0-blocks_2", "scores"], "no cut between 'blocks.0' and 'blocks.1', where 2 values cross"),
        ("InPlace", ["blocks_0", "blocks_2", "scores"], ""),
        ("Backwards", ["blocks_2", "blocks_0", "scores"], ""),
        ("OwnWeight", ["blocks_0", "blocks_2", "scores"], ""),
        ("Behind", ["blocks_0", "blocks_2", "scores"], ""),
        (
            "Tuples",
            ["model"],
            "something between the input and 'cell' torch.export cannot trace it: the forward pass is",
        ),
        ("tied", ["0", "1-3", "4"], "'1' and '3' share weights: they are one layer"),
        ("perceptron", ["0", "1", "2", "3", "4", "5"], ""),
    ],
)
def test_where_a_module_is_cut(model: str, layers: list[str], note: str) -> None:
    """Between children, where one tensor crosses, or not at all; in any way it computes what it computed."""
    workload = Workload(model=f"tests.test_models:{model}", data="digits")
    graph = capture(workload)
    assert [layer.name for layer in graph.layers] == layers
    assert note in " ".join(graph.notes)
    assert bool(note) == bool(graph.notes)
    torch.manual_seed(0)
    whole = globals()[model]()
    parts = [builder.build() for builder in layers_of(workload)]
    x = torch.randn(4, 1, 8, 8)
    y = x
    taken = load_parts(workload, parts, whole)
    assert taken == set(whole.state_dict())
    for part in parts:
        y = part(y)
    assert torch.equal(y, whole(x))


def load_parts(workload: Workload, parts: list[nn.Module], whole: nn.Module) -> set[str]:
    """Give the layers the weights of the whole, by the names that an export has; return the whole's that they took."""
    names = [builder.name for builder in layers_of(workload)]
    together = nn.ModuleDict(dict(zip(names, parts, strict=True)))
    outer = model_of(workload).weight_names(dataset_of(workload).shape, together.state_dict())
    state = whole.state_dict()
    together.load_state_dict({name: state[outer[name]] for name in together.state_dict()})
    return set(outer.values())


def test_a_module_without_weights_may_be_used_twice() -> None:
    workload = Workload(model="tests.test_models:one_relu_twice", data="digits")
    assert [builder.name for builder in layers_of(workload)] == ["0", "1", "2", "3", "4"]


def test_a_loss_is_the_mean_over_targets() -> None:
    model = model_of(ZOO["gpt"])
    output, target = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = -torch.log_softmax(output, -1).gather(-1, target[..., None]).mean()
    assert torch.allclose(model.loss(output, target), expected)


def test_the_code_of_a_model_is_that_of_its_shared_modules_too() -> None:
    shared = {name: model().code.count("-") for name, model in MODELS.items()}
    some = {**dict.fromkeys(("cnn", "wide_resnet"), 1), **dict.fromkeys(("gpt", "bert"), 2), "moe": 3}
    some |= {"llama": 3, "mixtral": 4}
    assert shared == {**dict.fromkeys(MODELS, 0), **some}
    assert len({model().code for model in MODELS.values()}) == len(MODELS)
