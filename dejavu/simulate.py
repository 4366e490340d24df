"""Plays torch's own order of actions, event by event, with the times of each stage.

The searches' formula (`plan.price`) hides messages, lets one stage bound forward and backward, and adds the fill behind
the slowest stage; this does none of it, so the final candidates are compared by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dejavu.cost import CostTable
from dejavu.plan import Plan, Price, Problem, price
from dejavu.problem import Posed
from dejavu.schedule import Action, Pass, actions


@dataclass(frozen=True)
class StageSeconds:
    """One stage: a microbatch forward and backward, the optimizer once a step, and a message to the next stage."""

    forward_seconds: float
    backward_seconds: float
    once_seconds: float
    transfer_seconds: float = 0.0


def stage_seconds(plan: Plan, table: CostTable, price: Price) -> tuple[StageSeconds, ...]:
    """The times to play, from the table's layers and the price's transfers and once-a-step work."""
    rows = []
    for s, stage in enumerate(plan.stages):
        column = table.device_types.index(stage.configuration.device_type)
        span = slice(stage.start, stage.stop)
        both_ways = price.transfer_seconds[s] if s < len(price.transfer_seconds) else 0.0
        rows.append(
            StageSeconds(
                forward_seconds=float(table.forward.seconds_LD[span, column].sum()),
                backward_seconds=float(table.backward.seconds_LD[span, column].sum()),
                once_seconds=price.once_seconds[s],
                transfer_seconds=both_ways / 2,
            )
        )
    return tuple(rows)


@dataclass(frozen=True)
class Event:
    """One action as it was played; `name` is `F3` or `B3` (microbatch 3), or `optimizer`."""

    stage: int
    name: str
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True)
class Simulation:
    """One step, played.

    Attributes:
        events: in the order in which they end.
        bubble_fraction: share of the stages' time in which they wait.
        in_flight: the most microbatches that each stage held.
    """

    step_seconds: float
    events: tuple[Event, ...]
    bubble_fraction: float
    in_flight: tuple[int, ...]

    def to_trace(self) -> dict[str, Any]:
        """Chrome's trace format, for Perfetto or chrome://tracing; a row for each stage."""
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
            for stage in sorted({event.stage for event in self.events})
        ]
        rows += [
            {
                "name": event.name,
                "cat": "simulated",
                "ph": "X",
                "pid": 0,
                "tid": event.stage,
                "ts": event.start_seconds * 1e6,
                "dur": (event.stop_seconds - event.start_seconds) * 1e6,
            }
            for event in self.events
        ]
        return {"traceEvents": rows, "displayTimeUnit": "ms"}


def play(problem: Problem, table: CostTable, plan: Plan) -> Simulation:
    """One step of a plan of the problem, at the table's prices."""
    return simulate(plan, stage_seconds(plan, table, price(problem, plan)))


def play_posed(posed: Posed, plan: Plan) -> Simulation:
    """One step of a plan whose stages may take several devices, at its configurations' own prices."""
    found = price(posed.problem, plan)
    halves = [both_ways / 2 for both_ways in found.transfer_seconds]
    rows = zip(plan.stages, found.once_seconds, (*halves, 0.0), strict=True)
    return simulate(plan, [StageSeconds(*posed.passes_seconds(stage), once, message) for stage, once, message in rows])


def simulate(plan: Plan, stages: Sequence[StageSeconds]) -> Simulation:
    """Play one step of the plan, stage s with `stages[s]`; messages overlap with computing.

    Raises:
        InputError: fewer microbatches than stages.
    """
    S = len(plan.stages)
    order = actions(plan.schedule, S, plan.num_microbatches)
    done: dict[Action, float] = {}
    clock, position = [0.0] * S, [0] * S
    held, most = [0] * S, [0] * S
    events: list[Event] = []
    remaining = sum(len(rank) for rank in order)
    while remaining:
        for s, rank in enumerate(order):
            while position[s] < len(rank):
                action = rank[position[s]]
                ready = _ready_seconds(action, done, stages, S)
                if ready is None:
                    break
                forward = action.direction is Pass.FORWARD
                seconds = stages[s].forward_seconds if forward else stages[s].backward_seconds
                start = max(clock[s], ready)
                clock[s] = done[action] = start + seconds
                events.append(Event(s, f"{'F' if forward else 'B'}{action.microbatch}", start, clock[s]))
                held[s] += 1 if forward else -1
                most[s] = max(most[s], held[s])
                position[s] += 1
                remaining -= 1
    for s in range(S):
        events.append(Event(s, "optimizer", clock[s], clock[s] + stages[s].once_seconds))
        clock[s] += stages[s].once_seconds
    step = max(clock)
    busy = sum(event.stop_seconds - event.start_seconds for event in events)
    return Simulation(
        step_seconds=step,
        events=tuple(sorted(events, key=lambda event: (event.stop_seconds, event.stage))),
        bubble_fraction=1.0 - busy / (S * step) if step > 0 else 0.0,
        in_flight=tuple(most),
    )


def _ready_seconds(
    action: Action, done: dict[Action, float], stages: Sequence[StageSeconds], num_stages: int
) -> float | None:
    """When the action's input has arrived; None: not yet."""
    s, direction, microbatch = action
    if direction is Pass.FORWARD:
        if s == 0:
            return 0.0
        before, message = Action(s - 1, direction, microbatch), stages[s - 1].transfer_seconds
    elif s == num_stages - 1:
        before, message = Action(s, Pass.FORWARD, microbatch), 0.0
    else:
        before, message = Action(s + 1, direction, microbatch), stages[s].transfer_seconds
    return done[before] + message if before in done else None
