"""How long the steps of a training took, and which of them were disturbed by other work on some rank's core."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from dejavu.foundation.units import format_seconds, plural
from dejavu.timing.clock import KEPT_STEPS
from dejavu.timing.interference import InterferenceProbe, TimedWork, counted, waited_seconds
from dejavu.timing.repeats import stretch_of
from dejavu.timing.spread import spread

LEAST_STEPS = 3  # that count, even if disturbed


@dataclass(frozen=True)
class StepTimes:
    """The steps of the last attempt at a training, its first one left out; of each step the slowest rank's time.

    Attributes:
        seconds: the median of the steps that count: the undisturbed ones, or the least disturbed where these are few.
        low_seconds, high_seconds: their 10th and 90th percentile.
        num_counted: how many these are.
        disturbed_share: the share of these that had other work beside them; None: unknown, as on GPUs.
        all_seconds: the median of all steps, disturbed or not: what the user waited for.
        num_steps, num_disturbed: how many steps were timed, and how many of them had other work beside them.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    num_counted: int
    disturbed_share: float | None
    all_seconds: float
    num_steps: int
    num_disturbed: int

    @property
    def beside_other_work(self) -> bool:
        """Whether `seconds` itself was measured beside other work: then it says nothing about a quiet machine."""
        from dejavu.profiles import MOST_DISTURBED_SHARE  # half a second, which ranks need not wait for

        return self.disturbed_share is not None and self.disturbed_share > MOST_DISTURBED_SHARE

    def __str__(self) -> str:
        if not self.num_disturbed:
            return f"median of {plural(self.num_counted, 'step')}"
        beside = f"{self.num_disturbed} of {self.num_steps} steps had other work beside them"
        if self.beside_other_work:
            return f"measured beside other work: {beside}"
        together = format_seconds(self.all_seconds, 4)
        return f"median of {plural(self.num_counted, 'undisturbed step')}; {beside}, all together {together}"


class RankStep(NamedTuple):
    """One step on one rank, in seconds on its clock.

    Attributes:
        per_step_seconds: of the per-step work (gradient synchronization and optimizer).
        counts: whether it is not the first one, which also sets things up.
    """

    seconds: float
    per_step_seconds: float
    stretch: float
    slowdown: float
    counts: bool


class StepWatch:
    """Watches the steps of one rank: a sample of its core before and after each, and how long it waited for the core.

    Args:
        is_alone: no other rank of the training shares the core: waiting for those is no disturbance.
        least_sample_seconds: the fastest known sample of a core of this host: without it a core that is slow throughout
            is taken for one that nobody disturbs.
    """

    def __init__(self, *, is_cpu: bool, is_alone: bool, least_sample_seconds: float = math.inf) -> None:
        self._is_cpu, self._is_alone, self._quiet = is_cpu, is_alone, InterferenceProbe(least_sample_seconds)
        self._steps: deque[tuple[RankStep, float]] = deque(maxlen=KEPT_STEPS)  # aligned with the steps of `Clock`
        self.begin()

    def begin(self) -> None:
        """Start a step, including what leads to it: a rank that waits for its core before a step delays the others."""
        if self._is_cpu:
            self._quiet.sample()
        self._waited, self._began = waited_seconds(all_threads=False) if self._is_cpu else 0.0, time.perf_counter()

    def end(self, seconds: float, per_step_seconds: float, *, counts: bool) -> None:
        """End a step that took so long."""
        stretch = 1.0
        if self._is_cpu and self._is_alone:
            stretch = stretch_of(time.perf_counter() - self._began, waited_seconds(all_threads=False) - self._waited)
        sample = self._quiet.sample() if self._is_cpu else 0.0
        self._steps.append((RankStep(seconds, per_step_seconds, stretch, 1.0, counts), sample))

    def steps(self) -> list[RankStep]:
        """Return the last steps, as many as a `Clock` keeps."""
        if not self._is_cpu:
            return [step for step, _ in self._steps]
        return [step._replace(slowdown=self._quiet.slowdown(sample)) for step, sample in self._steps]


class CountedSteps(NamedTuple):
    """Which steps count, as indices into the ranks' lists, and their times; None: none was timed."""

    places: tuple[int, ...]
    times: StepTimes | None


def count_steps(ranks: Sequence[Sequence[RankStep]], *, is_cpu: bool) -> CountedSteps:
    """Select the steps that count; each is as disturbed as on its most disturbed rank."""
    places = [place for place, step in enumerate(zip(*ranks, strict=True)) if step[0].counts]
    if not places:
        return CountedSteps((), None)
    timed = [_of_all_ranks([rank[place] for rank in ranks]) for place in places]
    chosen = counted(timed, LEAST_STEPS)
    seconds = [timed[k].seconds for k in chosen.places]
    figures = spread(seconds if len(seconds) > 1 else seconds * 2)
    times = StepTimes(
        seconds=figures["seconds"],
        low_seconds=figures["seconds_low"],
        high_seconds=figures["seconds_high"],
        num_counted=len(seconds),
        disturbed_share=chosen.disturbed_share if is_cpu else None,
        all_seconds=median(one.seconds for one in timed),
        num_steps=len(timed),
        num_disturbed=sum(one.is_disturbed for one in timed),
    )
    return CountedSteps(tuple(places[k] for k in chosen.places), times)


def _of_all_ranks(step: Sequence[RankStep]) -> TimedWork:
    return TimedWork(max(r.seconds for r in step), max(r.stretch for r in step), max(r.slowdown for r in step))
