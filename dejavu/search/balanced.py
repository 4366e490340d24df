"""What planners for one kind of device do: the slowest of S equal stages as fast as can be, by a dynamic program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dejavu.plans import Answer, Problem
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search._base import Incumbent, Search
from dejavu.search.shared.rows import Row, cheapest


@dataclass(frozen=True)
class Balanced(Search):
    """The best plan of stages on one kind of device whose slowest stage is as fast as can be, over their number.

    The dynamic program over layer times that balances stages of equal meshes (the linear partition problem), for every
    configuration and every number of stages that there are devices for. It knows neither the fill of the pipeline, nor
    links, nor memory; what does not fit is passed over. It proves nothing.
    """

    name: ClassVar[str] = "balanced"

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        return cheapest(problem, _balanced_rows(problem), best, "balanced stages on one kind of device")


def _balanced_rows(problem: Problem) -> Iterator[tuple[Row, list[int]]]:
    for c, configuration in enumerate(problem.configurations):
        room = problem.device_counts[configuration.kind] // configuration.num_devices
        for cuts in balanced_cuts(_stage_seconds(problem, c), min(room, problem.most_stages)):
            yield [configuration] * (len(cuts) - 1), cuts


def balanced_cuts(seconds_LL1: Floats, most_stages: int) -> Iterator[list[int]]:
    """The S + 1 positions from 0 to L between which the slowest of S stages is fastest, for S = 1 … `most_stages`.

    Args:
        seconds_LL1: [start, stop] of a stage; inf where there is none.
    """
    L = len(seconds_LL1)
    best_L1 = np.full(L + 1, np.inf)  # of the stages so far, up to each cut
    best_L1[0] = 0.0
    starts: list[np.ndarray] = []
    for _ in range(min(most_stages, L)):
        slowest = np.maximum(best_L1[:L, None], seconds_LL1)
        starts.append(slowest.argmin(axis=0))
        best_L1 = slowest.min(axis=0)
        if not np.isfinite(best_L1[L]):
            continue
        cuts = [L]
        for start_L1 in reversed(starts):
            cuts.append(int(start_L1[cuts[-1]]))
        yield cuts[::-1]


def _stage_seconds(problem: Problem, c: int) -> Floats:
    """[start, stop] under a configuration; inf where the stop is not after the start."""
    costs, L = problem.costs, problem.num_layers
    if not isinstance(costs, AdditiveCosts):
        return np.where(np.arange(L + 1) > np.arange(L)[:, None], costs.seconds_CLL1[c], np.inf)
    done_L1 = np.concatenate([[0.0], np.cumsum(costs.seconds_CL[c])])
    with np.errstate(invalid="ignore"):
        between_LL1 = done_L1[None, :] - done_L1[:L, None]
    between_LL1[np.isnan(between_LL1)] = np.inf  # from after a layer that is not possible here
    return np.where(np.arange(L + 1) > np.arange(L)[:, None], between_LL1, np.inf)
