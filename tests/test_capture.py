"""Capture against what torch does when it runs: FLOPs, what autograd keeps, published sizes; and reuse, and GPUs."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.published import PUBLISHED
from dejavu.cluster import catalogue
from dejavu.cluster.records import Kind
from dejavu.cost.work import recomputed_share
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph, Layer
from dejavu.graphs.kernels import kernel_of, without_family
from dejavu.graphs.layer_trace import CaptureError, is_view
from dejavu.init import Draw
from dejavu.runtime.shapes import boundaries
from dejavu.runtime.training import build_layers
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, layers_of, model_of
from tests.conftest import some, spread
from tests.test_models import ZOO, every_model, graph_of

RANDOM_STATE_BYTES = 32  # seed and offset of a GPU's attention kernels


def kept_bytes(module: nn.Module, x: torch.Tensor, loss: object) -> int:
    """What autograd really keeps of a layer, its weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(x.detach().requires_grad_(x.is_floating_point()))
        end = loss(output) if callable(loss) else output  # noqa: F841 (what it keeps must live until it is counted)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", spread(ZOO, 8))
def test_activations_are_what_autograd_keeps(name: str) -> None:
    workload, graph = ZOO[name], graph_of(name)
    whole = build_layers(workload, Draw(), torch.device("cpu"))
    x, target = dataset_of(workload).batch(0, workload.microbatch_size, seed=0)
    for position, (layer, module) in enumerate(zip(graph.layers, whole, strict=True)):
        last = position == len(graph.layers) - 1
        loss = (lambda output: model_of(workload).loss(output, target)) if last else None
        assert layer.activation_bytes == kept_bytes(module, x, loss), layer.name
        x = module(x).detach()


@every_model
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    """Written-out attention computes the scores once less going backward, which fused kernels compute again."""
    workload, graph = ZOO[name], graph_of(name)
    whole = build_layers(workload, Draw(), torch.device("cpu"))
    x, _ = dataset_of(workload).batch(0, workload.microbatch_size, seed=0)
    for layer, module in zip(graph.layers, whole, strict=True):
        x = x.detach().requires_grad_(x.is_floating_point())
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            output = module(x)
            if output.requires_grad:
                output.backward(torch.ones_like(output))
        attention = [op.flops for op in layer.operators if "attention" in op.kind and op.direction == "forward"]
        again = sum(attention) / 2
        assert layer.flops("forward") + layer.flops("backward") == counter.get_total_flops() + again, layer.name
        x = output


