"""Of decoders after Llama: no biases, RMSNorm, rotary positions, grouped-query attention, a gated feed-forward network.

Shape letters: B = batch, T = length, W = width, H = query heads, K = heads of keys and values, D = a head's width.
"""

from __future__ import annotations

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.models._base import Model, check_divides, check_whole_numbers
from dejavu.workload.models.modules.positions import positions

NORM_EPSILON = 1e-5  # as Llama 2, Llama 3 and Mixtral have it
# How attention is sharded: what reaches its first matrices is summed once going backward.
ATTENTION_COLUMNS, ATTENTION_ROWS = ("attention.query", "attention.key", "attention.value"), ("attention.output",)


class Embedding(nn.Module):
    """Tokens (B, T) to vectors (B, T, W); positions come in with each attention."""

    def __init__(self, num_tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.token(tokens)
        return vectors


class Head(nn.Module):
    """Vectors to a score for each token."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, NORM_EPSILON)
        self.logits = nn.Linear(width, num_tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.logits(self.norm(x))
        return scores


class Attention(nn.Module):
    """Causal self-attention whose query heads share keys and values in groups (Ainslie et al., 2023)."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, rope_theta: float) -> None:
        super().__init__()
        self.head_width, self.rope_theta = width // num_heads, rope_theta
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Heads are counted from what is there: a tensor-parallel device has a part of them.
        projected = (self.query(x), self.key(x), self.value(x))
        query, key, value = (one.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for one in projected)
        angles = rotations(query.shape[2], self.head_width, self.rope_theta, query.device)
        attended = nn.functional.scaled_dot_product_attention(
            rotate(query, angles),
            rotate(key, angles),
            value,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output: torch.Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


def rotations(length: int, head_width: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return cosine and sine (2, T, D / 2) of each position's angles, θ^(-2i / D) apart (Su et al., 2021, eq. 15).

    In float32: of long texts 16 bits would not tell positions apart.
    """
    steps = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    angles = torch.outer(positions(length, device, torch.float32), theta ** (-steps / head_width))
    return torch.stack((angles.cos(), angles.sin()))


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate (B, H, T, D): of a pair one number is in the first half of D and one in the second, as in transformers."""
    cosine, sine = angles.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class GatedFeedForward(nn.Module):
    """SwiGLU: an inner width, gated by itself (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.expand = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.contract = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.contract(nn.functional.silu(self.gate(x)) * self.expand(x))
        return output


def check_decoder(model: Model, *more: str) -> None:
    """Check a decoder's settings: whole numbers, heads that divide, and a base of the positions' wavelengths.

    Args:
        more: further settings that are whole numbers ≥ 1.

    Raises:
        InputError: one cannot be.
    """
    check_whole_numbers(model, "num_blocks", "width", "num_heads", "num_kv_heads", "feedforward", *more)
    check_divides(model, "width", "num_heads")
    check_divides(model, "num_heads", "num_kv_heads")
    settings = vars(model)
    head_width, theta = settings["width"] // settings["num_heads"], settings["rope_theta"]
    if head_width % 2:
        raise InputError(
            f"model_options: a head is {head_width} wide (width / num_heads); wanted an even number, since rotary "
            "positions turn pairs",
            ("model_options",),
        )
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 1 < theta < float("inf"):
        raise InputError(f"model_options: rope_theta is {theta!r}; wanted a number > 1", ("model_options",))
