"""Fake tensors, which have shapes and no memory, to trace layers without running them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from dejavu.foundation.tracing.recurrent import RecurrentLayer

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_KNOWN = 1024  # numbers of a tensor whose values are kept, at most
_aten = torch.ops.aten
_PRODUCTS = {  # torch's kernels take one dtype, which its shapes' rules do not ask for
    getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
}
_RESIZED = {  # torch's kernels make these results as large as what they read, and resize them: their memory stays
    getattr(_aten, name).default
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "col2im")
}
_RANGES = (_aten.linspace.default, _aten.arange.default, _aten.arange.start, _aten.arange.start_step)


class FakeMode(FakeTensorMode):
    """Torch's mode, which a deep copy of a fake tensor shares (`nn.TransformerEncoder` copies its layer).

    Of small tensors that follow from plain numbers the values are known, as torch's own mode knows those of a single
    number: models read rates of their blocks with `.item()` from `torch.linspace(0, rate, depth)`. Memory is as large
    as on a CPU where torch's own rules say less: what an LSTM keeps for its backward pass, results that are resized.
    """

    def __deepcopy__(self, memo: object) -> FakeMode:
        return self

    def may_turn_const(self, t: torch.Tensor) -> bool:
        is_plain = t.layout is torch.strided and t.device.type != "meta"
        return t.numel() <= _KNOWN and is_plain and not self.is_our_fake(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            dtypes = list(dict.fromkeys(str(one.dtype)[6:] for one in args if isinstance(one, torch.Tensor)))
            if len(dtypes) > 1:
                raise RuntimeError(f"a product ({func}) of {' and '.join(dtypes)}; wanted one dtype")
        found: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _RANGES and type(found) is FakeTensor and found.numel() <= _KNOWN and found.device.type == "cpu":
            with no_dispatch():
                found.constant = func(*args, **(kwargs or {}))
            self.fake_tensor_converter.add_constant_storage_mapping(found)
        if func in _RESIZED:
            return self._resized(found, args)
        if func is _aten.mkldnn_rnn_layer.default and args[-1]:  # it trains
            return *found[:-1], self._workspace(args[0], args[2])
        return found

    def _resized(self, found: torch.Tensor, args: Any) -> torch.Tensor:
        """Return a result of the same form in the memory that it has in a training."""
        most = max(one.numel() for one in args[:2] if isinstance(one, torch.Tensor))
        if most <= found.numel():
            return found
        with self:
            return torch.empty(most, dtype=found.dtype, device=found.device).resize_(found.shape)

    def _workspace(self, inputs: torch.Tensor, recurrent_weight: torch.Tensor) -> torch.Tensor:
        with self:
            size = RecurrentLayer.of(inputs, recurrent_weight).workspace_bytes()
            return torch.empty(size, dtype=torch.uint8, device=inputs.device)


@contextmanager
def without_torchs_stack() -> Iterator[None]:
    """Suppress the stack that torch prints where an operator rejects its inputs, before it raises."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = before


_TRUNCATES = "_no_grad_trunc_normal_"  # torch's, which draws again until no number is out of range
_truncated = getattr(nn.init, _TRUNCATES)


def _undrawn(tensor: torch.Tensor, *bounds: Any, **options: Any) -> torch.Tensor:
    """Do what torch's truncated normal distribution does to a tensor: to a fake one nothing."""
    found: torch.Tensor = tensor if isinstance(tensor, FakeTensor) else _truncated(tensor, *bounds, **options)
    return found


@contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Let `nn.init.trunc_normal_` pass over fake tensors: it asks for their values."""
    before = getattr(nn.init, _TRUNCATES)
    setattr(nn.init, _TRUNCATES, _undrawn)
    try:
        yield
    finally:
        setattr(nn.init, _TRUNCATES, before)


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None, *, allow_non_fake_inputs: bool = False) -> Iterator[None]:
    """Make tensors created in this block fake.

    Args:
        mode: the fake tensor mode; None: a new one.
    """
    with without_torchs_stack(), _drawing_nothing(), mode or FakeMode(allow_non_fake_inputs=allow_non_fake_inputs):
        yield
