"""Where each family of transformers' models has its parts, and the modules around its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dejavu.workload.models.modules.positions import num_at_hand, positions


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
        base: what names begin with in the whole model, and not in the model without its head.
        in_files: parts of names as files have them, by what they are called in the whole model.
        columns, rows: of a block, what tensor-parallel devices share; empty: it cannot be trained so.
        gathers: of a block whose devices split the sequence, the modules that need all of it; empty: they cannot.
        has_experts: its blocks have experts, as Mixtral's.
        has_context: its layers also work on a part of the sequence (`TensorParallel.context`).
        tied: the weight of the head, and that of the embedding which a config may tie it to.
    """

    module: str
    embedding: Callable[[Any, Any], nn.Module]
    block: str
    head: Callable[[Any, Any], nn.Module]
    whole: str
    names: Mapping[str, str]
    base: str
    tied: tuple[str, str]
    rotary: str = ""
    in_files: Mapping[str, str] = field(default_factory=dict)
    has_experts: bool = False
    has_context: bool = False
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()


class Positioned(nn.Module):
    """Tokens to vectors, learned positions added."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.token(tokens) + self.position(positions(tokens.shape[1], tokens.device))
        return vectors


class Block(nn.Module):
    """One of the model's own blocks, without a mask: causal or not as the block itself is.

    Attributes:
        length: of the sequence, of which what it receives may be a part: attention rotates all positions.
    """

    def __init__(self, block: nn.Module, rotary: nn.Module | None, length: int) -> None:
        super().__init__()
        self.block, self.rotary, self.length = block, rotary, length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rotary is None:
            output = self.block(x)
        else:
            places = positions(num_at_hand(self.length), x.device)[None]
            output = self.block(x, position_ids=places, position_embeddings=self.rotary(x, places))
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


def _gemma_tokens(module: Any, config: Any) -> nn.Module:
    scale = config.hidden_size**0.5
    embedding: nn.Module = module.GemmaTextScaledWordEmbedding(
        config.vocab_size, config.hidden_size, config.pad_token_id, embed_scale=scale
    )
    return embedding


def _rms_head(name: str) -> Callable[[Any, Any], nn.Module]:
    return lambda module, config: Head(getattr(module, name)(config.hidden_size, eps=config.rms_norm_eps), config)


def _llama_like(module: str, prefix: str, *, is_split: bool = True, has_experts: bool = False) -> Family:
    """A decoder as Llama's.

    Args:
        is_split: it can be trained tensor-parallel. Not where each head's queries and keys have a norm (Qwen 3), whose
            one weight would get a part of its gradient on each device that has some of the heads.
    """
    return Family(
        module,
        _tokens,
        f"{prefix}DecoderLayer",
        _rms_head(f"{prefix}RMSNorm"),
        f"{prefix}ForCausalLM",
        _names("model.embed_tokens", "model.layers.{}", "model.norm"),
        "model",
        ("lm_head.weight", "model.embed_tokens.weight"),
        rotary=f"{prefix}RotaryEmbedding",
        has_experts=has_experts,
        has_context=True,
        columns=(*_attention("q", "k", "v"), "block.mlp.gate_proj", "block.mlp.up_proj") if is_split else (),
        rows=(*_attention("o"), "block.mlp.down_proj") if is_split else (),
        gathers=("block.self_attn", "block.mlp") if is_split else (),
    )


def _attention(*names: str) -> tuple[str, ...]:
    return tuple(f"block.self_attn.{name}_proj" for name in names)


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
        "transformer",
        ("lm_head.weight", "transformer.wte.weight"),
        has_context=True,
    ),
    "gpt_neox": Family(
        "gpt_neox.modeling_gpt_neox",
        _tokens,
        "GPTNeoXLayer",
        lambda module, config: Head(nn.LayerNorm(config.hidden_size, config.layer_norm_eps), config),
        "GPTNeoXForCausalLM",
        _names("gpt_neox.embed_in", "gpt_neox.layers.{}", "gpt_neox.final_layer_norm"),
        "gpt_neox",
        ("lm_head.weight", "gpt_neox.embed_in.weight"),
        rotary="GPTNeoXRotaryEmbedding",
        has_context=True,
        in_files={"lm_head.": "embed_out."},
    ),
    "bert": Family(
        "bert.modeling_bert",
        lambda module, config: module.BertEmbeddings(config),
        "BertLayer",
        _bert_head,
        "BertForMaskedLM",
        {"embedding": "bert.embeddings", "block": "bert.encoder.layer.{}", "head": "cls"},
        "bert",
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        in_files={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},  # the published ones
    ),
    "t5": Family(
        "t5.modeling_t5",
        _tokens,
        "T5Block",
        lambda module, config: Head(module.T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon), config),
        "T5ForConditionalGeneration",
        {
            "embedding": "shared",
            "encoder": "encoder.block.{}",
            "encoder_norm.norm": "encoder.final_layer_norm",
            "decoder": "decoder.block.{}",
            "head.norm": "decoder.final_layer_norm",
            "head.logits": "lm_head",
        },
        "",
        ("lm_head.weight", "shared.weight"),
        in_files={"shared.": "encoder.embed_tokens."},
    ),
    "llama": _llama_like("llama.modeling_llama", "Llama"),
    "mistral": _llama_like("mistral.modeling_mistral", "Mistral"),
    "gemma": replace(_llama_like("gemma.modeling_gemma", "Gemma", is_split=False), embedding=_gemma_tokens),
    "qwen2": _llama_like("qwen2.modeling_qwen2", "Qwen2"),
    "qwen3": _llama_like("qwen3.modeling_qwen3", "Qwen3", is_split=False),
    "mixtral": _llama_like("mixtral.modeling_mixtral", "Mixtral", is_split=False, has_experts=True),
}
