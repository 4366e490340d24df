"""A limit of memory, by the price of a byte: Lagrange's multiplier, with the gap that it leaves proved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dejavu.foundation.units import format_bytes
from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError, Solver
from dejavu.sharding.solvers.elimination import Elimination


class NothingFitsError(ShardingError):
    """No choice holds so little memory; the message has the least that one holds."""


@dataclass(frozen=True)
class WithinMemory:
    """Searches without a limit, at a price per byte that rises until the choice fits.

    For any price p the least of seconds + p · (bytes - capacity) is a lower bound of every choice that fits.
    """

    solver: Solver = field(default_factory=Elimination)
    steps: int = 24

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return a choice that fits, with the best bound that the prices gave.

        Raises:
            NothingFitsError: proved that none fits.
            ShardingError: no choice is possible.
        """
        free = self.solver.run(ChoiceProblem(problem.seconds, problem.edges))
        capacity = problem.capacity_bytes
        if not problem.bytes or problem.held_bytes(free.chosen) <= capacity:
            return free
        small = self._smallest(problem)
        best, bound = Answer(small, problem.price(small)), free.lower_bound_seconds
        saved = problem.held_bytes(free.chosen) - problem.held_bytes(small)
        low, high = 0.0, 1e3 * max(best.seconds - free.seconds, 1e-9) / saved
        price = 1e-3 * high
        for _ in range(self.steps):
            found = self.solver.run(problem.with_multiplier(price))
            held = problem.held_bytes(found.chosen)
            bound = max(bound, found.lower_bound_seconds - price * capacity)
            seconds = problem.price(found.chosen)
            if held <= capacity:
                high = price
                if seconds < best.seconds:
                    best = Answer(found.chosen, seconds)
            else:
                low = price
            if best.seconds - bound <= 1e-9 * best.seconds:
                break
            price = float(np.sqrt(low * high)) if low > 0 else high / 10
        return replace(best, lower_bound_seconds=min(bound, best.seconds))

    def _smallest(self, problem: ChoiceProblem) -> tuple[int, ...]:
        """Return the choice that holds least, the fastest of those nearly so.

        Raises:
            NothingFitsError: it does not fit either.
        """
        possible = {pair: np.where(np.isfinite(table), 0.0, np.inf) for pair, table in problem.edges.items()}
        scale = max(float(own.max(initial=0.0)) for own in problem.bytes)
        held = tuple(
            own / scale + np.where(np.isfinite(s), 0.0, np.inf)
            for own, s in zip(problem.bytes, problem.seconds, strict=True)
        )
        least = self.solver.run(ChoiceProblem(held, possible))
        bytes_held = problem.held_bytes(least.chosen)
        if bytes_held > problem.capacity_bytes:
            proved = least.lower_bound_seconds * scale
            raise NothingFitsError(
                f"every sharding holds {format_bytes(proved)} or more on a device, which has "
                f"{format_bytes(problem.capacity_bytes)}; wanted that much, or more devices"
            )
        return least.chosen
