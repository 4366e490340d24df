"""Mixtral: Llama's decoder with a mixture of experts in every block (Jiang et al., 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, Model, TensorParallel, WholeExperts, check_tokens
from dejavu.workload.models.modules.decoder import (
    ATTENTION_COLUMNS,
    ATTENTION_ROWS,
    NORM_EPSILON,
    Attention,
    Embedding,
    Head,
    check_decoder,
)
from dejavu.workload.models.modules.experts import MixtureOfExperts
from dejavu.workload.models.modules.text import text_layers

EXPERTS = "feedforward.experts"
RESIDUAL = ("attention.output", f"{EXPERTS}.contract")  # what a block adds to its input


class Block(nn.Module):
    """Attention and a mixture of experts, each of its normalized input, and added to it."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        rope_theta: float,
        *,
        feedforward: int,
        num_experts: int,
        num_choices: int,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.attention = Attention(width, num_heads, num_kv_heads, rope_theta)
        self.feedforward_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.feedforward = MixtureOfExperts(width, feedforward, num_experts, num_choices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        states: torch.Tensor = x + self.feedforward(self.feedforward_norm(x))
        return states


@dataclass(frozen=True)
class Mixtral(Model):
    """Any size by its settings; 8x7B is 32 blocks, width 4096, 32 heads, 8 of keys and values, feedforward 14336.

    No token is dropped, however many go to one expert. Tensor parallelism gives each device a part of every expert's
    inner width, so devices have equal work, whatever the router chooses; expert parallelism gives it whole experts, so
    its work depends on the router. The balance loss is not added, since only the
    last layer of a chain has a loss.

    Attributes:
        num_kv_heads: heads of keys and values, which groups of query heads share.
        feedforward: the inner width of an expert.
        num_choices: experts that each token is sent to.
        rope_theta: the base of the rotary positions' wavelengths.
    """

    num_blocks: int = 8
    width: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    feedforward: int = 256
    num_experts: int = 8
    num_choices: int = 2
    rope_theta: float = 1_000_000.0

    def __post_init__(self) -> None:
        check_decoder(self, "num_experts", "num_choices")
        if self.num_choices > self.num_experts:
            raise InputError(
                f"model_options: num_choices is {self.num_choices}; wanted at most num_experts, {self.num_experts}",
                ("model_options",),
            )

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_tokens("mixtral", shape)
        block = partial(
            Block,
            self.width,
            self.num_heads,
            self.num_kv_heads,
            self.rope_theta,
            feedforward=self.feedforward,
            num_experts=self.num_experts,
            num_choices=self.num_choices,
        )
        split = TensorParallel.block(
            math.gcd(self.num_kv_heads, self.feedforward),
            columns=(*ATTENTION_COLUMNS, f"{EXPERTS}.gate", f"{EXPERTS}.expand"),
            rows=(*ATTENTION_ROWS, f"{EXPERTS}.contract"),
            shared=("attention",),
            summed=(EXPERTS,),
            sequence=True,
            experts=WholeExperts(self.num_experts, self.num_choices),
        )
        blocks = [LayerBuilder(f"block{i}", block, split, RESIDUAL) for i in range(self.num_blocks)]
        return text_layers(shape, self.width, self.num_kv_heads, blocks, embedding=Embedding, head=Head, by_position=())
