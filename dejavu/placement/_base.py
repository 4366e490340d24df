"""What all members share: the contract, the budget, the best placement so far, and the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from dejavu.foundation.units import format_bytes, format_seconds
from dejavu.placement.problem import Devices, Ints, Operation, PlacementProblem, Tensor
from dejavu.placement.shared.bound import LowerBound, lower_bound
from dejavu.placement.simulation import Placement, simulate
from dejavu.plans import Infeasible, NotFound, Obstacle
from dejavu.search.shared.clock import SearchClock


@dataclass(frozen=True)
class PlacementResult:
    """A placement, and what was proved about better ones.

    Attributes:
        seconds: simulated.
        lower_bound: no placement of the problem is faster.
        placer: the name of the member that found it.
        cpu_seconds: that it took, bound included, loops compiled before.
        history: (CPU seconds, best so far).
    """

    placement: Placement
    seconds: float
    lower_bound: LowerBound
    placer: str
    cpu_seconds: float
    history: tuple[tuple[float, float], ...] = ()

    @property
    def gap(self) -> float:
        """Upper bound on the relative distance to the fastest placement: 0 where this is the fastest."""
        return 1.0 - self.lower_bound.seconds / self.seconds if self.seconds > 0 else 0.0


PlacementAnswer = PlacementResult | Infeasible | NotFound


@dataclass(frozen=True)
class Placer(ABC):
    """Finds a placement. Settings are fields with defaults; work is `run`; randomness comes only from `seed`."""

    name: ClassVar[str]

    def run(self, problem: PlacementProblem, *, budget_seconds: float = 10.0, seed: int = 0) -> PlacementAnswer:
        """Return the best placement found within the budget and a bound, a proof that there is none, or neither.

        Args:
            budget_seconds: of processor time; the bound and a first placement are computed however little it is.
        """
        _load_loops(type(self))
        best = Incumbent(problem, self.name, budget_seconds)
        arrays = problem.arrays
        total, room = float(arrays.memory_G.sum()), float(arrays.memory_D.sum())
        if total > room:
            return best.infeasible(
                f"the operations keep {format_bytes(total)} and the devices have {format_bytes(room)} in all; wanted "
                f"{format_bytes(total)} or more"
            )
        self._place(problem, best, seed)
        return best.answer()

    @abstractmethod
    def _place(self, problem: PlacementProblem, best: Incumbent, seed: int) -> None:
        """Offer placements to `best`, and tell it what is proved."""


class Incumbent:
    """The best placement so far, and the bound."""

    def __init__(self, problem: PlacementProblem, placer: str, budget_seconds: float) -> None:
        self._problem, self._placer, self.budget_seconds = problem, placer, budget_seconds
        self._clock = SearchClock()
        self._history: list[tuple[float, float]] = []
        self._proof = ""
        self.bound = lower_bound(problem)
        self.placement: Placement | None = None
        self.seconds = float("inf")

    @property
    def remaining_seconds(self) -> float:
        return self.budget_seconds - self._clock.elapsed_seconds

    @property
    def is_done(self) -> bool:
        """Whether nothing faster can be found."""
        return self.seconds <= self.bound.seconds * (1 + 1e-12)

    def offer(self, device_G: Ints, order_N: Ints | Sequence[int]) -> float:
        """Simulate a placement, keep it if it is the fastest so far, and return its seconds."""
        device_N = np.asarray(device_G)[self._problem.group_N]
        placement = Placement(tuple(device_N.tolist()), tuple(int(n) for n in order_N))
        seconds = simulate(self._problem, placement).seconds
        if seconds < self.seconds:
            self.placement, self.seconds = placement, seconds
            self._history.append((self._clock.elapsed_seconds, seconds))
        return seconds

    def proved(self, seconds: float, because: str) -> None:
        """No placement takes less."""
        if seconds > self.bound.seconds:
            self.bound = LowerBound(seconds, because)

    def proved_none(self, proof: str) -> None:
        """There is no placement."""
        self._proof = proof

    def infeasible(self, proof: str) -> Infeasible:
        return Infeasible(self._placer, proof, self._clock.elapsed_seconds)

    def answer(self) -> PlacementAnswer:
        spent = self._clock.elapsed_seconds
        if self.placement is not None:
            # the price and the bound add the same numbers in other orders: a bound is never above what was found
            bound = LowerBound(min(self.bound.seconds, self.seconds), self.bound.because)
            return PlacementResult(self.placement, self.seconds, bound, self._placer, spent, tuple(self._history))
        if self._proof:
            return self.infeasible(self._proof)
        reason = f"{self._placer} met no placement that fits in {format_seconds(spent, 2)}"
        return NotFound(self._placer, Obstacle.NONE_CONSIDERED_FITS, reason, spent, self.bound.seconds)


@cache
def _load_loops(kind: type[Placer]) -> None:
    """Compile a member's loops, or load them from numba's cache, on a graph whose first placement is not proved."""
    names = ("fork", "left", "middle", "right", "join")
    tensors = (Tensor("fork", names[1:4], 0.4), *(Tensor(name, ("join",), 0.5) for name in names[1:4]))
    operations = tuple(Operation(name, (1.0, 2.0), group="ends" * (name in "forkjoin")) for name in names)
    problem = PlacementProblem(operations, tensors, Devices.alike(2, memory_bytes=1.0, bytes_per_second=1.0))
    for _ in range(2):  # loops that come last are reached when those before them are compiled
        kind()._place(problem, Incumbent(problem, kind.name, budget_seconds=0.05), seed=0)
