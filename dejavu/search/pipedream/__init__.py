"""PipeDream's objective: the least time of the slowest stage or link."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from typing import ClassVar

import numpy as np

from dejavu.foundation.units import counted_devices
from dejavu.plans import Answer, Obstacle, Plan, Problem, Stage
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search._base import Incumbent, Search
from dejavu.search.pipedream import line as _line
from dejavu.search.shared.compiling import tiny_problem
from dejavu.search.shared.stage_table import StageTable


@dataclass(frozen=True)
class PipeDream(Search):
    """Stages and replicas so that the slowest stage or link is as fast as can be, as PipeDream plans.

    The dynamic program of Narayanan et al., SOSP 2019, section 3.1, over (layers left, devices left), asked for one
    limit on the bottleneck after the other: B · seconds + once of a stage, B · seconds of a link, in a step. Devices
    stand in a line, type after type, in every order of the types; each type's stages are neighbours. Of the plans
    within a limit that with the fewest stages after each cut is kept, which holds the fewest microbatches, so that
    memory is kept by position.

    What it does not consider: the fill and drain of the pipeline, so that it takes more stages than a step of few
    microbatches can bear; types that alternate along the model; of many layers all cuts (`max_cuts`). With one type
    and few layers its bottleneck is the least of any plan; the step time is then priced as everybody's, and no bound
    on it follows. Choose it to see what a planner for the steady state alone would do.

    Attributes:
        max_cuts: of more layers than this only so many cuts are considered, with even work between them.
        max_orders: of the types; 24 are all orders of 4. Of more types so many random ones are tried.
        precision: of the least bottleneck, relative.
    """

    name: ClassVar[str] = "pipedream"
    max_cuts: int = 96
    max_orders: int = 24
    precision: float = 1e-6

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        with best.clock_stopped():
            load_compiled_loops()
        return self._least_bottleneck(problem, best, seed)

    def _least_bottleneck(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        table = StageTable.of(problem)
        if not table.num_usable:
            counts = counted_devices(problem.device_counts)
            return best.infeasible(f"every stage configuration takes more devices than there are ({counts})")
        line = _Line(problem, table, _cuts(problem, self.max_cuts))
        found: Plan | None = None
        limit = np.inf
        for order in self._orders(problem, seed):
            better = self._below(line, order, limit, best)
            if better is not None:
                found, limit = better, line.bottleneck_seconds(better)
            if best.remaining_seconds < 0:
                break
        if found is None:
            late = best.remaining_seconds < 0
            return best.not_found(
                Obstacle.OUT_OF_TIME if late else Obstacle.NONE_CONSIDERED_FITS,
                "no plan with one row of stages for each type of device "
                + (f"was found in {best.budget_seconds:g} s" if late else "fits; another may"),
            )
        best.offer(found)
        return best.result(lower_bound_seconds=0.0)

    def _below(self, line: _Line, order: tuple[int, ...], limit: float, best: Incumbent) -> Plan | None:
        """The plan of least bottleneck for one order of the types, if it is below the limit."""
        found: Plan | None = None
        low, ask = 0.0, limit * (1 - self.precision)
        while True:
            plan = line.within(ask, order)
            if plan is not None:
                found, limit = plan, line.bottleneck_seconds(plan)
            elif found is None:
                return None
            else:
                low = ask
            if limit - low <= self.precision * limit or best.remaining_seconds < 0:
                return found
            ask = 0.5 * (low + limit)

    def _orders(self, problem: Problem, seed: int) -> Iterator[tuple[int, ...]]:
        """Orders of the types, as indices; all of them, or random ones."""
        types = range(len(problem.device_counts))
        if math.factorial(len(types)) <= self.max_orders:
            yield from permutations(types)
            return
        rng = np.random.default_rng(seed)
        for _ in range(self.max_orders):
            yield tuple(int(d) for d in rng.permutation(len(types)))


class _Line:
    """A problem with its devices in a line: the stages to choose from, and plans within a limit."""

    def __init__(self, problem: Problem, table: StageTable, cut_K: np.ndarray) -> None:
        B, kind_C2, member_C = problem.num_microbatches, table.kinds[0], table.kinds[2]
        class_C, head_A = _link_classes(problem, member_C)
        keys = [(*(int(n) for n in kind_C2[c]), int(class_C[i])) for i, c in enumerate(member_C)]
        groups = {key: g for g, key in enumerate(dict.fromkeys(keys))}
        self._problem, self._cut_K, self._member_C = problem, cut_K, member_C
        self._group_C = np.array([groups[key] for key in keys], dtype=np.int64)
        # Each in one piece: for columns of one array the loops would be compiled once more.
        self._type_G, self._devices_G, self._class_G = (np.array(column) for column in zip(*groups, strict=True))
        need_J = table.rules[0][np.arange(1, table.most_stages + 1), 0]
        self._busy_CKK, self._after_CKK = _line.list_stages(table.costs, cut_K, member_C, need_J, B - 1)
        among = np.ix_(head_A, head_A)
        bytes_K = problem.cut_bytes_L1[cut_K][:, None, None]
        links = problem.link_latency_seconds_CC[among] + problem.link_seconds_per_byte_CC[among] * bytes_K
        self._link_KAA = 2.0 * B * links
        self._most_stages = table.most_stages

    def bottleneck_seconds(self, plan: Plan) -> float:
        """What the busiest stage or link does in a step."""
        problem, B = self._problem, self._problem.num_microbatches
        spans = [(stage.start, stage.stop, problem.index(stage.configuration)) for stage in plan.stages]
        stages = (B * problem.costs.stage_seconds(*span) + problem.costs.per_step_seconds(*span) for span in spans)
        links = (B * problem.transfer_seconds(b[0], a[2], b[2]) for a, b in pairwise(spans))
        return max(*stages, *links, 0.0)

    def within(self, limit: float, order: tuple[int, ...]) -> Plan | None:
        """A plan whose bottleneck is at most the limit, with the types in that order; None if there is none."""
        counts = list(self._problem.device_counts.values())
        end_D = np.cumsum([counts[d] for d in order])
        type_G = np.argsort(order)[self._type_G]
        use_all = self._problem.use_all_devices
        line = _line.Line(type_G, self._devices_G, self._class_G, self._link_KAA, end_D, use_all, self._most_stages)
        every = _line.Stages(self._busy_CKK, self._after_CKK, self._group_C)
        rest_KAM, next_KAM, allowed_GKK = _line.fewest_stages(limit, every, line)
        begins = np.array([0] if use_all else [0, *end_D[:-1]])
        m, a = min(
            ((int(m), a) for m in begins for a in range(rest_KAM.shape[1])), key=lambda at: rest_KAM[0, at[1], at[0]]
        )
        num_after = int(rest_KAM[0, a, m])
        if num_after == _line.NEVER:
            return None
        stages: list[Stage] = []
        k, last_cut = 0, len(self._cut_K) - 1
        while k < last_cut:  # follow the table: each stage has one less after it
            num_after -= 1
            g, stop = self._stage_from(k, m, a, num_after, next_KAM, allowed_GKK, type_G, end_D)
            stages.append(self._stage(g, k, stop, num_after, limit))
            k, m = stop, m + int(self._devices_G[g])
            if k < last_cut:
                starts = [m] if use_all else [m, *(int(begin) for begin in begins if begin > m)]
                links = self._link_KAA[k, a]
                m, a = next(
                    (m, b)
                    for m in starts
                    for b in range(len(links))
                    if rest_KAM[k, b, m] == num_after and links[b] <= limit
                )
        return Plan(tuple(stages), self._problem.schedule, self._problem.num_microbatches)

    def _stage_from(
        self,
        k: int,
        m: int,
        a: int,
        num_after: int,
        next_KAM: np.ndarray,
        allowed_GKK: np.ndarray,
        type_G: np.ndarray,
        end_D: np.ndarray,
    ) -> tuple[int, int]:
        """A group and a cut where a stage from cut k can stop, so that so many stages are after it."""
        last_cut = len(self._cut_K) - 1
        for g in np.flatnonzero(self._class_G == a):
            after, end = m + int(self._devices_G[g]), int(end_D[type_G[g]])
            begin = int(end_D[type_G[g] - 1]) if type_G[g] else 0
            if m < begin or after > end:
                continue
            if num_after == 0:
                ends = not self._problem.use_all_devices or after == end_D[-1]
                if ends and allowed_GKK[g, k, last_cut] >= 0:
                    return int(g), last_cut
                continue
            fits = (next_KAM[:last_cut, a, after] == num_after) & (allowed_GKK[g, k, :last_cut] >= num_after)
            if fits.any():
                return int(g), int(np.flatnonzero(fits)[-1])
        raise AssertionError("the table cannot be followed back")

    def _stage(self, g: int, k: int, stop: int, num_after: int, limit: float) -> Stage:
        """The least busy member of a group that fits."""
        fit = (self._group_C == g) & (self._after_CKK[:, k, stop] >= num_after)
        i = int(np.argmin(np.where(fit, self._busy_CKK[:, k, stop], np.inf)))
        configuration = self._problem.configurations[self._member_C[i]]
        return Stage(int(self._cut_K[k]), int(self._cut_K[stop]), configuration)


def _link_classes(problem: Problem, member_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each usable configuration, and one of each class: those of a class have the same links."""
    among = np.ix_(member_C, member_C)
    latency, per_byte = problem.link_latency_seconds_CC[among], problem.link_seconds_per_byte_CC[among]
    rows = np.concatenate([latency, latency.T, per_byte, per_byte.T], axis=1)
    _, heads, class_C = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return class_C.reshape(-1), member_C[heads]


def _cuts(problem: Problem, most: int) -> np.ndarray:
    """The cut positions to consider: all, or so many with even work between them."""
    L = problem.num_layers
    if most > L:
        return np.arange(L + 1)
    work_L: Floats = np.ones(L)
    if isinstance(problem.costs, AdditiveCosts):
        work_L = problem.costs.least_seconds_L + np.finfo(float).tiny
    done_L1 = np.concatenate([[0.0], np.cumsum(work_L)])
    wanted = np.linspace(0.0, done_L1[-1], most)
    return np.unique(np.concatenate([[0], np.searchsorted(done_L1, wanted[1:-1]), [L]]))


@cache
def load_compiled_loops() -> None:
    """Compile, or load from numba's cache, on a problem of one layer."""
    problem = tiny_problem()
    PipeDream()._least_bottleneck(problem, Incumbent(problem, PipeDream.name, np.inf), seed=0)
