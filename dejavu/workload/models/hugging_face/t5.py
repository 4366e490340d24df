"""Transformers' T5 as a chain: the encoder reads the first half of an example, the decoder continues it.

Shape letters: B = batch, E = encoder's tokens, D = decoder's tokens, W = width, T = rows for a table.

A layer's output is one tensor (B, E + D, W): the encoder's states, then the decoder's. All blocks of one side share the
table of relative positions that the first of them has; it follows the states as T more rows, so that its gradients come
back from every stage and add up where the table is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, TensorParallel, by_class, renamed
from dejavu.workload.models.hugging_face.families import FAMILIES
from dejavu.workload.models.hugging_face.model import HuggingFace, module_of, work_of


class Block(nn.Module):
    """A block of the encoder or the decoder; the first of a side appends its table, the others read it."""

    def __init__(self, block: Any, encoder_length: int, decoder_length: int, *, is_first: bool) -> None:
        super().__init__()
        self.block, self.is_first = block, is_first
        self.encoder_length, self.decoder_length = encoder_length, decoder_length

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        encoded, decoded, rows = packed.split(
            (self.encoder_length, self.decoder_length, packed.shape[1] - self.encoder_length - self.decoder_length), 1
        )
        attention = self.block.layer[0].SelfAttention
        if self.is_first:
            table = attention.relative_attention_bias.weight
            rows = _rows(table, packed)
        else:
            size = attention.relative_attention_num_buckets * attention.n_heads
            table = rows[0].flatten()[:size].view(-1, attention.n_heads)
        x = decoded if self.block.is_decoder else encoded
        options: dict[str, Any] = {"position_bias": _bias(attention, table, x)}
        if self.block.is_decoder:
            options["encoder_hidden_states"] = encoded
        x = self.block(x, **options)[0]
        return torch.cat((encoded, x, rows) if self.block.is_decoder else (x, decoded, rows), dim=1)


def _rows(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the table as rows (B, T, W), filled up with zeros."""
    batch, _, width = packed.shape
    missing = -table.numel() % width
    rows = nn.functional.pad(table.flatten(), (0, missing)).view(1, -1, width)
    return rows.to(packed.dtype).expand(batch, -1, -1)


def _bias(attention: Any, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what a table adds to the scores: (1, heads, queries, keys)."""
    positions = torch.arange(x.shape[1], device=x.device)
    buckets = attention._relative_position_bucket(
        positions[None, :] - positions[:, None],
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return nn.functional.embedding(buckets, table).permute(2, 0, 1).unsqueeze(0)


class EncoderNorm(nn.Module):
    """The encoder's result, normalized once for all blocks of the decoder; its table ends here."""

    def __init__(self, norm: nn.Module, encoder_length: int, decoder_length: int) -> None:
        super().__init__()
        self.norm = norm
        self.encoder_length, self.decoder_length = encoder_length, decoder_length

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        encoded, decoded = packed[:, : self.encoder_length + self.decoder_length].split(
            (self.encoder_length, self.decoder_length), 1
        )
        return torch.cat((self.norm(encoded), decoded), dim=1)


class Head(nn.Module):
    """The decoder's states to a score for each token: (B, D, tokens)."""

    def __init__(self, norm: nn.Module, config: Any, encoder_length: int, decoder_length: int) -> None:
        super().__init__()
        self.norm = norm
        self.logits = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        self.encoder_length, self.decoder_length = encoder_length, decoder_length

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        decoded = packed[:, self.encoder_length : self.encoder_length + self.decoder_length]
        scores: torch.Tensor = self.logits(self.norm(decoded) * self.scale)
        return scores


@dataclass(frozen=True)
class T5(HuggingFace):
    """Encoder blocks, decoder blocks; the loss is over the decoder's tokens."""

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        config = self.config()
        self.check(shape, {}, least_length=2)
        length = shape.input_shape[0]
        lengths = (length // 2, length - length // 2)
        encoded = lengths[0] / length
        decoded, heads = 1.0 - encoded, config.num_heads
        encoder = TensorParallel(heads, 2 * (encoded,), 2 * (encoded,))
        decoder = TensorParallel(heads, 3 * (decoded,), (*3 * (decoded,), encoded))
        return (
            LayerBuilder("embedding", partial(self._end, "embedding"), TensorParallel.embedding(heads)),
            *(
                LayerBuilder(f"encoder{i}", build, encoder, work=partial(work_of, build))
                for i, build in enumerate(self._sides(lengths, config.num_layers, decodes=False))
            ),
            LayerBuilder("encoder_norm", partial(self._norm, EncoderNorm, *lengths), TensorParallel(heads)),
            *(
                LayerBuilder(f"decoder{i}", build, decoder, work=partial(work_of, build))
                for i, build in enumerate(self._sides(lengths, config.num_decoder_layers, decodes=True))
            ),
            LayerBuilder(
                "head",
                partial(self._norm, Head, config, *lengths),
                TensorParallel.head(heads, config.d_model, config.vocab_size),
                tied=self.tied(),
            ),
        )

    def is_tied(self, config: Any) -> bool:
        """Whether the config is of the first T5, whose head is the embedding; later ones have a head of their own."""
        return bool(config.scale_decoder_outputs)

    def untied_parameters(self, shape: ExampleShape) -> int:
        config = self.config()
        size: int = config.vocab_size * config.d_model
        return size

    def weight_names(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, str]:
        """Return the names in transformers' own whole model."""
        config = self.config()
        outer = dict(FAMILIES["t5"].names)
        for side, number in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
            block = outer.pop(side)
            outer |= {f"{side}{i}.block": block.format(i) for i in range(number)}
        return renamed(names, outer)

    def save_config(self, folder: Path) -> None:
        """Write the config.json. It says tied, as every T5's does: a head that the files have is not overwritten."""
        config = self.config()
        config.architectures = [FAMILIES["t5"].whole]
        config.save_pretrained(folder)

    @by_class
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return mean cross entropy over the decoder's part of the targets."""
        return super().loss(output, target[:, -output.shape[1] :])

    def _sides(self, lengths: tuple[int, int], count: int, *, decodes: bool) -> Iterator[Callable[[], nn.Module]]:
        for i in range(count):
            yield partial(self._side, lengths, i, decodes=decodes)

    def _side(self, lengths: tuple[int, int], index: int, *, decodes: bool) -> nn.Module:
        config, module = self.config(), module_of(FAMILIES["t5"])
        config.is_decoder = decodes
        block = module.T5Block(config, has_relative_attention_bias=index == 0, layer_idx=index)
        for part in block.modules():
            if isinstance(part, module.T5Attention):  # its scores are not scaled: the query's weights make up for it
                nn.init.normal_(part.q.weight, std=(config.d_model * config.d_kv) ** -0.5)
        return Block(block, *lengths, is_first=index == 0)

    def _norm(self, kind: Any, *settings: Any) -> nn.Module:
        config, module = self.config(), module_of(FAMILIES["t5"])
        made: nn.Module = kind(module.T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon), *settings)
        return made
