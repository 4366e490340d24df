"""Tensors with shapes and no memory, to see what layers do without doing it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None, *, allow_non_fake_inputs: bool = False) -> Iterator[None]:
    """Tensors made inside have no memory.

    Args:
        mode: whose tensors they are to be; None: a new one's.

    Where an operator does not take its inputs, torch prints its own stack before it raises; here the error says it all.
    """
    before, _LOG.disabled = _LOG.disabled, True
    try:
        with mode or FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs):
            yield
    finally:
        _LOG.disabled = before
