"""Measured layers by device, model, tensor-parallel degree and microbatch; what is missing is derived, and said.

A stage's time is the sum over its layers. A layer that was not measured at this microbatch is interpolated between its
nearest sizes; one that was not measured at all is taken as the others of its kind. Nothing is fitted.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dejavu.foundation.errors import DejavuError

# The model whose optimizer step was timed: an embedding, this many transformer layers, a head (the data's README).
_PROFILED_TRANSFORMERS = 2
TRANSFORMER = "transformer"


class MissingProfileError(DejavuError):
    """Nothing was measured from which a layer could be priced; the message names model and device."""


@dataclass(frozen=True)
class LayerRow:
    """One layer on one rank of a tensor-parallel group.

    Attributes:
        forward_seconds, backward_seconds: one microbatch, collectives included.
        update_seconds: one optimizer step of the profiled model; None where unknown, as the bytes.
        parameter_bytes: of one rank.
        output_bytes_each: what goes to the next layer, for one example, whole.
    """

    kind: str
    forward_seconds: float
    backward_seconds: float
    update_seconds: float | None = None
    parameter_bytes: float | None = None
    output_bytes_each: float | None = None


Sizes = dict[int, LayerRow]  # by microbatch


@dataclass(eq=False)
class LayerProfile:
    """Every measured layer.

    Attributes:
        rows: (device type, model) -> tensor-parallel degree -> layer -> microbatch -> row.
    """

    rows: Mapping[tuple[str, str], dict[int, dict[int, Sizes]]]
    _known: dict[tuple[Any, ...], tuple[float, float, frozenset[str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, int, int, int, LayerRow]]) -> LayerProfile:
        """Gather (device type, model, layer, tensor parallel, microbatch size, row); the first of equals counts."""
        table: dict[tuple[str, str], dict[int, dict[int, Sizes]]] = {}
        for device, model, layer, degree, size, row in rows:
            layers = table.setdefault((device, model), {}).setdefault(degree, defaultdict(dict))
            layers[layer].setdefault(size, row)
        return cls(table)

    def passes_seconds(
        self, device: str, model: str, span: range, degree: int, size: int, notes: set[str]
    ) -> tuple[float, float]:
        """Return forward and backward of one microbatch through the layers; adds to `notes` what was not measured.

        Raises:
            MissingProfileError: the model was not measured on the device, or no layer of the kind.
        """
        key = (device, model, span, degree, size)
        if key not in self._known:
            own: set[str] = set()
            parts = [self._layer_seconds(device, model, layer, degree, size, own) for layer in span]
            self._known[key] = (sum(p[0] for p in parts), sum(p[1] for p in parts), frozenset(own))
        forward, backward, said = self._known[key]
        notes |= said
        return forward, backward

    def parameter_bytes(self, device: str, model: str, span: range, degree: int, notes: set[str]) -> float:
        """Return the bytes of the layers' parameters on one rank."""
        return sum(self._parameter_bytes(device, model, layer, degree, notes) for layer in span)

    def update_seconds(self, device: str, model: str, span: range, degree: int, notes: set[str]) -> float:
        """Return the optimizer's step of a stage on one rank: the profiled model's, in proportion to parameters."""
        used, layers = self._degree(device, model, degree)
        known = [row.update_seconds for sizes in layers.values() for row in sizes.values() if row.update_seconds]
        if not known:
            notes.add(f"no optimizer step of {model} was measured on {device}: 0")
            return 0.0
        ends = [min(layers), max(layers)]
        inner = next((at for at, sizes in layers.items() if _kind(sizes) == TRANSFORMER), ends[0])
        profiled = [*ends, *[inner] * _PROFILED_TRANSFORMERS]
        per_model = sum(self._parameter_bytes(device, model, layer, used, notes) for layer in profiled)
        if not per_model:
            return 0.0
        return statistics.median(known) * self.parameter_bytes(device, model, span, degree, notes) / per_model

    def output_bytes(self, model: str, layer: int, size: int) -> float | None:
        """Return what a layer hands on for one microbatch, whole; None where no row of the model says it."""
        found = {
            row.output_bytes_each
            for (_, name), degrees in self.rows.items()
            if name == model
            for layers in degrees.values()
            for row in layers.get(layer, {}).values()
            if row.output_bytes_each
        }
        return size * max(found) if found else None

    def _degree(self, device: str, model: str, degree: int) -> tuple[int, dict[int, Sizes]]:
        """Return the nearest measured degree, and its layers."""
        degrees = self.rows.get((device, model))
        if not degrees:
            measured = sorted({name for name, of in self.rows if of == model})
            there = f"it was on {', '.join(measured)}" if measured else "nor on any other"
            raise MissingProfileError(f"{model} was not measured on {device}; {there}")
        used = min(degrees, key=lambda one: (abs(math.log(one / degree)), one))
        return used, degrees[used]

    def _layer_seconds(
        self, device: str, model: str, layer: int, degree: int, size: int, notes: set[str]
    ) -> tuple[float, float]:
        used, layers = self._degree(device, model, degree)
        if used != degree:
            notes.add(f"{model} on {device} was not measured at tp {degree}: tp {used} in proportion")
        if layer in layers:
            forward, backward = _at(layers[layer], size, f"{model} on {device} tp {used}", notes)
        else:
            kind = self._kind_of(model, layer)
            alike = [
                _at(sizes, size, f"{model} on {device} tp {used}", notes)
                for sizes in layers.values()
                if _kind(sizes) == kind
            ]
            if not alike:
                raise MissingProfileError(f"no {kind} layer of {model} was measured on {device}; layer {layer} is one")
            notes.add(f"layer {layer} of {model} was not measured on {device} tp {used}: as its other {kind} layers")
            forward, backward = (statistics.median(column) for column in zip(*alike, strict=True))
        return forward * used / degree, backward * used / degree

    def _kind_of(self, model: str, layer: int) -> str:
        """Return what another device's row calls the layer; a transformer layer where none does."""
        for (_, name), degrees in self.rows.items():
            for layers in degrees.values() if name == model else ():
                if layer in layers:
                    return _kind(layers[layer])
        return TRANSFORMER

    def _parameter_bytes(self, device: str, model: str, layer: int, degree: int, notes: set[str]) -> float:
        places = sorted(self.rows, key=lambda place: place != (device, model))  # this device's first
        for place in places:
            degrees = self.rows[place]
            for used in sorted(degrees, key=lambda one: abs(math.log(one / degree))) if place[1] == model else ():
                known = [row.parameter_bytes for row in degrees[used].get(layer, {}).values()]
                found = [size for size in known if size is not None]
                if found:
                    return found[0] * used / degree
        notes.add(f"the size of layer {layer} of {model} is not known: 0")
        return 0.0


