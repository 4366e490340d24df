"""The exact member: a program over labels of (Σ, busiest part)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from dejavu.operator_cuts._base import Answer, Best, Cutter
from dejavu.operator_cuts._labels import Level, Tables, last_stages, least_memory, one_stage_more
from dejavu.operator_cuts.pricing import ROUNDING, Sums, all_reduce_rates, transfer_rates
from dejavu.operator_cuts.problem import CutPlan, CutProblem


@dataclass(frozen=True)
class LabelProgram(Cutter):
    """Adds stages from the last device on; keeps what no other way to run the same beats. Proves its answer.

    The plans whose device cuts are between servers, which are few, are settled first: their best is the cutoff for
    all others. Takes seconds for 128 points and every cut of 32 devices; time grows with the square of the points and
    the third power of the allowed device cuts.
    """

    name: ClassVar[str] = "label_program"

    def run(self, problem: CutProblem, *, seed: int = 0) -> Answer:
        best = Best(problem)
        for even in even_plans(problem):
            best.offer(even)
        if best.step_seconds == float("inf"):
            least = least_bytes(problem)
            if least > problem.servers.memory_bytes * (1 + ROUNDING):
                return best.none_fits(self.name, least)
        allowed = set(problem.device_cuts or ())
        spaces = [tuple(sorted(allowed & set(cuts))) for cuts in self._spaces(problem)]
        for cuts in dict.fromkeys((*spaces, problem.device_cuts)):
            plan = best_plan(replace(problem, device_cuts=cuts), best.step_seconds)
            if plan is not None:
                best.offer(plan)
        return best.found(self.name, best.step_seconds)

    def _spaces(self, problem: CutProblem) -> Sequence[Sequence[int]]:
        """Return smaller sets of device cuts, whose plans come before all others."""
        servers = problem.servers
        return (servers.boundaries, servers.near_boundaries(1), servers.near_boundaries())


def even_plans(problem: CutProblem) -> list[CutPlan]:
    """Return a plan for each number of stages: cuts between servers where possible, compute as even as points allow."""
    boundaries = [cut for cut in problem.servers.boundaries if cut in set(problem.device_cuts or ())]
    places = boundaries if len(boundaries) + 1 >= problem.most_stages else list(problem.device_cuts or ())
    before_P = np.cumsum(problem.arrays.compute_seconds_P)[:-1] / max(
        float(problem.arrays.compute_seconds_P.sum()), 1e-300
    )
    plans = []
    for cuts in range(problem.most_stages):
        devices = sorted({places[(k + 1) * len(places) // (cuts + 1)] for k in range(cuts)} if places else ())
        operators = [int(np.abs(before_P - device / problem.servers.num_devices).argmin()) + 1 for device in devices]
        if len(devices) == cuts and len(set(operators)) == cuts:
            plans.append(CutPlan(tuple(operators), tuple(devices)))
    return plans


def best_plan(problem: CutProblem, cutoff: float = float("inf")) -> CutPlan | None:
    """Return the cheapest of the plans below the cutoff that fit; None: there is none."""
    tables, B = _tables(problem), problem.num_microbatches
    levels = [last_stages(tables, cutoff)]
    chosen, winner = _whole(levels[0], tables)
    cutoff = min(cutoff, chosen)
    ends = [(0, winner)] if winner >= 0 else []
    for stages in range(2, problem.most_stages + 1):
        if not levels[-1].first_NNP[-1]:
            break
        levels.append(one_stage_more(tables, levels[-1], float(min(B, stages)), stages == problem.most_stages, cutoff))
        price, label = _whole(levels[-1], tables)
        if price < cutoff:
            cutoff = price
            ends.append((len(levels) - 1, label))
    return _followed(levels, *ends[-1], tables) if ends else None


def least_bytes(problem: CutProblem) -> float:
    """Return the least memory with which some plan fits: what its fullest device needs."""
    in_flight = [min(problem.num_microbatches, k + 1) for k in range(problem.most_stages)]
    return float(least_memory(_tables(problem), np.array(in_flight, dtype=float)))


def _tables(problem: CutProblem) -> Tables:
    return Tables(
        *Sums.of(problem),
        problem.positions_N,
        all_reduce_rates(problem),
        transfer_rates(problem),
        float(problem.num_microbatches - 1),
        float(problem.copies),
        float(problem.servers.memory_bytes * (1 + ROUNDING)),
    )


def _whole(level: Level, tables: Tables) -> tuple[float, int]:
    """Return the price of a level's cheapest whole plan, and its label; −1: there is none."""
    N, P = len(tables.at_N), len(tables.seconds_P1) - 1
    best, winner = float("inf"), -1
    for b in range(1, N):
        for label in range(level.first_NNP[b * P], level.first_NNP[b * P + 1]):
            step = float(level.total_K[label] + level.busiest_K[label])
            if step < best:
                best, winner = step, label
    return best, winner


def _followed(levels: Sequence[Level], at: int, label: int, tables: Tables) -> CutPlan:
    """Return the plan of a label: its own stage's cuts, then those of the label downstream, and so on."""
    N, P = len(tables.at_N), len(tables.seconds_P1) - 1
    operators, devices = [], []
    for level in reversed(levels[1 : at + 1]):
        state = int(level.state_K[label])
        operators.append(state % P)
        devices.append(int(tables.at_N[state // P // N]))
        label = int(level.parent_K[label])
    return CutPlan(tuple(operators), tuple(devices))
