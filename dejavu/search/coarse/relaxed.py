"""A problem whose counts of devices have prices and whose messages are the least: what both bounds under a limit read.

Shape suffixes: C = configurations that are kept, L = layers, L1 = cut positions, A = link classes, R = resources: the
devices of each type, then rounded counts of them; N = levels, see `coarse.levels.counted`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from threading import Event
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem, price
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search._base import Incumbent
from dejavu.search.coarse import windows
from dejavu.search.coarse.undominated import Undominated
from dejavu.search.exact.cutting_planes import Bounded, CuttingPlanes, Enough, PlansMet, PricedPlan
from dejavu.search.shared.options import link_classes

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ROUNDING = 1e-8  # sums over thousands of layers, one after the other, err by less
_SMOOTHING = 0.6  # of the prices; a third to a half of the evaluations of none, for 20 to 30 prices
_PATIENCE = 0.1  # see `CuttingPlanes`
_MOST_BITS = 62  # of one integer; more types or devices are not packed, and no beam looks for plans


@dataclass(frozen=True, eq=False)
class States:
    """Where stages are counted in the state: states, and the configurations of stages from there.

    Attributes:
        alive_NL1: of each level and cut.
        used_NC: of each level.
    """

    alive_NL1: Flags
    used_NC: Flags

    @property
    def among_K(self) -> Ints:
        """The configurations of any level."""
        return np.flatnonzero(self.used_NC.any(axis=0))

    @property
    def num_levels(self) -> int:
        """Without that of no stages."""
        return len(self.alive_NL1) - 1

    def deeper(self, num_levels: int) -> States:
        """The same, where the last level stood for all from it on."""
        more = ((0, num_levels - self.num_levels), (0, 0))
        return States(np.pad(self.alive_NL1, more, mode="edge"), np.pad(self.used_NC, more, mode="edge"))

    def over(self, own_cuts: Ints, cuts_L1: Ints, num_levels: int) -> States:
        """About the same over more cuts and other levels: next to the cuts that these are of."""
        states = self.deeper(num_levels) if num_levels > self.num_levels else self
        alive_NL1, used_NC = states.alive_NL1[: num_levels + 1].copy(), states.used_NC[: num_levels + 1].copy()
        alive_NL1[-1] |= states.alive_NL1[num_levels + 1 :].any(axis=0)  # the last level stands for all from it on
        used_NC[-1] |= states.used_NC[num_levels + 1 :].any(axis=0)
        before = np.maximum(np.searchsorted(own_cuts, cuts_L1, side="right") - 1, 0)
        after = np.minimum(before + 1, len(own_cuts) - 1)
        return States(alive_NL1[:, before] | alive_NL1[:, after], used_NC)

    def among(self, other: States) -> States:
        """Those of the other that are here, too."""
        return States(self.alive_NL1 & other.alive_NL1, self.used_NC & other.used_NC)

    def with_those(self, other: States | None) -> States:
        """These and the others, where these are of as many levels and cuts."""
        if other is None or other.alive_NL1.shape != self.alive_NL1.shape:
            return self
        return States(self.alive_NL1 | other.alive_NL1, self.used_NC | other.used_NC)


@dataclass(frozen=True, eq=False)
class Through:
    """The least Σ with prices of plans that have a state, or a configuration there, under a limit or a lower one.

    Attributes:
        seconds_NL1, seconds_NC: inf: there is no such plan whose Σ is below the cutoff.
        spent_seconds: what all devices cost at these prices, and what sums may err by.
    """

    seconds_NL1: Floats
    seconds_NC: Floats
    spent_seconds: float
    cutoff: float

    def below(self, sum_seconds: float) -> States:
        """Those with a plan whose Σ is no more than this, as far as these prices say."""
        most = sum_seconds + self.spent_seconds + ROUNDING * abs(sum_seconds)
        return States(self.seconds_NL1 <= most, self.seconds_NC <= most)


@dataclass(frozen=True, eq=False)
class Kept:
    """What is known of some plans: those within a range of bottlenecks, and cheaper than some price.

    Attributes:
        among_K: they have stages of these configurations only.
        after_L1: they have at least so many stages from each cut on, where they have that cut.
        most_L1: and at most so many; None: that was not looked at.
        prices_R: the prices to go on from: those that proved most, or that are next.
        sum_seconds: none of them has a lower Σ.
        states: they have these only; None: stages were not counted in the state.
        near: those next to the plans that are the cheapest at the best prices; maybe those of another limit.
        through: of the states that were left before, at the prices that were known then.
        cutoff: of Σ of the plans that these states hold.
        about_seconds: no prices prove more than this for Σ; inf: that is not known.
        proved_R, proved_seconds: the prices that proved most, where stages are counted in the state, and what.
    """

    among_K: Ints
    after_L1: Ints
    prices_R: Floats
    sum_seconds: float = 0.0
    most_L1: Ints | None = None
    states: States | None = None
    near: States | None = None
    through: Through | None = None
    cutoff: float = np.inf
    about_seconds: float = np.inf
    proved_R: Floats | None = None
    proved_seconds: float = -np.inf


class Met(NamedTuple):
    """Prices that were the best under some limit, and the states near there; with these cuts.

    Attributes:
        has_plans: some are left there; else prices rise without end, and are of use under lower limits only.
    """

    limit: float
    known: Kept
    cuts_L1: Ints
    has_plans: bool = True


class Packed(NamedTuple):
    """Devices packed into one number: a field for each type, with a spare bit above it.

    Attributes:
        packed_C: of a stage.
        guard, have: all spare bits; all devices.
        use_all: none may stay idle.
    """

    packed_C: Ints
    guard: int
    have: int
    use_all: bool


@dataclass(frozen=True, eq=False)
class Devices:
    """The resources, and how the devices of a stage are packed into one number; see `Packed`.

    Attributes:
        bits: of one type's field; 0: there are too many.
    """

    use_CR: Ints
    count_R: Ints
    num_types: int
    packed_C: Ints
    bits: int

    @classmethod
    def of(cls, problem: Problem, kept: Ints) -> Devices:
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
            use_CT[row, types.index(configuration.kind)] = configuration.num_devices
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

    def packed(self, use_all: bool) -> Packed:
        """`use_all`: none may stay idle."""
        shifts = self.bits * np.arange(self.num_types, dtype=np.int64)
        return Packed(
            packed_C=self.packed_C,
            guard=int(((1 << (self.bits - 1)) << shifts).sum()),
            have=int((self.count_R[: self.num_types] << shifts).sum()),
            use_all=use_all,
        )


class Relaxed:
    """The relaxed problem. Messages at a stage's cuts are taken at their least over all cuts.

    Attributes:
        kept: the configurations of the problem that are looked at.
        devices, costs, links, class_C, seconds_CL1: see there, and `windows.Stages`.
        cuts_L1: which of the problem's cuts there are.
        most_price: of a device, in seconds.
        size_seconds: of which precision is a share where there is no plan yet: all layers, where they are fastest.
        planes: the plans that prices brought forth, under any limit, without counting stages in the state.
        met: the same with stages in the state, over any of the problem's cuts.
    """

    def __init__(self, problem: Problem, best: Incumbent, kept: Ints | None = None) -> None:
        """`kept`: configurations that are not dominated; found out where it is not given."""
        costs = problem.costs
        assert isinstance(costs, AdditiveCosts)
        self.problem, self.best = problem, best
        self.cuts_L1 = np.arange(problem.num_layers + 1)
        self.kept = kept = Undominated.of(problem).kept if kept is None else kept
        self.devices = Devices.of(problem, kept)
        class_C, heads = link_classes(problem)
        self.class_C = class_C[kept]
        usable_CL = _usable(costs, best.step_seconds)[kept]

        def prefix(table_CL: Floats) -> Floats:
            return np.pad(np.cumsum(np.where(usable_CL, table_CL[kept], 0.0), axis=1), ((0, 0), (1, 0)))

        self.seconds_CL1 = prefix(costs.seconds_CL)
        self.most_price = float(self.seconds_CL1[:, -1].max()) + 1e-12
        fastest_L = np.where(usable_CL, costs.seconds_CL[kept], np.inf).min(axis=0)
        self.size_seconds = float(fastest_L[np.isfinite(fastest_L)].sum())
        repeats = float(problem.num_microbatches - 1)
        self.costs = windows.Costs(
            busy_CL1=repeats * self.seconds_CL1 + prefix(costs.per_step_seconds_CL),
            per_step_C=costs.per_step_latency_seconds_C[kept],
            fixed_CL1=prefix(costs.fixed_bytes_CL),
            active_CL1=prefix(costs.activation_bytes_CL),
            step_CL1=prefix(costs.step_bytes_CL),
            scratch_CL=np.ascontiguousarray(costs.temporary_bytes_CL[kept]),
            # A hair more than there is: sums in another order must not make a stage that just fits too large.
            capacity_C=costs.capacity_bytes_C[kept] * (1 + ROUNDING) - costs.message_bytes_CL1.min(axis=1)[kept],
            end_CL=_next_unusable(usable_CL),
        )
        self.links = windows.Links(
            repeats=repeats,
            latency_AA=problem.link_latency_seconds_CC[np.ix_(heads, heads)],
            per_byte_AA=problem.link_seconds_per_byte_CC[np.ix_(heads, heads)],
            bytes_L1=problem.cut_bytes_L1,
        )
        num_signed = self.devices.num_types if problem.use_all_devices else 0
        self.planes = CuttingPlanes(self.devices.count_R, num_signed, _SMOOTHING, _PATIENCE)
        self.met = PlansMet()

    def at_cuts(self, cuts: Ints) -> Relaxed:
        """The same with these cuts only, 0 and L among them, without plans: quick, and no bound on the others'."""
        few = copy(self)
        few.cuts_L1 = cuts
        costs, last = self.costs, cuts[1:] - 1
        few.seconds_CL1 = np.ascontiguousarray(self.seconds_CL1[:, cuts])
        few.costs = costs._replace(
            busy_CL1=np.ascontiguousarray(costs.busy_CL1[:, cuts]),
            fixed_CL1=np.ascontiguousarray(costs.fixed_CL1[:, cuts]),
            active_CL1=np.ascontiguousarray(costs.active_CL1[:, cuts]),
            step_CL1=np.ascontiguousarray(costs.step_CL1[:, cuts]),
            scratch_CL=np.ascontiguousarray(np.maximum.reduceat(costs.scratch_CL, cuts[:-1], axis=1)),
            end_CL=_next_unusable(costs.end_CL[:, cuts[:-1]] > last),
        )
        few.links = self.links._replace(bytes_L1=self.links.bytes_L1[cuts])
        few.planes = self.planes.anew()
        return few

    def ending_early(self, early: float) -> Relaxed:
        """The same where so much of what is between a stage's last two cuts takes it no time and no memory."""
        roomy = copy(self)
        roomy.costs = self.costs._replace(early=early)
        return roomy

    def without_seconds(self) -> Relaxed:
        """The same where only the prices of devices cost anything, of which each is 1 at most; without plans."""
        idle, links = copy(self), self.links
        idle.seconds_CL1 = np.zeros_like(self.seconds_CL1)
        idle.links = links._replace(latency_AA=0.0 * links.latency_AA, per_byte_AA=0.0 * links.per_byte_AA)
        idle.planes, idle.met, idle.most_price, idle.size_seconds = self.planes.anew(), PlansMet(), 1.0, 1.0
        return idle

    @property
    def about_seconds(self) -> float:
        """The size of a step: the best plan's, where there is one."""
        return self.size_seconds if self.best.plan is None else self.best.step_seconds

    @property
    def place_L1(self) -> Ints:
        """Of the problem's cuts among these; −1: it is none of them."""
        place_L1 = np.full(self.problem.num_layers + 1, -1)
        place_L1[self.cuts_L1] = np.arange(len(self.cuts_L1))
        return place_L1

    @cached_property
    def better_CC(self) -> NDArray[np.bool_]:
        """[j, k]: j takes devices and has links as k, and is in no layer slower or busier; memory is not looked at."""
        seconds_CL, busy_CL = np.diff(self.seconds_CL1, axis=1), np.diff(self.costs.busy_CL1, axis=1)
        found = np.zeros((len(self.kept), len(self.kept)), dtype=np.bool_)
        _, group_C = np.unique(np.column_stack([self.devices.use_CR, self.class_C]), axis=0, return_inverse=True)
        for group in range(int(group_C.max()) + 1):
            members = np.flatnonzero(group_C == group)
            for j, k in permutations(members, 2):
                found[j, k] = (
                    self.costs.per_step_C[j] <= self.costs.per_step_C[k]
                    and (seconds_CL[j] <= seconds_CL[k]).all()
                    and (busy_CL[j] <= busy_CL[k]).all()
                )
        return found

    @property
    def most_stages(self) -> int:
        """The most that a plan can have: of layers, and of devices."""
        return min(self.problem.most_stages, int(self.devices.count_R[: self.devices.num_types].sum()))

    @property
    def num_stages(self) -> int:
        """Of the best plan; as many as a plan can have where there is none yet."""
        return self.most_stages if self.best.plan is None else len(self.best.plan.stages)

    def bound(
        self,
        planes: CuttingPlanes,
        cheapest: Callable[[Floats], PricedPlan | None],
        allows: Callable[[PricedPlan], bool],
        cutoff: float,
        prices_R: Floats,
        enough: Enough,
        until: Event | None = None,
    ) -> Bounded:
        """See `CuttingPlanes.bound`; `until`: it stops once this is set."""
        return planes.bound(
            cheapest,
            allows=allows,
            cutoff=cutoff,
            most_price=self.most_price,
            enough=enough,
            prices_T=prices_R,
            is_late=lambda: self.best.is_late or (until is not None and until.is_set()),
        )

    def enough(self, share: float, near_seconds: float = 0.0) -> Enough:
        """`share`: of the best price, to which a bound is found."""
        return Enough(share * self.about_seconds, near_seconds)

    def plan(self, priced_seconds: float, prices_R: Floats, stages_3S: Ints) -> PricedPlan:
        """The plan of these stages (configuration, start, stop), which cost so much with prices."""
        how, start, stop = stages_3S
        use_R = self.devices.use_CR[how].sum(axis=0)
        of_problem_3S = np.stack([how, self.cuts_L1[start], self.cuts_L1[stop]])
        bottleneck = self.bottleneck_seconds(stages_3S)
        return PricedPlan(float(priced_seconds - use_R @ prices_R), bottleneck, use_R, of_problem_3S)

    def bottleneck_seconds(self, stages_3S: Ints) -> float:
        """Of stages (configuration, start, stop) between these cuts."""
        how, start, stop = stages_3S
        upto, busy_CL1 = self.costs.busy_CL1[how, stop], self.costs.busy_CL1
        busy = upto - self.costs.early * (upto - busy_CL1[how, stop - 1]) - busy_CL1[how, start]
        before, after, links = self.class_C[how[:-1]], self.class_C[how[1:]], self.links
        message = links.latency_AA[before, after] + links.per_byte_AA[before, after] * links.bytes_L1[start[1:]]
        longest = float((busy + self.costs.per_step_C[how]).max())
        return max(longest, links.repeats * 2.0 * float(message.max(initial=0.0)))


def apart(one_seconds: float, other_seconds: float) -> float:
    """How far two limits are from each other, relative to their size; 0 where both are 0."""
    return abs(one_seconds - other_seconds) / ((one_seconds + other_seconds) or 1.0)


def bottleneck_seconds(problem: Problem, plan: Plan) -> float:
    """What a plan's step takes beside Σ of its stages and transfers."""
    cost = price(problem, plan)
    return cost.step_seconds - sum(cost.stage_seconds) - sum(cost.transfer_seconds)


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
