"""BERT: an encoder that sees the whole text (Devlin et al., 2019), post-norm, learned positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import (
    LayerBuilder,
    Model,
    TensorParallel,
    by_class,
    check_divides,
    check_tokens,
    check_whole_numbers,
    with_context_parallel,
)
from dejavu.workload.models.modules.positions import positions
from dejavu.workload.models.modules.text import text_layers

NORM_EPSILON = 1e-12  # as published
MASK_EVERY, MASK_FROM = 7, 3  # 14.3 % of the positions; the paper draws 15 %
NUM_SEGMENTS = 2
RESIDUAL = ("projection", "contract")  # what a block adds to its input


def masked_positions(length: int) -> list[int]:
    """Return the positions of hidden tokens, the same in every example: embedding and loss must agree."""
    return list(range(MASK_FROM, length, MASK_EVERY))


class Embedding(nn.Module):
    """Tokens (batch, length) to vectors (batch, length, width), positions and the first segment's vector added.

    Tokens at `masked_positions` are replaced by the vocabulary's last one.
    """

    def __init__(self, num_tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.mask_token = num_tokens - 1
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(length, width)
        self.segment = nn.Embedding(NUM_SEGMENTS, width)
        self.norm = nn.LayerNorm(width, NORM_EPSILON)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = positions(tokens.shape[1], tokens.device)
        tokens = torch.where(places % MASK_EVERY == MASK_FROM, self.mask_token, tokens)
        first = torch.zeros_like(tokens)
        vectors: torch.Tensor = self.norm(self.token(tokens) + self.position(places) + self.segment(first))
        return vectors


class Block(nn.Module):
    """Self-attention and a feed-forward network, each added to its input and normalized."""

    def __init__(self, width: int, num_heads: int, feedforward: int) -> None:
        super().__init__()
        self.head_width = width // num_heads  # columns of a head stay together: query, key, value
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, NORM_EPSILON)
        self.expand = nn.Linear(width, feedforward)
        self.contract = nn.Linear(feedforward, width)
        self.feedforward_norm = nn.LayerNorm(width, NORM_EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = self.attention_norm(x + self.projection(attended.transpose(1, 2).flatten(2)))
        states: torch.Tensor = self.feedforward_norm(x + self.contract(nn.functional.gelu(self.expand(x))))
        return states


class TokenHead(nn.Module):
    """Vectors to a score for each token."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, NORM_EPSILON)
        self.logits = nn.Linear(width, num_tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.logits(self.norm(nn.functional.gelu(self.transform(x))))
        return scores


@dataclass(frozen=True)
class BERT(Model):
    """Trained to predict the hidden tokens (masked language modelling).

    Base is 12 blocks, width 768, 12 heads; large 24, 1024, 16; BERT-48 is large with 48 blocks (as PipeDream and DAPPLE
    use it). Dropout is left out: a step has to give the same loss under every plan. The hidden positions are fixed and
    their tokens always replaced; data with next-token targets is read one token back. `feedforward` is 4 × width if 0.
    """

    num_blocks: int = 12
    width: int = 768
    num_heads: int = 12
    feedforward: int = 0

    def __post_init__(self) -> None:
        check_whole_numbers(self, "num_blocks", "width", "num_heads")
        check_divides(self, "width", "num_heads")
        if self.feedforward:
            check_whole_numbers(self, "feedforward")

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_tokens("bert", shape, MASK_FROM + 1)
        block = partial(Block, self.width, self.num_heads, self.feedforward or 4 * self.width)
        heads = self.num_heads
        split = TensorParallel.block(heads, columns=("qkv", "expand"), rows=("projection", "contract"), sequence=True)
        blocks = [LayerBuilder(f"block{i}", block, split, RESIDUAL) for i in range(self.num_blocks)]
        by_position = ("position", "segment")
        ends: dict[str, Any] = {"embedding": Embedding, "head": TokenHead}
        chain = text_layers(shape, self.width, heads, blocks, **ends, by_position=by_position)
        return with_context_parallel(
            chain, loss_by_position=False
        )  # it is of some positions, by targets that are beside them

    def untied_parameters(self, shape: ExampleShape) -> int:
        """Count the head's table, which BERT ties to the embedding."""
        return shape.num_classes * self.width

    @by_class
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return mean cross entropy of the hidden tokens; the token at a position is the target one before it."""
        hidden = torch.tensor(masked_positions(output.shape[1]), device=output.device)
        return super().loss(output[:, hidden], target[:, hidden - 1])
