"""The step time of bindings, thousands at once: the searches' cost model with the links that are really used.

Shape suffixes as in `link_prices`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from dejavu.binding.binding import BindError
from dejavu.binding.link_prices import LinkPrices, StageExchange
from dejavu.binding.site import Ints, Site
from dejavu.cluster.islands import Island
from dejavu.foundation.registry import named
from dejavu.plans import Plan, Problem, StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import HAIR, AdditiveCosts, Floats, StageBytes, rank_bytes


class BindingPrices(LinkPrices):
    """Prices a plan's step for any placement of its pipeline ranks.

    Args:
        moves: as of `bind`.

    Attributes:
        repeats: microbatches of a step but the first.
        seconds_RK, load_seconds_RK: one microbatch, and all but one of the step's plus the per-step work; inf where the
            rank cannot be on the kind: no such configuration in the problem, or too little memory, or it may not move.
    """

    def __init__(self, problem: Problem, plan: Plan, site: Site, runs: int = 1, *, moves: bool = True) -> None:
        super().__init__(problem, plan, site, _exchanges(problem, plan), runs)
        self.repeats = problem.num_microbatches - 1
        self.seconds_RK, self.load_seconds_RK = (np.full(self.index_RK.shape, np.inf) for _ in range(2))
        for (rank, k), c in np.ndenumerate(self.index_RK):
            stages = plan.ranks[rank]
            if c >= 0 and (moves or self.is_own_RK[rank, k]) and self._fits(stages, problem.configurations[c]):
                spans = [(plan.stages[s].start, plan.stages[s].stop, int(c)) for s in stages]
                seconds = sum(problem.costs.stage_seconds(*span) for span in spans)
                once = sum(problem.costs.per_step_seconds(*span) for span in spans)
                if np.isfinite(seconds + once):
                    self.seconds_RK[rank, k] = seconds
                    self.load_seconds_RK[rank, k] = self.repeats * seconds + once

    @property
    def num_ranks(self) -> int:
        return len(self.configurations)

    def check_memory(self) -> None:
        """Check that every rank fits the kind of device that the plan gave it.

        Raises:
            BindError: one does not.
        """
        for rank, configuration in enumerate(self.configurations):
            if not np.isfinite(self.seconds_RK[rank, self.site.kinds.index(Island.of(configuration))]):
                raise BindError(
                    f"pipeline rank {rank} does not fit {configuration}; wanted a plan that holds in its memory"
                )

    def _fits(self, stages: Sequence[int], configuration: StageConfiguration) -> bool:
        """Return whether the stages fit in memory.

        For several stages on a rank only an upper bound is known: a rank may not move to where the bound does not fit,
        but may stay where the plan has it.
        """
        costs, c, plan = self.problem.costs, self.problem.index(configuration), self.plan
        schedule, needed, in_flight_bytes, host_share = named(SCHEDULES, plan.schedule), list[StageBytes](), 0.0, 0.0
        is_same = Island.of(configuration) == Island.of(plan.stages[stages[0]].configuration)
        if plan.both_ways or (len(stages) > 1 and is_same):  # a stage of the other copy is there as well
            return is_same
        for s in stages:
            stage, held = plan.stages[s], schedule.in_flight(s, len(plan.stages), plan.num_microbatches)
            if costs.max_in_flight(stage.start, stage.stop, c) < held:
                return False
            one = costs.stage_bytes(stage.start, stage.stop, c)
            if schedule.splits_backward:
                one = one._replace(passing=one.in_parts, each=max(one.retained, one.waiting))
            needed.append(one)
            in_flight_bytes += held * one.each
            host_share += costs.host_share(stage.start, stage.stop, c, held)
        if len(stages) == 1 or not isinstance(costs, AdditiveCosts):
            return True
        return bool(rank_bytes(needed, in_flight_bytes) <= costs.room_bytes_C[c] and host_share <= 1 + HAIR)

    def kinds_NR(self, places_NRW: Ints) -> Ints:
        return self.site.kind_P[places_NRW[:, :, 0]]

    def step_seconds_N(self, places_NRW: Ints) -> Floats:
        """Return the step seconds of N bindings; inf where a rank is on a kind that it cannot be on."""
        kinds, ranks = self.kinds_NR(places_NRW), np.arange(self.num_ranks)
        seconds, load = self.seconds_RK[ranks, kinds], self.load_seconds_RK[ranks, kinds]
        transfers = self.transfer_seconds_NQ(places_NRW)
        busiest = np.maximum(load.max(axis=1), self.repeats * transfers.max(axis=1, initial=0.0))
        return np.asarray(seconds.sum(axis=1) + transfers.sum(axis=1) + busiest)


def _exchanges(problem: Problem, plan: Plan) -> tuple[StageExchange, ...]:
    schedule, S = named(SCHEDULES, plan.schedule), len(plan.stages)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for s, take_block in enumerate(plan.cuts):
        a, b = sorted((schedule.rank_of(s, S), schedule.rank_of(s + 1, S)))
        if a != b:  # stages on one rank pass tensors in memory
            found[a, b].append(float(problem.cut_bytes_L1[take_block]))
    return tuple(StageExchange(a, b, len(sizes), sum(sizes)) for (a, b), sizes in found.items())
