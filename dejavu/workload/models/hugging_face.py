"""Models of Hugging Face's transformers, from a local config.json and without weights: `hf:PATH`.

A block is built on its own and called as the model's own forward pass calls it, so no process holds a whole model.
The package is optional: `pip install pipe-dejavu[hf]`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, Model, TensorParallel, check_tokens, renamed

PREFIX = "hf:"
# Left out, because a step has to give the same loss under every plan.
DROPOUTS = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
)


@dataclass(frozen=True)
class Family:
    """Where a family of models has its parts.

    Attributes:
        module: transformers' module, below `transformers.models`.
        embedding: makes the first layer from the module and the config.
        block: the class of a block, made from the config and the block's number.
        head: makes the last layer.
        rotary: the class that gives a block the rotations of its positions; empty where positions are embedded.
        whole: the class of the whole model, which has `names`.
        names: where it has our layers' modules; blocks have their number in place of `{}`.
    """

    module: str
    embedding: Callable[[Any, Any], nn.Module]
    block: str
    head: Callable[[Any, Any], nn.Module]
    whole: str
    names: Mapping[str, str]
    rotary: str = ""


class Positioned(nn.Module):
    """Tokens to vectors, learned positions added."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return vectors


class Block(nn.Module):
    """One of the model's own blocks, without a mask: causal or not as the block itself is."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rotary is None:
            output = self.block(x)
        else:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            output = self.block(x, position_ids=positions, position_embeddings=self.rotary(x, positions))
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return states


class Head(nn.Module):
    """The last norm and a score for each token."""

    def __init__(self, norm: nn.Module, config: Any) -> None:
        super().__init__()
        self.norm = norm
        self.logits = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.logits(self.norm(x))
        return scores


def _tokens(module: Any, config: Any) -> nn.Module:
    return nn.Embedding(config.vocab_size, config.hidden_size)


def _rms_head(name: str) -> Callable[[Any, Any], nn.Module]:
    return lambda module, config: Head(getattr(module, name)(config.hidden_size, eps=config.rms_norm_eps), config)


def _llama_like(module: str, prefix: str) -> Family:
    return Family(
        module,
        _tokens,
        f"{prefix}DecoderLayer",
        _rms_head(f"{prefix}RMSNorm"),
        f"{prefix}ForCausalLM",
        _names("model.embed_tokens", "model.layers.{}", "model.norm"),
        rotary=f"{prefix}RotaryEmbedding",
    )


def _names(embedding: str, block: str, norm: str) -> dict[str, str]:
    return {"embedding": embedding, "block": block, "head.norm": norm, "head.logits": "lm_head"}


def _bert_head(module: Any, config: Any) -> nn.Module:
    built = module.BertOnlyMLMHead(config)
    built.predictions.bias = built.predictions.decoder.bias  # as the whole model ties them
    head: nn.Module = built
    return head


# By the config's `model_type`.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "gpt2.modeling_gpt2",
        lambda module, config: Positioned(config),
        "GPT2Block",
        lambda module, config: Head(nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon), config),
        "GPT2LMHeadModel",
        {
            "embedding.token": "transformer.wte",
            "embedding.position": "transformer.wpe",
            "block": "transformer.h.{}",
            "head.norm": "transformer.ln_f",
            "head.logits": "lm_head",
        },
    ),
    "gpt_neox": Family(
        "gpt_neox.modeling_gpt_neox",
        _tokens,
        "GPTNeoXLayer",
        lambda module, config: Head(nn.LayerNorm(config.hidden_size, config.layer_norm_eps), config),
        "GPTNeoXForCausalLM",
        _names("gpt_neox.embed_in", "gpt_neox.layers.{}", "gpt_neox.final_layer_norm"),
        rotary="GPTNeoXRotaryEmbedding",
    ),
    "bert": Family(
        "bert.modeling_bert",
        lambda module, config: module.BertEmbeddings(config),
        "BertLayer",
        _bert_head,
        "BertForMaskedLM",
        {"embedding": "bert.embeddings", "block": "bert.encoder.layer.{}", "head": "cls"},
    ),
    "llama": _llama_like("llama.modeling_llama", "Llama"),
    "mistral": _llama_like("mistral.modeling_mistral", "Mistral"),
    "qwen2": _llama_like("qwen2.modeling_qwen2", "Qwen2"),
    "qwen3": _llama_like("qwen3.modeling_qwen3", "Qwen3"),
}


@dataclass(frozen=True)
class HuggingFace(Model):
    """Embedding, blocks, head; the loss is over every position, also for an encoder such as BERT, which sees targets.

    Weights are drawn here, never loaded. A head that the config ties to the embedding has a table of its own.

    Attributes:
        path: the config.json.
        options: fields of the config to change, such as num_hidden_layers.
    """

    path: Path
    options: Mapping[str, Any]

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        config = self._config()
        check_tokens(f"{PREFIX}{self.path}", shape)
        limits = {"vocab_size": shape.num_classes, "max_position_embeddings": shape.input_shape[0]}
        window = getattr(config, "sliding_window", None)
        if window and getattr(config, "use_sliding_window", True):
            limits["sliding_window"] = shape.input_shape[0]
        for name, needed in limits.items():
            if getattr(config, name) < needed:
                raise InputError(
                    f"{self.path}: {name} is {getattr(config, name)}; the data needs at least {needed}",
                    ("model_options",),
                )
        # Heads that share keys and values stay together.
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        split, head = TensorParallel.block(heads), TensorParallel.head(heads, config.hidden_size, config.vocab_size)
        return (
            LayerBuilder("embedding", partial(self._end, "embedding"), TensorParallel.embedding(heads)),
            *(LayerBuilder(f"block{i}", partial(self._block, i), split) for i in range(config.num_hidden_layers)),
            LayerBuilder("head", partial(self._end, "head"), head),
        )

    def untied_parameters(self, shape: ExampleShape) -> int:
        config = self._config()
        return config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0

    def weight_names(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, str]:
        """Return the names in transformers' own whole model."""
        config = self._config()
        outer = dict(FAMILIES[config.model_type].names)
        block = outer.pop("block")
        blocks = {f"block{i}.block": block.format(i) for i in range(config.num_hidden_layers)}
        return renamed(names, {**outer, **blocks})

    def save_config(self, folder: Path) -> None:
        """Write the config.json of the model as it was trained: its head has weights of its own."""
        fields = {**json.loads(self.path.read_text()), **self.options, "tie_word_embeddings": False}
        config = importlib.import_module("transformers").AutoConfig.for_model(**fields)
        config.architectures = [FAMILIES[config.model_type].whole]
        config.save_pretrained(folder)

    def notes(self, shape: ExampleShape) -> tuple[str, ...]:
        if not self.untied_parameters(shape):
            return ()
        return ("the config ties the head to the embedding; here the head has weights of its own",)

    @property
    def code(self) -> str:
        version = importlib.import_module("transformers").__version__
        return hashlib.sha256(f"{super().code} {version} {self.path.read_text()}".encode()).hexdigest()[:16]

    def _config(self) -> Any:
        fields = {**json.loads(self.path.read_text()), **self.options}
        fields |= {name: 0.0 for name in DROPOUTS if name in fields}
        config = importlib.import_module("transformers").AutoConfig.for_model(**fields)
        for name in DROPOUTS:
            if getattr(config, name, None):
                setattr(config, name, 0.0)
        config._attn_implementation = "sdpa"
        return config

    def _end(self, which: str) -> nn.Module:
        config = self._config()
        family = FAMILIES[config.model_type]
        end: nn.Module = getattr(family, which)(_module(family), config)
        return end

    def _block(self, index: int) -> nn.Module:
        config = self._config()
        family = FAMILIES[config.model_type]
        module = _module(family)
        rotary = getattr(module, family.rotary)(config=config) if family.rotary else None
        return Block(getattr(module, family.block)(config, layer_idx=index), rotary)


