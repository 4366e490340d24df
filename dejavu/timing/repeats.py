"""Repeating what several ranks do together until enough repeats had no other work beside them on any of their cores.

Of messages processor time says little: a rank waits for the other, whose core somebody else may have. What the kernel
made the ranks' threads wait for their cores (`quiet.waited_seconds`) tells which repeats had that in them. Where there
are too few others, such a repeat counts without those waits, but as no less than the processor time of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dejavu.timing.interference import InterferenceProbe, TimedWork, counted, waited_seconds

MOST_ROUNDS = 8  # of repeats, while too few are undisturbed
MOST_SECONDS = 2.0  # on the clock; then what was measured has to do
LEAST_REPEATS = 10  # count, however disturbed
OWN_WAIT_SECONDS = 1e-4  # threads of a rank hand work to each other faster; another program keeps a core for longer


def repeat_together(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    before_each: Callable[[], object] = lambda: None,
    slowest: bool = True,
) -> tuple[list[float], float | None]:
    """Seconds of the repeats that count, and the share of these that had other work beside them; alike on all ranks.

    Args:
        repeats: in a round; one round does where all of it was undisturbed, and on GPUs, where nobody can tell.
        before_each: brings the ranks together; not timed.
        slowest: what the slowest rank took counts, not what the first one did.
    """
    if device.type != "cpu":
        return [_on_gpu(work, device, before_each, slowest) for _ in range(repeats)], None
    probe, started = InterferenceProbe(), time.perf_counter()
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
    """One repeat on one rank, in seconds: on the clock, of the processor, waiting for the core, and the look beside."""

    clock: float
    processor: float
    waited: float
    sample: float


def _round(
    work: Callable[[], object], before_each: Callable[[], object], repeats: int, probe: InterferenceProbe
) -> Iterator[_Repeat]:
    """So many repeats, with a look before and after all of them.

    A rank that waits for its core between two repeats comes late to the second, and the others' repeats begin and end
    at other moments than its own: with each repeat count the waits since the one before it began.
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
    """One repeat. Which of the waits others had to wait for, too, nobody knows: less than all of them is not left."""
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
    """What a piece of work took over what it would have taken without waiting for a core."""
    if waited_seconds <= OWN_WAIT_SECONDS:
        return 1.0
    return max(seconds, OWN_WAIT_SECONDS) / max(seconds - waited_seconds, OWN_WAIT_SECONDS)
