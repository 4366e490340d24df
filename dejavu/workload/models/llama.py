"""Llama: a decoder-only transformer (Touvron et al., 2023; Dubey et al., 2024, section 3.2), no weight tying."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, Model, TensorParallel, check_tokens
from dejavu.workload.models.modules.decoder import (
    ATTENTION_COLUMNS,
    ATTENTION_ROWS,
    NORM_EPSILON,
    Attention,
    Embedding,
    GatedFeedForward,
    Head,
    check_decoder,
)
from dejavu.workload.models.modules.text import text_layers

RESIDUAL = ("attention.output", "feedforward.contract")  # what a block adds to its input


class Block(nn.Module):
    """Attention and a gated feed-forward network, each of its normalized input, and added to it."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, feedforward: int, rope_theta: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.attention = Attention(width, num_heads, num_kv_heads, rope_theta)
        self.feedforward_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.feedforward = GatedFeedForward(width, feedforward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        states: torch.Tensor = x + self.feedforward(self.feedforward_norm(x))
        return states


@dataclass(frozen=True)
class Llama(Model):
    """Any size by its settings.

    Llama 3 8B is 32 blocks, width 4096, 32 heads, feedforward 14336; 70B is 80, 8192, 64, 28672. Both have 8 heads of
    keys and values and 128,256 tokens.

    Attributes:
        num_kv_heads: heads of keys and values, which groups of query heads share.
        feedforward: the inner width.
        rope_theta: the base of the rotary positions' wavelengths; Llama 2 has 10,000.
        tied: the head's matrix is the embedding's, as in Llama 3.2's small ones.
    """

    num_blocks: int = 8
    width: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    feedforward: int = 352
    rope_theta: float = 500_000.0
    tied: bool = False

    def __post_init__(self) -> None:
        check_decoder(self)

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_tokens("llama", shape)
        block = partial(Block, self.width, self.num_heads, self.num_kv_heads, self.feedforward, self.rope_theta)
        split = TensorParallel.block(
            math.gcd(self.num_kv_heads, self.feedforward),
            columns=(*ATTENTION_COLUMNS, "feedforward.gate", "feedforward.expand"),
            rows=(*ATTENTION_ROWS, "feedforward.contract"),
            shared=("attention", "feedforward"),
            sequence=True,
        )
        blocks = [LayerBuilder(f"block{i}", block, split, RESIDUAL) for i in range(self.num_blocks)]
        kv, tied = self.num_kv_heads, self.tied
        return text_layers(shape, self.width, kv, blocks, embedding=Embedding, head=Head, tied=tied, by_position=())

    def untied_parameters(self, shape: ExampleShape) -> int:
        return shape.num_classes * self.width if self.tied else 0
