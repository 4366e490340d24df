"""Activation checkpointing of a layer whose backward pass runs in two parts: it runs forward again once for both.

Torch's checkpoint runs a layer again in every backward call that wants something of it, and the second part is a call
for each group of weights (`split_backward`): a transformer block would run forward six times more. Here what the layer
computes again stays until the last operator that saved it has gone backward, as it does without checkpointing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.units import plural

Run = Callable[[torch.Tensor], torch.Tensor]


def run_again_once(
    run: Run,
    x: torch.Tensor,
    *,
    again: AbstractContextManager[object] | None = None,
    stops_early: bool = True,
    keeps_generators: bool = True,
) -> torch.Tensor:
    """Return the layer's output; of what autograd saves only the input is kept, and the rest made when it is asked for.

    Args:
        again: entered while it runs again.
        stops_early: it runs no further than to where the last tensor was saved.
        keeps_generators: the random generators are as they were, when it runs again.
    """
    kept = _Kept(run, x, again or nullcontext(), stops_early=stops_early, keeps_generators=keeps_generators)
    with saved_tensors_hooks(kept.forget, kept.remember):
        return run(x)


class _Slot:
    """One saved tensor's place; it dies with the operator that saved it, and what it holds with it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.form = (tensor.shape, tensor.dtype)
        self.tensor: torch.Tensor | None = None


class _Done(Exception):  # nothing is wrong
    """All saved tensors are there again."""


class _Kept:
    """What a layer needs to run again, and weakly the places of what autograd saved."""

    def __init__(
        self, run: Run, x: torch.Tensor, again: AbstractContextManager[object], *, stops_early: bool,
        keeps_generators: bool,
    ) -> None:  # fmt: skip
        self._run, self._x, self._wants_gradient = run, x.detach(), x.requires_grad
        self._again, self._stops_early = again, stops_early
        self._slots = list[weakref.ref[_Slot]]()
        self._devices = [x.device] if x.is_cuda else []
        self._state = torch.get_rng_state() if keeps_generators else None
        self._states = [torch.cuda.get_rng_state(one) for one in self._devices] if keeps_generators else []
        kind = x.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def forget(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot(tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def remember(self, slot: _Slot) -> torch.Tensor:
        if slot.tensor is None:
            self._run_again()
        assert slot.tensor is not None
        return slot.tensor

    def _run_again(self) -> None:
        """Fill all places that are still wanted.

        Raises:
            DejavuError: the layer saves other tensors than before.
        """
        count = 0

        def keep(tensor: torch.Tensor) -> None:
            nonlocal count
            slot = self._slots[count]() if count < len(self._slots) else None
            if slot is not None:
                if slot.form != (tensor.shape, tensor.dtype):
                    raise DejavuError(
                        f"run again for its backward pass, a layer saves a tensor of shape {tuple(tensor.shape)} and "
                        f"{tensor.dtype}; wanted {tuple(slot.form[0])} and {slot.form[1]}, as the first time"
                    )
                slot.tensor = tensor.detach()
            count += 1
            if self._stops_early and count == len(self._slots):
                raise _Done

        kind, dtype, enabled = self._autocast
        with ExitStack() as contexts:
            if self._state is not None:
                contexts.enter_context(torch.random.fork_rng(self._devices))
                torch.set_rng_state(self._state)
                for one, state in zip(self._devices, self._states, strict=True):
                    torch.cuda.set_rng_state(state, one)
            contexts.enter_context(self._again)
            contexts.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(saved_tensors_hooks(keep, _nothing_is_there))
            try:
                self._run(self._x.detach().requires_grad_(self._wants_gradient))
            except _Done:
                return
        if count != len(self._slots):
            raise DejavuError(
                f"run again for its backward pass, a layer saves {plural(count, 'tensor')}; wanted {len(self._slots)}, "
                "as the first time"
            )


def _nothing_is_there(_: object) -> NoReturn:
    raise DejavuError("a layer goes backward in its own forward pass; wanted one that does not, to be run again")
