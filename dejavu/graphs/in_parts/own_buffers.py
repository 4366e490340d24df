"""Buffers that a layer's forward pass changes, while backward passes of earlier microbatches are still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Run = Callable[[torch.Tensor], torch.Tensor]
Places = tuple[tuple[nn.Module, str], ...]  # of one tensor: the modules that hold it, and its name in each
Group = tuple[Places, ...]  # of tensors in the same memory, as a table and a view of its rows: mostly one


class OwnBuffers:
    """Gives each forward pass copies of the buffers that it may change in place, which the layer has from then on.

    What a backward pass reads is then as its own forward pass left it, however many others ran in between: in place,
    autograd refuses what was saved of a buffer, and does not see a change to its `.data`.

    Of a layer whose first pass leaves something for later ones, if only a count of passes, they are all its buffers: a
    later pass may change others, as a mean that is kept from some step on. Of others they are none.

    Attributes:
        changed: where the buffers are that the first pass changed; None: none was seen yet.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._may_change = layer, False
        self.changed: tuple[Group, ...] | None = None

    def run(self, run: Run, x: torch.Tensor) -> torch.Tensor:
        """Run the layer's forward pass."""
        if not torch.is_grad_enabled():  # no backward pass will read them
            return run(x)
        if self.changed is None:
            with self.looking():
                return run(x)
        if self._may_change:
            _renew(_groups(self._layer))
        return run(x)

    @property
    def changes_views(self) -> bool:
        """Whether forward passes change buffers that share their memory."""
        return any(len(group) > 1 for group in self.changed or ())

    def renew(self) -> None:
        """Put copies in the places of what the first pass changed. Torch's compiler traces this, too."""
        _renew(self.changed or ())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """See what the forward pass inside changes, of which all buffers are copies."""
        groups, attributes = _groups(self._layer), _attributes(self._layer)
        before = [_tensors(group) for group in groups]
        copied = [_copied(tensors) for tensors in before]
        versions = [[copy._version for copy in copies] for copies in copied]
        for group, copies in zip(groups, copied, strict=True):
            for places, copy in zip(group, copies, strict=True):
                _set(places, copy)
        yield
        changed = list[Group]()
        for group, olds, copies, counts in zip(groups, before, copied, versions, strict=True):
            # Where the layer has put another tensor there, it stays.
            rows = zip(group, olds, copies, counts, strict=True)
            kept = [row for row in rows if getattr(*row[0][0]) is row[2]]
            self._may_change |= len(kept) < len(group)
            # By its values, too: torch counts no changes by a batch norm, nor any of `.data`.
            if any(copy._version != version or not torch.equal(copy, old) for _, old, copy, version in kept):
                changed.append(tuple(places for places, *_ in kept))
            else:
                for places, old, *_ in kept:
                    _set(places, old)
        self.changed = tuple(changed)
        self._may_change |= bool(changed) or _attributes(self._layer) != attributes


class BuffersBefore:
    """A context, to be entered any number of times, in which a layer has the buffers that it has now.

    What runs a layer's forward pass again enters it: it has to compute what the first pass did, which may have read
    what later microbatches have changed since, as a mean that a layer keeps and subtracts. And the first pass has
    written what there is to write, such as a batch norm's statistics. Both passes run on `OwnBuffers`: these stay.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._before = layer, _held(layer)
        self._after = list[tuple[nn.Module, dict[str, torch.Tensor | None]]]()

    def __enter__(self) -> None:
        self._after = _held(self._layer)
        _put(self._before)

    def __exit__(self, *_: object) -> None:
        _put(self._after)


def _renew(groups: Iterable[Group]) -> None:
    for group in groups:
        for places, copy in zip(group, _copied(_tensors(group)), strict=True):
            _set(places, copy)


def _attributes(layer: nn.Module) -> list[tuple[str, object]]:
    """Return what modules may count their passes in, besides buffers: numbers, and tensors by their versions."""
    held = [(name, one) for part in layer.modules() for name, one in vars(part).items()]
    tensors = [(name, (id(one), one._version)) for name, one in held if isinstance(one, torch.Tensor)]
    return [*tensors, *((name, one) for name, one in held if isinstance(one, int | float))]


def _set(places: Places, tensor: torch.Tensor) -> None:
    for part, name in places:
        setattr(part, name, tensor)


def _held(layer: nn.Module) -> list[tuple[nn.Module, dict[str, torch.Tensor | None]]]:
    return [(part, dict(part._buffers)) for part in layer.modules() if part._buffers]


def _put(held: list[tuple[nn.Module, dict[str, torch.Tensor | None]]]) -> None:
    for part, own in held:
        part._buffers.update(own)


def _tensors(group: Group) -> list[torch.Tensor]:
    return [getattr(*places[0]) for places in group]


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors in the same memory, which are in the same memory again."""
    if len(tensors) == 1:
        return [tensors[0].clone()]
    ends = [
        one.storage_offset() + sum((n - 1) * s for n, s in zip(one.shape, one.stride(), strict=True)) for one in tensors
    ]
    memory = tensors[0].as_strided((max(ends) + 1,), (1,), 0).clone()
    return [memory.as_strided(one.shape, one.stride(), one.storage_offset()) for one in tensors]


def _groups(layer: nn.Module) -> list[Group]:
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    memories: dict[object, list[int]] = {}
    for part, own in _held(layer):
        for name, one in own.items():
            if one is None:
                continue
            if id(one) not in found:
                memory = (one.untyped_storage()._cdata, one.dtype) if one.numel() else id(one)
                memories.setdefault(memory, []).append(id(one))
            found.setdefault(id(one), []).append((part, name))
    return [tuple(tuple(found[one]) for one in together) for together in memories.values()]
