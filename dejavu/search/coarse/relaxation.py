"""A problem without its counts of devices, which have prices, and with every cut: the bound under one limit.

Shape suffixes: C = configurations, L = layers, L1 = cut positions, A = link classes, R = resources: the devices of each
type, then rounded counts of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem, Stage
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search._base import Incumbent
from dejavu.search.coarse import guided, windows
from dejavu.search.coarse.undominated import Undominated
from dejavu.search.exact.cutting_planes import CuttingPlanes, PricedPlan
from dejavu.search.shared.options import link_classes
from dejavu.search.shared.stage_table import StageTable

Ints = NDArray[np.int64]

ROUNDING = 1e-8  # sums over thousands of layers, one after the other, err by less
_PRICE_PRECISION = 1e-3  # of the best price: the bound under one limit is found to this
_SMOOTHING = 0.6  # of the prices; a third to a half of the evaluations of none, for 20 to 30 prices
_PATIENCE = 0.1  # see `CuttingPlanes`
_MOST_ROUNDS = 8  # of counting stages for one bound
_LEAST_GAIN = 0.04  # of what is missing to the cutoff: a round of counting that gains less is the last
_NEAR = 0.15  # of the best price: further from the cutoff than this counting finds next to nothing
_STAGE_PRICES = (0.1, 0.4, 1.6)  # seconds that a stage costs more, in those that the cheapest plan's have each
_MOST_BITS = 62  # of one integer; more types or devices are not packed, and no beam looks for plans
_MOST_LABELS = 600_000  # of a beam: 30 MB
_WHOLE = 1e-6  # a number of stages this much above a whole number is that number


@dataclass(frozen=True, eq=False)
class Kept:
    """What is known of some plans: those within a range of bottlenecks, and cheaper than some price.

    Attributes:
        among_K: they have stages of these configurations only.
        after_L1: they have at least so many stages from each cut on, where they have that cut.
        prices_R: the prices that proved most.
        sum_seconds: none of them has a lower Σ.
    """

    among_K: Ints
    after_L1: Ints
    prices_R: Floats
    sum_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class _Devices:
    """The resources, and how the devices of a stage are packed into one number; see `guided.Devices`.

    Attributes:
        bits: of one type's field; 0: there are too many.
    """

    use_CR: Ints
    count_R: Ints
    num_types: int
    packed_C: Ints
    bits: int

    @classmethod
    def of(cls, problem: Problem, kept: Ints) -> _Devices:
        """Of the configurations that are kept.

        Stages that take n devices each of a type with N keep to Σ ⌊n / g⌋ ≤ ⌊N / g⌋ for every g. Any g is allowed, the
        sizes of stages say something: of 7 devices no plan makes 7 / 4 stages of four, though a mean of plans does
        (Chvátal's and Gomory's cuts; for sizes that divide each other these are all that whole numbers add: Marcotte,
        1985). They have prices as devices have.
        """
        types = list(problem.device_counts)
        use_CT = np.zeros((len(kept), len(types)), dtype=np.int64)
        for row, c in enumerate(kept):
            configuration = problem.configurations[c]
            use_CT[row, types.index(configuration.device_type)] = configuration.num_devices
        count_T = np.array([problem.device_counts[name] for name in types], dtype=np.int64)
        pairs = [(t, int(size)) for t in range(len(types)) for size in np.unique(use_CT[:, t]) if size > 1]
        rounded = [use_CT[:, t] // size for t, size in pairs]
        bits = int(count_T.max()).bit_length() + 1
        if bits * len(types) > _MOST_BITS:
            bits = 0
        return cls(
            use_CR=np.column_stack([use_CT, *rounded]),
            count_R=np.concatenate([count_T, np.array([count_T[t] // size for t, size in pairs], dtype=np.int64)]),
            num_types=len(types),
            packed_C=use_CT @ (1 << (bits * np.arange(len(types), dtype=np.int64))),
            bits=bits,
        )

    def priced(self, prices_R: Floats, use_all: bool) -> guided.Devices:
        shifts = self.bits * np.arange(self.num_types, dtype=np.int64)
        return guided.Devices(
            packed_C=self.packed_C,
            guard=int(((1 << (self.bits - 1)) << shifts).sum()),
            have=int((self.count_R[: self.num_types] << shifts).sum()),
            use_all=use_all,
            spent=float(self.count_R @ prices_R),
        )


class Windowed:
    """The relaxed problem, for one limit on the bottleneck after another.

    Messages at a stage's cuts are taken at their least over all cuts, and `max_stages` is not looked at. Memory is that
    of the fewest stages that may come after.
    """

    def __init__(self, problem: Problem, best: Incumbent) -> None:
        costs = problem.costs
        assert isinstance(costs, AdditiveCosts)
        self._problem, self._best = problem, best
        self._kept = kept = Undominated.of(problem).kept
        self._devices = _Devices.of(problem, kept)
        class_C, heads = link_classes(problem)
        self._class_C = class_C[kept]
        self._repeats = float(problem.num_microbatches - 1)
        usable_CL = _usable(costs, best.step_seconds)[kept]

        def prefix(table_CL: Floats) -> Floats:
            return np.pad(np.cumsum(np.where(usable_CL, table_CL[kept], 0.0), axis=1), ((0, 0), (1, 0)))

        self._seconds_CL1 = prefix(costs.seconds_CL)
        self._costs = windows.Costs(
            busy_CL1=self._repeats * self._seconds_CL1 + prefix(costs.per_step_seconds_CL),
            per_step_C=costs.per_step_latency_seconds_C[kept],
            fixed_CL1=prefix(costs.fixed_bytes_CL),
            active_CL1=prefix(costs.activation_bytes_CL),
            step_CL1=prefix(costs.step_bytes_CL),
            scratch_CL=np.ascontiguousarray(costs.temporary_bytes_CL[kept]),
            # A hair more than there is: sums in another order must not make a stage that just fits too large.
            capacity_C=costs.capacity_bytes_C[kept] * (1 + ROUNDING) - costs.message_bytes_CL1.min(axis=1)[kept],
            end_CL=_next_unusable(usable_CL),
        )
        C, L1 = self._seconds_CL1.shape
        A = len(heads)
        self._furthest_CL = np.empty((C, L1 - 1), dtype=np.int64)
        self._links = windows.Links(
            repeats=self._repeats,
            latency_AA=problem.link_latency_seconds_CC[np.ix_(heads, heads)],
            per_byte_AA=problem.link_seconds_per_byte_CC[np.ix_(heads, heads)],
            bytes_L1=problem.cut_bytes_L1,
        )
        self._choices = windows.Choices(
            choice_AL1=np.zeros((A, L1), np.int32),
            start_CL1=np.zeros((C, L1), np.int32),
            class_before_AL1=np.zeros((A, L1), np.int32),
            to_AL1=np.empty((A, L1)),
        )
        num_signed = self._devices.num_types if problem.use_all_devices else 0
        self._planes = CuttingPlanes(self._devices.count_R, num_signed, _SMOOTHING, _PATIENCE)
        self._exactly: guided.Exactly | None = None

    def everything(self) -> Kept:
        """Nothing is known yet."""
        C, L1 = self._seconds_CL1.shape
        return Kept(np.arange(C), np.zeros(L1, dtype=np.int64), np.zeros(len(self._devices.count_R)))

    def tightened(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """The same of the plans with no bottleneck above the limit and Σ below the cutoff; Σ inf: there is none.

        Prices bound Σ, and with the same prices the stages from each cut on are counted: fewer than some number would
        take Σ above the cutoff. With them there are more microbatches in flight, less fits, and the next bound is
        higher, until one is above the cutoff or little is gained.
        """
        before = -np.inf
        for _ in range(_MOST_ROUNDS):
            sum_seconds, prices_R = self._bound(known, limit, cutoff)
            known = replace(known, prices_R=prices_R, sum_seconds=max(sum_seconds, known.sum_seconds))
            missing = cutoff - sum_seconds
            is_far = missing > _NEAR * self._best.step_seconds
            if missing <= 0 or is_far or sum_seconds - before < _LEAST_GAIN * missing or self._best.is_late:
                break
            before = sum_seconds
            known = self._counted(known, limit, cutoff)
            if not len(known.among_K):
                return replace(known, sum_seconds=np.inf)
        return known

    def plan_under(self, known: Kept, limit: float, cutoff: float, width: int) -> Plan | None:
        """A plan with no bottleneck above the limit and Σ below the cutoff, if a beam at the known prices meets one."""
        problem, devices = self._problem, self._devices
        if not devices.bits or not self._windows(known, limit):
            return None
        if self._exactly is None:
            most = min(problem.most_stages, int(devices.count_R[: devices.num_types].sum()))
            need = [problem.in_flight(0, after + 1) for after in range(most)]
            self._exactly = guided.Exactly(StageTable.of(problem).costs, self._kept, np.array(need, dtype=np.int64))
        self._cheapest(limit, known, known.prices_R)
        found, starts, hows = guided.beam(
            guided.Aim(limit, cutoff, width, _MOST_LABELS),
            self._stages(known, known.prices_R),
            self._links,
            self._choices,
            devices.priced(known.prices_R, problem.use_all_devices),
            self._exactly,
        )
        if found == np.inf:
            return None
        stops = [*starts[1:], problem.num_layers]
        stages = (
            Stage(int(start), int(stop), problem.configurations[self._kept[c]])
            for start, stop, c in zip(starts, stops, hows, strict=True)
        )
        return Plan(tuple(stages), problem.schedule, problem.num_microbatches)

    def _windows(self, known: Kept, limit: float) -> bool:
        most_in_flight = float(self._problem.in_flight(0, self._problem.most_stages))
        among, after = known.among_K, known.after_L1
        return windows.furthest_stops(limit, most_in_flight, self._costs, among, after, self._furthest_CL)

    def _bound(self, known: Kept, limit: float, cutoff: float) -> tuple[float, Floats]:
        """A bound on Σ, up to the cutoff, and its prices."""
        if not self._windows(known, limit):
            return np.inf, known.prices_R
        is_among_C = np.zeros(len(self._furthest_CL), dtype=np.bool_)
        is_among_C[known.among_K] = True

        def allows(plan: PricedPlan) -> bool:
            assert plan.stages_3S is not None
            how, start, stop = plan.stages_3S
            return bool(is_among_C[how].all() and (self._furthest_CL[how, start] >= stop).all())

        return self._planes.bound(
            lambda prices_R: self._cheapest(limit, known, prices_R),
            allows=allows,
            cutoff=cutoff,
            most_price=float(self._seconds_CL1[:, -1].max()) + 1e-12,
            precision_seconds=_PRICE_PRECISION * self._best.step_seconds,
            prices_T=known.prices_R,
            is_late=lambda: self._best.is_late,
        )

    def _stages(self, known: Kept, prices_R: Floats) -> windows.Stages:
        price_C = self._devices.use_CR @ prices_R
        return windows.Stages(price_C, self._class_C, self._seconds_CL1, self._furthest_CL, known.among_K)

    def _cheapest(self, limit: float, known: Kept, prices_R: Floats) -> PricedPlan | None:
        choices = self._choices
        total, a = windows.cheapest(limit, self._stages(known, prices_R), self._links, choices)
        if total == np.inf:
            return None
        stages, stop, bottleneck = [], self._problem.num_layers, 0.0
        while stop > 0:
            c = choices.choice_AL1[a, stop]
            start = choices.start_CL1[c, stop]
            stages.append((c, start, stop))
            busy = self._costs.busy_CL1[c, stop] - self._costs.busy_CL1[c, start] + self._costs.per_step_C[c]
            bottleneck = max(bottleneck, float(busy))
            a, stop = choices.class_before_AL1[self._class_C[c], start], start
        stages_3S = np.array(stages, dtype=np.int64).T
        use_R = self._devices.use_CR[stages_3S[0]].sum(axis=0)
        return PricedPlan(float(total - use_R @ prices_R), bottleneck, use_R, stages_3S)

    def _counted(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """With more stages from each cut on, and without configurations, as the prices at hand prove.

        A plan of interest has Σ + prices · use ≤ `most`. Let every stage from a cut on cost `more` in addition: the
        least of that, less `more` for each stage there is, and the least of what is before, come to `most` at most.
        """
        prices_R, choices = known.prices_R, self._choices
        plan = self._cheapest(limit, known, prices_R)
        assert plan is not None and plan.stages_3S is not None
        slack = ROUNDING * (abs(cutoff) + float(self._devices.count_R @ np.abs(prices_R)))
        most = cutoff + float(self._devices.count_R @ prices_R) + slack
        stages = self._stages(known, prices_R)
        _, through_C = windows.downstream(limit, 0.0, stages, self._links, choices.to_AL1)
        each = (plan.sum_seconds + float(plan.use_T @ prices_R)) / plan.stages_3S.shape[1]
        after_L1 = known.after_L1
        for share in _STAGE_PRICES:
            more = share * each
            if more <= 0:
                continue
            here_AL1, _ = windows.downstream(limit, more, stages, self._links, choices.to_AL1)
            room_AL1 = most - choices.to_AL1  # −inf where nothing leads to a cut: no plan has it
            fewest_AL1 = np.where(np.isfinite(here_AL1) & np.isfinite(room_AL1), (here_AL1 - room_AL1) / more, np.inf)
            fewest_L1 = np.minimum(fewest_AL1.min(axis=0), self._problem.num_layers)[:-1]
            after_L1 = np.maximum(after_L1, np.append(np.ceil(fewest_L1 - _WHOLE), 0.0).astype(np.int64))
        among_K = known.among_K[through_C[known.among_K] <= most]
        return replace(known, among_K=among_K, after_L1=after_L1)


def _usable(costs: AdditiveCosts, price: float) -> NDArray[np.bool_]:
    """The layers that a plan cheaper than this can run under each configuration: numbers of one size.

    What takes longer than a whole plan, or more than a device's memory, is part of none; were it part of prefix sums,
    it would take the digits of all that follows.
    """
    most_bytes_C1 = costs.capacity_bytes_C[:, None] * (1 + ROUNDING)
    bytes_CL = costs.fixed_bytes_CL + np.maximum(costs.activation_bytes_CL, costs.step_bytes_CL)
    longest_CL = np.maximum(costs.seconds_CL, costs.per_step_seconds_CL)
    usable_CL: NDArray[np.bool_] = costs.can_run_CL & (longest_CL <= price) & (bytes_CL <= most_bytes_C1)
    return usable_CL


def _next_unusable(usable_CL: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[c, start]: the first layer from there on that is not usable; L if all are."""
    L = usable_CL.shape[1]
    at = np.where(usable_CL, L, np.arange(L))
    return np.ascontiguousarray(np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1])
