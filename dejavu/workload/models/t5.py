"""T5: an encoder and a decoder with cross-attention (Raffel et al., 2020), pre-norm, relative positions.

Shape letters: B = batch, E = encoder's tokens, D = decoder's tokens, W = width.

A layer's output is one tensor (B, E + D, W): the encoder's states, then the decoder's. A layer transforms its part and
passes the other on, so any cut carries everything that it has to: in the encoder the decoder's embedded
tokens (the embedding is shared and lives in the first layer), in the decoder the encoder's result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import (
    LayerBuilder,
    Model,
    Split,
    TensorParallel,
    by_class,
    check_tokens,
    check_whole_numbers,
)

NUM_BUCKETS, MAX_DISTANCE = 32, 128  # as published
NORM_EPSILON = 1e-6
RESIDUAL = ("attention.projection", "cross_attention.projection", "feedforward.contract")  # added to a block's states


class RelativeBias(nn.Module):
    """A learned number for each head and bucket of distances: (heads, queries, keys)."""

    def __init__(self, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(NUM_BUCKETS, num_heads)

    def forward(self, length: int, device: torch.device) -> torch.Tensor:
        positions = torch.arange(length, device=device)
        distance = positions[None, :] - positions[:, None]
        bias: torch.Tensor = self.table(self._buckets(distance)).permute(2, 0, 1)
        return bias

    def _buckets(self, distance: torch.Tensor) -> torch.Tensor:
        """Half of the buckets for small distances, one each, the others logarithmically; both sides if not causal."""
        count = NUM_BUCKETS if self.causal else NUM_BUCKETS // 2
        side = 0 if self.causal else count * (distance > 0)
        far = -distance.clamp(max=0) if self.causal else distance.abs()
        exact = count // 2
        ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact)
        large = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return side + torch.where(far < exact, far, large)


class Attention(nn.Module):
    """Attention without biases and without scaling, which the drawing of the query's weights makes up for.

    Written out, as in the published code: a learned bias keeps fused kernels away.
    """

    def __init__(self, width: int, num_heads: int, head_width: int, *, causal: bool, relative: bool) -> None:
        super().__init__()
        self.head_width, self.causal = head_width, causal
        inner = num_heads * head_width
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.projection = nn.Linear(inner, width, bias=False)
        self.bias = RelativeBias(num_heads, causal=causal) if relative else None
        nn.init.normal_(self.query.weight, std=(width * head_width) ** -0.5)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        query, key, value = self._heads(self.query(x)), self._heads(self.key(memory)), self._heads(self.value(memory))
        scores = query @ key.transpose(-1, -2)
        if self.bias is not None:
            scores = scores + self.bias(x.shape[1], x.device)
        if self.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        attended = torch.softmax(scores, dim=-1) @ value
        output: torch.Tensor = self.projection(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.unflatten(-1, (-1, self.head_width))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """ReLU, or GELU with a gate as in T5 1.1; no biases."""

    def __init__(self, width: int, inner: int, *, gated: bool) -> None:
        super().__init__()
        self.expand = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.contract = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor
        if self.gate is None:
            output = self.contract(nn.functional.relu(self.expand(x)))
        else:
            output = self.contract(nn.functional.gelu(self.gate(x), approximate="tanh") * self.expand(x))
        return output


class Block(nn.Module):
    """What a block of the encoder and one of the decoder are made of; in the decoder with attention to the encoder."""

    decodes: ClassVar[bool]

    def __init__(
        self, encoder_length: int, width: int, num_heads: int, head_width: int, feedforward: int, *, gated: bool
    ) -> None:
        super().__init__()
        self.encoder_length = encoder_length
        self.attention_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.attention = Attention(width, num_heads, head_width, causal=self.decodes, relative=True)
        if self.decodes:
            self.cross_norm = nn.RMSNorm(width, NORM_EPSILON)
            self.cross_attention = Attention(width, num_heads, head_width, causal=False, relative=False)
        self.feedforward_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.feedforward = FeedForward(width, feedforward, gated=gated)


class EncoderBlock(Block):
    """Self-attention and feed-forward of the encoder's states; the decoder's pass by."""

    decodes = False

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        x, waiting = packed[:, : self.encoder_length], packed[:, self.encoder_length :]
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed)
        x = x + self.feedforward(self.feedforward_norm(x))
        return torch.cat((x, waiting), dim=1)


class EncoderNorm(nn.Module):
    """The encoder's result, normalized once for all layers of the decoder."""

    def __init__(self, encoder_length: int, width: int) -> None:
        super().__init__()
        self.encoder_length = encoder_length
        self.norm = nn.RMSNorm(width, NORM_EPSILON)

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.norm(packed[:, : self.encoder_length]), packed[:, self.encoder_length :]), dim=1)


