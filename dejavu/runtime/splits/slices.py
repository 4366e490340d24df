"""A sequence in slices, one after the other through the same stage (TeraPipe, Li et al., ICML 2021).

Of a causal decoder a position depends on earlier ones only. So a stage runs a slice as soon as it is there: its queries
attend to its own keys and values and to those of the slices before, which the stage kept. Backward passes come in the
reverse order, as each gives the keys and values that it saw a part of their gradient: a slice's own are complete when
all later slices have been there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dejavu.runtime.splits.attention import KEYS, Attending, InPlaceOfAttention
from dejavu.runtime.training import Loss
from dejavu.workload.models.modules.positions import having_slice

_SEQUENCE = 1  # the dimension of positions between layers, and of targets
_Pair = tuple["_Kept", "_Kept"]


class SlicedSequence:
    """The slices of every sequence, and what this rank's layers keep of those that went through.

    Args:
        lengths: of the slices, in order.

    Attributes:
        index: of the slice that comes next; the executor sets it.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths, self.index = tuple(lengths), 0
        self._starts = (0, *itertools.accumulate(self.lengths))
        self._kept: dict[tuple[int, int], list[_Pair]] = {}

    @property
    def count(self) -> int:
        return len(self.lengths)

    def cut(self, microbatches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Cut microbatches (examples, positions, …) into the slices of each, in order."""
        return [part for one in microbatches for part in one.split(self.lengths, dim=_SEQUENCE)]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return what goes into the model as it is: it was cut before."""
        return x

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out of the model as it is: the loss is computed slice by slice."""
        return x

    def part_of_loss(self, loss: Loss) -> Loss:
        """Return what a slice adds to its microbatch's loss, the mean over all positions."""
        whole = self._starts[-1]

        def part(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss(output, target).float() * (target.shape[_SEQUENCE] / whole)

        return part

    def runs(
        self, layer: Callable[[torch.Tensor], torch.Tensor], microbatch: int, position: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what runs a layer, by its position in the model, on the next slice; recomputation comes here again."""
        return partial(self._run, layer, (microbatch, position), self.index)

    def forget(self) -> None:
        """Drop what is kept still: of a step before, whose keys no gradient came to, or that was broken off."""
        self._kept.clear()

    def _run(
        self, layer: Callable[[torch.Tensor], torch.Tensor], key: tuple[int, int], index: int, x: torch.Tensor
    ) -> torch.Tensor:
        kept = self._kept.setdefault(key, [])
        with having_slice(self._starts[index], self.lengths[index]), _AttentionToEarlier(kept, index, self.lengths):
            output: torch.Tensor = layer(x)
        if not torch.is_grad_enabled() and index + 1 == self.count:
            del self._kept[key]  # nobody comes back for it
        return output


class _Kept:
    """Keys, or values, of a microbatch's slices in one attention, and the gradients that later slices gave them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.parts: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}

    def until(self, index: int, own: torch.Tensor) -> torch.Tensor:
        """Keep a slice's own, and return those of all slices until it."""
        found: torch.Tensor = _UntilSlice.apply(own, self, index)  # type: ignore[no-untyped-call]
        return found

    def gradient_of_own(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return a slice's own gradient, whole; remember what earlier slices have of the one given."""
        parts: tuple[torch.Tensor, ...] = gradient.split(self._lengths[: index + 1], dim=KEYS)
        own = parts[index]
        for k in range(index):
            self._gradients.setdefault(k, []).append(parts[k])
        given = self._gradients.pop(index, [])
        if len(given) != len(self._lengths) - 1 - index:
            raise RuntimeError(
                f"slice {index} goes back after {len(given)} of {len(self._lengths) - 1 - index} later slices"
            )
        for part in given:
            own = own + part
        del self.parts[index]
        return own


class _UntilSlice(torch.autograd.Function):
    """Keys or values of the slices until one; going backward each slice gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, kept: _Kept, index: int) -> torch.Tensor:
        ctx.kept, ctx.index = kept, index
        kept.parts[index] = own.detach()
        return torch.cat([kept.parts[k] for k in range(index + 1)], dim=KEYS)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.kept.gradient_of_own(ctx.index, gradients[0]), None, None


class _AttentionToEarlier(InPlaceOfAttention):
    """Gives torch's attention the keys and values of the slices before, too.

    Args:
        kept: of each attention of a layer in the order of its calls; new ones are added.
    """

    def __init__(self, kept: list[_Pair], index: int, lengths: Sequence[int]) -> None:
        super().__init__()
        self._kept, self._index, self._lengths, self._calls = kept, index, lengths, 0

    def attend(self, asked: Attending) -> torch.Tensor:
        # Libraries do not call one query causal, since it sees everything; here, everything until it.
        assert asked.mask is None and (asked.is_causal or asked.num_queries == 1), "rejected by check_slices"
        if self._calls == len(self._kept):
            self._kept.append((_Kept(self._lengths), _Kept(self._lengths)))
        keys, values = self._kept[self._calls]
        self._calls += 1
        seen = keys.until(self._index, asked.key), values.until(self._index, asked.value)
        return asked.to(*seen, is_causal=True)
