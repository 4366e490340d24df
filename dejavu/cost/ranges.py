"""90 % ranges of a predicted step and of predicted memory: the prices' own intervals, carried through the simulation.

What a range of a step holds: errors of the passes' and the collectives' prices, and what a step takes beside its prices
(waiting, the runtime). What it does not hold: links and prices of devices that the cluster file declares are taken at
their word, and so is that nothing else runs there.

Shape suffixes: K = draws, L = layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from dejavu.cost.collectives.inside_stages import StageCollectives
from dejavu.cost.estimates import INTERPOLATED, MEASURED, TRAINED
from dejavu.cost.kernels.sequence import SliceOfTokens
from dejavu.cost.parallel import ParallelPrices
from dejavu.cost.parts import Passes, ratio
from dejavu.cost.trainings.believed import NORMAL_90
from dejavu.cost.trainings.steps import Basis, StepFactor
from dejavu.plans import Plan, Stage
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.stage_costs import Floats
from dejavu.simulation import BlockedStep, Simulation, StageSeconds, simulate_plan, stages_of
from dejavu.workload.slices import slice_spans

Simulated = Callable[[PricedProblem, Plan, Sequence[StageSeconds] | None], Simulation | BlockedStep]

MOST_DRAWS, LEAST_DRAWS = 200, 40
MOST_ACTIONS = 500_000  # simulated passes in all draws together: about a second
# What steps that were never trained take beside their prices, as a standard deviation of the logarithm: layers of the
# default GPT were measured, and its steps 6.7 % off in the mean (docs/log.md, "déjà vu"); a normal one is that / 0.8.
UNTRAINED_LOG_DEVIATION = 0.085
# The memory model is an upper bound: of 48 real ranks with one stage none held more, nine in ten more than 1 / 1.15 of
# it, of 48 with two stages 1 / 1.25 (benchmarks/results/cost-memory.json).
MOST_MEMORY_RATIO, SHARED_MEMORY_RATIO = 1.15, 1.25


class Range(NamedTuple):
    """A 90 % range: in nine of ten cases the truth lies between the two."""

    low: float
    high: float

    def of_rate(self, amount: float) -> Range:
        """Return the range of so much a second, where this is the range of the seconds."""
        return Range(*(amount / seconds if seconds > 0 else math.inf for seconds in (self.high, self.low)))


def memory_range(plan: Plan, predicted_bytes: float) -> Range:
    """Return what a device of the plan holds that is predicted to hold so much at most."""
    is_shared = any(len(seats) > 1 for seats in plan.seats_of_ranks)
    return Range(predicted_bytes / (SHARED_MEMORY_RATIO if is_shared else MOST_MEMORY_RATIO), predicted_bytes)


class Draws:
    """Standard normal errors by name, K draws of each: equal names have equal errors, others independent ones.

    Each is a Latin hypercube's column (McKay et al., Technometrics 1979): one value from each K-th of the distribution,
    so that few draws give quantiles as many plain ones would.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self._random = np.random.default_rng(seed)
        self._known: dict[Hashable, Floats] = {}

    def of(self, name: Hashable) -> Floats:
        if name not in self._known:
            shares = (self._random.permutation(self.count) + self._random.random(self.count)) / self.count
            normal = NormalDist()
            self._known[name] = np.array([normal.inv_cdf(min(max(share, 1e-9), 1 - 1e-9)) for share in shares])
        return self._known[name]

    def factors(self, name: Hashable, low: float, high: float) -> Floats:
        """Return K factors on a number whose 90 % interval is `low` to `high` times itself."""
        z_K = self.of(name) / NORMAL_90
        found: Floats = np.maximum(1.0 + np.where(z_K > 0, (high - 1.0) * z_K, (1.0 - low) * z_K), 0.0)
        return found


def _beside_computing(priced: PricedProblem, plan: Plan, stages: Sequence[StageSeconds] | None) -> Simulation:
    return simulate_plan(priced, plan, stages=stages)


