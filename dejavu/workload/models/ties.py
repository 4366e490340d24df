"""Tied weights of a model: one matrix that two layers use, such as an embedding and the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from dejavu.workload.models._base import LayerBuilder


class End(NamedTuple):
    """One of the two layers of a tied weight: its place in the model, its name, and the weight's name inside it."""

    position: int
    layer: str
    weight: str

    def of(self, layers: Mapping[str, nn.Module]) -> nn.Parameter | None:
        """Return the weight, where this layer is among them."""
        return layers[self.layer].get_parameter(self.weight) if self.layer in layers else None


class Tie(NamedTuple):
    """A tied weight: the layer whose draw counts, and a later one that uses it, too."""

    owner: End
    copy: End

    @property
    def ends(self) -> tuple[End, End]:
        return self.owner, self.copy


def ties_of(builders: Sequence[LayerBuilder]) -> tuple[Tie, ...]:
    """Return the tied weights of a model's layers."""
    position_of = {builder.name: position for position, builder in enumerate(builders)}
    found = []
    for position, builder in enumerate(builders):
        for own, used in builder.tied:
            layer, _, weight = used.partition(".")
            found.append(Tie(End(position_of[layer], layer, weight), End(position, builder.name, own)))
    return tuple(found)
