"""What a training's last step looked like: for a trace beside the simulated one, and for what is remembered of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

from dejavu.binding import Binding
from dejavu.runtime.clock import Timed
from dejavu.schedule import Pass
from dejavu.simulate import Event

_LETTERS = {Pass.FORWARD: "F", Pass.BACKWARD: "B", Pass.BACKWARD_INPUT: "I", Pass.BACKWARD_WEIGHT: "W"}
_BACKWARD = (Pass.BACKWARD, Pass.BACKWARD_INPUT)


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


def transfer_seconds(binding: Binding, passes: Sequence[Sequence[Timed]]) -> dict[int, float]:
    """By stage: the median time until its output was taken up by the next stage, where that had been waiting for it.

    A message that arrives early is not seen, and on several hosts, whose clocks differ, nothing is.
    """
    if len({placed.device.host for placed in binding.placements}) > 1:
        return {}
    rows = first_replicas(binding, passes)
    done = {(one.stage, one.direction in _BACKWARD, one.microbatch): one.stop_seconds for row in rows for one in row}
    seen: dict[int, list[float]] = {}
    for row in rows:
        own = {one.stage for one in row}
        for before, one in itertools.pairwise(row):
            if one.direction is Pass.BACKWARD_WEIGHT:
                continue
            back = one.direction in _BACKWARD
            sender = one.stage + 1 if back else one.stage - 1
            sent = done.get((sender, back, one.microbatch))
            if sent is not None and sender not in own and sent > before.stop_seconds:
                seen.setdefault(min(sender, one.stage), []).append(one.start_seconds - sent)
    return {stage: median(seconds) for stage, seconds in sorted(seen.items())}
