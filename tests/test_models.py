"""The zoo, its data, and what capture says of them, against real modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dejavu.data import DATASETS, dataset_of
from dejavu.errors import InputError
from dejavu.graph import CaptureError, capture
from dejavu.init import PROPOSERS, SCHEMES, Draw, draw_layer
from dejavu.models import MODELS, layers_of, model_of
from dejavu.runtime.training import build_layers
from dejavu.workload import Workload

ZOO = {
    "gpt": Workload(model_options={"num_blocks": 2, "width": 32}, sequence_length=16, batch_size=4, num_microbatches=2),
    "cnn": Workload(model="cnn", data="digits", batch_size=8, num_microbatches=2),
    "user": Workload(
        model="tests.test_models:perceptron",
        data="digits",
        batch_size=8,
        num_microbatches=2,
        model_options={"depth": 3},
    ),
}
every_model = pytest.mark.parametrize("workload", ZOO.values(), ids=ZOO)


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
    return nn.Sequential(nn.Flatten(), linear, nn.ReLU(), linear)


def failing() -> nn.Sequential:
    raise ValueError("no such size")


def not_sequential() -> nn.Module:
    return nn.Linear(2, 2)


def test_the_zoo_is_covered() -> None:
    assert set(MODELS) <= set(ZOO)
    assert {workload.data for workload in ZOO.values()} == set(DATASETS)


@every_model
def test_capture_equals_the_real_module(workload: Workload) -> None:
    graph = capture(workload)
    whole = build_layers(workload, Draw(), torch.device("cpu"))
    assert [layer.name for layer in graph.layers] == [name for name, _ in whole.named_children()]
    assert graph.parameter_bytes == sum(p.numel() * p.element_size() for p in whole.parameters())
    x, _ = dataset_of(workload).batch(0, workload.microbatch_size, seed=0)
    for layer, module in zip(graph.layers, whole, strict=True):
        with (
            FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            expected = module(x)
        assert layer.output_shape == tuple(expected.shape)
        assert layer.output_bytes == expected.numel() * expected.element_size()
        assert layer.flops("forward") == counter.get_total_flops()  # the math path counts attention's two products
        x = expected


@every_model
def test_layers_that_do_the_same_share_a_signature(workload: Workload) -> None:
    layers = capture(workload).layers
    blocks = {layer.signature for layer in layers if layer.name.startswith("block")}
    assert len(blocks) <= 1
    assert capture(workload).fingerprint == capture(workload).fingerprint
    larger = capture(workload.model_copy(update={"batch_size": workload.batch_size * 2}))
    weighty = [i for i, layer in enumerate(layers) if layer.flops("forward")]
    assert all(larger.layers[i].signature != layers[i].signature for i in weighty)


def test_activations_are_what_autograd_keeps() -> None:
    """A linear layer keeps its input; a ReLU its output; both known exactly."""
    graph = capture(ZOO["user"])
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


@every_model
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_stage_draws_the_same_weights_as_the_whole(workload: Workload, scheme: str) -> None:
    draw, cpu = Draw(scheme, 0.7, seed=3), torch.device("cpu")
    before = torch.random.get_rng_state()
    whole = build_layers(workload, draw, cpu).state_dict()
    parts = {
        **build_layers(workload, draw, cpu, 0, 2).state_dict(),
        **build_layers(workload, draw, cpu, 2).state_dict(),
    }
    assert torch.equal(before, torch.random.get_rng_state())
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_seeds_and_gains_matter(scheme: str) -> None:
    builder = layers_of(ZOO["user"])[1]
    one, other = (draw_layer(builder, Draw(scheme, 1.0, seed), depth=4).weight for seed in (0, 1))
    twice = draw_layer(builder, Draw(scheme, 2.0, 0), depth=4).weight
    assert not torch.equal(one, other)
    assert torch.allclose(twice, 2 * one)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_proposers_repeat_and_begin_with_the_default(name: str, count: int) -> None:
    draws = PROPOSERS[name].propose(count, seed=5)
    assert len(draws) == count
    assert draws == PROPOSERS[name].propose(count, seed=5)
    assert draws[:1] == [Draw("default", 1.0, 5)][:count]
    assert len(set(draws)) == count


@every_model
def test_a_batch_depends_on_its_step_alone(workload: Workload) -> None:
    dataset = dataset_of(workload)
    later = [dataset.batch(step, 4, seed=1)[0] for step in (3, 4)]
    assert torch.equal(later[0], dataset.batch(3, 4, seed=1)[0])
    assert not torch.equal(later[0], later[1])
    assert not torch.equal(later[0], dataset.batch(3, 4, seed=2)[0])


def test_text_is_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 8)
    for path in (tmp_path, tmp_path / "a.txt"):
        inputs, targets = dataset_of(Workload(text=path, sequence_length=8, batch_size=8)).batch(0, 4, seed=0)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert set(inputs.unique().tolist()) <= set(b"abcdefgh")
    with pytest.raises(InputError, match="64 bytes; wanted more than 128"):
        dataset_of(Workload(text=tmp_path / "a.txt", sequence_length=128)).batch(0, 4, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gtp"}, "did you mean 'gpt'"),
        ({"model_options": {"depth": 3}}, "does not take model_options"),
        ({"model_options": {"width": 30, "num_heads": 4}}, "does not divide into num_heads"),
        ({"model_options": {"num_blocks": 0}}, "num_blocks is 0; wanted a whole number"),
        ({"data": "digits"}, "model gpt reads tokens"),
        ({"model": "cnn"}, "model cnn reads images"),
        ({"model": "no.such.module:thing"}, "wanted package.module:factory"),
        ({"model": "tests.test_models:not_sequential"}, "wanted an nn.Sequential or a Model"),
        ({"model": "tests.test_models:tied", "data": "digits"}, "layers '1' and '3' share weights"),
        ({"model": "tests.test_models:failing", "data": "digits"}, "ValueError: no such size"),
    ],
)
def test_mistakes_are_named(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layers_of(Workload(**change))


def test_a_module_without_weights_may_be_used_twice() -> None:
    workload = Workload(model="tests.test_models:one_relu_twice", data="digits")
    assert [builder.name for builder in layers_of(workload)] == ["0", "1", "2", "3", "4"]


def test_a_loss_is_the_mean_over_targets() -> None:
    model = model_of(ZOO["gpt"])
    output, target = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = -torch.log_softmax(output, -1).gather(-1, target[..., None]).mean()
    assert torch.allclose(model.loss(output, target), expected)