class Counted(TorchDispatchMode):
    """The operators that compute something, those of a forward pass that begins again apart."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_view(func):
            self.kinds.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@every_model
def test_recomputation_runs_again_what_torchs_checkpoint_runs_again(name: str) -> None:
    """Torch stops once all that autograd had kept is there: the operators of a backward pass with and without it."""
    workload, graph = ZOO[name], graph_of(name)
    whole = build_layers(workload, Draw(), torch.device("cpu"))
    x, _ = dataset_of(workload).batch(0, workload.microbatch_size, seed=0)
    for layer, module in zip(graph.layers, whole, strict=True):
        x = x.detach().requires_grad_(x.is_floating_point())
        counted = list[Counted]()
        for is_checkpointed in (False, True):
            # The generator's state is read and written besides, which is no operator of the layer.
            output = (
                checkpoint(module, x, use_reentrant=False, preserve_rng_state=False) if is_checkpointed else module(x)
            )
            with Counted() as counter:
                if output.requires_grad:
                    output.backward(torch.ones_like(output))
            counted.append(counter)
            module.zero_grad()
        without, again = (Counter(one.kinds) for one in counted)
        forward = [one.kind for one in layer.operators if one.direction == "forward"]
        expected = Counter(forward[: len(forward) - len(layer.not_recomputed)])
        ran = again - without
        products = [kind for kind in expected if any(word in kind for word in ("mm", "convolution", "attention"))]
        assert {kind: ran[kind] for kind in products} == {kind: expected[kind] for kind in products}, layer.name
        x = output.detach()


def test_a_transformer_block_s_last_product_is_not_run_again() -> None:
    graph = graph_of("gpt")
    block = graph.layers[1]
    assert [one.kind for one in block.not_recomputed if one.flops] == ["aten.addmm"]
    device = catalogue()["A100-SXM4-80GB"]
    assert 0.5 < recomputed_share(block, device) < 1.0
    assert recomputed_share(replace(block, num_recomputed=None), device) == 1.0


@every_model
def test_every_weight_is_in_one_layer_and_read_once_going_forward(name: str) -> None:
    graph = graph_of(name)
    whole = build_layers(ZOO[name], Draw(), torch.device("cpu"))
    weights = [parameter for layer in whole for parameter in layer.parameters()]
    assert len({id(weight) for weight in weights}) == len(weights)
    for layer in graph.layers:
        read = sum(operator.parameter_bytes for operator in layer.operators if operator.direction == "forward")
        times = 2 if name == "user_tied" and layer.name == "1-3" else 1  # one matrix, used twice
        assert read == times * layer.parameter_bytes, layer.name
        assert all(operator.parameter_bytes <= operator.read_bytes for operator in layer.operators)


@every_model
def test_layers_of_a_kind_differ_in_their_names_alone(name: str) -> None:
    graph = graph_of(name)
    kinds, kind_L = graph.kinds
    assert len(kind_L) == len(graph.layers) and set(kind_L.tolist()) == set(range(len(kinds)))
    for layer, kind in zip(graph.layers, kind_L, strict=True):
        assert replace(layer, name="") == replace(kinds[kind], name="")


@pytest.mark.parametrize("name", some(ZOO, ["gpt", "moe", "t5", "vgg"]))
def test_what_is_traced_once_is_what_is_traced_each_time(name: str) -> None:
    assert capture(ZOO[name], reuse=False) == graph_of(name)
    assert graph_of(name).microbatch_size == ZOO[name].microbatch_size


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("position", range(3))
def test_up_to_a_layer_that_computes_without_gradients_there_is_no_backward_pass(position: int, kind: Kind) -> None:
    """As trainings have it: to the layers before it no gradient comes back. What comes after is as it was."""
    fixed, whole = (capture(_on_fixed(layer), kind).layers for layer in (position, None))
    are_fixed = [not one.requires_grad for one in boundaries(_on_fixed(position))[1:]]
    assert sum(are_fixed) > position
    for layer, other, is_fixed in zip(fixed, whole, are_fixed, strict=True):
        assert layer.output_shape == other.output_shape and layer.parameter_bytes == other.parameter_bytes
        _check(layer, other, is_fixed=is_fixed)


@pytest.mark.parametrize("frozen", [frozen for n in range(4) for frozen in itertools.combinations((0, 2, 3), n)][:-1])
def test_what_comes_before_all_that_is_trained_has_no_backward_pass(frozen: tuple[int, ...]) -> None:
    own, whole = (_with_frozen(layers) for layers in (frozen, ()))
    are_fixed = [not one.requires_grad for one in boundaries(own)[1:]]
    assert are_fixed == [position < min({0, 2, 3} - set(frozen)) for position in range(4)]
    captured = zip(capture(own).layers, capture(whole).layers, are_fixed, strict=True)
    for position, (layer, other, is_fixed) in enumerate(captured):
        assert layer.frozen_bytes == (layer.parameter_bytes if position in frozen else 0)
        if is_fixed or position not in frozen:
            _check(layer, other, is_fixed=is_fixed)
        else:  # it passes gradients on, and makes none of its weights
            assert layer.flops("backward") == layer.flops("forward") == other.flops("backward") / 2


def _check(layer: Layer, other: Layer, *, is_fixed: bool) -> None:
    """Compare a layer with the same one where all is trained."""
    assert layer.has_backward == (not is_fixed)
    assert layer.trained_bytes == (0 if is_fixed else other.parameter_bytes)
    if is_fixed:
        assert all(operator.direction == "forward" for operator in layer.operators)
        assert layer.flops("forward") == other.flops("forward") and not layer.activation_bytes
        assert layer.footprint.held_bytes <= 4  # a number that stands for what comes after
    else:
        assert layer.operators == other.operators and layer.signature == other.signature


def test_scores_without_a_gradient_are_refused() -> None:
    with pytest.raises(CaptureError, match="layer '3' gives scores without a gradient; wanted some that"):
        capture(_on_fixed(3))


def in_double(*, layer: int | None) -> nn.Sequential:
    own = [torch.float64 if k == layer else None for k in range(4)]
    norm = nn.Sequential(nn.LayerNorm(32, dtype=own[2]), nn.ReLU())
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32, dtype=own[1]), norm, nn.Linear(32, 10, dtype=own[3]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layer", "weight"), [(1, "weight"), (2, "0.weight"), (3, "weight")])
def test_weights_in_float64_are_named(layer: int, weight: str, dtype: str) -> None:
    """They would be trained in the workload's type, and no device's products in float64 are known."""
    asked = {"model": "tests.test_capture:in_double", "data": "digits", "batch_size": 8, "dtype": dtype}
    found = f"layer '{layer}': '{weight}' is in float64; wanted .* the workload's dtype, {dtype}"
    with pytest.raises(CaptureError, match=found):
        capture(Workload(**asked, model_options={"layer": layer}))
    assert capture(Workload(**asked, model_options={"layer": None})).dtype == dtype


def _with_frozen(layers: tuple[int, ...]) -> Workload:
    data = {"synthetic": {"num_classes": 256}, "sequence_length": 8}
    options = {"layers": list(layers)}
    return Workload(
        model="tests.own_models:with_frozen", model_options=options, data="synthetic", batch_size=8, num_microbatches=2,
        **data,
    )  # fmt: skip


def _on_fixed(layer: int | None) -> Workload:
    options = {"layer": layer}
    return Workload(
        model="tests.own_models:on_fixed", model_options=options, data="digits", batch_size=8, num_microbatches=2
    )


def test_layers_are_not_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of constructor, arguments and inputs is traced once, no fewer and no more."""
    import dejavu.graphs.capture

    built: list[str] = []
    inner = dejavu.graphs.capture.trace_layer

    def counted(builder: LayerBuilder, *arguments: object) -> object:
        built.append(builder.name)
        return inner(builder, *arguments)

    monkeypatch.setattr(dejavu.graphs.capture, "trace_layer", counted)
    expected = {
        "gpt": ["embedding", "block0", "head"],
        "t5": ["embedding", "encoder0", "encoder_norm", "decoder0", "head"],
        "moe": ["embedding", "block0", "block1", "head"],
        "user": ["0", "1", "2", "3", "4", "5", "6", "7"],  # a factory's parts may differ
    }
    for name, wanted in expected.items():
        built.clear()
        capture(ZOO[name])
        assert built == wanted


