"""The events of a training's last step: for a trace next to the simulated one, and for the database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from dejavu.binding.binding import Binding
from dejavu.plans.schedule import Pass
from dejavu.simulation import Event
from dejavu.timing.clock import Timed

Row = TypeVar("Row")

_LETTERS = {Pass.FORWARD: "F", Pass.BACKWARD: "B", Pass.BACKWARD_INPUT: "I", Pass.BACKWARD_WEIGHT: "W"}


def first_replicas(binding: Binding, passes: Sequence[Sequence[Row]]) -> list[Sequence[Row]]:
    """Return one row for each pipeline rank: its first replica's first shard. Empty where nothing was measured."""
    rows = zip(binding.placements, passes or [()] * len(binding.placements), strict=True)
    return [row for placed, row in rows if placed.replica == 0 and placed.shard == 0]


def measured_events(binding: Binding, passes: Sequence[Sequence[Timed]]) -> list[Event]:
    """Return the passes as the simulator's events."""
    return [
        Event(one.stage, f"{_LETTERS[one.direction]}{one.microbatch}", one.start_seconds, one.stop_seconds, rank)
        for rank, row in enumerate(first_replicas(binding, passes))
        for one in row
    ]


def waited_messages(binding: Binding, passes: Sequence[Sequence[Timed]]) -> list[Event]:
    """Return messages that the receiving rank was idle for, from their sending until their pass started.

    For other messages the arrival is unknown. Only between stages with equally many replicas on one host, whose ranks
    share a clock.
    """
    plan = binding.plan
    events = {(event.stage, event.name): event for event in measured_events(binding, passes)}
    free_seconds = _free_seconds(list(events.values()))
    hosts = {
        placed.pipeline_rank: placed.device.host
        for placed in binding.placements
        if placed.replica == 0 and placed.shard == 0
    }
    found = []
    for sent, received in input_pairs(events):
        rank, to_rank = sent.rank, received.rank
        alike = plan.rank_configuration(rank).data_parallel == plan.rank_configuration(to_rank).data_parallel
        if rank == to_rank or not alike or hosts[rank] != hosts[to_rank]:
            continue
        # A pass that started earlier is of a stage that waits for no gradient: no upstream layer has weights.
        if free_seconds[received.stage, received.name] <= sent.stop_seconds < received.start_seconds:
            found.append(Event(sent.stage, sent.name, sent.stop_seconds, received.start_seconds, rank, to_rank))
    return found


def input_pairs(events: Mapping[tuple[int, str], Event]) -> Iterator[tuple[Event, Event]]:
    """Pair every pass with the one that receives its result: activations go downstream, gradients upstream."""
    for (stage, name), event in events.items():
        way, microbatch = name[0], name[1:]
        if way == "W":
            continue
        for taker in "F" if way == "F" else "BI":
            received = events.get((stage + 1 if way == "F" else stage - 1, f"{taker}{microbatch}"))
            if received is not None:
                yield event, received


def _free_seconds(events: list[Event]) -> dict[tuple[int, str], float]:
    """Return when each pass's rank had finished the previous pass."""
    found, before = {}, dict[int, float]()
    for event in sorted(events, key=lambda event: event.start_seconds):
        found[event.stage, event.name] = before.get(event.rank, 0.0)
        before[event.rank] = event.stop_seconds
    return found


def bubble_fraction(binding: Binding, passes: Sequence[Sequence[Timed]]) -> float | None:
    """Return the share of the pipeline ranks' time, from first to last pass, in which no pass ran; None: none ran."""
    events = measured_events(binding, passes)
    if not events:
        return None
    whole = max(event.stop_seconds for event in events) - min(event.start_seconds for event in events)
    ranks = len({event.rank for event in events})
    return 1.0 - sum(event.seconds for event in events) / (ranks * whole)
