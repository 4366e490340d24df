"""Of mixtures of experts without dropped tokens: rows sorted by expert, and products of groups of rows.

Shape letters: N = tokens of a microbatch, E = experts, C = experts that a token goes to, M = N · C rows, W = width,
F = inner width. Rows of an expert are neighbours; `ends_E` says where each expert's end. So every shape is known
beforehand, whatever the router chooses, and no more is computed than the rows that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

_ALIGNED_BYTES = 16  # of rows and columns, which torch's own grouped product asks for


@torch.library.custom_op("dejavu::grouped_mm", mutates_args=())
def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows (M, K) by its own matrix (E, K, N): (M, N).

    torch's own product is used on GPUs that have it; it cannot be traced in float32.
    """
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    if _has_own_kernel(rows, weights, out):
        return nn.functional.grouped_mm(rows, weights, offs=ends)
    for expert, (start, stop) in enumerate(_groups(ends)):
        torch.mm(rows[start:stop], weights[expert], out=out[start:stop])
    return out


@torch.library.custom_op("dejavu::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sum each expert's outer products of rows (M, K) and (M, N): (E, K, N). An expert without rows has zeros."""
    out = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    if _has_own_kernel(left, right, out):
        return nn.functional.grouped_mm(left.t(), right, offs=ends)
    for expert, (start, stop) in enumerate(_groups(ends)):
        torch.mm(left[start:stop].t(), right[start:stop], out=out[expert])
    return out


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, int]]:
    stops = ends.tolist()
    return zip([0, *stops[:-1]], stops, strict=True)


def _has_own_kernel(*tensors: torch.Tensor) -> bool:
    return all(
        tensor.is_cuda
        and tensor.numel() > 0  # no token may go to a device's experts
        and tensor.dtype == torch.bfloat16
        and all(step == 1 or step * tensor.element_size() % _ALIGNED_BYTES == 0 for step in tensor.stride())
        for tensor in tensors
    )


@grouped_mm.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@grouped_outer.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # torch calls it by these names
    ctx.save_for_backward(*inputs)


def _backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, weights, ends = context.saved_tensors
    gradient = gradient.contiguous()
    return grouped_mm(gradient, weights.transpose(1, 2), ends), grouped_outer(rows, gradient, ends), None


grouped_mm.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.dejavu.grouped_mm)
def _grouped_mm_flops(rows: Any, weights: Any, ends: Any, *_: Any, **__: Any) -> int:
    return 2 * int(rows[0] * weights[1] * weights[2])


@register_flop_formula(torch.ops.dejavu.grouped_outer)
def _grouped_outer_flops(left: Any, right: Any, ends: Any, *_: Any, **__: Any) -> int:
    return 2 * int(left[0] * left[1] * right[1])


class GroupedLinear(nn.Module):
    """E linear maps without biases, each for its own rows: weights (E, out, in)."""

    def __init__(self, num_experts: int, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out, width))
        bound = 1.0 / math.sqrt(width)  # as torch draws a linear map's
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, rows: torch.Tensor, ends: torch.Tensor | None = None, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map rows (M, in) to (M, out); or, without ends, as many rows of each expert (E, M / E, in).

        Args:
            weight: what this device has of it, where it is sharded.
        """
        weights = self.weight if weight is None else weight
        if torch.is_autocast_enabled(rows.device.type):
            narrow = torch.get_autocast_dtype(rows.device.type)
            rows, weights = rows.to(narrow), weights.to(narrow)
        matrices = weights.transpose(1, 2)
        if ends is None:
            return torch.bmm(rows, matrices)
        if torch.compiler.is_exporting():
            return _by_torch_alone(rows, matrices, ends)
        mapped: torch.Tensor = grouped_mm(rows, matrices, ends)
        return mapped


def _by_torch_alone(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply all rows by every matrix and keep each expert's own: exported models load without our operator."""
    expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for number, matrix in enumerate(matrices.unbind()):
        out = torch.where((expert == number)[:, None], rows @ matrix, out)
    return out


class Experts(nn.Module):
    """E gated feed-forward networks (SwiGLU) of one inner width."""

    def __init__(self, width: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = GroupedLinear(num_experts, width, inner)
        self.expand = GroupedLinear(num_experts, width, inner)
        self.contract = GroupedLinear(num_experts, inner, width)

    def forward(
        self, tokens: torch.Tensor, share: torch.Tensor, choice: torch.Tensor, own: range | None = None
    ) -> torch.Tensor:
        """Return, for each token (N, W), what its experts make of it: sums weighted by `share` (N, C).

        Args:
            own: the experts that this device has, and whose part of the sums it returns; None: all. How many rows
                these get is known here alone: the shapes inside follow it, and a GPU waits for the number.
        """
        num_choices = choice.shape[1]
        expert, order = choice.flatten().sort(stable=True)  # a token's rows are in turn where they were
        ends = (expert[:, None] <= torch.arange(self.num_experts, device=expert.device)).sum(0).to(torch.int32)
        if own is not None:
            start, stop = (int(ends[end - 1]) if end else 0 for end in (own.start, own.stop))
            order, ends = order[start:stop], ends[own.start : own.stop] - start
        rows = tokens.index_select(0, order // num_choices)
        inner = nn.functional.silu(self.gate(rows, ends)) * self.expand(rows, ends)
        done = self.contract(inner, ends)
        if own is None:
            back = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0], device=order.device))
            done = done.index_select(0, back)
        else:  # zeros for the choices of others; a token's sum has the same order on every device
            done = done.new_zeros(choice.numel(), done.shape[1]).index_copy(0, order, done)
        done = done.unflatten(0, (-1, num_choices))
        combined: torch.Tensor = (done * share.to(done.dtype)[:, :, None]).sum(1)
        return combined


class MixtureOfExperts(nn.Module):
    """Experts, and a router that sends each token to the few that it scores highest (token choice, none dropped)."""

    def __init__(self, width: int, inner: int, num_experts: int, num_choices: int) -> None:
        super().__init__()
        self.num_choices = num_choices
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(width, inner, num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        # Softmax over the chosen is softmax over all, divided by the chosen ones' sum.
        scores, choice = self.router(tokens).float().topk(self.num_choices, dim=-1)
        output: torch.Tensor = self.experts(tokens, torch.softmax(scores, dim=-1), choice)
        return output.view_as(x)
