"""Torch's attention replaced while a layer runs, for devices and slices that have a part of the sequence."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

KEYS = 2  # the dimension of positions of keys and values (batch, heads, positions, width)


class Attending:
    """One call of torch's attention, by the names of its arguments."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> None:
        self.query, self.key, self.value, self.mask = query, key, value, attn_mask
        self.is_causal, self._dropout, self._options = is_causal, dropout_p, options

    @property
    def num_queries(self) -> int:
        return self.query.shape[KEYS]

    def of(self, start: int, length: int) -> Attending:
        """Return the same of some of the queries alone."""
        return Attending(
            self.query.narrow(KEYS, start, length), self.key, self.value, self.mask, self._dropout, self.is_causal,
            **self._options,
        )  # fmt: skip

    def to(self, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        """Attend to other keys and values; if causal, the last of them are the queries' own positions."""
        later: Any = None
        if is_causal and keys.shape[KEYS] > self.num_queries:  # the first query sees all earlier keys
            later = causal_lower_right(self.num_queries, keys.shape[KEYS])
        attended: torch.Tensor = scaled_dot_product_attention(
            self.query, keys, values, later, self._dropout, is_causal and later is None, **self._options
        )
        return attended


class InPlaceOfAttention(TorchFunctionMode):
    """Calls `attend` for torch's attention, and everything else as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return self.attend(Attending(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    @abstractmethod
    def attend(self, asked: Attending) -> torch.Tensor:
        """Return what comes out."""
