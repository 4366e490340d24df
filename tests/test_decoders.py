"""The zoo's Llama and Mixtral: as transformers has them, and what the products of groups of rows promise."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from dejavu.graphs.capture import capture
from dejavu.graphs.kernels import kernel_of
from dejavu.init import SCHEMES, Draw, draw_layer
from dejavu.runtime.training import build_layers
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of
from dejavu.workload.models.modules.experts import Experts, GroupedLinear, grouped_mm, grouped_outer
from tests.test_models import ZOO

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
SAME = 1e-5  # of scores of about 3, in float32; attention and norms are summed in another order


def config_of(workload: Workload) -> dict[str, Any]:
    """What transformers calls our options."""
    layers, options = layers_of(workload), workload.model_options
    return {
        "vocab_size": dataset_of(workload).shape.num_classes,
        "hidden_size": options["width"],
        "intermediate_size": options["feedforward"],
        "num_hidden_layers": len(layers) - 2,
        "num_attention_heads": options["num_heads"],
        "num_key_value_heads": options["num_kv_heads"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": workload.sequence_length,
        "tie_word_embeddings": False,
    }


def copy_block(ours: Any, theirs: Any) -> None:
    pairs = [
        (ours.attention_norm, theirs.input_layernorm),
        (ours.feedforward_norm, theirs.post_attention_layernorm),
        (ours.attention.query, theirs.self_attn.q_proj),
        (ours.attention.key, theirs.self_attn.k_proj),
        (ours.attention.value, theirs.self_attn.v_proj),
        (ours.attention.output, theirs.self_attn.o_proj),
    ]
    if isinstance(getattr(ours.feedforward, "experts", None), Experts):
        own, experts = ours.feedforward.experts, theirs.mlp.experts
        own.gate.weight.data, own.expand.weight.data = experts.gate_up_proj.data.chunk(2, dim=1)
        own.contract.weight.data = experts.down_proj.data
        pairs.append((ours.feedforward.router, theirs.mlp.gate))
    else:
        pairs += [
            (ours.feedforward.gate, theirs.mlp.gate_proj),
            (ours.feedforward.expand, theirs.mlp.up_proj),
            (ours.feedforward.contract, theirs.mlp.down_proj),
        ]
    for own, other in pairs:
        assert own.weight.shape == other.weight.shape
        own.weight.data = other.weight.data


@needs_transformers
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_it_scores_as_transformers_does(name: str) -> None:
    import transformers

    workload = ZOO[name]
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            **config_of(workload), rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}
        )
        make: Any = transformers.LlamaForCausalLM
    else:
        config = transformers.MixtralConfig(
            **config_of(workload),
            num_local_experts=workload.model_options["num_experts"],
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        )
        make = transformers.MixtralForCausalLM
    torch.manual_seed(3)
    whole = make(config).eval()
    for parameter in whole.parameters():  # drawn so small that every score would be about 0
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    layers = build_layers(workload, Draw(), torch.device("cpu"))
    embedding, *blocks, head = layers
    embedding.token.weight.data = whole.model.embed_tokens.weight.data
    head.norm.weight.data, head.logits.weight.data = whole.model.norm.weight.data, whole.lm_head.weight.data
    for ours, theirs in zip(blocks, whole.model.layers, strict=True):
        copy_block(ours, theirs)
    x = dataset_of(workload).batch(0, 3, seed=0)[0]
    with torch.no_grad():
        expected, found = whole(x).logits, layers(x)
    assert expected.abs().max() > 0.5
    assert torch.allclose(found, expected, atol=SAME, rtol=0)
    assert sum(p.numel() for p in layers.parameters()) == sum(p.numel() for p in whole.parameters())


@needs_transformers
@pytest.mark.parametrize(
    ("name", "parameters", "options"),
    [
        ("llama", 8_030_261_248, {"num_blocks": 32, "width": 4096, "num_heads": 32, "feedforward": 14336}),
        ("llama", 70_553_706_496, {"num_blocks": 80, "width": 8192, "num_heads": 64, "feedforward": 28672}),
        ("mixtral", 46_702_792_704, {"num_blocks": 32, "width": 4096, "num_heads": 32, "feedforward": 14336}),
    ],
)
def test_it_has_as_many_parameters_as_in_transformers(name: str, parameters: int, options: dict[str, int]) -> None:
    import transformers

    tokens = 128_256 if name == "llama" else 32_000
    workload = Workload(
        model=name,
        model_options={**options, "num_kv_heads": 8},
        data="synthetic",
        synthetic={"num_classes": tokens},
        dtype="bfloat16",
    )
    config = config_of(workload)
    kind: Any = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    }[name]
    with torch.device("meta"):
        theirs = kind[1](kind[0](**config))
    assert capture(workload).num_parameters == sum(p.numel() for p in theirs.parameters()) == parameters


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_exported_model_needs_no_operator_of_ours(name: str) -> None:
    """It is loaded where this project is not installed, as MLflow's registered models are."""
    workload = ZOO[name]
    layers = build_layers(workload, Draw(seed=2), torch.device("cpu")).eval()
    x = dataset_of(workload).batch(0, 4, seed=0)[0]
    exported = torch.export.export(layers, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert "dejavu" not in str(exported.graph)
    more = dataset_of(workload).batch(1, 7, seed=0)[0]
    with torch.no_grad():
        assert torch.allclose(exported.module()(more), layers(more), atol=1e-5)


def some_groups(seed: int, *, num_rows: int = 23, num_groups: int = 5) -> torch.Tensor:
    """Ends of groups of rows; some groups are empty."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, num_rows + 1, (num_groups,), generator=generator).sort().values
    ends[-1] = num_rows
    return ends.to(torch.int32)


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_multiplied_one_by_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = some_groups(seed)
    rows = torch.randn(23, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    starts = [0, *ends.tolist()[:-1]]
    one_by_one = torch.cat([rows[a:b] @ weights[e] for e, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True))])
    assert torch.equal(grouped_mm(rows, weights, ends), one_by_one)
    assert torch.autograd.gradcheck(lambda r, w: grouped_mm(r, w, ends), (rows, weights))
    outer = grouped_outer(rows.detach(), one_by_one.detach(), ends)
    for expert, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True)):
        assert torch.allclose(outer[expert], rows[a:b].T @ one_by_one[a:b])


@pytest.mark.parametrize("operator", [grouped_mm, grouped_outer])
def test_the_operators_are_whole(operator: Any) -> None:
    """Torch's own check: schema, fake tensors and gradients agree with what runs."""
    ends = some_groups(1)
    left = torch.randn(23, 6)
    right = torch.randn(5, 6, 4) if operator is grouped_mm else torch.randn(23, 4)
    if operator is grouped_mm:
        left.requires_grad_()
        right.requires_grad_()
    torch.library.opcheck(operator, (left, right, ends))


@pytest.mark.parametrize("spread", ["even", "all to one", "as drawn"])
def test_no_token_is_dropped(spread: str) -> None:
    """Whatever the router chooses, a token gets what its own experts make of it."""
    torch.manual_seed(0)
    experts, tokens = Experts(16, 24, 4), torch.randn(10, 16)
    share = torch.rand(10, 2)
    choice = {
        "even": torch.arange(20).view(10, 2) % 4,
        "all to one": torch.tensor([[2, 0]]).expand(10, 2),
        "as drawn": torch.stack([torch.randperm(4)[:2] for _ in range(10)]),
    }[spread]
    expected = torch.zeros_like(tokens)
    for n in range(10):
        for c in range(2):
            gate, expand, contract = (
                part.weight[choice[n, c]] for part in (experts.gate, experts.expand, experts.contract)
            )
            made = contract @ (nn.functional.silu(gate @ tokens[n]) * (expand @ tokens[n]))
            expected[n] += share[n, c] * made
    assert torch.allclose(experts(tokens, share, choice), expected, atol=1e-5)


def test_only_the_chosen_experts_are_priced() -> None:
    """Rows of two of four experts each, however many experts there are; and the products of one group's shape."""
    few = capture(ZOO["mixtral"]).layers[1]
    workload = ZOO["mixtral"]
    more = {**workload.model_options, "num_experts": 8}
    many = capture(workload.model_copy(update={"model_options": more})).layers[1]
    router = 2 * 2 * 16 * 32 * 4  # of four more experts
    assert many.flops("forward") - few.flops("forward") == router
    assert many.parameter_bytes - few.parameter_bytes == 4 * 4 * (3 * 32 * 48 + 32)
    kernels = [kernel_of(operator) for operator in few.operators if "grouped" in operator.kind]
    assert [(k.family, k.batch, k.m, k.n, k.k) for k in kernels if k][:3] == [
        ("matmul", 4, 16, 48, 32),
        ("matmul", 4, 16, 48, 32),
        ("matmul", 4, 16, 32, 48),
    ]
    assert len(kernels) == 9  # three forward, six backward


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_expert_is_drawn_as_a_matrix_of_its_own(scheme: str) -> None:
    """Fans are those of one expert's matrix, whatever their number."""
    builder = layers_of(ZOO["mixtral"])[1]
    block: Any = draw_layer(builder, Draw(scheme, seed=1), position=1, depth=4)
    weight = block.feedforward.experts.gate.weight.detach()
    dense = draw_layer(layers_of(ZOO["llama"])[1], Draw(scheme, seed=1), position=1, depth=4)
    like = dense.feedforward.gate.weight.detach()  # type: ignore[union-attr]
    assert isinstance(block.feedforward.experts.gate, GroupedLinear)
    for matrix in weight:
        assert matrix.std().item() == pytest.approx(like.std().item(), rel=0.1)
    assert not torch.equal(weight[0], weight[1])
