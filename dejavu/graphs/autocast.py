"""Layers that compute in a narrower type than that of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def autocast(device: torch.device, dtype: str | None) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Compute in this type where torch holds that safe; None: in that of the weights.

    Yields:
        What makes of a layer's output what the next one gets: float32 again, so that messages do not depend on where
        the cut is.
    """
    if dtype is None:
        yield lambda output: output
        return
    with torch.autocast(device.type, getattr(torch, dtype)):
        yield lambda output: output.float() if output.is_floating_point() else output


def computing_in(module: nn.Module, dtype: str | None) -> nn.Module:
    """Let a module compute like that from now on, as it does in a training; its weights stay as they are."""
    if dtype is not None:
        inner = module.forward

        def forward(x: torch.Tensor) -> Any:
            with autocast(x.device, dtype) as passed_on:
                output = inner(x)
                return passed_on(output) if isinstance(output, torch.Tensor) else output

        module.forward = forward
    return module
