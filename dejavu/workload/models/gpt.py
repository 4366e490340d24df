"""GPT: a decoder-only transformer (Radford et al., 2019), pre-norm, learned positions, no weight tying."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import (
    LayerBuilder,
    Model,
    TensorParallel,
    check_divides,
    check_tokens,
    check_whole_numbers,
)

RESIDUAL = ("projection", "contract")  # what a block adds to its input


class Embedding(nn.Module):
    """Tokens (batch, length) to vectors (batch, length, width), positions added."""

    def __init__(self, num_tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network four times as wide, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads  # columns of a head stay together: query, key, value
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, -1, 3, self.head_width)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.contract(nn.functional.gelu(self.expand(self.feedforward_norm(x))))


class Head(nn.Module):
    """Vectors to a score for each token."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, num_tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


@dataclass(frozen=True)
class GPT(Model):
    """Any size by its three settings; 175B is 96 blocks, width 12288, 96 heads."""

    num_blocks: int = 8
    width: int = 128
    num_heads: int = 4

    def __post_init__(self) -> None:
        check_whole_numbers(self, "num_blocks", "width", "num_heads")
        check_divides(self, "width", "num_heads")

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_tokens("gpt", shape)
        heads, block = self.num_heads, partial(Block, self.width, self.num_heads)
        split = TensorParallel.block(heads, columns=("qkv", "expand"), rows=("projection", "contract"))
        return (
            LayerBuilder(
                "embedding",
                partial(Embedding, shape.num_classes, shape.input_shape[0], self.width),
                TensorParallel.embedding(heads, "token"),
            ),
            *(LayerBuilder(f"block{i}", block, split, RESIDUAL) for i in range(self.num_blocks)),
            LayerBuilder(
                "head",
                partial(Head, self.width, shape.num_classes),
                TensorParallel.head(heads, self.width, shape.num_classes, "logits"),
            ),
        )

    def untied_parameters(self, shape: ExampleShape) -> int:
        """Count the head's table, which GPT-2 and GPT-3 tie to the embedding."""
        return shape.num_classes * self.width
