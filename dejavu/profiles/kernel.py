"""One kernel on one device: the input of cost predictors, whatever its source.

A captured operator, an imported row and a measurement all become a `Kernel`, so that what is learned from one prices
the other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

FAMILIES = (
    *("matmul", "convolution", "attention"),  # arithmetic
    *("elementwise", "softmax", "normalization", "reduction", "gather", "copy"),  # memory traffic
)

_UNLESS_FALSE = ("is_indexed", "has_bias")  # fields that came later: rows written before keep their keys
CAUSAL = "_causal"  # ends the name of attention in which a query sees the keys up to its own position alone


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one kernel computes, reads and writes.

    Attributes:
        family: one of `FAMILIES`; predictors are per family.
        name: the operation inside the family, such as `gelu` or `aten.addmm`.
        dtype: torch's name of the inputs, `float32`, or `tfloat32` where matrix products may round to it.
        batch, m, n, k: matmul: `batch` products (m × k) · (k × n), k is summed over; convolution: the implicit product,
            m = images × output pixels, n = output channels, k = input channels × kernel area; attention: batch × heads
            of m queries, n keys, k wide; softmax, normalization, reduction: m rows of n elements; otherwise m elements.
        flops: multiplications and additions, each counted.
        read_bytes, written_bytes: each tensor once, as if nothing were cached.
        is_indexed: where its tensors' elements lie is worked out for each one: operands of several shapes, copies of
            what lies in another order; of a reduction, rows are summed with each other. Not written where False.
        has_bias: a convolution that adds a bias, or its gradient. Not written where False.
    """

    family: str
    name: str
    dtype: str
    batch: int = 1
    m: int = 1
    n: int = 1
    k: int = 1
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    is_indexed: bool = False
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown kernel family {self.family!r}; wanted one of {', '.join(FAMILIES)}")

    @property
    def is_causal(self) -> bool:
        """Whether it is attention that skips the keys after each query; its `flops` are those of half the scores."""
        return self.name.endswith(CAUSAL)

    @property
    def is_backward(self) -> bool:
        return "backward" in self.name

    @property
    def subject(self) -> str:
        """The key of its rows in the cost database: the same for kernels that do the same work."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return it for the column `extra` of the cost database."""
        fields = vars(self)  # as asdict, without its copies: an import makes 300,000
        written = {name: value for name, value in fields.items() if value or name not in _UNLESS_FALSE}
        return json.dumps(written, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Kernel:
        """Read what `to_json` gave.

        Raises:
            TypeError, ValueError: the text is no kernel.
        """
        return cls(**json.loads(text))
