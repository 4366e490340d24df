"""One step of a plan of the problem that a search was asked, simulated at its configurations' own prices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

from dejavu.foundation.registry import named
from dejavu.plans import Plan, Price, Stage, price
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.simulation.blocking import BlockedStep, BlockingMessages, simulate_blocking
from dejavu.simulation.result import Simulation
from dejavu.simulation.step import Message, StageSeconds, simulate


def simulate_plan(
    priced: PricedProblem,
    plan: Plan,
    devices: Sequence[Hashable] | None = None,
    stages: Sequence[StageSeconds] | None = None,
    message_seconds: Sequence[float] | None = None,
    sum_seconds: Sequence[float] | None = None,
) -> Simulation:
    """Simulate one step of the plan, under any schedule.

    Messages and the runtime's own work count where they were measured.

    A message between stages of several replicas goes in as many parts as the one with more of them has; the parts
    travel at the same time.

    Args:
        devices: where each pipeline rank sits, by any name; None: each on devices of its own.
        stages: what each stage takes; None: `stages_of` by the problem's costs.
        message_seconds: one way from each seat to the next, where it is known which devices they have
            (`binding.message_seconds`); None: by the problem, over the fastest links that their types may have.
        sum_seconds: likewise of gradients' sums over two copies of the model (`binding.sum_seconds`).

    Example:
        >>> import dejavu
        >>> choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact",), microbatches=(8,))
        >>> dejavu.simulate(choice.priced, choice.plan).step_seconds <= choice.simulated_seconds
        True
    """
    messages = _messages(priced, plan, message_seconds)
    return simulate(plan, stages or stages_of(priced, plan, sum_seconds), messages=messages, devices=devices)


def simulate_plan_blocking(
    priced: PricedProblem,
    plan: Plan,
    stages: Sequence[StageSeconds] | None = None,
    message_seconds: Sequence[float] | None = None,
) -> BlockedStep:
    """Simulate one step of 1F1B whose messages block both ends; also of fewer microbatches than stages.

    Args:
        stages, message_seconds: as of `simulate_plan`.
    """
    found = []
    for message in _messages(priced, plan, message_seconds):
        seconds = message.latency_seconds + message.wire_seconds + message.sender_seconds + message.receiver_seconds
        found.append(BlockingMessages(seconds, seconds))
    return simulate_blocking(stages or stages_of(priced, plan), found, plan.num_microbatches)


def stages_of(priced: PricedProblem, plan: Plan, sum_seconds: Sequence[float] | None = None) -> list[StageSeconds]:
    """What each of the plan's seats takes, by the problem's costs; of sequences in slices, the mean one and each.

    Args:
        sum_seconds: as of `simulate_plan`.
    """
    problem, rows, splits = priced.problem, [], named(SCHEDULES, plan.schedule).splits_backward
    seats = plan.seats
    for s, stage in enumerate(seats):
        forward, backward = priced.passes_seconds(stage)
        once = problem.costs.per_step_seconds(stage.start, stage.stop, problem.index(stage.configuration))
        beside = _overhead(priced, stage.configuration.device_type).pass_seconds
        # Nobody waits for the gradient of the examples: torch leaves all of the first stage's work to the second part.
        parts = (0.0, backward) if stage.start == 0 else priced.parts_seconds(stage)
        needed = problem.costs.stage_bytes(stage.start, stage.stop, problem.index(stage.configuration))
        if plan.both_ways:
            once += (
                sum_seconds[s] if sum_seconds else _seconds_to_other_copy(priced, stage, seats[s - len(plan.stages)])
            )
        each = priced.slices_seconds(stage)
        rows.append(
            StageSeconds(
                forward_seconds=forward + beside,
                backward_seconds=backward + beside,
                per_step_seconds=once,
                backward_input_seconds=parts[0] + beside,
                backward_weight_seconds=parts[1] + beside,
                activation_bytes=needed.each,
                retained_bytes=needed.retained,
                waiting_bytes=needed.waiting,
                fixed_bytes=needed.always,
                passing_bytes=needed.in_parts if splits else needed.passing,
                stepping_bytes=needed.stepping,
                slices_seconds=tuple((ahead + beside, back + beside) for ahead, back in each),
            )
        )
    return rows


def _messages(priced: PricedProblem, plan: Plan, message_seconds: Sequence[float] | None = None) -> list[Message]:
    problem, rows = priced.problem, []
    for seat, (before, after) in enumerate(itertools.pairwise(plan.seats)):
        cut, ends = after.start, [before.configuration, after.configuration]
        if cut == 0:  # between two copies of the model
            rows.append(Message(0.0, 0.0))
            continue
        if message_seconds is not None:
            one_way = message_seconds[seat]
        else:
            one_way = problem.transfer_seconds(cut, *(problem.index(configuration) for configuration in ends)) / 2
        part_bytes = problem.cut_bytes_L1[cut] / max(configuration.data_parallel for configuration in ends)
        busy = [_overhead(priced, configuration.device_type).of_message(part_bytes) for configuration in ends]
        # What was measured of a message holds the work at both of its ends.
        rows.append(Message(0.0, max(0.0, one_way - sum(busy)), *busy))
    return rows


def both_ways_seconds(priced: PricedProblem, plan: Plan) -> float:
    """Return a step of Chimera by a closed formula, a lower bound where stages are not alike, and of longer messages.

    Of B microbatches each copy has half, and the two fill each other's gaps: of up to P, each is a 1F1B of B / 2, and
    each further one takes what it takes on the busiest rank, which has a stage of both: step = Σ t + Σ x +
    (min(B, P) / 2 − 1 + max(B − P, 0)) · max over ranks of (t_r + t_(P−1−r)) / 2, and what ranks do once. Where all
    stages take the same, forward as long as backward, that is Li and Hoefler's table 2 (SC 2021).
    """
    rows, B, P = stages_of(priced, plan), plan.num_microbatches, len(plan.stages)
    passes = [row.forward_seconds + row.backward_seconds for row in rows]
    messages = sum(
        m.latency_seconds + m.wire_seconds + m.sender_seconds + m.receiver_seconds for m in _messages(priced, plan)
    )
    busiest = max(sum(passes[s] for s in own) / 2 for own in plan.seats_of_ranks)
    once = max(sum(rows[s].per_step_seconds for s in own) for own in plan.seats_of_ranks)
    # Σ t over one copy, and its messages there and back: those of both copies, once each.
    return sum(passes) / 2 + messages + (min(B, P) / 2 - 1 + max(B - P, 0)) * busiest + once


def _seconds_to_other_copy(priced: PricedProblem, stage: Stage, other_copy: Stage) -> float:
    """Price the sum of a stage's gradients over its two holders: each sends the other half of them, and a half back.

    Between CPUs all of them at once (`runtime.replicas.sum_gradients`): as many bytes, and a latency less.
    """
    problem = priced.problem
    c, other = (problem.index(one.configuration) for one in (stage, other_copy))
    size = float(priced.gradient_bytes_L[stage.start : stage.stop].sum())
    latency, per_byte = problem.link_latency_seconds_CC, problem.link_seconds_per_byte_CC
    return float(2 * latency[c, other] + size * per_byte[c, other]) / priced.accumulate  # which links count


def _overhead(priced: PricedProblem, device_type: str) -> PassCost:
    return priced.pass_costs.get(device_type, PassCost())


def price_of_simulated(priced: PricedProblem, plan: Plan, simulated: Simulation) -> Price:
    """The searches' price part by part; under a schedule that they do not price, the step and bubble as simulated."""
    problem = priced.problem
    if plan.schedule == problem.schedule and not plan.both_ways:
        return price(problem, plan)
    spans = [(stage.start, stage.stop, problem.index(stage.configuration)) for stage in plan.stages]
    peaks = list(simulated.peak_bytes)
    for rank, seats in enumerate(plan.seats_of_ranks):
        if len(seats) == 1:
            peaks[rank] = problem.costs.peak_bytes(*spans[seats[0]], simulated.in_flight[seats[0]])
        elif not isinstance(problem.costs, AdditiveCosts):
            peaks[rank] = math.nan
    cuts = [
        problem.transfer_seconds(stage.start, a[2], b[2])
        for stage, a, b in zip(plan.stages[1:], spans[:-1], spans[1:], strict=True)
    ]
    return Price(
        step_seconds=simulated.step_seconds,
        stage_seconds=tuple(problem.costs.stage_seconds(*span) for span in spans),
        transfer_seconds=tuple(cuts),
        per_step_seconds=tuple(problem.costs.per_step_seconds(*span) for span in spans),
        peak_bytes=tuple(peaks),
        bubble_fraction=simulated.bubble_fraction,
    )
