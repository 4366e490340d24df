"""Asks the searches which plan is best, over several numbers of microbatches, within one budget.

Needs neither the cluster nor a server: the model is captured without weights and priced from the database and physics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dejavu.cluster import Cluster
from dejavu.cost import transfer_costs
from dejavu.parallelism import Parallelism
from dejavu.planning.choice import CLOSE, EVEN, Choice, Considered
from dejavu.planning.prices import parallel_prices
from dejavu.problem import Posed, microbatch_choices, pose_parallel, split_into
from dejavu.profiles import ProfileDatabase
from dejavu.search import SEARCHES, search_named
from dejavu.workload import Workload

PROVERS = ("auto", "exact")  # the first that there is answers every question
OTHERS = ("hybrid", "differentiable", "mcmc", "pipedream")  # asked where the proof leaves something open
EXPLAIN_SECONDS = 10.0  # to find the least memory that would do where nothing fits
EVEN_SHARE = 0.1  # of a question's time goes to the even split, at most


@dataclass(frozen=True)
class Question:
    """A what-if question.

    Attributes:
        microbatches: into how many a step may be split; empty: `microbatch_choices` of the workload.
        search: the one search to ask besides the even split; None: the prover, and others where it leaves a gap.
        budget_seconds: for all searches together; capture and prices take what they take.
    """

    cluster: Cluster
    workload: Workload
    database: Path = Path("profiles_db")
    parallelism: Parallelism = field(default_factory=Parallelism)
    microbatches: Sequence[int] = ()
    search: str | None = None
    budget_seconds: float = 8.0
    seed: int = 0

    def answer(self) -> Choice:
        """The best plan over all numbers of microbatches, with what was proved.

        Raises:
            NoPlanError: there is no plan, or none was found; the message is that of the most microbatches.
            InputError: what was asked contradicts itself.
            CostError: a number is missing.
        """
        splits = [split_into(self.workload, count) for count in self.microbatches or microbatch_choices(self.workload)]
        prover = search_named(self.search or next(name for name in PROVERS if name in SEARCHES)).name
        prices = parallel_prices(self.workload, self.cluster, self.database)
        transfers = transfer_costs(self.cluster, ProfileDatabase(self.database))
        clock, asked = _Clock(self.budget_seconds), list[Considered]()
        for place, workload in enumerate(splits):
            posed = pose_parallel(prices, self.cluster, workload, transfers, self.parallelism)
            if not asked:
                self._ask(prover, posed, 0.0)  # compiles, or loads what was compiled, before the clock starts
            with clock.share(1 / (len(splits) - place)) as seconds:
                asked.append(self._ask(prover, posed, seconds))
                if prover != EVEN and not asked[-1].proved_infeasible:
                    asked.append(self._ask(EVEN, posed, EVEN_SHARE * seconds))
        if all(row.proved_infeasible for row in asked):  # the time for a good sentence is not spent on each of them
            asked.append(self._ask(prover, asked[-1].posed, EXPLAIN_SECONDS))
        choice = Choice.of(self.workload.model, self.cluster, asked)
        # What is left goes to questions that were left open, and to other searches for better plans.
        again = [(prover, row.posed) for row in asked if row.search == prover and self.search is None]
        again += [(name, choice.chosen.posed) for name in OTHERS if name in SEARCHES and self.search is None]
        for place, (name, posed) in enumerate(again):
            count = posed.problem.num_microbatches
            if clock.left_seconds <= 0 or choice.gap_percent < 100 * CLOSE:
                break
            if name != prover or choice.bound_seconds(count) < (1 - CLOSE) * choice.step_seconds:
                with clock.share(1 / (len(again) - place)) as seconds:
                    asked.append(self._ask(name, posed, seconds))
                choice = Choice.of(self.workload.model, self.cluster, asked)
        return choice

    def _ask(self, name: str, posed: Posed, budget_seconds: float) -> Considered:
        count = posed.problem.num_microbatches
        answer = search_named(name)().run(posed.problem, budget_seconds=budget_seconds, seed=self.seed)
        return Considered(name, count, posed, answer)


class _Clock:
    """A budget that only searches spend."""

    def __init__(self, budget_seconds: float) -> None:
        self.left_seconds = budget_seconds

    @contextmanager
    def share(self, part: float) -> Iterator[float]:
        """That part of what is left; what is spent inside counts."""
        began = time.perf_counter()
        yield max(self.left_seconds, 0.0) * part
        self.left_seconds -= time.perf_counter() - began
