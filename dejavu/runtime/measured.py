"""What a training's last step looked like: for a trace beside the simulated one, and for what is remembered of it."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.binding import Binding
from dejavu.runtime.clock import Timed
from dejavu.schedule import Pass
from dejavu.simulate import Event

_LETTERS = {Pass.FORWARD: "F", Pass.BACKWARD: "B", Pass.BACKWARD_INPUT: "I", Pass.BACKWARD_WEIGHT: "W"}


def first_replicas(binding: Binding, passes: Sequence[Sequence[Timed]]) -> list[Sequence[Timed]]:
    """One row for each pipeline rank: its first replica's first shard. Empty where nothing was measured."""
    rows = zip(binding.placements, passes or [()] * len(binding.placements), strict=True)
    return [row for placed, row in rows if placed.replica == 0 and placed.shard == 0]


def measured_events(binding: Binding, passes: Sequence[Sequence[Timed]]) -> list[Event]:
    """The passes as the simulator names them."""
    return [
        Event(one.stage, f"{_LETTERS[one.direction]}{one.microbatch}", one.start_seconds, one.stop_seconds, rank)
        for rank, row in enumerate(first_replicas(binding, passes))
        for one in row
    ]


def bubble_fraction(binding: Binding, passes: Sequence[Sequence[Timed]]) -> float | None:
    """Share of the pipeline ranks' time, from the first pass to the last, in which no pass ran; None: nothing ran."""
    events = measured_events(binding, passes)
    if not events:
        return None
    whole = max(event.stop_seconds for event in events) - min(event.start_seconds for event in events)
    ranks = len({event.rank for event in events})
    return 1.0 - sum(event.seconds for event in events) / (ranks * whole)
