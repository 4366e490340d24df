"""LSUV's second half: weights rescaled by their outputs on a batch (Mishkin & Matas, 2016, algorithm 1)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

LINEAR_MAPS = (nn.Linear, _ConvNd)
ROUNDING = 8.0  # a deviation of so many units in the last place of the largest output counts as zero


def calibrate(module: nn.Sequential, inputs: torch.Tensor) -> None:
    """Rescale each linear map so that its outputs, less the bias, have a unit deviation over this batch.

    One pass is enough: outputs are proportional to the weight, and each map sees inputs that the maps before it have
    already corrected. A map whose outputs are constant or not finite stays as it is; so does one that is frozen, or
    never called (attention that reads its projection's weight itself); one that is called twice is rescaled by its
    first outputs.
    Weights change and nothing else: neither running statistics nor torch's global random state.

    Args:
        module: the whole model; it runs in the mode in which it is.
        inputs: of one batch, on the module's device.
    """
    rescaled: set[int] = set()

    def rescale(part: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        weight, bias = part.weight, part.bias
        if id(weight) in rescaled or not weight.requires_grad:
            return output
        rescaled.add(id(weight))
        shift = 0.0 if bias is None else bias.unflatten(0, (-1, *(1,) * (weight.dim() - 2)))  # channels, then pixels
        without = output - shift
        deviation = without.float().std(correction=0).item()
        noise = ROUNDING * torch.finfo(output.dtype).eps * output.abs().max().item()
        if not noise < deviation < math.inf:
            return output
        weight.div_(deviation)
        return (without / deviation + shift).to(output.dtype)

    hooks = [part.register_forward_hook(rescale) for part in module.modules() if isinstance(part, LINEAR_MAPS)]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
            module(inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