@dataclass(frozen=True, eq=False)
class PriceErrors:
    """How far a plan's price may be off, from the intervals of what it was computed from.

    All predictions for one type of device share one error (a device is faster or slower than predicted as a whole), and
    so do all its collectives; what was measured has an error of its own for each kind of layer and pass. Types of
    devices err independently.

    Attributes:
        run_size: examples in one run of the schedule.
    """

    prices: ParallelPrices
    collectives: StageCollectives
    run_size: int

    def step_range(
        self,
        priced: PricedProblem,
        plan: Plan,
        factor: StepFactor,
        step_seconds: float,
        seed: int = 0,
        simulated: Simulated = _beside_computing,
        sum_seconds: Sequence[float] | None = None,
    ) -> Range:
        """Return the range of a plan's predicted step; where trainings of this model corrected it, theirs.

        Args:
            step_seconds: the prediction, the factor included; it is always inside.
            simulated: how a step is simulated.
            sum_seconds: as of `simulate_plan`.
        """
        if factor.basis is not Basis.NOTHING:
            return Range(*factor.interval(step_seconds))
        base = stages_of(priced, plan, sum_seconds)
        drawn_K = self._drawn_seconds(priced, plan, base, seed, simulated) * factor.factor
        low, high = np.quantile(drawn_K, (0.05, 0.95))
        return Range(min(float(low), step_seconds), max(float(high), step_seconds))

    def _drawn_seconds(
        self, priced: PricedProblem, plan: Plan, base: Sequence[StageSeconds], seed: int, simulated: Simulated
    ) -> Floats:
        """Simulate the plan, whose stages are predicted to take `base`, with K draws of all errors."""
        actions = max(1, simulated(priced, plan, None).num_actions)
        draws = Draws(min(MOST_DRAWS, max(LEAST_DRAWS, MOST_ACTIONS // actions)), seed)
        factors = [
            self._stage_factors(priced, stage, row.per_step_seconds, plan.num_microbatches, draws)
            for stage, row in zip(plan.seats, base, strict=True)
        ]
        found = np.empty(draws.count)
        for k in range(draws.count):
            rows = [
                _scaled(row, _overhead(priced, stage), *(factor[k] for factor in of_stage))
                for row, stage, of_stage in zip(base, plan.seats, factors, strict=True)
            ]
            found[k] = simulated(priced, plan, rows).step_seconds
        drawn: Floats = found * np.exp(UNTRAINED_LOG_DEVIATION * draws.of("untrained"))
        return drawn

    def _stage_factors(
        self, priced: PricedProblem, stage: Stage, per_step_seconds: float, num_microbatches: int, draws: Draws
    ) -> tuple[Floats, Floats, Floats]:
        """Return K factors on what the stage's forward, its backward, and its work once a step take.

        Computing errs as its layers do, and what a pass takes besides as the stage's collectives. Both are of one run
        of the schedule, and of the mean slice where sequences come in slices.
        """
        configuration, runs = stage.configuration, priced.accumulate
        c, span = priced.problem.index(configuration), slice(stage.start, stage.stop)
        m = self.run_size // num_microbatches
        priced_at, slices = self.prices.computing, [SliceOfTokens(*one) for one in slice_spans(priced.slice_lengths)]
        passes = Passes.mean([priced_at.passes(configuration, m, own) for own in slices or (None,)])
        computing = [passes.forward_L[span], passes.backward_L[span], passes.optimizer_L[span]]
        drawn_KL = [self._layer_factors(stage, m, name, draws) for name in ("forward", "backward", "optimizer")]
        computed = [
            (float(seconds_L.sum()), factor_KL @ seconds_L)
            for seconds_L, factor_KL in zip(computing, drawn_KL, strict=True)
        ]
        if configuration.recompute:
            whole_L = priced_at.passes(configuration, m).forward_L
            again_L = (priced_at.recomputed(configuration, m) * ratio(passes.forward_L, whole_L))[span]
            computed[1] = (computed[1][0] + float(again_L.sum()), computed[1][1] + drawn_KL[0] @ again_L)
        totals = (
            float(priced.forward_seconds_CL[c, span].sum()) / runs,
            float(priced.backward_seconds_CL[c, span].sum()) / runs,
            per_step_seconds,
        )
        said = draws.factors((configuration.device_type, "collectives"), *self.collectives.spread(configuration))
        forward, backward, once = (
            (drawn_K + max(0.0, total - seconds) * said) / total if total > 0 else np.ones(draws.count)
            for total, (seconds, drawn_K) in zip(totals, computed, strict=True)
        )
        return forward, backward, once

    def _layer_factors(self, stage: Stage, microbatch_size: int, name: str, draws: Draws) -> Floats:
        """Return factors on one pass of each of the stage's layers, of shape (K, L)."""
        configuration = stage.configuration
        known = self.prices.at(microbatch_size // configuration.example_parts)
        column, device = known.table.device_types.index(configuration.device_type), configuration.device_type
        grid, found = known.table.grids[name], []
        for number in range(stage.start, stage.stop):
            one, signature = grid.at(number, column), known.graph.layers[number].signature
            own: Hashable = (device, "predicted")
            if one.source in (MEASURED, INTERPOLATED):
                own = (device, signature, name)
            elif one.source == TRAINED:
                own = (device, TRAINED)
            low, high = (
                bound / one.seconds if one.seconds > 0 else 1.0 for bound in (one.low_seconds, one.high_seconds)
            )
            found.append(draws.factors(own, low, high))
        return np.stack(found, axis=1)


def _overhead(priced: PricedProblem, stage: Stage) -> float:
    return priced.pass_costs.get(stage.configuration.device_type, PassCost()).pass_seconds


def _scaled(row: StageSeconds, overhead: float, forward: float, backward: float, once: float) -> StageSeconds:
    """Return the stage with its passes scaled; the runtime's own work in each stays."""

    def scaled(seconds: float | None, factor: float) -> float:
        return max(0.0, (seconds or 0.0) - overhead) * factor + overhead

    return replace(
        row,
        forward_seconds=scaled(row.forward_seconds, forward),
        backward_seconds=scaled(row.backward_seconds, backward),
        backward_input_seconds=scaled(row.backward_input_seconds, backward),
        backward_weight_seconds=scaled(row.backward_weight_seconds, backward),
        per_step_seconds=row.per_step_seconds * once,
        slices_seconds=tuple((scaled(ahead, forward), scaled(back, backward)) for ahead, back in row.slices_seconds),
    )
