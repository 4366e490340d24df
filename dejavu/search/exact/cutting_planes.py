"""The prices on devices that prove most: cutting planes over the plans that prices bring forth (Kelley, 1960).

Letters: T = device types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from dejavu.plans.stage_costs import Floats

MOST_ROUNDS = 30  # of prices for one limit
_MOST_PLANES = 200  # plans that are remembered from one limit to the next


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
        known: the plans that prices brought forth so far.
    """

    count_T: NDArray[np.int64]
    num_signed: int
    smoothing: float = 0.0
    patience: float = 0.0
    known: list[PricedPlan] = field(default_factory=list)

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
    ) -> tuple[float, Floats]:
        """The bound, up to the cutoff, and its prices; inf if there is no plan.

        Args:
            cheapest: the cheapest plan at the prices it is given; None: there is no plan.
            allows: whether a plan that was met before, under other limits, is one that is bounded now.
            prices_T: to begin with.
            is_late: whether to stop with what there is.
        """
        T = len(self.count_T)
        best, best_prices = -np.inf, prices_T
        known = [plan for plan in self.known[-_MOST_PLANES:] if allows(plan)]
        bounds = [*((-most_price if t < self.num_signed else 0.0, most_price) for t in range(T)), (None, None)]
        for _ in range(enough.most_rounds):
            plan = cheapest(prices_T)
            if plan is None:
                return np.inf, prices_T
            value = plan.sum_seconds + float((plan.use_T - self.count_T) @ prices_T)
            if value > best:
                best, best_prices = value, prices_T
            if best >= cutoff or is_late():
                break
            known.append(plan)
            self.known.append(plan)
            planes = np.array([np.append(self.count_T - plan.use_T, 1.0) for plan in known])
            sums = np.array([plan.sum_seconds for plan in known])
            unit = float(sums.max()) or 1.0  # the solver's tolerances are absolute
            box = [(None if low is None else low / unit, None if high is None else high / unit) for low, high in bounds]
            answer = linprog(np.append(np.zeros(T), -1.0), planes, sums / unit, bounds=box)
            if not answer.success:
                break
            most = -answer.fun * unit
            if most - best <= max(enough.precision_seconds, self.patience * min(cutoff - most, abs(most))):
                break
            if most < cutoff < best + enough.near_seconds:
                break
            prices_T = self.smoothing * best_prices + (1 - self.smoothing) * answer.x[:T] * unit
        return best, best_prices
