"""What one of t tensor-parallel devices computes of a mixture of experts: a part of every expert, or E / t whole ones.

A part of each divides the experts' inner width, so each device reads and writes all rows of the model's width. Whole
experts get the rows that are sent to them, and the group waits for the device with the most. How many these are depends
on the router; assumed is one that sends each token to any C of the E experts alike (`fullest_part`).

Shape letters: N = tokens of a microbatch, E = experts, C = experts that a token goes to, W = the model's width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dejavu.graphs.graph import Graph, Layer, Operator
from dejavu.graphs.kernels import base_name
from dejavu.profiles.kernel import Kernel
from dejavu.workload.models import WholeExperts

_OF_ROWS, _OVER_ROWS, _PADDED = "grouped_mm", "grouped_outer", "bmm"  # products; of the second, k are an expert's rows
Sizes = dict[str, int]


def experts_to_share(graph: Graph) -> int:
    """Return the number that a degree has to divide for devices to hold whole experts; 0: no layer has experts."""
    mixtures = (layer.tensor_parallel.experts for layer in graph.layers if layer.tensor_parallel)
    return math.gcd(*(experts.count for experts in mixtures if experts))


def most_rows(experts: WholeExperts, degree: int) -> float:
    """Return the largest part of all rows that one device's experts may get, whatever the router does."""
    if experts.choices is None:  # all places are computed, filled or not
        return 1 / degree
    return min(1.0, experts.count / degree / experts.choices)


def fullest_part(experts: WholeExperts, degree: int, num_tokens: float) -> float:
    """Return how many times its equal part the fullest of the devices gets, where all experts are chosen alike.

    A device's rows are a sum over tokens of hypergeometric counts (C draws of E experts, E / t of which are its own).
    For many tokens the t sums are normal, and correlated alike since their total is fixed: their expected largest is
    then the mean plus √(N C / t · (E − C) / (E − 1)) times the expected largest of t independent standard normals.
    """
    E, C = experts.count, experts.choices
    if C is None or degree == 1 or E == C:
        return 1.0
    mean = num_tokens * C / degree
    more = _largest_of_normals(degree) * math.sqrt((E - C) / (E - 1) / mean)
    return min(1.0 + more, degree * most_rows(experts, degree))


@lru_cache(maxsize=64)
def _largest_of_normals(count: int) -> float:
    """Integrate x over the density of the largest of so many independent standard normals."""
    x = np.linspace(-9.0, 9.0, 4001)
    below = np.array([0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in x])
    density = np.exp(-(x**2) / 2) / math.sqrt(2.0 * math.pi)
    return float(np.trapezoid(x * count * density * below ** (count - 1), x))


class MixtureParts:
    """The parts of a mixture's kernels in one pass of a layer.

    Args:
        operators: of the pass, in order.
        is_whole: of the experts each device has some whole, not a part of each.
    """

    def __init__(
        self, layer: Layer, experts: WholeExperts, operators: Sequence[Operator], degree: int, *, is_whole: bool
    ) -> None:
        self._experts, self._degree, self._is_whole = experts, degree, is_whole
        num_tokens, width = math.prod(layer.output_shape[:-1]), layer.output_shape[-1]
        self._part = fullest_part(experts, degree, num_tokens) / degree
        self._num_rows = num_tokens * (experts.choices or 0)
        self._wide = {(self._num_rows, width), (num_tokens, experts.choices, width)}
        # Forward, rows are gathered from tokens before the products and summed to tokens after them; backward, a
        # sum's gradients come before, and those of gathered rows after.
        places = [place for place, operator in enumerate(operators) if self._is_product(operator)]
        forward = bool(operators) and operators[0].direction == "forward"
        self._own = range(max(places, default=0)) if forward else range(min(places, default=0), len(operators))

    def sizes(self, place: int, operator: Operator, kernel: Kernel) -> Sizes | None:
        """Return which of the kernel's sizes are others on the device; None: the kernel is not the experts' own."""
        shapes = {*operator.input_shapes, *operator.output_shapes}
        if self._is_product(operator):
            return self._of_product(operator, kernel)
        if self._experts.choices is None:
            return None
        if shapes & self._wide:  # of a part of each expert they are as many; if as wide inside, that is too many
            return {"m": self._own_rows(kernel.m)} if self._is_whole and place in self._own else {}
        inside = (shape for shape in shapes if len(shape) == 2 and shape[0] == self._num_rows)
        if self._is_whole and any(width not in (1, self._experts.count) for _, width in inside):  # counting sees all
            return {"m": self._own_rows(kernel.m)}
        return None

    def _is_product(self, operator: Operator) -> bool:
        name = base_name(operator.kind)
        is_padded = name == _PADDED and all(shape[0] == self._experts.count for shape in operator.input_shapes)
        return name in (_OF_ROWS, _OVER_ROWS) or is_padded

    def _of_product(self, operator: Operator, kernel: Kernel) -> Sizes | None:
        if not self._is_whole:  # of a gradient of the matrices, too, the inner width is divided
            side = "m" if kernel.m >= kernel.n else "n"
            return None if operator.parameter_bytes else {side: -(-getattr(kernel, side) // self._degree)}
        rows = {_OF_ROWS: "m", _OVER_ROWS: "k"}.get(base_name(operator.kind))
        more = {rows: self._own_rows(self._degree * getattr(kernel, rows))} if rows else {}
        return {"batch": kernel.batch // self._degree, **more}

    def _own_rows(self, count: int) -> int:
        return math.ceil(count * self._part)
