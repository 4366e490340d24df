"""Mixtral's experts with shapes that are known beforehand, and where its files have their weights.

Transformers' own loop over the experts that got tokens depends on the numbers, so it cannot be traced. Here the tokens
are sorted by expert, and a product takes each expert's rows: transformers' grouped product, whose fallback has a form
for fake tensors and takes any sizes.

Shape letters: N = tokens, k = experts of a token, E = experts, W = width, F = inner width.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dejavu.workload.models._base import Source

NAME = "dejavu"  # under which transformers finds it


def use_static_experts(config: Any) -> None:
    """Let the experts of a model with this config compute as below."""
    module = importlib.import_module("transformers.integrations.moe")
    module.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    config._experts_implementation = NAME


def _experts(module: Any, x: torch.Tensor, expert: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return (N, W): the sum of each token's experts, by its shares (N, k)."""
    if torch.compiler.is_exporting():  # a graph that is kept has to load where transformers' operators are not known
        return _every_expert(module, x, expert, share)
    chosen = expert.shape[-1]
    ordered, order = torch.sort(expert.reshape(-1))
    numbers = torch.arange(module.num_experts, device=x.device)
    ends = torch.searchsorted(ordered, numbers, right=True).to(torch.int32)  # where each expert's rows end
    rows = x[order // chosen]
    gate, up = _product(rows, module.gate_up_proj, ends).chunk(2, dim=-1)
    done = _product(module.act_fn(gate) * up, module.down_proj, ends)
    weighted = done * share.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=x.device))
    return weighted[back].view(len(x), chosen, -1).sum(dim=1).to(x.dtype)


def _every_expert(module: Any, x: torch.Tensor, expert: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the same, with each token sent through all experts."""
    shares = torch.zeros(len(x), module.num_experts, dtype=share.dtype, device=x.device).scatter_add(1, expert, share)
    gate, up = torch.einsum("nw,efw->enf", x, module.gate_up_proj).chunk(2, dim=-1)
    done = torch.einsum("enf,ewf->enw", module.act_fn(gate) * up, module.down_proj)
    return torch.einsum("enw,ne->nw", done, shares.to(done.dtype)).to(x.dtype)


def _product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    rows, weight = rows.to(weight.dtype), weight.transpose(-2, -1)
    if rows.is_cuda:  # without waiting for the numbers of rows
        return nn.functional.grouped_mm(rows, weight, offs=ends)
    product: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    return product


def initialize(block: nn.Module, deviation: float) -> None:
    """Fill the experts and their router, which transformers' constructors leave empty, as its models do."""
    for part in block.modules():
        for name, weight in part.named_parameters(recurse=False):
            if name in ("gate_up_proj", "down_proj") or type(part).__name__.endswith("Router"):
                nn.init.normal_(weight, std=deviation)


def published(name: str, num_experts: int) -> tuple[Source, ...]:
    """Return where published files have a weight of a block: each expert has its own three matrices there."""
    before, _, last = name.partition(".mlp.")
    if last == "gate.weight":
        return (Source((f"{before}.block_sparse_moe.gate.weight",)),)
    experts = [f"{before}.block_sparse_moe.experts.{number}" for number in range(num_experts)]
    if last == "experts.gate_up_proj":
        return (Source(tuple(f"{one}.{which}.weight" for which in ("w1", "w3") for one in experts), _pairs),)
    if last == "experts.down_proj":
        return (Source(tuple(f"{one}.w2.weight" for one in experts), lambda matrices: torch.stack(list(matrices))),)
    return ()


def _pairs(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack E matrices (F, W) of the gates and as many of the values to (E, 2F, W)."""
    half = len(matrices) // 2
    return torch.cat((torch.stack(list(matrices[:half])), torch.stack(list(matrices[half:]))), dim=1)
