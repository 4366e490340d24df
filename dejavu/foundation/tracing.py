"""Fake tensors, which have shapes and no memory, to trace layers without running them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class FakeMode(FakeTensorMode):
    """Torch's mode, which a deep copy of a fake tensor shares (`nn.TransformerEncoder` copies its layer)."""

    def __deepcopy__(self, memo: object) -> FakeMode:
        return self


@contextmanager
def without_torchs_stack() -> Iterator[None]:
    """Suppress the stack that torch prints where an operator rejects its inputs, before it raises."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = before


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None, *, allow_non_fake_inputs: bool = False) -> Iterator[None]:
    """Make tensors created in this block fake.

    Args:
        mode: the fake tensor mode; None: a new one.
    """
    with without_torchs_stack(), mode or FakeMode(allow_non_fake_inputs=allow_non_fake_inputs):
        yield
