"""The outcomes of a search, as types."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dejavu.foundation.errors import DejavuError
from dejavu.plans.plan import Plan

BUDGET_SECONDS = 8.0  # of all searches together, where nobody says otherwise


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A plan, and what was proved about better ones.

    Attributes:
        plan, step_seconds: the best plan found and its price.
        lower_bound_seconds: no plan of the problem is cheaper (what was proved; 0 if nothing).
        search: the name of the search that found it.
        seconds: CPU time of the search, as its budget counts it.
        history: (seconds by that clock, best price so far), for the convergence plot.
        near: other plans that cost hardly more, for who simulates them: a formula cannot tell these apart.
    """

    plan: Plan
    step_seconds: float
    lower_bound_seconds: float
    search: str
    seconds: float
    history: tuple[tuple[float, float], ...] = field(default=())
    near: tuple[Plan, ...] = ()

    @property
    def gap(self) -> float:
        """Upper bound on the relative distance to the best plan: 1 where nothing was proved, 0 for a free plan."""
        return 1.0 - self.lower_bound_seconds / self.step_seconds if self.step_seconds > 0 else 0.0


class Obstacle(StrEnum):
    """Why a search found no plan without proving that there is none."""

    OUT_OF_TIME = "out of time"
    TOO_LARGE = "too large"  # for this search, or of a form that it does not take
    NONE_CONSIDERED_FITS = "none considered fits"  # of the plans that this search looks at; others may


@dataclass(frozen=True)
class Infeasible:
    """It is proved that the problem has no plan.

    Attributes:
        proof: a sentence for people: what is too large, and what would suffice.
    """

    search: str
    proof: str
    seconds: float

    def __str__(self) -> str:
        return self.proof


@dataclass(frozen=True)
class NotFound:
    """No plan was found, which says nothing about whether there is one.

    Attributes:
        reason: a sentence for people.
        lower_bound_seconds: no plan of the problem is cheaper, if it has any.
    """

    search: str
    obstacle: Obstacle
    reason: str
    seconds: float
    lower_bound_seconds: float = 0.0

    def __str__(self) -> str:
        return self.reason


Answer = SearchResult | Infeasible | NotFound


class NoPlanError(DejavuError):
    """A plan was wanted and there is none.

    Attributes:
        answer: the search's outcome, whose sentence is the message unless a longer one is given.
    """

    def __init__(self, answer: Infeasible | NotFound, message: str = "") -> None:
        super().__init__(message or str(answer))
        self.answer = answer

    def __reduce__(self) -> tuple[type[NoPlanError], tuple[Infeasible | NotFound, str]]:
        return type(self), (self.answer, str(self))  # for pickling to other processes


def solved(answer: Answer) -> SearchResult:
    """Return the answer as a plan, for callers that need one.

    Raises:
        NoPlanError: it is not a plan.
    """
    if isinstance(answer, SearchResult):
        return answer
    raise NoPlanError(answer)
