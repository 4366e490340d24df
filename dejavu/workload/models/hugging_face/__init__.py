"""Models of Hugging Face's transformers, from a local config.json: `hf:PATH`.

A block is built on its own and called as the model's own forward pass calls it, so no process holds a whole model.
The package is optional: `pip install pipe-dejavu[hf]`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, Model, Source, TensorParallel, check_tokens, renamed
from dejavu.workload.models.hugging_face.families import FAMILIES, Block, Family
from dejavu.workload.models.hugging_face.saved import sources

PREFIX = "hf:"
# Left out, because a step has to give the same loss under every plan.
DROPOUTS = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
)


@dataclass(frozen=True)
class HuggingFace(Model):
    """Embedding, blocks, head; the loss is over every position, also for an encoder such as BERT, which sees targets.

    A head that the config ties to the embedding has a table of its own; where weights are loaded it starts as a copy.

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
        family = FAMILIES[config.model_type]
        words, scores = ("", "logits") if family.columns else (None, None)
        split = TensorParallel.block(heads, family.columns, family.rows)
        head = TensorParallel.head(heads, config.hidden_size, config.vocab_size, scores)
        return (
            LayerBuilder("embedding", partial(self._end, "embedding"), TensorParallel.embedding(heads, words)),
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

    def weight_sources(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, tuple[Source, ...]]:
        """Return where transformers' files may have each weight."""
        config = self._config()
        family = FAMILIES[config.model_type]
        return {name: sources(family, config, outer) for name, outer in self.weight_names(shape, names).items()}

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
        """As of every model, and of transformers and the config."""
        version = importlib.import_module("transformers").__version__
        own = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
        return hashlib.sha256(f"{own} {version} {self.path.read_text()}".encode()).hexdigest()[:16]

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
