"""What all members share: the contract and the answers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from dejavu.foundation.units import format_bytes
from dejavu.operator_cuts.pricing import fits, price
from dejavu.operator_cuts.problem import CutPlan, CutProblem


@dataclass(frozen=True)
class Found:
    """A plan that fits, and what was proved about it.

    Attributes:
        lower_bound_seconds: no plan is faster; 0: nothing was proved.
        cpu_seconds: of this process, compiling included where a loop was not compiled before.
        history: (plans priced, step) at each improvement, where a member improves plans one by one.
    """

    plan: CutPlan
    step_seconds: float
    lower_bound_seconds: float
    member: str
    cpu_seconds: float
    history: tuple[tuple[int, float], ...] = ()

    @property
    def gap_percent(self) -> float:
        """How much longer than the bound the plan may be."""
        return 100.0 * (1.0 - self.lower_bound_seconds / self.step_seconds) if self.step_seconds else 0.0


@dataclass(frozen=True)
class NoneFits:
    """Proved: no plan fits into the devices' memory.

    Attributes:
        least_bytes: of the plans, the least that the fullest device needs: with so much memory one fits.
    """

    member: str
    least_bytes: float
    memory_bytes: float
    cpu_seconds: float

    def __str__(self) -> str:
        return (
            f"no cut fits: found {format_bytes(self.memory_bytes)} a device; wanted at least "
            f"{format_bytes(self.least_bytes)}, which the plan of the least memory needs"
        )


@dataclass(frozen=True)
class NoneFound:
    """None of the plans that were tried fits; that proves nothing."""

    member: str
    cpu_seconds: float


Answer = Found | NoneFits | NoneFound


@dataclass(frozen=True)
class Cutter(ABC):
    """Finds operator cuts and device cuts. Settings are fields with defaults; randomness comes only from `seed`.

    Every member is priced by `pricing.price`, so results compare.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, problem: CutProblem, *, seed: int = 0) -> Answer:
        """Return the best plan found with what was proved, a proof that none fits, or neither.

        Raises:
            InputError: the problem is larger than the member takes.
        """


class Best:
    """The best plan so far that fits, and when it came."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem, self.plan, self.step_seconds = problem, CutPlan(), float("inf")
        self.least_bytes, self.num_priced = float("inf"), 0
        self.history: list[tuple[int, float]] = []
        self._began = time.process_time()

    @property
    def cpu_seconds(self) -> float:
        return time.process_time() - self._began

    def offer(self, plan: CutPlan) -> float:
        """Return the plan's step in seconds, infinite where it does not fit; it is kept if it is the best so far."""
        found = price(self.problem, plan)
        self.num_priced += 1
        self.least_bytes = min(self.least_bytes, max(found.device_bytes))
        if not fits(self.problem, found):
            return float("inf")
        if found.step_seconds < self.step_seconds:
            self.plan, self.step_seconds = plan, found.step_seconds
            self.history.append((self.num_priced, found.step_seconds))
        return found.step_seconds

    def found(self, member: str, lower_bound_seconds: float) -> Found:
        bound = min(lower_bound_seconds, self.step_seconds)
        return Found(self.plan, self.step_seconds, bound, member, self.cpu_seconds, tuple(self.history))

    def none_fits(self, member: str, least_bytes: float) -> NoneFits:
        return NoneFits(member, least_bytes, self.problem.servers.memory_bytes, self.cpu_seconds)
