"""What a module's forward passes leave for the next one, but a traced graph's do not: it only writes to buffers."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import nn

_OF_TORCH = vars(nn.Module())  # attributes that every module has
_WANTED = "wanted a buffer that is written in place, as by `copy_`"


def kept_outside_graphs(module: nn.Module, example: torch.Tensor) -> str:
    """Return what a forward pass changes that a traced graph would have as it was; "": nothing.

    An attribute counts where passes read what earlier ones left. What the first pass alone makes, as a table, does not.

    Args:
        module: of fake tensors, and nobody else's: it is left changed.
    """
    drawn = _random_numbers()
    module(example)
    parts = dict(module.named_modules())
    before = {name: (dict(part._buffers), _attributes(part)) for name, part in parts.items()}
    module(example)
    if _random_numbers() != drawn:
        return "its forward pass draws random numbers of Python or NumPy; wanted torch's"
    for path, part in parts.items():
        buffers, attributes = before[path]
        for name, tensor in part._buffers.items():
            if tensor is not buffers.get(name):
                return f"its forward pass puts another tensor in the place of {_named(path, name)}; {_WANTED}"
        for name, value in _attributes(part).items():
            if not _is_same(value, attributes.get(name)) and _is_read(module, part, name, example):
                return f"its forward pass reads what earlier ones left in {_named(path, name)}; {_WANTED}"
    return ""


def _named(path: str, name: str) -> str:
    return repr(f"{path}.{name}" if path else name)


def _random_numbers() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _attributes(part: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes; of collections how much is in them."""
    return {
        name: len(value) if isinstance(value, list | dict | set) else value
        for name, value in vars(part).items()
        if name not in _OF_TORCH
    }


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value is before
    return not isinstance(value, int | float | complex | str) or bool(value == before)


def _is_read(module: nn.Module, part: nn.Module, name: str, example: torch.Tensor) -> bool:
    """Return whether a forward pass fails without this attribute."""
    held = vars(part).pop(name)
    try:
        module(example)
    except AttributeError:
        return True
    finally:
        vars(part)[name] = held
    return False