class DecoderBlock(Block):
    """Causal self-attention, attention to the encoder's result and feed-forward of the decoder's states."""

    decodes = True

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        memory, x = packed[:, : self.encoder_length], packed[:, self.encoder_length :]
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed)
        x = x + self.cross_attention(self.cross_norm(x), memory)
        x = x + self.feedforward(self.feedforward_norm(x))
        return torch.cat((memory, x), dim=1)


class Head(nn.Module):
    """The decoder's states to a score for each token: (B, D, tokens)."""

    def __init__(self, encoder_length: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self.encoder_length = encoder_length
        self.norm = nn.RMSNorm(width, NORM_EPSILON)
        self.logits = nn.Linear(width, num_tokens, bias=False)

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.logits(self.norm(packed[:, self.encoder_length :]))
        return scores


def _split(
    attention: str, feedforward: str = "", *, relative: bool = False, gated: bool = False
) -> tuple[tuple[str, Split], ...]:
    """Return which weights of a block are sharded: heads, and the inner width of the feed-forward network."""
    columns = [f"{attention}.{name}" for name in ("query", "key", "value", *(("bias.table",) if relative else ()))]
    rows = [f"{attention}.projection"]
    if feedforward:
        columns += [f"{feedforward}.{name}" for name in ("expand", *(("gate",) if gated else ()))]
        rows.append(f"{feedforward}.contract")
    shared = [attention, *((feedforward,) if gated else ())]  # its input's gradients are summed once
    return (
        *((name, "columns") for name in columns),
        *((name, "rows") for name in rows),
        *((name, "shared") for name in shared),
    )


@dataclass(frozen=True)
class T5(Model):
    """The encoder reads the first part of a text, the decoder continues it (the paper's language-model objective).

    Published sizes: base 12 + 12 blocks, width 768, 12 heads 64 wide, feedforward 3072; 3B 24 + 24, 1024, 32 heads
    128 wide, 16384; 11B the same with 128 heads and 65536. The paper's encoder and decoder each share one table of
    relative positions among all their blocks, and the head shares the embedding's; here each has its own, because tied
    weights must be on one stage. Dropout is left out: a step has to give the same loss under every plan.

    Attributes:
        num_blocks: of the encoder, and again of the decoder.
        encoder_length: how many tokens the encoder reads; 0: half of the example.
        gated: GELU with a gate, as in T5 1.1.
    """

    num_blocks: int = 12
    width: int = 768
    num_heads: int = 12
    head_width: int = 64
    feedforward: int = 3072
    gated: bool = False
    encoder_length: int = 0

    def __post_init__(self) -> None:
        check_whole_numbers(self, "num_blocks", "width", "num_heads", "head_width", "feedforward")
        if self.encoder_length != 0:
            check_whole_numbers(self, "encoder_length")

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_tokens("t5", shape, max(2, self.encoder_length + 1))
        encoder_length = self.encoder_length or shape.input_shape[0] // 2
        sizes = (encoder_length, self.width, self.num_heads, self.head_width, self.feedforward)
        encoder, decoder = (
            partial(EncoderBlock, *sizes, gated=self.gated),
            partial(DecoderBlock, *sizes, gated=self.gated),
        )
        heads = self.num_heads
        # Sums are over one side's tokens, a part of what the layers hand on; backward also over the encoder's result.
        encoded = encoder_length / shape.input_shape[0]
        decoded = 1.0 - encoded
        own = _split("attention", "feedforward", relative=True, gated=self.gated)
        split_encoder = TensorParallel(heads, 2 * (encoded,), 2 * (encoded,), own)
        split_decoder = TensorParallel(
            heads, 3 * (decoded,), (*3 * (decoded,), encoded), (*own, *_split("cross_attention"))
        )
        return (
            LayerBuilder(
                "embedding", partial(nn.Embedding, shape.num_classes, self.width), TensorParallel.embedding(heads, "")
            ),
            *(LayerBuilder(f"encoder{i}", encoder, split_encoder, RESIDUAL) for i in range(self.num_blocks)),
            # Each device normalizes its part of the tokens.
            LayerBuilder(
                "encoder_norm", partial(EncoderNorm, encoder_length, self.width), TensorParallel(heads, weights=())
            ),
            *(LayerBuilder(f"decoder{i}", decoder, split_decoder, RESIDUAL) for i in range(self.num_blocks)),
            LayerBuilder(
                "head",
                partial(Head, encoder_length, self.width, shape.num_classes),
                TensorParallel.head(heads, self.width, shape.num_classes, "logits"),
            ),
        )

    def untied_parameters(self, shape: ExampleShape) -> int:
        """Count all but one relative table on each side, and the head's table (T5 1.1, the gated one, has that too)."""
        tables = 2 * (self.num_blocks - 1) * NUM_BUCKETS * self.num_heads
        return tables + (0 if self.gated else shape.num_classes * self.width)

    @by_class
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return mean cross entropy over the decoder's part of the targets."""
        return super().loss(output, target[:, -output.shape[1] :])