def _module(family: Family) -> Any:
    return importlib.import_module(f"transformers.models.{family.module}")


def load_config(reference: str, options: Mapping[str, Any]) -> HuggingFace:
    """Load the model of `hf:PATH`, a config.json or the folder that contains one.

    Raises:
        InputError: transformers is missing, there is no such file, or it describes a model that is not known here.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            f"model {reference!r} needs the package transformers, which is not installed; "
            "`pip install --constraint constraints.txt pipe-dejavu[hf]` brings it",
            ("model",),
        )
    path = Path(reference.removeprefix(PREFIX))
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text())
        kind = fields["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"model {reference!r} cannot be read: {type(error).__name__}: {error}; wanted a config.json that names its "
            "model_type",
            ("model",),
        ) from error
    if kind not in FAMILIES:
        raise InputError(f"{path}: model_type is {kind!r}; wanted one of {', '.join(FAMILIES)}", ("model",))
    model = HuggingFace(path, options)
    known = importlib.import_module("transformers").AutoConfig.for_model(kind).to_dict()
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{path}: a config of {kind} has no field {unknown[0]!r}", ("model_options",))
    try:
        model._config()
    except Exception as error:  # whatever transformers finds wrong with the fields
        raise InputError(f"{path}: {type(error).__name__}: {error}", ("model",)) from error
    return model
