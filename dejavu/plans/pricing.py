"""The one price that all searches share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.units import plural
from dejavu.plans.plan import Plan
from dejavu.plans.problem import Problem
from dejavu.plans.stage_costs import PlanError


class DoesNotFitError(DejavuError):
    """A stage needs more memory than its devices have; the message names the stage and what it needs."""


@dataclass(frozen=True, eq=False)
class Price:
    """What a plan costs, part by part.

    Attributes:
        step_seconds: fill and drain, plus what the busiest stage or link does besides.
        stage_seconds: one microbatch through each of the S stages, forward and backward; of sequences in slices, the
            mean slice.
        transfer_seconds: the same across each of the S − 1 cuts, both ways.
        per_step_seconds: each stage's gradient synchronization and optimizer.
        peak_bytes: on a device of each pipeline rank, with all stages that it runs; nan where the problem only says
            whether they fit.
        bubble_fraction: share of the stages' time spent waiting.
    """

    step_seconds: float
    stage_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    per_step_seconds: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    bubble_fraction: float


def check(problem: Problem, plan: Plan) -> None:
    """Validate `plan` against `problem`: every layer once and in order, within stage and device counts and memory.

    Raises:
        PlanError: it is not; the message names the stage.
        DoesNotFitError: a stage exceeds its memory.
    """
    at = 0
    for stage in plan.stages:
        if stage.start != at or stage.stop <= stage.start:
            raise PlanError(f"{stage} does not begin where the stage before it ends (layer {at})")
        at = stage.stop
    if at != problem.num_layers:
        raise PlanError(f"the plan's stages end at layer {at}; the problem has {problem.num_layers}")
    counted = plan.num_microbatches * plan.num_slices
    if (plan.schedule, counted) != (problem.schedule, problem.num_microbatches):
        raise PlanError(f"the plan is for {plan.schedule} × {plan.num_microbatches} microbatches, not the problem's")
    if problem.max_stages is not None and len(plan.stages) > problem.max_stages:
        raise PlanError(f"the plan has {len(plan.stages)} stages; the problem wants at most {problem.max_stages}")
    used: dict[str, int] = dict.fromkeys(problem.device_counts, 0)
    for stage in plan.stages:
        used[stage.configuration.kind] += stage.configuration.num_devices
    for name, count in used.items():
        have = problem.device_counts[name]
        if count > have or (problem.use_all_devices and count != have):
            raise PlanError(f"the plan uses {count} × {name}; the cluster has {have}")
    for s, stage in enumerate(plan.stages):
        c = problem.index(stage.configuration)
        for name, cost in (
            ("seconds", problem.costs.stage_seconds),
            ("per_step_seconds", problem.costs.per_step_seconds),
        ):
            seconds = cost(stage.start, stage.stop, c)
            if not np.isfinite(seconds):
                raise PlanError(f"{stage} is not possible: its {name} is {seconds}; wanted a finite number")
        held = problem.in_flight(s, len(plan.stages))
        if problem.costs.max_in_flight(stage.start, stage.stop, c) < held:
            raise DoesNotFitError(
                f"{stage} does not fit its memory with {plural(held, 'microbatch')} in flight: it needs "
                f"{problem.costs.peak_bytes(stage.start, stage.stop, c, held):,.0f} bytes"
            )


def is_valid(problem: Problem, plan: Plan) -> bool:
    """Return whether `check` accepts the plan."""
    try:
        check(problem, plan)
    except (PlanError, DoesNotFitError):
        return False
    return True


def price(problem: Problem, plan: Plan) -> Price:
    """Price a plan by the cost model of all searches; a plan that does not fit the problem is rejected by `check`.

    With t_s the stages' seconds for one microbatch, o_s each stage's per-step work and x_k the transfers' seconds,
    step = Σ t + Σ x + max over stages and links of ((B − 1) · t_s + o_s, (B − 1) · x_k).
    Without o and x this is Alpa's objective (Zheng et al., OSDI 2022, eq. 2); a link is one more resource of the
    pipeline, as in PipeDream (Narayanan et al., SOSP 2019); a fast stage's synchronization overlaps with slow stages.
    Of sequences in slices B counts these, with the mean slice's seconds: where slices take the same it is TeraPipe's
    equation 5 (Li et al., ICML 2021).
    """
    check(problem, plan)
    index = [problem.index(stage.configuration) for stage in plan.stages]
    spans = [(stage.start, stage.stop, c) for stage, c in zip(plan.stages, index, strict=True)]
    stages = tuple(problem.costs.stage_seconds(*span) for span in spans)
    once = tuple(problem.costs.per_step_seconds(*span) for span in spans)
    transfers = tuple(
        problem.transfer_seconds(plan.stages[s + 1].start, index[s], index[s + 1]) for s in range(len(spans) - 1)
    )
    repeats = problem.num_microbatches - 1
    busiest = max(*(repeats * t + o for t, o in zip(stages, once, strict=True)), repeats * max(transfers, default=0.0))
    total = sum(stages) + sum(transfers) + busiest
    busy = problem.num_microbatches * sum(stages) + sum(once)
    return Price(
        step_seconds=total,
        stage_seconds=stages,
        transfer_seconds=transfers,
        per_step_seconds=once,
        peak_bytes=tuple(
            problem.costs.peak_bytes(*span, problem.in_flight(s, len(spans))) for s, span in enumerate(spans)
        ),
        bubble_fraction=1.0 - busy / (len(stages) * total) if total > 0 else 0.0,
    )


def step_seconds(problem: Problem, plan: Plan) -> float:
    """Return the objective of every search; see `price`."""
    return price(problem, plan).step_seconds
