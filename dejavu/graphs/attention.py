"""Attention as a GPU runs it, on fake tensors of any device, for which torch would choose the CPU's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_WIDEST_FLASH_HEAD, _FLASH_HEAD_MULTIPLE = 256, 8  # of torch's flash attention on CUDA


class AttendsOnGPU(nn.Module):
    """A layer whose attention runs as on a GPU, also when it is recomputed for its backward."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _FusedAttention():
            output: torch.Tensor = self.layer(x)
        return output


class _FusedAttention(TorchFunctionMode):
    """Dispatch attention to the kernel that torch chooses on a GPU, in the order in which it tries them.

    Flash for 16-bit numbers without a mask (from compute capability 8.0 on: older devices have no bfloat16), the
    memory-efficient one otherwise, and the written-out products where neither takes the inputs. Flash pads heads to a
    multiple of 8.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attend_on_gpu(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    alike = query.dim() == 4 and width == key.shape[-1] == value.shape[-1]
    if alike and attn_mask is None and width <= _WIDEST_FLASH_HEAD and query.dtype.itemsize == 2:
        padded = [torch.nn.functional.pad(x, (0, -width % _FLASH_HEAD_MULTIPLE)) for x in (query, key, value)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        attended: torch.Tensor = flash(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return attended[..., :width]
    if alike and not enable_gqa:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        keeps = any(x.requires_grad for x in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        fused: torch.Tensor = efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
        return fused
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
