"""Modules whose branches can run side by side: two towers, and a mixture whose experts are modules of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class TwoTowers(nn.Module):
    """A text encoder and an image encoder whose ends are compared, as in CLIP."""

    def __init__(self, width: int = 768, depth: int = 4, patch: int = 768, tokens: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.patches = nn.Linear(patch, width)
        self.text = nn.ModuleList(_block(width) for _ in range(depth))
        self.image = nn.ModuleList(_block(width) for _ in range(depth))

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        words, patches = self.embedding(text), self.patches(image)
        for block in self.text:
            words = block(words)
        for block in self.image:
            patches = block(patches)
        return words.mean(dim=1) @ patches.mean(dim=1).t()


class Mixture(nn.Module):
    """Layers of experts, each a module: every expert sees all tokens, weighted by the router."""

    def __init__(self, width: int = 1024, experts: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_MixtureLayer(width, experts) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _MixtureLayer(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        weights = self.router(normed).softmax(dim=-1)
        outputs = [expert(normed) * weights[..., e : e + 1] for e, expert in enumerate(self.experts)]
        return x + torch.stack(outputs).sum(dim=0)


def _block(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


# Name: how it is made, and its inputs.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "two towers": (
        TwoTowers,
        (
            torch.empty(32, 128, dtype=torch.int64, device="meta"),
            torch.empty(32, 196, 768, device="meta"),
        ),
    ),
    "mixture": (Mixture, (torch.empty(16, 512, 1024, device="meta"),)),
}
