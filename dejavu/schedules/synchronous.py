"""Schedules that flush the pipeline at every step and that torch's runtime runs: their lists, and their papers' words.

Sources: GPipe, Huang et al. NeurIPS 2019; 1F1B, Narayanan et al. SOSP 2019, with flushes Fan et al. PPoPP 2021
(DAPPLE); interleaved, Narayanan et al. SC 2021 (section 2.2); breadth-first, Lamy-Poirier MLSys 2023 (section 4);
zero bubble, Qi et al. ICLR 2024; waves, Liu et al. SC 2023 (Hanayo).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dejavu.foundation.errors import InputError
from dejavu.plans.schedule import SCHEDULES, Schedule, actions_of
from dejavu.schedules._base import PipelineSchedule, Task, Theory, flushed
from dejavu.simulation import StageSeconds

Formula = Callable[[int, int, int], Theory]


@dataclass(frozen=True)
class Synchronous(PipelineSchedule):
    """A schedule whose order of passes torch or we list for torch's runtime.

    Attributes:
        listed: the schedule as searches and trainings have it, or another depth of one.
        formula: (num_ranks, num_microbatches, stages_per_rank) -> what its paper says.
    """

    listed: Schedule
    formula: Formula

    @property
    def runs_as(self) -> str | None:
        known = SCHEDULES.get(self.listed.name)
        return None if known is None or known != self.listed else known.name

    @property
    def stages_per_rank(self) -> int:
        return self.listed.stages_per_rank

    def rank_of(self, stage: int, num_ranks: int, copy: int = 0) -> int:
        return self.listed.rank_of(stage, num_ranks * self.stages_per_rank)

    def check(self, num_ranks: int, num_microbatches: int) -> None:
        super().check(num_ranks, num_microbatches)
        actions_of(self.listed, num_ranks * self.stages_per_rank, num_microbatches)

    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        rows = actions_of(self.listed, num_ranks * self.stages_per_rank, num_microbatches)
        tasks = [[Task(a.stage, a.direction, a.microbatch) for a in row] for row in rows]
        return flushed(tasks, num_microbatches, num_steps)

    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        return self.formula(num_ranks, num_microbatches, self.stages_per_rank)


def of_depth(name: str, depth: int) -> Schedule:
    """Return a looped or wave-like schedule with another number of stages on each rank, such as one of `SCHEDULES`.

    Raises:
        InputError: the schedule has one stage a rank, or its depth is fixed.
    """
    known = SCHEDULES[name]
    if known.stages_per_rank == 1 or known.splits_backward or depth < 2 or (known.orders and depth % 2):
        raise InputError(f"{name} with {depth} stages a rank; wanted 2 or more, even for waves, of a looped schedule")
    for one in SCHEDULES.values():
        if (one.torch_name, one.orders, one.stages_per_rank) == (known.torch_name, known.orders, depth):
            return one
    return replace(known, name=f"{name}_{depth}", stages_per_rank=depth, by_default=False)


def _flushed_bubble(P: int, B: int, v: int) -> float:
    """Return (P − 1) / (vB + P − 1): the bubble over the ideal time is (P − 1) / (vB)."""
    return (P - 1) / (v * B + P - 1)


def _theory(P: int, bubble: float | None, activations: Sequence[float] | None) -> Theory:
    held = None if activations is None else tuple(float(one) for one in activations)
    return Theory(bubble, held, (1.0,) * P, (0.0,) * P)


def gpipe(P: int, B: int, v: int) -> Theory:
    """All forward passes, then all backward passes (GPipe, section 2.3)."""
    return _theory(P, _flushed_bubble(P, B, 1), [B] * P)


def one_forward_one_backward(P: int, B: int, v: int) -> Theory:
    """As GPipe, at most P − r microbatches on rank r (DAPPLE, section 3)."""
    return _theory(P, _flushed_bubble(P, B, 1), [min(B, P - r) for r in range(P)])


def interleaved(P: int, B: int, v: int) -> Theory:
    """Of v stages a rank, B a multiple of P: 1 + (P − 1) / (Pv) times P microbatches on rank 0 (Korthikanti et al.)."""
    held = [min(v * B, (v - 1) * P + 2 * (P - 1 - r) + 1) / v for r in range(P)] if B % P == 0 else None
    return _theory(P, _flushed_bubble(P, B, v) if B % P == 0 else None, held)


def breadth_first(P: int, B: int, v: int) -> Theory:
    """All microbatches through a stage before the rank's next one, so that weights are gathered once."""
    return _theory(P, _flushed_bubble(P, B, v), [B] * P)


def zero_bubble(P: int, B: int, v: int) -> Theory:
    """What remains depends on what the parts of the backward pass take; the papers bound it, no more."""
    return _theory(P, None, None)


def waves(P: int, B: int, v: int) -> Theory:
    """Of W = v / 2 waves, as much as interleaved stages; our order of the passes, not a table of the paper."""
    return _theory(P, _flushed_bubble(P, B, v) if B % P == 0 else None, None)
