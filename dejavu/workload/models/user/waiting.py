"""Large tensors of a module that get their values when something reads them; what is let go before never has any.

A layer is taken from the whole module that its factory returns. What the constructors of all other layers write to
their weights would be drawn for nothing, in memory that is not touched otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 2**20  # of memory whose values wait


@contextmanager
def values_when_read() -> Iterator[None]:
    """Let what is written in place to large new tensors in this block wait until they are read.

    Those that are still there at its end get their values then. What is drawn at random depends on what was asked
    for before it, and not on what is read or let go. Fake tensors have no values, and are made as ever.
    """
    if detect_fake_mode() is not None:
        yield
        return
    with _Waiting() as waiting:
        yield
    waiting.fill_what_is_left()


@dataclass(frozen=True)
class _Write:
    """An operator that writes to a tensor in place and reads no other.

    Attributes:
        form: the tensor's size, stride and offset in its memory.
        seed: of the random numbers it draws; None: it draws none.
    """

    operator: Any
    dtype: torch.dtype
    form: tuple[torch.Size, tuple[int, ...], int]
    others: tuple[Any, ...]
    options: dict[str, Any]
    seed: int | None

    def carry_out(self, memory: torch.UntypedStorage) -> None:
        size, stride, offset = self.form
        tensor = torch.empty(0, dtype=self.dtype).set_(memory, offset, size, stride)
        if self.seed is None:
            self.operator(tensor, *self.others, **self.options)
            return
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self.seed)
        self.operator(tensor, *self.others, **self.options)
        torch.default_generator.set_state(before)


class _Waiting(TorchDispatchMode):
    """Keeps what is to be written to large memory, and carries it out before anything else meets that memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        # A weak reference keeps an address from being another memory's later.
        self._writes: dict[int, tuple[StorageWeakRef, list[_Write]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        tensors = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
        if len(tensors) == 1 and tensors[0] is args[0] and _may_wait(func, args[0], options):
            self._keep(func, args, options)
            return args[0]
        if not getattr(func, "is_view", False):
            for one in tensors:
                if one.layout is torch.strided:
                    self._fill(one.untyped_storage())
        return func(*args, **options)

    def _keep(self, func: Any, args: Any, options: dict[str, Any]) -> None:
        tensor, memory = args[0], args[0].untyped_storage()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        seed = int(torch.randint(2**62, ())) if draws else None
        form = tensor.size(), tensor.stride(), tensor.storage_offset()
        _, writes = self._writes.setdefault(memory._cdata, (StorageWeakRef(memory), []))
        writes.append(_Write(func, tensor.dtype, form, args[1:], options, seed))

    def _fill(self, memory: torch.UntypedStorage) -> None:
        if memory._cdata in self._writes:
            for write in self._writes.pop(memory._cdata)[1]:
                write.carry_out(memory)

    def fill_what_is_left(self) -> None:
        """Give those tensors their values that anybody still has."""
        if self._writes:
            gc.collect()  # a module may be part of a cycle
        with torch.no_grad():
            for reference, _ in list(self._writes.values()):
                memory = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if memory is not None:
                    self._fill(memory)


def _may_wait(func: Any, tensor: torch.Tensor, options: dict[str, Any]) -> bool:
    """Return whether an operator only writes to this tensor, which is large; a generator of one's own says no."""
    written = func._schema.arguments[0].alias_info
    if written is None or not written.is_write or torch.Tag.inplace_view in func.tags or options.get("generator"):
        return False
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_conj()
    return is_plain and tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() >= LEAST_BYTES
