"""Of language models: tokens to vectors, attention, vectors to scores, and the chain of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, TensorParallel, with_context_parallel
from dejavu.workload.models.modules.positions import positions


class Embedding(nn.Module):
    """Tokens (batch, length) to vectors (batch, length, width), positions added."""

    def __init__(self, num_tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.token(tokens) + self.position(positions(tokens.shape[1], tokens.device))
        return vectors


def causal_attention(qkv: torch.Tensor, head_width: int) -> torch.Tensor:
    """Attend to each token and those before it: (batch, length, 3 × width) to (batch, length, width).

    Args:
        qkv: the columns of a head stay together: its query, key and value.
    """
    batch, length, _ = qkv.shape
    query, key, value = qkv.view(batch, length, -1, 3, head_width).permute(3, 0, 2, 1, 4)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


class Head(nn.Module):
    """Vectors to a score for each token."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, num_tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.logits(self.norm(x))
        return scores


def text_layers(
    shape: ExampleShape,
    width: int,
    num_heads: int,
    blocks: Sequence[LayerBuilder],
    *,
    embedding: Callable[[int, int, int], nn.Module] = Embedding,
    head: Callable[[int, int], nn.Module] = Head,
    tied: bool = False,
    by_position: Sequence[str] | None = None,
) -> tuple[LayerBuilder, ...]:
    """Chain an embedding, the blocks and a head, of which the first and the last may be split by words.

    Args:
        tied: the head's matrix is the embedding's.
        by_position: what of the embedding gives something for each position; None: the blocks do not split along the
            sequence.
    """
    length, num_tokens = shape.input_shape[0], shape.num_classes
    chain = (
        LayerBuilder(
            "embedding",
            partial(embedding, num_tokens, length, width),
            TensorParallel.embedding(num_heads, "token", by_position),
        ),
        *blocks,
        LayerBuilder(
            "head",
            partial(head, width, num_tokens),
            TensorParallel.head(num_heads, width, num_tokens, "logits", sequence=by_position is not None),
            tied=(("logits.weight", "embedding.token.weight"),) if tied else (),
        ),
    )
    return chain if by_position is None else with_context_parallel(chain, loss_by_position=True)