@every_model
def test_the_zoo_trains(name: str) -> None:
    """Every weight has a gradient, and one batch can be learned by heart."""
    workload = ZOO[name]
    model, module = model_of(workload), build_layers(workload, Draw("kaiming", seed=1), torch.device("cpu"))
    x, target = dataset_of(workload).batch(0, 8, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.003)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model.loss(module(x), target)
        loss.backward()
        losses.append(loss.item())
        idle = [name for name, weight in module.named_parameters() if weight.grad is None or not weight.grad.any()]
        assert not idle
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    published = PUBLISHED[name]
    workload = published.workload()
    counted: dict[object, int] = {}
    total = 0
    for builder in layers_of(workload):
        key = (builder.build.func, builder.build.args, *builder.build.keywords.items())
        if key not in counted:
            with torch.device("meta"):
                counted[key] = sum(parameter.numel() for parameter in builder.build().parameters())
        total += counted[key]
    total -= model_of(workload).untied_parameters(dataset_of(workload).shape)
    assert (
        total == published.num_parameters
        if published.exact
        else total == pytest.approx(published.num_parameters, rel=0.03)
    )


def test_the_largest_models_are_captured() -> None:
    """GPT-3 has 6 FLOPs for each weight and token, and attention's; T5-11B's encoder and decoder see half each."""
    gpt3 = capture(PUBLISHED["gpt3-175b"].workload(dtype="bfloat16"))
    tokens, blocks, width = 2048, 96, 12288
    flops = sum(layer.flops("forward") + layer.flops("backward") for layer in gpt3.layers)
    matrices = blocks * 12 * width**2 + width * 50257
    assert flops == 6 * matrices * tokens + blocks * (4 + 10) * width * tokens**2
    assert {layer.output_bytes for layer in gpt3.layers[:-1]} == {tokens * width * 2}
    mixtral = capture(PUBLISHED["mixtral-8x7b"].workload(dtype="bfloat16"), "cuda").layers[1]
    tokens, width, inner = 4096, 4096, 14336
    used = width * (2 * width + 2 * 1024) + width * 8 + 2 * 3 * width * inner  # two of eight experts
    assert mixtral.flops("forward") == 2 * used * tokens + 4 * width * tokens**2
    t5 = capture(PUBLISHED["t5-11b"].workload())
    assert len({layer.signature for layer in t5.layers}) == 5
    assert {layer.output_bytes for layer in t5.layers[:-1]} == {1024 * 1024 * 4}


