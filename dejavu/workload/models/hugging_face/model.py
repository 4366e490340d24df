"""A model of transformers as a chain of layers: embedding, blocks, head.

A block is built on its own and called as the model's own forward pass calls it, so no process holds a whole model.
"""

from __future__ import annotations

import hashlib
import importlib
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
from dejavu.workload.models._base import (
    LayerBuilder,
    Model,
    Source,
    TensorParallel,
    check_tokens,
    renamed,
    with_context_parallel,
)
from dejavu.workload.models.hugging_face.experts import initialize, use_static_experts
from dejavu.workload.models.hugging_face.families import FAMILIES, Block, Family
from dejavu.workload.models.hugging_face.saved import sources

PREFIX = "hf:"
_PLAIN = (bool, int, float, str, tuple, torch.dtype, type(None))
# Left out, because a step has to give the same loss under every plan.
DROPOUTS = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout_rate"),
)


@dataclass(frozen=True)
class HuggingFace(Model):
    """Embedding, blocks, head; the loss is over every position, also for an encoder such as BERT, which sees targets.

    A head that the config ties to the embedding is tied here, too, wherever the two are.

    Attributes:
        path: the config.json.
        options: fields of the config to change, such as num_hidden_layers.
    """

    path: Path
    options: Mapping[str, Any]

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        config = self.config()
        limits = {"max_position_embeddings": shape.length}
        window = getattr(config, "sliding_window", None)
        if window and getattr(config, "use_sliding_window", True):
            limits["sliding_window"] = shape.length
        self.check(shape, limits)
        # Heads that share keys and values stay together.
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        family = FAMILIES[config.model_type]
        words, scores = ("", "logits") if family.columns else (None, None)
        can = bool(family.gathers)
        split = TensorParallel.block(heads, family.columns, family.rows, gathers=family.gathers, sequence=can)
        head = TensorParallel.head(heads, config.hidden_size, config.vocab_size, scores, sequence=can)
        embedding = TensorParallel.embedding(heads, words, () if can else None)
        blocks = [partial(self._block, i, shape.input_shape[0]) for i in range(config.num_hidden_layers)]
        chain = (
            LayerBuilder("embedding", partial(self._end, "embedding"), embedding),
            *(LayerBuilder(f"block{i}", build, split, work=partial(work_of, build)) for i, build in enumerate(blocks)),
            LayerBuilder("head", partial(self._end, "head"), head, tied=self.tied()),
        )
        return with_context_parallel(chain, loss_by_position=True) if family.has_context else chain

    def tied(self) -> tuple[tuple[str, str], ...]:
        """Return the head's weight and the embedding's that it is, by our names; nothing where each has its own."""
        config = self.config()
        family = FAMILIES[config.model_type]
        if not self.is_tied(config):
            return ()
        head, embedding = (_inner(family, outer) for outer in family.tied)
        return ((head.partition(".")[2], embedding),)

    def is_tied(self, config: Any) -> bool:
        """Whether the config says that the head's table is the embedding's."""
        return bool(config.tie_word_embeddings)

    def check(self, shape: ExampleShape, limits: Mapping[str, int], least_length: int = 1) -> None:
        """Check that a block can be made, and that the model can take such examples.

        Args:
            limits: the least that these fields of the config have to be; the vocabulary's is added.

        Raises:
            InputError: it cannot.
        """
        config = self.config()
        check_tokens(f"{PREFIX}{self.path}", shape, least_length)
        for name, needed in {"vocab_size": shape.num_classes, **limits}.items():
            if getattr(config, name) < needed:
                raise InputError(
                    f"{self.path}: {name} is {getattr(config, name)}; the data needs at least {needed}",
                    ("model_options",),
                )
        family = FAMILIES[config.model_type]
        try:
            with torch.device("meta"):
                getattr(module_of(family), family.block)(config, layer_idx=0)
                _rotary(family, config)
        except Exception as error:  # whatever transformers finds wrong with numbers that do not go together
            raise InputError(f"{self.path}: {family.block}: {type(error).__name__}: {error}", ("model",)) from error

    def untied_parameters(self, shape: ExampleShape) -> int:
        config = self.config()
        return config.vocab_size * config.hidden_size if self.is_tied(config) else 0

    def weight_names(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, str]:
        """Return the names in transformers' own whole model."""
        config = self.config()
        outer = dict(FAMILIES[config.model_type].names)
        block = outer.pop("block")
        blocks = {f"block{i}.block": block.format(i) for i in range(config.num_hidden_layers)}
        return renamed(names, {**outer, **blocks})

    def weight_sources(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, tuple[Source, ...]]:
        """Return where transformers' files may have each weight."""
        config = self.config()
        family = FAMILIES[config.model_type]
        return {name: sources(family, config, outer) for name, outer in self.weight_names(shape, names).items()}

    def save_config(self, folder: Path) -> None:
        """Write the config.json of the model as it was trained."""
        fields = {**json.loads(self.path.read_text()), **self.options}
        config = importlib.import_module("transformers").AutoConfig.for_model(**fields)
        config.architectures = [FAMILIES[config.model_type].whole]
        config.save_pretrained(folder)

    @property
    def code(self) -> str:
        """As of every model, and of transformers and the config."""
        version = importlib.import_module("transformers").__version__
        own = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
        return hashlib.sha256(f"{own} {version} {self.path.read_text()}".encode()).hexdigest()[:16]

    def config(self) -> Any:
        """Return transformers' own record, without dropout."""
        fields = {**json.loads(self.path.read_text()), **self.options}
        fields |= {name: 0.0 for name in DROPOUTS if name in fields}
        config = importlib.import_module("transformers").AutoConfig.for_model(**fields)
        for name in DROPOUTS:
            if getattr(config, name, None):
                setattr(config, name, 0.0)
        config._attn_implementation = "sdpa"
        return config

    def _end(self, which: str) -> nn.Module:
        config = self.config()
        family = FAMILIES[config.model_type]
        end: nn.Module = getattr(family, which)(module_of(family), config)
        return end

    def _block(self, index: int, length: int) -> nn.Module:
        config = self.config()
        family = FAMILIES[config.model_type]
        rotary = _rotary(family, config)
        if family.has_experts:
            use_static_experts(config)
        block = getattr(module_of(family), family.block)(config, layer_idx=index)
        if family.has_experts:
            initialize(block, config.initializer_range)
        return Block(block, rotary, length)


def _rotary(family: Family, config: Any) -> nn.Module | None:
    """Make what gives a block the rotations of its positions; None where positions are embedded."""
    found: nn.Module | None = getattr(module_of(family), family.rotary)(config=config) if family.rotary else None
    return found


def work_of(build: Callable[[], nn.Module]) -> Any:
    """Return what a block computes by: its modules with their numbers and the shapes of their weights.

    All but the block's own place: families give it to each block, which is to find its part of a cache by.
    """
    with torch.device("meta"):
        block = build()
    found = list[Any]()
    for name, module in block.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN) and key != "layer_idx"}
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = tuple((weight, tuple(tensor.shape), str(tensor.dtype)) for weight, tensor in own)
        found.append((name, type(module), repr(sorted(plain.items())), shapes))
    return tuple(found)


def module_of(family: Family) -> Any:
    """Import transformers' module of a family."""
    return importlib.import_module(f"transformers.models.{family.module}")


def _inner(family: Family, outer: str) -> str:
    """Return our name of a weight outside the blocks, by its name in the whole model."""
    ours = {theirs: inner for inner, theirs in family.names.items()}
    module = max((theirs for theirs in ours if outer.startswith(f"{theirs}.")), key=len)
    return ours[module] + outer.removeprefix(module)
