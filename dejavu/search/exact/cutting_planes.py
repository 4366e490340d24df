"""The prices on devices that prove most: cutting planes over the plans that prices bring forth (Kelley, 1960).

Letters: T = device types.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from dejavu.plans.stage_costs import Floats

MOST_ROUNDS = 30  # of prices for one limit
_LEVEL = 0.9  # of what planes allow, as far as it is wanted: from where on prices are near enough to the best
_BEYOND = 0.3  # of what is missing, beyond the cutoff: further prices need not reach
_MOST_PLANES = 200  # plans that are remembered from one limit to the next
_NOTHING = 1e-9  # of a price: a lower Σ is rounding, where stages cost nothing
_MOST_LOOKED_AT = 1000  # for some of these, that are allowed


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """The cheapest plan at some prices.

    Attributes:
        sum_seconds: Σ of its stages and transfers, without prices.
        bottleneck_seconds: the plan is one for every limit that is not below this.
        use_T: its devices of each type.
        stages_3S: configuration, start and stop of its stages, where who asks wants to know them.
    """

    sum_seconds: float
    bottleneck_seconds: float
    use_T: NDArray[np.int64]
    stages_3S: NDArray[np.int64] | None = None

    def bound_seconds(self, prices_T: Floats, count_T: NDArray[np.int64]) -> float:
        """What no plan within these counts has a lower Σ than, where this one is the cheapest at these prices."""
        return self.sum_seconds + float((self.use_T - count_T) @ prices_T)

    @property
    def key(self) -> Hashable:
        """Equal where it is the same plan: its stages, or what is known of it."""
        if self.stages_3S is not None:
            return self.stages_3S.tobytes()
        return self.sum_seconds, self.bottleneck_seconds, self.use_T.tobytes()


class PlansMet:
    """The plans that prices brought forth so far, each once. Everything here may be called from any thread."""

    def __init__(self) -> None:
        self._lock, self._plans = Lock(), dict[Hashable, PricedPlan]()

    def add(self, plan: PricedPlan) -> None:
        """Have it as the last one, whether it was met before or not."""
        with self._lock:
            self._plans.pop(plan.key, None)
            self._plans[plan.key] = plan

    def latest(self, most: int) -> list[PricedPlan]:
        """So many of them, the last one first."""
        with self._lock:
            return list(islice(reversed(self._plans.values()), most))


class Bounded(NamedTuple):
    """The most that was proved of Σ, and its prices; and what no prices prove more than, as far as that is known."""

    sum_seconds: float
    prices_T: Floats
    most_seconds: float


@dataclass(frozen=True)
class Enough:
    """When a bound is good enough, and no more prices are looked at.

    Attributes:
        precision_seconds: what is left to be gained.
        near_seconds: once no prices can reach the cutoff, a bound that is as near to it as this will do.
        most_rounds: of prices.
    """

    precision_seconds: float
    near_seconds: float = 0.0
    most_rounds: int = MOST_ROUNDS


@dataclass(eq=False)
class CuttingPlanes:
    """Maximizes min over plans of Σ + prices · (use − count) over the prices: a bound on Σ of all plans within counts.

    Attributes:
        num_signed: prices of so many types, the first ones, may be negative, because all of it has to be used.
        smoothing: how near to the best prices so far the next ones are, from those that the planes propose (0) to
            staying there (1): with many prices proposals jump, and halfway there are fewer of them (Wentges, 1997).
        patience: what the planes leave to be gained is not looked for where it is less than this, as a share of what
            is missing to the cutoff even so.
        is_near: of prices that seem to reach the cutoff the nearest to the best so far are taken (a level method,
            Lemaréchal and others, 1995), since planes say nothing of what far ones bring forth.
        known: the plans that prices brought forth so far.
    """

    count_T: NDArray[np.int64]
    num_signed: int
    smoothing: float = 0.0
    patience: float = 0.0
    is_near: bool = False
    known: PlansMet = field(default_factory=PlansMet)

    def anew(self) -> CuttingPlanes:
        """The same, which has met no plans."""
        return replace(self, known=PlansMet())

    def bound(
        self,
        cheapest: Callable[[Floats], PricedPlan | None],
        *,
        allows: Callable[[PricedPlan], bool],
        cutoff: float,
        most_price: float,
        enough: Enough,
        prices_T: Floats,
        is_late: Callable[[], bool],
    ) -> Bounded:
        """The bound, up to the cutoff; inf if there is no plan.

        Args:
            cheapest: the cheapest plan at the prices it is given; None: there is no plan.
            allows: whether a plan that was met before, under other limits, is one that is bounded now.
            prices_T: to begin with.
            is_late: whether to stop with what there is.
        """
        best, best_prices, top = -np.inf, prices_T, np.inf
        known = list(islice(filter(allows, self.known.latest(_MOST_LOOKED_AT)), _MOST_PLANES))[::-1]
        bounds = [(-most_price if t < self.num_signed else 0.0, most_price) for t in range(len(self.count_T))]
        for _ in range(enough.most_rounds):
            plan = cheapest(prices_T)
            if plan is None:
                return Bounded(np.inf, prices_T, np.inf)
            value = plan.bound_seconds(prices_T, self.count_T)
            if value > best:
                best, best_prices = value, prices_T
            if best >= cutoff or is_late():
                break
            known.append(plan)
            self.known.add(plan)
            planes = _Planes.of(known, self.count_T, bounds)
            proposed = planes.best()
            if proposed is None:
                break
            most, prices_T = proposed
            top = min(top, most)
            if most - best <= max(enough.precision_seconds, self.patience * min(cutoff - most, abs(most))):
                break
            if most < cutoff < best + enough.near_seconds:
                break
            prices_T = self.smoothing * best_prices + (1 - self.smoothing) * prices_T
            if self.is_near and most >= cutoff:
                level = best + _LEVEL * (min(most, cutoff + _BEYOND * (cutoff - best)) - best)
                prices_T = planes.nearest(level, best_prices, prices_T)
        return Bounded(best, best_prices, top)


@dataclass(frozen=True, eq=False)
class _Planes:
    """Σ + prices · (use − count) of plans: what no bound at these prices is above.

    Letters: P = plans.
    """

    sum_P: Floats
    spare_PT: Floats  # count − use
    count_T: NDArray[np.int64]
    bounds: list[tuple[float, float]]  # of the prices
    unit: float  # the solver's tolerances are absolute

    @classmethod
    def of(cls, known: Sequence[PricedPlan], count_T: NDArray[np.int64], bounds: list[tuple[float, float]]) -> _Planes:
        sum_P = np.array([plan.sum_seconds for plan in known])
        spare_PT = np.array([count_T - plan.use_T for plan in known], dtype=np.float64)
        most_price = max(high for _, high in bounds)
        unit = float(sum_P.max())
        return cls(sum_P, spare_PT, count_T, bounds, unit if unit > _NOTHING * most_price else most_price)

    def best(self) -> tuple[float, Floats] | None:
        """The most that the planes allow, and its prices."""
        T = len(self.bounds)
        planes = np.column_stack([self.spare_PT, np.ones(len(self.sum_P))])
        box = [(low / self.unit, high / self.unit) for low, high in self.bounds]
        answer = linprog(np.append(np.zeros(T), -1.0), planes, self.sum_P / self.unit, bounds=[*box, (None, None)])
        return (-answer.fun * self.unit, answer.x[:T] * self.unit) if answer.success else None

    def nearest(self, level: float, from_T: Floats, otherwise_T: Floats) -> Floats:
        """The prices next to these at which the planes allow this level; next to: all devices cost little more or less.

        `otherwise_T`: where the solver finds none.
        """
        T = len(self.bounds)
        room_P = (self.sum_P - level - self.spare_PT @ from_T) / self.unit
        up = [(0.0, max(high - at, 0.0) / self.unit) for (_, high), at in zip(self.bounds, from_T, strict=True)]
        down = [(0.0, max(at - low, 0.0) / self.unit) for (low, _), at in zip(self.bounds, from_T, strict=True)]
        cost = np.tile(self.count_T.astype(np.float64), 2)
        answer = linprog(cost, np.hstack([self.spare_PT, -self.spare_PT]), room_P, bounds=[*up, *down])
        if not answer.success:
            return otherwise_T
        found_T: Floats = from_T + (answer.x[:T] - answer.x[T:]) * self.unit
        return found_T