class Attend(nn.Module):
    """Attention alone: three images are queries, keys and values."""

    def __init__(self, num_heads: int = 4, masked: bool = False, shared_heads: int = 1) -> None:
        super().__init__()
        self.num_heads, self.masked, self.shared_heads = num_heads, masked, shared_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in x.unbind(1))
        mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).tril() if self.masked else None
        if self.shared_heads > 1:
            key, value = key[:, :: self.shared_heads], value[:, :: self.shared_heads]
        shared = self.shared_heads > 1
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=shared).mean((1, 2))


def attend(**options: object) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), Attend(**options), nn.Linear(8, 10))  # type: ignore[arg-type]


def attention(dtype: str, kind: str, length: int = 48, head_width: int = 8, **options: object) -> Graph:
    images = {"num_classes": 10, "image_shape": (3, length, 4 * head_width)}
    workload = Workload(
        model="tests.test_capture:attend",
        model_options=options,
        data="synthetic",
        synthetic=images,
        batch_size=4,
        num_microbatches=2,
        dtype=dtype,
    )
    return capture(workload, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_attention_keeps_and_computes_what_its_kernel_does(kind: str, dtype: str, masked: bool) -> None:
    """Inputs, output and one float32 for each query; two products forward, five backward."""
    batch, heads, length, width = 2, 4, 48, 8
    layer = attention(dtype, kind, masked=masked).layers[1]
    kernel = {"cpu": "flash_attention_for_cpu", "cuda": "efficient"}[kind]
    if kind == "cuda" and dtype == "bfloat16" and not masked:
        kernel = "scaled_dot_product_flash_attention"
    assert any(kernel in operator.kind and "for_cpu" in operator.kind + "for_cpu" for operator in layer.operators)
    assert ("cpu" in " ".join(operator.kind for operator in layer.operators)) == (kind == "cpu")
    product = 2 * batch * heads * length**2 * width
    assert layer.flops("forward") == 2 * product
    assert layer.flops("backward") == 5 * product
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    rows = -(-length // 32) * 32 if "efficient" in kernel else length  # that kernel pads to whole warps
    expected = 4 * batch * heads * length * width * size + 4 * batch * heads * rows
    mask = length**2 * size if masked else 0
    assert expected + mask <= layer.activation_bytes <= expected + mask + RANDOM_STATE_BYTES


def test_attention_that_no_fused_kernel_takes_is_written_out() -> None:
    shared = attention("float32", "cuda", shared_heads=2).layers[1]
    kinds = {operator.kind for operator in shared.operators}
    assert {"aten.bmm"} <= kinds
    assert not any("scaled_dot_product" in kind for kind in kinds)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_gpu_has_one_kernel_for_a_norm(name: str) -> None:
    """It keeps its input and a float32 of each row, where the CPU's operators keep what they compute on the way."""
    workload = ZOO[name].model_copy(update={"dtype": "bfloat16"})
    cpu, cuda = (capture(workload, kind).layers[1] for kind in ("cpu", "cuda"))  # type: ignore[arg-type]
    norms = [operator for operator in cuda.operators if "rms_norm" in operator.kind]
    assert [operator.direction for operator in norms] == ["forward"] * 2 + ["backward"] * 2
    rows, width = 2 * 16, 32
    assert norms[0].input_shapes == ((2, 16, width), (width,))
    assert norms[0].output_shapes == ((2, 16, width), (2, 16, 1))
    assert norms[2].input_shapes[2] == (2, 16, 1)
    assert cpu.activation_bytes - cuda.activation_bytes >= 2 * 4 * rows * width  # at least the input in float32
    kinds = {kernel.name for operator in cuda.operators if (kernel := kernel_of(operator)) and "rms" in kernel.name}
    assert kinds == {"fused_rms_norm", "fused_rms_norm_backward"}
    assert not without_family(cuda.operators)


@pytest.mark.parametrize("name", ["gpt", "bert", "moe"])
def test_a_gpu_changes_attention_alone(name: str) -> None:
    cpu, cuda = graph_of(name), capture(ZOO[name], "cuda")
    assert [layer.name for layer in cuda.layers] == [layer.name for layer in cpu.layers]
    for ours, theirs in zip(cpu.layers, cuda.layers, strict=True):
        for way in ("forward", "backward"):
            assert ours.flops(way) == theirs.flops(way)
        others = [
            [(op.kind, op.input_shapes) for op in layer.operators if "attention" not in op.kind]
            for layer in (ours, theirs)
        ]
        assert others[0] == others[1]
        assert theirs.parameter_bytes == ours.parameter_bytes
        assert theirs.output_bytes == ours.output_bytes
