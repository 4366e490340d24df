"""What each pipeline rank does at every moment of a step, simulated or measured: rows without gaps.

Shares are sums over these rows, so what the page says of waiting is what its rows show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from dejavu.binding.binding import Binding
from dejavu.runtime.job import TrainingResult
from dejavu.simulation import Event, Simulation
from dejavu.timing.events import first_replicas, input_pairs, measured_events


class Work(StrEnum):
    """What a pipeline rank does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    ONCE = "optimizer and sync"
    MESSAGES = "send / receive"  # and nothing else: its next input is on the way, or the runtime is between two passes
    WAIT = "wait"  # its next input is not computed yet, or it is done before others


PASSES = (Work.FORWARD, Work.BACKWARD, Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT)
IDLE = (Work.MESSAGES, Work.WAIT)
_WORK = {
    "F": Work.FORWARD,
    "B": Work.BACKWARD,
    "I": Work.INPUT_GRADIENT,
    "W": Work.WEIGHT_GRADIENT,
    "o": Work.ONCE,
}


@dataclass(frozen=True)
class Bar:
    """One thing that a pipeline rank does without interruption.

    Attributes:
        name: of a pass as the simulator writes it (`F3`); for anything else what it is.
        stage: None where no stage is concerned.
    """

    rank: int
    work: Work
    name: str
    stage: int | None
    start_seconds: float
    stop_seconds: float

    @property
    def seconds(self) -> float:
        return self.stop_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """One step: every rank's bars, which follow each other without gaps from 0 to `step_seconds`.

    Attributes:
        numbered: what a pass's number counts: "microbatch", or "slice" (of all microbatches, numbered through).
    """

    bars: tuple[Bar, ...]
    num_ranks: int
    step_seconds: float
    numbered: str = "microbatch"

    def share(self, *works: Work) -> float:
        """Return the share of all ranks' time that goes into this."""
        total = self.num_ranks * self.step_seconds
        return sum(bar.seconds for bar in self.bars if bar.work in works) / total if total > 0 else 0.0

    @property
    def works(self) -> tuple[Work, ...]:
        """What occurs in it, in the order of `Work`."""
        found = {bar.work for bar in self.bars}
        return tuple(work for work in Work if work in found)


def simulated_timeline(simulation: Simulation, num_stages: int | None = None) -> Timeline:
    """Return the rows of a simulated step.

    Args:
        num_stages: of the plan; None: as many as were simulated, which of two copies of the model are those of both.
    """
    found = _tiled(simulation.events, {}, simulation.num_ranks, simulation.step_seconds)
    bars = found.bars
    if num_stages is not None:
        bars = tuple(bar if bar.stage is None else replace(bar, stage=bar.stage % num_stages) for bar in bars)
    return replace(found, bars=bars, numbered=_numbered(simulation.action_table.num_slices))


def measured_timeline(binding: Binding, training: TrainingResult) -> Timeline | None:
    """Return the rows of the training's last step, each rank's first replica; None where no step was measured.

    Hosts' clocks differ: a rank that waits for another host is shown to wait until its input is there.
    """
    events = measured_events(binding, training.last_step_passes)
    if not events:
        return None
    num_ranks = len(binding.plan.ranks)
    once = training.last_step_once or ((),) * len(binding.placements)
    events += [
        Event(binding.plan.ranks[rank][-1], "optimizer", *span, rank)
        for rank, spans in enumerate(first_replicas(binding, once))
        for span in spans
    ]
    hosts = {placed.pipeline_rank: placed.device.host for placed in reversed(binding.placements)}
    found = _tiled(events, hosts, num_ranks, max(event.stop_seconds for event in events))
    return replace(found, numbered=_numbered(binding.plan.num_slices))


def _numbered(num_slices: int) -> str:
    return "slice" if num_slices > 1 else "microbatch"


def _tiled(events: Iterable[Event], hosts: Mapping[int, str], num_ranks: int, step_seconds: float) -> Timeline:
    """Fill each rank's gaps: until a pass's input was computed the rank waited, then the message was on its way."""
    passes = {(event.stage, event.name): event for event in events if event.name != "optimizer"}
    computed = {(taker.stage, taker.name): giver for giver, taker in input_pairs(passes) if giver.rank != taker.rank}
    bars, free_seconds = list[Bar](), [0.0] * num_ranks

    def idle(rank: int, work: Work, until_seconds: float) -> None:
        if until_seconds > free_seconds[rank]:
            bars.append(Bar(rank, work, work, None, free_seconds[rank], until_seconds))
            free_seconds[rank] = until_seconds

    for event in sorted(events, key=lambda event: event.start_seconds):
        rank, giver = event.rank, computed.get((event.stage, event.name))
        if event.name == "optimizer" or (giver and hosts.get(giver.rank) != hosts.get(rank)):
            idle(rank, Work.WAIT, event.start_seconds)
        elif giver:
            idle(rank, Work.WAIT, min(giver.stop_seconds, event.start_seconds))
        idle(rank, Work.MESSAGES, event.start_seconds)
        bars.append(Bar(rank, _WORK[event.name[0]], event.name, event.stage, event.start_seconds, event.stop_seconds))
        free_seconds[rank] = max(free_seconds[rank], event.stop_seconds)
    for rank in range(num_ranks):
        idle(rank, Work.WAIT, step_seconds)
    return Timeline(tuple(bars), num_ranks, step_seconds)
