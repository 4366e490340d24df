"""The stages of a pipeline as an integer program, solved by HiGHS: a referee that shares only the price with others.

Which stages there are is a path through a network, as in the integer programs of Tarnawski et al. (NeurIPS 2020,
section 4; max-load of contiguous splits) and of Alpa's inter-operator level (Zheng et al., OSDI 2022, eq. 2-5). The
network's places say how many stages come after, which is all that a schedule's memory depends on.

Letters: J = numbers of stages after, C = configurations, A = link classes, L = layers, L1 = L + 1 cuts, X = stages to
choose from, Y = transfers to choose from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array, csr_array, hstack, vstack

from dejavu.plans import Answer, Obstacle, Plan, Problem, Stage
from dejavu.plans.stage_costs import Floats
from dejavu.search._base import Incumbent, Search, TooLargeError
from dejavu.search.shared.options import check_number_of_options, link_classes, most_stages, needs_of, usable

Ints = NDArray[np.int64]
_OF_STAGES = ("start_X", "stop_X", "configuration_X", "after_X", "seconds_X", "busy_X")
_OF_TRANSFERS = ("cut_Y", "from_Y", "to_Y", "after_Y", "seconds_Y")
TOLERANCE = 1e-6  # HiGHS's own: of a constraint, of a whole number and of the objective
_INFEASIBLE = 2  # of scipy's statuses
# A whole number may be off by a millionth in HiGHS: beside a stage of this many units one of a unit counts for nothing.
# Of 1e15 and more it takes no number at all, and says that there is no plan.
_MOST_UNITS = 1e6


@dataclass(frozen=True)
class IntegerProgram(Search):
    """Proves the best plan of a small problem by branch and cut; what it proves is exact to a millionth.

    Every stage that could be chosen is a variable of its own, so it takes problems of tens of layers. `exact` gives the
    same answers sooner; this one shares nothing with it but the price.

    Attributes:
        max_variables: problems with more stages and transfers to choose from, each at every place in the pipeline, are
            refused.
        max_options_bytes: so are those whose stages alone take more than this to list.
        incumbent: a plan to return if none is found in time.
    """

    name: ClassVar[str] = "ilp"
    max_variables: int = 200_000
    max_options_bytes: float = 2**30
    incumbent: Plan | None = None

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        if self.incumbent is not None:
            best.offer(self.incumbent)
        check_number_of_options(problem, self.name, self.max_options_bytes)
        program = _Program.of(problem, self.max_variables)
        if not len(program.start_X):
            return self._none(best, "no stage fits its devices")
        unit = program.unit_seconds
        found = program.solved(best.remaining_seconds, unit)
        while found.x is not None and unit > 1.0:
            # No better plan has a stage that alone takes longer than a plan: without those units are smaller.
            fewer = program.within(best.offer(program.plan(found.x)))
            if len(fewer.start_X) == len(program.start_X) or best.remaining_seconds < 0:
                break
            program, unit = fewer, fewer.unit_seconds
            found = program.solved(best.remaining_seconds, unit)
        proved = 0.0 if found.mip_dual_bound is None else found.mip_dual_bound
        bound = max(0.0, proved * (1 - TOLERANCE) - TOLERANCE) * unit
        if found.x is not None:
            best.offer(program.plan(found.x))
            return best.result(bound)
        if found.status == _INFEASIBLE:
            return self._none(best, f"the integer program over {len(program.start_X):,} stages has no solution")
        late = f"HiGHS found no plan in {best.budget_seconds:g} s, nor that there is none"
        return best.not_found(Obstacle.OUT_OF_TIME, late, bound)

    @staticmethod
    def _none(best: Incumbent, proof: str) -> Answer:
        """The answer where there is no plan: a plan to start from would have been one."""
        return best.infeasible(proof) if best.plan is None else best.result(0.0)


@dataclass(frozen=True, eq=False)
class _Program:
    """Stages and transfers between the cuts of a problem.

    A stage goes from the place (start, class, stages after) to (stop, class, stages after), a transfer from there to
    (cut, next class, one stage after fewer).

    Attributes:
        start_X, stop_X, configuration_X, after_X: of each stage.
        cut_Y, from_Y, to_Y, after_Y: of each transfer, with the stages after its sender.
    """

    problem: Problem
    class_C: Ints
    start_X: Ints
    stop_X: Ints
    configuration_X: Ints
    after_X: Ints
    seconds_X: Floats
    busy_X: Floats
    cut_Y: Ints
    from_Y: Ints
    to_Y: Ints
    after_Y: Ints
    seconds_Y: Floats

    @classmethod
    def of(cls, problem: Problem, max_variables: int) -> _Program:
        """List them.

        Raises:
            TooLargeError: there are too many, or the schedule's memory depends on more than the stages after.
        """
        chosen, B = usable(problem), problem.num_microbatches
        costs, L = problem.costs.dense(), problem.num_layers
        S = max(1, min(most_stages(problem, chosen), problem.most_stages))
        possible_CLL1 = np.isfinite(costs.seconds_CLL1) & np.isfinite(costs.per_step_seconds_CLL1)
        possible_CLL1[np.setdiff1d(np.arange(len(possible_CLL1)), chosen)] = False
        need_J = needs_of(problem, S)
        class_C, heads = link_classes(problem)
        A, listed = len(heads), list[Ints]()
        count = A * A * (L - 1) * (S - 1)  # of transfers
        for after, need in enumerate(need_J[:S].tolist()):
            fits_CLL1 = possible_CLL1 & (costs.max_in_flight_CLL1 >= need)
            fits_CLL1[:, :, L - after + 1 :] = False  # each of the stages after has a layer
            fits_CLL1[:, :, : L if after == 0 else 0] = False
            listed.append(np.stack([*np.nonzero(fits_CLL1), np.full(np.count_nonzero(fits_CLL1), after)]))
            count += listed[-1].shape[1]
            if count > max_variables:
                size = f"{L} layers × {len(problem.configurations)} configurations × {S} stages"
                raise TooLargeError(
                    f"the integer program of {size} has more than {max_variables:,} variables; `exact` takes more"
                )
        c_X, start_X, stop_X, after_X = np.concatenate(listed, axis=1) if listed else np.zeros((4, 0), np.int64)
        cut_Y, from_Y, to_Y, after_Y = (one.ravel() for one in np.mgrid[1:L, 0:A, 0:A, 1:S])
        ends = heads[from_Y], heads[to_Y]
        per_byte_Y = problem.link_seconds_per_byte_CC[ends]
        seconds_X = costs.seconds_CLL1[c_X, start_X, stop_X]
        return cls(
            problem,
            class_C,
            start_X,
            stop_X,
            c_X,
            after_X,
            seconds_X,
            (B - 1) * seconds_X + costs.per_step_seconds_CLL1[c_X, start_X, stop_X],
            cut_Y,
            from_Y,
            to_Y,
            after_Y,
            2.0 * (problem.link_latency_seconds_CC[ends] + per_byte_Y * problem.cut_bytes_L1[cut_Y]),
        )

    @property
    def unit_seconds(self) -> float:
        """One of the problem's, or more where some stage takes very many of these."""
        most = max(float(self.busy_X.max()), float(self.seconds_X.max()), self._most_between_seconds)
        return max(1.0, most / _MOST_UNITS)

    @property
    def _most_between_seconds(self) -> float:
        """Return what the longest transfer takes of all microbatches."""
        return max(1, self.problem.num_microbatches - 1) * float(self.seconds_Y.max(initial=0.0))

    def within(self, step_seconds: float) -> _Program:
        """Return the program without the stages and transfers that no plan of so many seconds has."""
        repeats = self.problem.num_microbatches - 1
        has_X = self.seconds_X + self.busy_X <= step_seconds
        has_Y = (1 + repeats) * self.seconds_Y <= step_seconds
        kept_X = {name: getattr(self, name)[has_X] for name in _OF_STAGES}
        return replace(self, **kept_X, **{name: getattr(self, name)[has_Y] for name in _OF_TRANSFERS})

    def solved(self, budget_seconds: float, unit_seconds: float) -> OptimizeResult:
        """Minimize the sum of all stages and transfers and the busiest of them, in this unit."""
        X, Y, repeats = len(self.start_X), len(self.cut_Y), self.problem.num_microbatches - 1
        seconds_X, seconds_Y, busy_X = (times / unit_seconds for times in (self.seconds_X, self.seconds_Y, self.busy_X))
        objective = np.concatenate([seconds_X, seconds_Y, [1.0]])
        stages_JX, stages_LX = _by_row(self.after_X, busy_X, X), self._holding_each_layer(busy_X)
        transfers_JY = _by_row(self.after_Y, repeats * seconds_Y, Y)
        return milp(
            objective,
            integrality=np.concatenate([np.ones(X), np.zeros(Y + 1)]),  # transfers follow from the stages
            bounds=Bounds(0.0, np.concatenate([np.ones(X + Y), [np.inf]])),
            constraints=[
                self._path(),
                self._devices(),
                _at_most_busiest(hstack([stages_JX, csr_array((stages_JX.shape[0], Y))])),
                _at_most_busiest(hstack([stages_LX, csr_array((stages_LX.shape[0], Y))])),
                _at_most_busiest(hstack([csr_array((transfers_JY.shape[0], X)), transfers_JY])),
            ],
            options={"time_limit": max(budget_seconds, 0.0), "mip_rel_gap": 0.0},
        )

    def _holding_each_layer(self, busy_X: Floats) -> csr_array:
        """Return the busy seconds of the stages that hold a layer, of which one is chosen: implied, and tighter."""
        layer, stage = np.nonzero(
            (self.start_X <= np.arange(self.problem.num_layers)[:, None])
            & (np.arange(self.problem.num_layers)[:, None] < self.stop_X)
        )
        shape = (self.problem.num_layers, len(self.start_X))
        return coo_array((busy_X[stage], (layer, stage)), shape=shape).tocsr()

    def _path(self) -> LinearConstraint:
        """One stage holds the first layer, and whoever comes to a place leaves it, the last place excepted."""
        problem, X, Y = self.problem, len(self.start_X), len(self.cut_Y)
        A, L1 = int(self.class_C.max()) + 1, problem.num_layers + 1
        J = 1 + int(max(self.after_X.max(), self.after_Y.max(initial=0)))
        shape, class_X = (2, L1, A, J), self.class_C[self.configuration_X]

        def place(side: int, cut: Ints, of_class: Ints, after: Ints) -> Ints:
            return np.ravel_multi_index((np.full_like(cut, side), cut, of_class, after), shape)

        stages, transfers = np.arange(X), X + np.arange(Y)
        left = place(0, self.start_X, class_X, self.after_X), place(1, self.cut_Y, self.from_Y, self.after_Y)
        met = place(1, self.stop_X, class_X, self.after_X), place(0, self.cut_Y, self.to_Y, self.after_Y - 1)
        rows = np.concatenate([*left, *met])
        columns = np.concatenate([stages, transfers] * 2)
        signs = np.concatenate([-np.ones(X + Y), np.ones(X + Y)])
        balance = coo_array((signs, (rows, columns)), shape=(int(np.prod(shape)), X + Y + 1)).tocsr()
        side, cut, _, _ = np.unravel_index(np.arange(int(np.prod(shape))), shape)
        inner = ~(((side == 0) & (cut == 0)) | ((side == 1) & (cut == L1 - 1)))
        kept = balance[np.flatnonzero(inner & (np.diff(balance.indptr) > 0))]
        first = np.flatnonzero(self.start_X == 0)
        begun = coo_array((np.ones(len(first)), (np.zeros_like(first), first)), shape=(1, X + Y + 1)).tocsr()
        wanted = np.concatenate([np.zeros(kept.shape[0]), [1.0]])
        return LinearConstraint(vstack([kept, begun]).tocsr(), wanted, wanted)

    def _devices(self) -> LinearConstraint:
        """No type has more devices in use than there are; where all must be used, no fewer."""
        problem, X, Y = self.problem, len(self.start_X), len(self.cut_Y)
        types = list(problem.device_counts)
        type_C = np.array([types.index(one.kind) for one in problem.configurations])
        taken_C = np.array([float(one.num_devices) for one in problem.configurations])
        most = np.array([float(problem.device_counts[name]) for name in types])
        c_X = self.configuration_X
        used = coo_array((taken_C[c_X], (type_C[c_X], np.arange(X))), shape=(len(types), X + Y + 1)).tocsr()
        return LinearConstraint(used, most if problem.use_all_devices else 0.0, most)

    def plan(self, values: Floats) -> Plan:
        """Return the plan whose stages are 1."""
        taken = np.flatnonzero(values[: len(self.start_X)] > 0.5)
        taken = taken[np.argsort(self.start_X[taken])]
        spans = zip(self.start_X[taken].tolist(), self.stop_X[taken].tolist(), self.configuration_X[taken], strict=True)
        stages = tuple(Stage(start, stop, self.problem.configurations[c]) for start, stop, c in spans)
        return Plan(stages, self.problem.schedule, self.problem.num_microbatches)


def _by_row(row_N: Ints, value_N: Floats, count: int) -> csr_array:
    """Return a matrix with one entry in each column."""
    height = int(row_N.max(initial=0)) + 1
    return coo_array((value_N, (row_N, np.arange(count))), shape=(height, count)).tocsr()


def _at_most_busiest(busy: csr_array) -> LinearConstraint:
    """Each row's sum, of which one entry at most is chosen, is no more than the last variable."""
    last = csr_array(-np.ones((busy.shape[0], 1)))
    return LinearConstraint(hstack([busy, last]).tocsr(), -np.inf, 0.0)
