"""Cases of a what-if question, what each came to, and what the change from one to another brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dejavu.planning import Choice, PlanRequest
from dejavu.plans import NoPlanError


@dataclass(frozen=True, eq=False)
class Case:
    """One of several things to plan.

    Attributes:
        name: for people: the cluster's, or what differs.
    """

    name: str
    request: PlanRequest


@dataclass(frozen=True, eq=False)
class Answered:
    """A case and its plan.

    Attributes:
        choice: None where no plan was found.
        failure: then why, and whether that is proved; empty otherwise.
    """

    case: Case
    choice: Choice | None
    failure: str = ""

    @property
    def cost_of_a_step(self) -> tuple[float, str] | None:
        """The amount and its currency; None: a price is not said, or there is no plan."""
        if self.choice is None or self.choice.rates.cost is None:
            return None
        amount, currency = self.choice.rates.cost
        return amount * self.choice.step_seconds / 3600.0, currency


def answer(cases: Iterable[Case], plan: Callable[[PlanRequest], Choice]) -> list[Answered]:
    """Plan each case; one that has no plan is an answer like others.

    Raises:
        InputError, CostError: as the planner; they hold for all cases alike.
    """
    found = []
    for case in cases:
        try:
            found.append(Answered(case, plan(case.request)))
        except NoPlanError as error:
            found.append(Answered(case, None, str(error)))
    return found


class Difference(NamedTuple):
    """What a change brings, as factors and amounts; None where one of the two is not known.

    Attributes:
        speedup: steps in the same time, after over before.
        is_sure: the two 90 % ranges of the step do not overlap.
        cost_per_hour, cost_of_1e9_tokens: after minus before, and their currency.
    """

    speedup: float
    is_sure: bool
    cost_per_hour: float | None
    cost_of_1e9_tokens: float | None
    currency: str


def difference(before: Answered, after: Answered) -> Difference | None:
    """Compare two cases; None where one has no plan."""
    if before.choice is None or after.choice is None:
        return None
    one, other = before.choice, after.choice
    apart = one.range_seconds.low > other.range_seconds.high or other.range_seconds.low > one.range_seconds.high
    speedup = one.step_seconds / other.step_seconds if other.step_seconds > 0 else 1.0
    costs = (one.rates.cost, other.rates.cost)
    if costs[0] is None or costs[1] is None or costs[0][1] != costs[1][1]:
        return Difference(speedup, apart, None, None, "")
    tokens = (one.rates.cost_of_1e9_tokens, other.rates.cost_of_1e9_tokens)
    return Difference(speedup, apart, costs[1][0] - costs[0][0], (tokens[1] or 0.0) - (tokens[0] or 0.0), costs[0][1])
