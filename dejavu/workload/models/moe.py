"""A language model with a mixture of experts in every other block, after GShard (Lepikhin et al., 2021).

Shape letters: N = tokens of a microbatch, E = experts, C = an expert's capacity, W = width, F = inner width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import (
    LayerBuilder,
    Model,
    TensorParallel,
    WholeExperts,
    check_divides,
    check_tokens,
    check_whole_numbers,
)
from dejavu.workload.models.modules.experts import GroupedLinear
from dejavu.workload.models.modules.text import causal_attention, text_layers

NUM_CHOICES = 2  # experts that a token is sent to
DENSE, EXPERTS = "feedforward", "feedforward.experts"  # the modules of which a block has one


class FeedForward(nn.Module):
    """The feed-forward network of a dense block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.contract(nn.functional.gelu(self.expand(x)))
        return output


class Experts(nn.Module):
    """E feed-forward networks.

    An expert takes at most C = capacity_factor · N / E tokens of a microbatch, first choices before second ones, in the
    order of the text; for what is over, the expert adds nothing. So all shapes are known beforehand.
    """

    def __init__(self, width: int, inner: int, num_experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.num_experts, self.capacity_factor = num_experts, capacity_factor
        self.expand = GroupedLinear(num_experts, width, inner)
        self.contract = GroupedLinear(num_experts, inner, width)

    def forward(
        self, tokens: torch.Tensor, share: torch.Tensor, choice: torch.Tensor, own: range | None = None
    ) -> torch.Tensor:
        """Return, for each token (N, W), what its experts make of it: sums weighted by `share` (N, 2).

        Args:
            own: the experts that this device has, and whose part of the sums it returns; None: all.
        """
        N, W = tokens.shape
        E = self.num_experts
        C = math.ceil(self.capacity_factor * N / E)
        expert = choice.T.flatten()  # all first choices, then all second ones
        rank = nn.functional.one_hot(expert, E).cumsum(0).gather(1, expert[:, None]).squeeze(1) - 1
        fits = rank < C
        if own is not None:
            fits, expert = fits & (expert >= own.start) & (expert < own.stop), expert - own.start
            E = len(own)
        place = torch.where(fits, expert * C + rank, E * C)  # after the last: what does not fit
        waiting = tokens.new_zeros(E * C + 1, W).index_copy(0, place, tokens.repeat(NUM_CHOICES, 1))
        done = self.contract(nn.functional.gelu(self.expand(waiting[:-1].view(E, C, W))))
        taken = done.flatten(0, 1).index_select(0, place.clamp(max=E * C - 1))
        weight = torch.where(fits, share.T.flatten(), 0.0).to(taken.dtype)
        combined: torch.Tensor = (taken * weight[:, None]).view(NUM_CHOICES, N, W).sum(0)
        return combined


class Mixture(nn.Module):
    """Experts, and a gate that sends each token through the two that it ranks first."""

    def __init__(self, width: int, inner: int, num_experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(width, inner, num_experts, capacity_factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        share, choice = torch.softmax(self.gate(tokens).float(), dim=-1).topk(NUM_CHOICES)
        output: torch.Tensor = self.experts(tokens, share / share.sum(dim=-1, keepdim=True), choice)
        return output.view_as(x)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, dense or of experts, each added to its input."""

    def __init__(self, width: int, num_heads: int, inner: int, num_experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.head_width = width // num_heads  # columns of a head stay together: query, key, value
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward: nn.Module = (
            Mixture(width, inner, num_experts, capacity_factor) if num_experts else FeedForward(width, inner)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.projection(causal_attention(self.qkv(self.attention_norm(x)), self.head_width))
        added: torch.Tensor = self.feedforward(self.feedforward_norm(x))
        return x + added


@dataclass(frozen=True)
class MoE(Model):
    """Every second block has experts; all tokens of a microbatch are one group of GShard's.

    Alpa's family (Zheng et al., 2022, table 3) has feedforward_factor 8: 380M is 8 blocks, width 768, 8 experts; 2.4B
    16, 1024, 16; 10B 16, 1536, 32; 70B 32, 2048, 64; all with 16 heads. GShard's balance loss is not added, since only
    the last layer of a chain has a loss: the capacity alone bounds what an expert is given.

    Attributes:
        feedforward_factor: inner width of an expert or a dense network, as a multiple of the width.
        capacity_factor: places of all experts together, as a multiple of the tokens; 2 holds all choices if balanced.
    """

    num_blocks: int = 16
    width: int = 1024
    num_heads: int = 16
    num_experts: int = 16
    feedforward_factor: int = 8
    capacity_factor: float = 2.0

    def __post_init__(self) -> None:
        check_whole_numbers(self, "num_blocks", "width", "num_heads", "num_experts", "feedforward_factor")
        check_divides(self, "width", "num_heads")
        if self.num_experts < NUM_CHOICES:
            raise InputError(
                f"model_options: num_experts is {self.num_experts}; wanted at least {NUM_CHOICES}", ("model_options",)
            )
        if not 0 < self.capacity_factor < math.inf:
            raise InputError(
                f"model_options: capacity_factor is {self.capacity_factor!r}; wanted a number > 0", ("model_options",)
            )

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_tokens("moe", shape)
        inner = self.feedforward_factor * self.width
        dense = partial(Block, self.width, self.num_heads, inner, 0, self.capacity_factor)
        experts = partial(Block, self.width, self.num_heads, inner, self.num_experts, self.capacity_factor)
        heads = self.num_heads
        blocks = []
        for i in range(self.num_blocks):
            kind, inside = (experts, EXPERTS) if i % 2 else (dense, DENSE)
            rows = ("projection", f"{inside}.contract")
            split = TensorParallel.block(
                heads,
                columns=("qkv", f"{inside}.expand"),
                rows=rows,
                summed=(EXPERTS,) if i % 2 else (),
                experts=WholeExperts(self.num_experts) if i % 2 else None,
            )
            blocks.append(LayerBuilder(f"block{i}", kind, split, residual=rows))  # what a block adds to its input
        return text_layers(shape, self.width, heads, blocks)

    def untied_parameters(self, shape: ExampleShape) -> int:
        """Count the head's table, which the published sizes tie to the embedding."""
        return shape.num_classes * self.width
