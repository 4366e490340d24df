"""The search space of initializations: which scheme, and a few factors on what it draws.

Shape letters: d = dimensions of the space, the scheme being the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.init._base import FACTORS, Draw, Role
from dejavu.init.drawing import roles
from dejavu.init.schemes import MENU, SCHEMES
from dejavu.workload import Workload
from dejavu.workload.models import layers_of

MOST_DIMENSIONS = 8  # more could not be covered by the tens of draws that are tried
DIGITS = 4  # significant digits of a factor: a draw reads well, and survives a round trip through a file
BELOW_ONE = math.nextafter(1.0, 0.0)  # coordinates are in [0, 1)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True)
class Dimension:
    """A factor of a draw and its search range.

    Attributes:
        name: a field of `Draw`.
        log: the range is logarithmic.
    """

    name: str
    least: float
    most: float
    log: bool = True

    def __post_init__(self) -> None:
        if self.name not in FACTORS:
            raise InputError(f"the space has a dimension {self.name!r}; wanted one of {', '.join(FACTORS)}")
        if not (math.isfinite(self.least) and math.isfinite(self.most) and self.least <= self.most):
            raise InputError(
                f"{self.name} goes from {self.least} to {self.most}, where no draw is valid; "
                "wanted two finite numbers, the smaller first"
            )
        if self.least < 0.0 or (self.log and self.least == 0.0):
            raise InputError(f"{self.name} begins at {self.least}; wanted a factor {'> 0' if self.log else '≥ 0'}")

    def value(self, coordinate: float) -> float:
        """Return the factor at a coordinate in [0, 1), to `DIGITS` significant digits."""
        if self.log:
            value = self.least * (self.most / self.least) ** coordinate
        else:
            value = self.least + (self.most - self.least) * coordinate
        return min(max(_rounded(value), self.least), self.most)

    def coordinate(self, value: float) -> float:
        """Return the coordinate of a factor; outside of the range that of its nearer end."""
        if self.least == self.most:
            return 0.5
        inside = min(max(value, self.least), self.most)
        if self.log:
            where = math.log(inside / self.least) / math.log(self.most / self.least)
        else:
            where = (inside - self.least) / (self.most - self.least)
        return min(where, BELOW_ONE)


# A framework's or a paper's own initialization (1.0 in all) lies inside of every range.
DIMENSIONS = (
    Dimension("gain", 0.15, 2.8),
    Dimension("slope", 0.4, 2.5),
    Dimension("embedding", 0.01, 2.0),  # torch draws tables with deviation 1, GPT-2 with 0.02
    Dimension("head", 0.1, 4.0),
    Dimension("residual", 0.01, 1.5),  # down to nearly zero: blocks that start as the identity train well
    Dimension("bias", 0.0, 1.0, log=False),
)
# Without a residual stream or a norm the layers' gains multiply: 1.3 to the 20th power is 190, and a gain farther from
# the critical one does not learn. The range is relative to that.
CHAIN_DIMENSIONS = {"gain": Dimension("gain", 0.85, 1.3), "slope": Dimension("slope", 0.5, 2.0)}


@dataclass(frozen=True)
class Space:
    """All draws with one of these schemes and factors in these ranges; every other factor is 1.

    Attributes:
        schemes: those that are tried as published.
        is_chain: the range of the gain is relative to each scheme's critical gain.

    Raises:
        InputError: it holds no valid draw.
    """

    schemes: tuple[str, ...]
    dimensions: tuple[Dimension, ...] = DIMENSIONS
    is_chain: bool = False

    def __post_init__(self) -> None:
        if not self.schemes:
            raise InputError("trials: schemes is empty, so there is no draw; wanted a name or more", ("trials",))
        for scheme in self.schemes:
            named(SCHEMES, scheme)
        for what, names in (("schemes", self.schemes), ("dimensions", tuple(one.name for one in self.dimensions))):
            if len(set(names)) < len(names):
                raise InputError(f"trials: {what} are {', '.join(names)}; wanted each of them once", ("trials",))
        if self.num_dimensions > MOST_DIMENSIONS:
            raise InputError(f"the space has {self.num_dimensions} dimensions; wanted at most {MOST_DIMENSIONS}")

    @cached_property
    def scaled_schemes(self) -> tuple[str, ...]:
        """Schemes that the first coordinate chooses from: in a chain those with a critical gain, if any has one."""
        known = tuple(name for name in self.schemes if named(SCHEMES, name).critical_gain is not None)
        return known if known and self.is_chain else self.schemes

    @property
    def num_dimensions(self) -> int:
        """How many coordinates a point has."""
        return 1 + len(self.dimensions)

    def draw(self, point_d: Sequence[float] | np.ndarray, seed: int) -> Draw:
        """Return the draw at a point of the unit cube [0, 1)^d."""
        which, *where = map(float, point_d)
        factors = {one.name: one.value(x) for one, x in zip(self.dimensions, where, strict=True)}
        scheme = self.scaled_schemes[int(which * len(self.scaled_schemes))]
        if "gain" in factors:
            factors["gain"] = _rounded(factors["gain"] * self._unit_gain(scheme))
        return Draw(scheme, **factors, seed=seed)

    def point(self, draw: Draw) -> np.ndarray:
        """Return the point of a draw of a scaled scheme: the inverse of `draw`; the scheme at its part's middle."""
        scheme = (self.scaled_schemes.index(draw.scheme) + 0.5) / len(self.scaled_schemes)
        unit = {"gain": self._unit_gain(draw.scheme)}
        factors = [getattr(draw, one.name) / unit.get(one.name, 1.0) for one in self.dimensions]
        return np.array([scheme, *(one.coordinate(x) for one, x in zip(self.dimensions, factors, strict=True))])

    def _unit_gain(self, scheme: str) -> float:
        return (self.is_chain and named(SCHEMES, scheme).critical_gain) or 1.0


def space_of(workload: Workload) -> Space:
    """Return the space of the workload's schemes, and the dimensions that change something in its model.

    Raises:
        InputError: an unknown scheme, or none at all.
    """
    builders = layers_of(workload)
    depth, moving, has_norms = len(builders), set[str](), False
    for position, builder in enumerate(builders):
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            module = builder.build()
        found = list(roles(module, builder, is_last=0 < position == depth - 1))
        trained = [one for one in module.parameters() if one.requires_grad]
        has_norms |= len(found) < len(trained)  # vectors that are not biases
        for role in {role for _, role in found}:
            moving |= {name for name in FACTORS if _changes(name, role, position, depth)}
    schemes = MENU if workload.trials.schemes is None else workload.trials.schemes
    is_chain = not has_norms and "residual" not in moving
    ranges = {one.name: one for one in DIMENSIONS} | (CHAIN_DIMENSIONS if is_chain else {})
    return Space(tuple(schemes), tuple(one for name, one in ranges.items() if name in moving), is_chain)


def _changes(name: str, role: Role | Literal["bias"], position: int, depth: int) -> bool:
    """Return whether a draw's factor of this name applies to weights with this role in this layer."""
    if role == "bias":
        return name == "bias"
    changed: dict[str, Any] = {name: 0.5}
    return Draw(**changed).factor(role, position=position, depth=depth) != 1.0
