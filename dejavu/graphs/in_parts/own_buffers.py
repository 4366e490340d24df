"""Buffers that a layer's forward pass changes, while backward passes of earlier microbatches are still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Run = Callable[[torch.Tensor], torch.Tensor]
Places = tuple[tuple[nn.Module, str], ...]  # of one tensor: the modules that hold it, and its name in each


class OwnBuffers:
    """Gives each forward pass copies of the buffers that it changes in place, which the layer has from then on.

    What a backward pass reads is then as its own forward pass left it, however many others ran in between: in place,
    autograd refuses what was saved of a buffer, and does not see a change to its `.data`.

    Attributes:
        changed: where the buffers are that forward passes change; None: none was seen yet.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.changed: tuple[Places, ...] | None = None

    def run(self, run: Run, x: torch.Tensor) -> torch.Tensor:
        """Run the layer's forward pass."""
        if not torch.is_grad_enabled():  # no backward pass will read them
            return run(x)
        if self.changed is None:
            with self.looking():
                return run(x)
        self.renew()
        return run(x)

    def renew(self) -> None:
        """Put copies in the places of what forward passes change. Torch's compiler traces this, too."""
        for places in self.changed or ():
            _set(places, getattr(*places[0]).clone())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """See what the forward pass inside changes, of which all buffers are copies."""
        held = _places(self._layer)
        before = [getattr(*places[0]) for places in held]
        copies = [one.clone() for one in before]
        versions = [one._version for one in copies]
        for places, copy in zip(held, copies, strict=True):
            _set(places, copy)
        yield
        changed = list[Places]()
        for places, old, copy, version in zip(held, before, copies, versions, strict=True):
            if getattr(*places[0]) is not copy:  # the layer has put another there
                continue
            # By its values, too: torch counts no changes by a batch norm, nor any of `.data`.
            if copy._version != version or not torch.equal(copy, old):
                changed.append(places)
            else:
                _set(places, old)
        self.changed = tuple(changed)


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


def _set(places: Places, tensor: torch.Tensor) -> None:
    for part, name in places:
        setattr(part, name, tensor)


def _held(layer: nn.Module) -> list[tuple[nn.Module, dict[str, torch.Tensor | None]]]:
    return [(part, dict(part._buffers)) for part in layer.modules() if part._buffers]


def _put(held: list[tuple[nn.Module, dict[str, torch.Tensor | None]]]) -> None:
    for part, own in held:
        part._buffers.update(own)


def _places(layer: nn.Module) -> list[Places]:
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for part, own in _held(layer):
        for name, one in own.items():
            if one is not None:
                found.setdefault(id(one), []).append((part, name))
    return [tuple(places) for places in found.values()]
