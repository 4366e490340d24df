"""Repeat what several ranks do together until enough repeats were undisturbed on all of their cores.

For messages CPU time says little: a rank waits for the other, whose core another program may have. How long the ranks'
threads waited for their cores (`interference.waited_seconds`) tells which repeats were disturbed. Where there are too
few others, such a repeat counts without those waits, but as no less than a rank's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dejavu.timing.interference import InterferenceProbe, TimedWork, counted, least_told, waited_seconds

MOST_ROUNDS = 8  # of repeats, while too few are undisturbed
MOST_SECONDS = 2.0  # of wall-clock time; then what was measured has to suffice
LEAST_REPEATS = 10  # that count, even if disturbed
OWN_WAIT_SECONDS = 1e-4  # threads of a rank hand over work faster; another program keeps a core for longer


def repeat_together(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    before_each: Callable[[], object] = lambda: None,
    slowest: bool = True,
) -> tuple[list[float], float | None]:
    """Return the seconds of the repeats that count and their disturbed share; the same on all ranks.

    Args:
        repeats: in a round; one round suffices if all of it was undisturbed, and on GPUs, where that is unknown.
        before_each: synchronizes the ranks; not timed.
        slowest: use the slowest rank's time instead of the first rank's.
    """
    if device.type != "cpu":
        return [_on_gpu(work, device, before_each, slowest) for _ in range(repeats)], None
    probe, started = InterferenceProbe(least_told()), time.perf_counter()
    own: list[_Repeat] = []
    for _ in range(MOST_ROUNDS):
        own += _round(work, before_each, repeats, probe)
        everyone: list[Any] = [None] * dist.get_world_size()
        slowed = [one._replace(sample=probe.slowdown(one.sample)) for one in own]
        dist.all_gather_object(everyone, (slowed, time.perf_counter() - started))
        timings = [_of_all_ranks(ranks, slowest=slowest) for ranks in zip(*(rows for rows, _ in everyone), strict=True)]
        chosen = counted(timings, LEAST_REPEATS)
        if chosen.disturbed_share == 0 or max(took for _, took in everyone) > MOST_SECONDS:
            break
    return [timings[k].seconds for k in chosen.places], chosen.disturbed_share


class _Repeat(NamedTuple):
    """One repeat on one rank, in seconds: wall clock, CPU time, waiting for the core, and the sample around it."""

    clock: float
    processor: float
    waited: float
    sample: float


def _round(
    work: Callable[[], object], before_each: Callable[[], object], repeats: int, probe: InterferenceProbe
) -> Iterator[_Repeat]:
    """Run so many repeats, with a sample before and after all of them.

    A rank that waits for its core between two repeats comes late to the second, and the others' repeats start and end
    at other moments than its own: so each repeat counts the waits since the start of the one before it.
    """
    probe.sample()
    taken, before = list[tuple[float, float, float]](), [waited_seconds()] * 2
    for _ in range(repeats):
        before_each()
        busy, began = time.process_time(), time.perf_counter()
        work()
        took, busy = time.perf_counter() - began, time.process_time() - busy
        before.append(waited_seconds())
        taken.append((took, busy, before[-1] - before[-3]))
    sample = probe.sample()
    return (_Repeat(*one, sample) for one in taken)


def _of_all_ranks(ranks: Sequence[_Repeat], *, slowest: bool) -> TimedWork:
    """Combine one repeat of all ranks. Which waits delayed other ranks is unknown, so all of them are subtracted."""
    clock = max(one.clock for one in ranks) if slowest else ranks[0].clock
    waited, slowdown = sum(one.waited for one in ranks), max(one.sample for one in ranks)
    if waited <= OWN_WAIT_SECONDS:
        return TimedWork(clock, 1.0, slowdown)
    seconds = max(clock - waited, *(min(one.processor, clock) for one in ranks))
    return TimedWork(seconds, clock / seconds, slowdown)


def _on_gpu(
    work: Callable[[], object], device: torch.device, before_each: Callable[[], object], slowest: bool
) -> float:
    before_each()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    took = torch.tensor([time.perf_counter() - began], device=device)
    if slowest:
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def stretch_of(seconds: float, waited_seconds: float) -> float:
    """Return the time of a piece of work over what it would have taken without waiting for a core."""
    if waited_seconds <= OWN_WAIT_SECONDS:
        return 1.0
    return max(seconds, OWN_WAIT_SECONDS) / max(seconds - waited_seconds, OWN_WAIT_SECONDS)
