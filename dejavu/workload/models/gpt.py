"""GPT: a decoder-only transformer (Radford et al., 2019), pre-norm, learned positions."""

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
from dejavu.workload.models.modules.text import causal_attention, text_layers

RESIDUAL = ("projection", "contract")  # what a block adds to its input


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
        x = x + self.projection(causal_attention(self.qkv(self.attention_norm(x)), self.head_width))
        added: torch.Tensor = self.contract(nn.functional.gelu(self.expand(self.feedforward_norm(x))))
        return x + added


@dataclass(frozen=True)
class GPT(Model):
    """Any size by its three settings; 175B is 96 blocks, width 12288, 96 heads.

    Attributes:
        tied: the head's matrix is the embedding's, as published; both ends of the pipeline hold it.
    """

    num_blocks: int = 8
    width: int = 128
    num_heads: int = 4
    tied: bool = False

    def __post_init__(self) -> None:
        check_whole_numbers(self, "num_blocks", "width", "num_heads")
        check_divides(self, "width", "num_heads")

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_tokens("gpt", shape)
        heads, block = self.num_heads, partial(Block, self.width, self.num_heads)
        split = TensorParallel.block(heads, columns=("qkv", "expand"), rows=("projection", "contract"), sequence=True)
        blocks = [LayerBuilder(f"block{i}", block, split, RESIDUAL) for i in range(self.num_blocks)]
        return text_layers(shape, self.width, heads, blocks, tied=self.tied, by_position=("position",))

    def untied_parameters(self, shape: ExampleShape) -> int:
        """Count the head's table, which GPT-2 and GPT-3 tie to the embedding."""
        return shape.num_classes * self.width
