"""Tensors with shapes and no memory, to see what layers do without doing it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def fake_tensors(*, allow_non_fake_inputs: bool = False) -> Iterator[None]:
    """Tensors made inside have no memory.

    Where an operator does not take its inputs, torch prints its own stack before it raises; here the error says it all.
    """
    before, _LOG.disabled = _LOG.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs):
            yield
    finally:
        _LOG.disabled = before