def _kind(sizes: Sizes) -> str:
    return next(iter(sizes.values())).kind


def _at(sizes: Sizes, size: int, what: str, notes: set[str]) -> tuple[float, float]:
    """Return the layer's seconds at a microbatch: measured, or on the line through the two nearest sizes.

    Below the smallest and above the largest as well; with one size alone, or where the line falls, in proportion.
    """
    if size in sizes:
        return sizes[size].forward_seconds, sizes[size].backward_seconds
    below, above = [m for m in sizes if m < size], [m for m in sizes if m > size]
    nearest_two = sorted(sizes, key=lambda m: abs(m - size))[:2]
    pair = [max(below), min(above)] if below and above else nearest_two
    notes.add(f"{what} was not measured at microbatches of {size}: from {' and '.join(map(str, sorted(pair)))}")
    nearest = min(pair, key=lambda m: abs(m - size))
    parts = []
    for name in ("forward_seconds", "backward_seconds"):
        own = getattr(sizes[nearest], name)
        slope = 0.0
        if len(pair) == 2:
            slope = (getattr(sizes[pair[1]], name) - getattr(sizes[pair[0]], name)) / (pair[1] - pair[0])
        found = own + slope * (size - nearest)
        parts.append(found if slope > 0 and found > 0 else own * size / nearest)
    return parts[0], parts[1]
