"""Models from Hugging Face configs, against transformers' own; without the package only its absence is told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of, model_of
from dejavu.workload.models.hugging_face import FAMILIES
from tests.conftest import some

installed = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not installed, reason="transformers is not installed")
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 300, "bos_token_id": 0}
    | {"eos_token_id": 0},
    "gpt_neox": SIZES,
    "bert": SIZES,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 64},
    "gemma": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "t5": {"num_layers": 2, "num_decoder_layers": 3, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    | {"vocab_size": 300},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def workload_of(kind: str, folder: Path, **fields: Any) -> Workload:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGS.get(kind, SIZES)}))
    return Workload(**{"model": f"hf:{path}", "sequence_length": 24, "batch_size": 4, "num_microbatches": 2, **fields})


def test_the_families_are_covered() -> None:
    assert set(CONFIGS) == set(FAMILIES)


def whole_class(kind: str) -> Any:
    """Transformers' class of the whole model."""
    import transformers

    return getattr(transformers, FAMILIES[kind].whole)


def logits_of(whole: Any, x: torch.Tensor) -> torch.Tensor:
    """Transformers' own scores; an encoder reads the first half."""
    if whole.config.is_encoder_decoder:
        half = x.shape[1] // 2
        found: torch.Tensor = whole(input_ids=x[:, :half], decoder_input_ids=x[:, half:]).logits
    else:
        found = whole(x).logits
    return found


def sources(kind: str, whole: Any) -> list[list[nn.Module]]:
    """The modules of the whole model that each layer stands for."""
    if kind == "t5":
        blocks, norm = [[block] for block in whole.encoder.block], whole.encoder.final_layer_norm
        after = [*([block] for block in whole.decoder.block), [whole.decoder.final_layer_norm, whole.lm_head]]
        return [[whole.shared], *blocks, [norm], *after]
    if kind == "gpt2":
        base = whole.transformer
        return [[base.wte, base.wpe], *([block] for block in base.h), [base.ln_f, whole.lm_head]]
    if kind == "bert":
        return [[whole.bert.embeddings], *([block] for block in whole.bert.encoder.layer), [whole.cls]]
    if kind == "gpt_neox":
        base = whole.gpt_neox
        return [[base.embed_in], *([block] for block in base.layers), [base.final_layer_norm, whole.lm_head]]
    base = whole.model
    return [[base.embed_tokens], *([block] for block in base.layers), [base.norm, whole.lm_head]]


@needs_transformers
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_chain_is_the_whole_model(kind: str, tmp_path: Path) -> None:
    workload = workload_of(kind, tmp_path)
    model: Any = model_of(workload)
    whole = whole_class(kind)._from_config(model.config())
    layers = [builder.build() for builder in layers_of(workload)]
    for layer, parts in zip(layers, sources(kind, whole), strict=True):
        theirs = [parameter for part in parts for parameter in part.parameters()]
        for ours, other in zip(layer.parameters(), theirs, strict=True):
            ours.data = other.data
    x = dataset_of(workload).batch(0, 2, seed=0)[0]
    output = x
    for layer in layers:
        output = layer(output)
    assert torch.equal(output, logits_of(whole.train(), x))
    graph = capture(workload)
    tied = model.untied_parameters(dataset_of(workload).shape)
    assert graph.num_parameters - tied == sum(parameter.numel() for parameter in whole.parameters())
    assert bool(layers_of(workload)[-1].tied) == model.is_tied(model.config())


@needs_transformers
@pytest.mark.parametrize("kind", some(CONFIGS, ["gpt2", "llama", "t5", "mixtral"]))
def test_blocks_that_are_alike_are_traced_once(kind: str, tmp_path: Path) -> None:
    workload = workload_of(kind, tmp_path, num_microbatches=2)
    graph = capture(workload)
    assert graph == capture(workload, reuse=False)
    assert graph.microbatch_size == workload.microbatch_size != 1
    blocks = [layer.operators for layer in graph.layers if layer.name.startswith(("block", "decoder"))]
    assert len(blocks) > 1
    # T5's first decoder block draws the positions for the others.
    assert len({id(operators) for operators in blocks}) == (2 if kind == "t5" else 1)


@needs_transformers
def test_options_change_the_config(tmp_path: Path) -> None:
    workload = workload_of("llama", tmp_path, model_options={"num_hidden_layers": 5})
    assert len(layers_of(workload)) == 7
    folder = workload_of("llama", tmp_path, model=f"hf:{tmp_path}")
    assert len(layers_of(folder)) == 4
    assert model_of(workload).code == model_of(folder).code


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "xlnet",
            {},
            "model_type is 'xlnet'; wanted one of gpt2, .* or `model: package.module:factory` with a factory",
        ),
        ("llama", {"model_options": {"depth": 3}}, "a config of llama has no field 'depth'"),
        ("llama", {"sequence_length": 65}, "max_position_embeddings is 64; the data needs at least 65"),
        ("llama", {"model_options": {"vocab_size": 200}}, "vocab_size is 200; the data needs at least 256"),
        ("mistral", {"model_options": {"sliding_window": 8}}, "sliding_window is 8; the data needs at least 24"),
        ("llama", {"data": "digits"}, "reads tokens"),
        ("llama", {"model": "hf:no/such.json"}, "FileNotFoundError"),
    ],
)
def test_mistakes_are_named(kind: str, fields: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        layers_of(workload_of(kind, tmp_path, **fields))


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        ("bert", {"num_attention_heads": 5}, "ValueError: The hidden size"),
        ("gpt2", {"n_head": 7}, "ValueError: `embed_dim` must be divisible"),
        ("llama", {"hidden_act": "none"}, "KeyError: 'none'"),
        ("llama", {"rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}, "KeyError: 'none'"),
        ("t5", {"dense_act_fn": "none"}, "KeyError: 'none'"),
    ],
)
def test_a_block_that_transformers_cannot_make_is_named(kind: str, options: dict, found: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"config\.json: \w+: {found}"):
        layers_of(workload_of(kind, tmp_path, model_options=options))


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "named", "trained"),
    [
        ("bert", "BertForSequenceClassification", "BertForMaskedLM"),
        ("bert", "BertForPreTraining", "BertForMaskedLM"),
        ("llama", "LlamaForTokenClassification", "LlamaForCausalLM"),
        ("t5", "T5EncoderModel", "T5ForConditionalGeneration"),
    ],
)
def test_a_config_of_another_class_is_refused_unless_ours_is_asked_for(
    kind: str, named: str, trained: str, tmp_path: Path
) -> None:
    def workload(named: list[str] | None, **fields: Any) -> Workload:
        found = workload_of(kind, tmp_path, **fields)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind], "architectures": named}))
        return found

    with pytest.raises(InputError, match=rf"architectures is {named}; wanted {trained}, .* of your own a {named}"):
        layers_of(workload([named]))
    layers = layers_of(workload([named], model_options={"architectures": [trained]}))
    for known in (None, [trained], [trained.partition("For")[0] + "Model"]):
        assert [layer.name for layer in layers_of(workload(known))] == [layer.name for layer in layers]


@needs_transformers
def test_the_former_name_of_a_class_is_known(tmp_path: Path) -> None:
    layers_of(workload_of("t5", tmp_path, model_options={"architectures": ["T5WithLMHeadModel"]}))


@pytest.mark.skipif(installed, reason="transformers is installed")
def test_its_absence_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"needs the package transformers, which is not installed; `pip install .*\[hf\]"
    ):
        layers_of(workload_of("llama", tmp_path))
