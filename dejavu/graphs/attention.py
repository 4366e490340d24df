"""Attention and RMSNorm as a GPU runs them, on fake tensors of any device, for which torch would choose the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_WIDEST_FLASH_HEAD, _FLASH_HEAD_MULTIPLE = 256, 8  # of torch's flash attention on CUDA


_is_written_out: ContextVar[float | None] = ContextVar("_is_written_out", default=None)


@contextmanager
def written_out(dropout: float = 0.0) -> Iterator[None]:
    """Capture attention as trainings had it before one kernel did it all: two products, softmax, dropout between.

    Layers must not be taken from a cache meanwhile, whose keys do not know of it.

    Args:
        dropout: of the probabilities.
    """
    token = _is_written_out.set(dropout)
    try:
        yield
    finally:
        _is_written_out.reset(token)


class AttendsOnGPU(nn.Module):
    """A layer whose attention and norms run as on a GPU, also when it is recomputed for its backward."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _FusedKernels():
            output: torch.Tensor = self.layer(x)
        return output


class _FusedKernels(TorchFunctionMode):
    """Dispatch attention to the kernel that torch chooses on a GPU, in the order in which it tries them.

    Flash for 16-bit numbers without a mask (from compute capability 8.0 on: older devices have no bfloat16), the
    memory-efficient one otherwise, and the written-out products where neither takes the inputs. Flash pads heads to a
    multiple of 8. RMSNorm is one kernel there, which keeps its input and a number of each row.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attend_on_gpu(*args, **(kwargs or {}))
        if func is torch.nn.functional.rms_norm:
            return _rms_norm_on_gpu(*args, **(kwargs or {}))
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
    if (dropout := _is_written_out.get()) is not None:
        return _attend_in_parts(query, key, value, dropout)
    scale = width**-0.5 if scale is None else scale
    alike = query.dim() == 4 and width == key.shape[-1] == value.shape[-1]
    if alike and attn_mask is None and width <= _WIDEST_FLASH_HEAD and query.dtype.itemsize == 2:
        missing = -width % _FLASH_HEAD_MULTIPLE
        heads = [torch.nn.functional.pad(x, (0, missing)) if missing else x for x in (query, key, value)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        attended: torch.Tensor = flash(*heads, dropout_p, is_causal, False, scale=scale)[0]
        return attended[..., :width] if missing else attended
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


def _attend_in_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
    """Return a tensor as attention's, by the kernels that it took; scale and mask were of the softmax's kernel."""
    scores = torch.matmul(query, key.transpose(-2, -1)).softmax(dim=-1)
    return torch.matmul(torch.nn.functional.dropout(scores, dropout, training=dropout > 0), value)


def _rms_norm_on_gpu(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is None or len(normalized_shape) != 1:
        return torch.rms_norm(x, list(normalized_shape), weight, eps)
    normalized: torch.Tensor = _RMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's has no types
    return normalized


# A GPU's two kernels, for fake tensors alone: torch's own operator comes apart into the CPU's at once.
torch.library.define("dejavu::fused_rms_norm", "(Tensor x, Tensor weight) -> (Tensor, Tensor)")
torch.library.define(
    "dejavu::fused_rms_norm_backward", "(Tensor gradient, Tensor x, Tensor scale, Tensor weight) -> (Tensor, Tensor)"
)


@torch.library.register_fake("dejavu::fused_rms_norm")  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.register_fake("dejavu::fused_rms_norm_backward")  # type: ignore[untyped-decorator]
def _(
    gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and a number of each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normalized, scale = torch.ops.dejavu.fused_rms_norm(x, weight)
        ctx.save_for_backward(x, scale, weight)
        result: torch.Tensor = normalized
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale, weight = ctx.saved_tensors
        of_x, of_weight = torch.ops.dejavu.fused_rms_norm_backward(gradients[0], x, scale, weight)
        return of_x, of_weight
