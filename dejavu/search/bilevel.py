"""Architecture and weights in turns: between training steps, a search on what the steps before have measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from dejavu.errors import InputError
from dejavu.plan import Plan, Problem, SearchResult, price
from dejavu.search._base import Search
from dejavu.search.differentiable import Differentiable
from dejavu.stage_costs import AdditiveCosts, DenseCosts, Floats

Measure = Callable[[Plan], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn: what was searched for, trained for some steps, and measured.

    Attributes:
        step_seconds: the plan's price with the stages' measured seconds.
        stage_seconds: measured, one microbatch forward and backward through each stage.
    """

    plan: Plan
    step_seconds: float
    stage_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Bilevel(Search):
    """min over weights and architecture together: a search, some training steps that measure it, a search again.

    The inner level trains weights under the plan so far, the outer one chooses a plan on the costs that training has
    measured (Liu et al., DARTS, ICLR 2019, eq. 3, alternating as there). A measured stage corrects what its layers
    cost on its type of device, in every configuration; layers that nothing was measured of keep their prediction,
    times what the measured ones of that type are off by in the mean. So a type that is slower than predicted is given
    less, and a plan that was measured is not preferred only because it was.

    Without measurements (`run`) it is the search that it holds.

    Attributes:
        inner: the search of each turn.
        num_turns: at most; it stops when a plan comes back.
        trust: how far a turn moves a correction towards what was measured, from 0 to 1.
    """

    name: ClassVar[str] = "bilevel"
    inner: Search = field(default_factory=Differentiable)
    num_turns: int = 5
    trust: float = 0.8

    def run(self, problem: Problem, *, budget_seconds: float = 30.0, seed: int = 0) -> SearchResult:
        """The inner search's answer on the predicted costs."""
        return replace(self.inner.run(problem, budget_seconds=budget_seconds, seed=seed), search=self.name)

    def turns(
        self, problem: Problem, measure: Measure, *, budget_seconds: float = 30.0, seed: int = 0
    ) -> tuple[Turn, ...]:
        """Every turn, in order; the best is the one with the least `step_seconds`.

        Args:
            measure: trains a plan for some steps and returns seconds of one microbatch through each of its stages.
            budget_seconds: of all searches together, without what measuring takes.

        Raises:
            InputError: as many seconds as stages were wanted, each finite and above 0.
        """
        types = list(problem.device_counts)
        log_factor_TL = np.zeros((len(types), problem.num_layers))
        known_TL = np.zeros_like(log_factor_TL, dtype=bool)
        found: list[Turn] = []
        for number in range(self.num_turns):
            corrected = _corrected(problem, types, _spread(log_factor_TL, known_TL))
            share = budget_seconds / self.num_turns
            plan = self.inner.run(corrected, budget_seconds=share, seed=seed + number).plan
            if any(turn.plan == plan for turn in found):
                break
            measured = _checked(plan, measure(plan))
            found.append(Turn(plan, _step_seconds(problem, plan, measured), measured))
            predicted = price(problem, plan).stage_seconds
            for stage, seconds, expected in zip(plan.stages, measured, predicted, strict=True):
                if expected > 0:
                    at = types.index(stage.configuration.device_type), slice(stage.start, stage.stop)
                    trust = np.where(known_TL[at], self.trust, 1.0)  # the first measurement has nothing to smooth
                    log_factor_TL[at] += trust * (np.log(seconds / expected) - log_factor_TL[at])
                    known_TL[at] = True
        return tuple(found)


def _spread(log_factor_TL: Floats, known_TL: np.ndarray) -> Floats:
    """Factors for every layer: where nothing was measured, the mean of the type, or of all types."""
    factors = log_factor_TL.copy()
    mean = log_factor_TL[known_TL].mean() if known_TL.any() else 0.0
    for row, known in zip(factors, known_TL, strict=True):
        row[~known] = row[known].mean() if known.any() else mean
    return np.exp(factors)


def _corrected(problem: Problem, types: list[str], factor_TL: Floats) -> Problem:
    """The problem with every layer's seconds times the factor of its type."""
    factor_CL = factor_TL[[types.index(how.device_type) for how in problem.configurations]]
    costs = problem.costs
    if isinstance(costs, AdditiveCosts):
        return replace(problem, costs=replace(costs, seconds_CL=costs.seconds_CL * factor_CL))
    return replace(problem, costs=_dense(costs, factor_CL))


def _dense(costs: DenseCosts, factor_CL: Floats) -> DenseCosts:
    """Stages given one by one: times the mean factor of their layers."""
    sums = np.pad(np.cumsum(factor_CL, axis=1), ((0, 0), (1, 0)))
    lengths = np.arange(sums.shape[1])[None, :] - np.arange(factor_CL.shape[1])[:, None]
    mean = (sums[:, None, :] - sums[:, :-1, None]) / np.maximum(lengths, 1)
    possible = np.isfinite(costs.seconds_CLL1) & (lengths > 0)
    seconds = np.where(possible, costs.seconds_CLL1, 0.0) * np.where(lengths > 0, mean, 1.0)
    return replace(costs, seconds_CLL1=np.where(possible, seconds, costs.seconds_CLL1))


def _step_seconds(problem: Problem, plan: Plan, measured: Sequence[float]) -> float:
    """The one price, with measured stages in place of predicted ones."""
    parts = price(problem, plan)
    repeats = plan.num_microbatches - 1
    busy = [repeats * t + o for t, o in zip(measured, parts.once_seconds, strict=True)]
    links = repeats * max(parts.transfer_seconds, default=0.0)
    return sum(measured) + sum(parts.transfer_seconds) + max(*busy, links)


def _checked(plan: Plan, measured: Sequence[float]) -> tuple[float, ...]:
    seconds = tuple(float(value) for value in measured)
    if len(seconds) != len(plan.stages) or not all(0 < value < np.inf for value in seconds):
        raise InputError(
            f"measured {list(seconds)} for a plan of {len(plan.stages)} stages; "
            "wanted as many seconds, each finite and above 0"
        )
    return seconds
