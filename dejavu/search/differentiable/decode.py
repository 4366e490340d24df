"""From prices on devices and a limit on the bottleneck to plans, whole or window by window.

Letters as in `rounding`; T = device types, S = stages of a plan. A plan is the array of its options, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dejavu.plans import Plan, Problem, Stage
from dejavu.plans.stage_costs import Floats
from dejavu.search.differentiable import rounding
from dejavu.search.shared.options import Ints, Options

_ROUNDING = 1e-9  # sums in different orders agree to this, relative
_SHORTER = 0.97  # of the bottleneck: what a window that holds it is asked to stay below


@dataclass(frozen=True, eq=False)
class Window:
    """Layers lo to hi of a plan, and what is kept around them.

    Attributes:
        level, class_after: level of the stages after it, and the class of the first of them; −1: none.
        outside_T: devices of the stages that are kept.
        front_JA: the transfer to the first stage, by its class and level; inf where the stages before would not fit.
    """

    lo: int
    hi: int
    level: int
    class_after: int
    outside_T: Ints
    front_JA: Floats


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decoding found.

    Attributes:
        chosen: options of the window in order; empty if none was found below the cutoff.
        is_complete: nothing was dropped: under the limit there is no smaller sum, nor any below the cutoff.
    """

    chosen: Ints
    is_complete: bool


class Decoder:
    """Decodes prices into plans of one problem.

    Attributes:
        options: the stages that plans are made of.
        counts_T: devices of each type.
        type_G, taken_G: the device type of a group, and how many devices a stage of it takes.
    """

    def __init__(self, problem: Problem, options: Options) -> None:
        self._problem, self.options = problem, options
        self.counts_T = np.array(list(problem.device_counts.values()), dtype=np.int64)
        self._stride_T = np.concatenate([[1], np.cumprod(self.counts_T + 1)[:-1]]).astype(np.int64)
        # A type without devices has no group, and ends where the type before it does.
        self.type_G = np.searchsorted(self._stride_T * (self.counts_T + 1), options.block_G).astype(np.int64)
        self.taken_G = options.offset_G // self._stride_T[self.type_G]

    @cached_property
    def _start_N(self) -> Ints:
        return np.repeat(np.arange(self._problem.num_layers), np.diff(self.options.first_L1))

    def values(self, least_L1: Floats) -> Floats:
        """What a device of each type is worth, all devices together 1: its speed on the stages that it can hold.

        least_L1: least seconds up to each cut on any device, the measure of a stage's work.
        """
        o = self.options
        reached_L1 = np.where(np.isfinite(least_L1), least_L1, 0.0)  # a cut that no stages reach has no plan either
        work_N = reached_L1[o.stop_N] - reached_L1[self._start_N]
        type_N = self.type_G[o.group_N]
        spent_N = self.taken_G[o.group_N] * o.seconds_N
        speed_T = np.zeros(len(self.counts_T))
        for t in range(len(speed_T)):
            of_type = (type_N == t) & (spent_N > 0) & (work_N > 0)
            if of_type.any():
                speed_T[t] = float(np.median(work_N[of_type] / spent_N[of_type]))
        total = float(speed_T @ self.counts_T)
        return speed_T / total if total > 0 else speed_T

    def whole(
        self, price_T: Floats, limit: float, cutoff: float, width: int, prior_LG: Floats | None = None
    ) -> Decoded:
        """The cheapest plan that a beam of this width finds, none busier than the limit, its sum below the cutoff."""
        L1, J, A, _ = self.options.table_shape
        everything = Window(0, L1 - 1, 0, -1, np.zeros_like(self.counts_T), np.zeros((J, A)))
        return self._decode(everything, price_T, limit, cutoff, width, prior_LG)

    def _decode(
        self,
        window: Window,
        price_T: Floats,
        limit: float,
        cutoff: float,
        width: int,
        prior_LG: Floats | None = None,
    ) -> Decoded:
        o, lo, hi = self.options, window.lo, window.hi
        L1, J, A, _ = o.table_shape
        within = slice(o.first_L1[lo], o.first_L1[hi])
        kept = within.start + np.flatnonzero((o.busy_N[within] <= limit) & (o.stop_N[within] <= hi))
        first_L1 = np.searchsorted(kept, o.first_L1)
        stop_N, group_N, seconds_N = o.stop_N[kept], o.group_N[kept], o.seconds_N[kept]
        price_G = np.ascontiguousarray(price_T[self.type_G] * self.taken_G)
        cost_N = seconds_N + price_G[group_N]
        stages = rounding.Stages(first_L1, stop_N, group_N, seconds_N, o.fits_N[kept], cost_N)
        groups = rounding.Groups(o.offset_G, o.block_G, o.class_G, price_G)
        rules = o.rules(limit)

        def prefix(cost_N: Floats, transfer_weight: float, front_JA: Floats) -> Floats:
            table = np.full((L1, J, A), np.inf)
            table[lo] = front_JA
            rounding.prefix_costs(stages._replace(cost_N=cost_N), o.class_G, rules, lo, hi, transfer_weight, table)
            return table

        bound_L1JA = guide_L1JA = prefix(cost_N, 1.0, window.front_JA)
        spend_L1JA = prefix(price_G[group_N], 0.0, np.where(window.front_JA < np.inf, 0.0, np.inf))
        if prior_LG is not None:
            upto = np.pad(np.cumsum(prior_LG, axis=0), ((1, 0), (0, 0)))
            cost_N = cost_N + upto[stop_N, group_N] - upto[self._start_N[kept], group_N]
            guide_L1JA = prefix(cost_N, 1.0, window.front_JA)
        prefixes = rounding.Prefixes(guide_L1JA, bound_L1JA, spend_L1JA)
        surroundings = rounding.Surroundings(window.level, window.class_after, int(window.outside_T @ self._stride_T))
        budget = float(price_T @ (self.counts_T - window.outside_T))
        goal = rounding.Goal(
            cutoff=cutoff,
            ceiling=cutoff + budget + _ROUNDING * (cutoff + abs(budget)),
            budget=budget + _ROUNDING * abs(budget),
            whole_devices=int(self.counts_T @ self._stride_T) if o.use_all_devices else -1,
        )
        problem = (stages._replace(cost_N=cost_N), groups, rules, prefixes)
        chosen, complete = rounding.beam(lo, hi, width, problem, surroundings, goal)
        return Decoded(kept[chosen], complete)

    def plan(self, chosen: Ints) -> Plan:
        """The plan of these options."""
        o, problem, stages, start = self.options, self._problem, [], 0
        for i in chosen:
            stages.append(Stage(start, int(o.stop_N[i]), problem.configurations[o.configuration_N[i]]))
            start = int(o.stop_N[i])
        return Plan(tuple(stages), problem.schedule, problem.num_microbatches)

    def busy(self, chosen: Ints) -> Floats:
        """What each stage of a plan, or the link after it, is busy with besides the fill: the larger of the two."""
        o = self.options
        class_S = o.class_G[o.group_N[chosen]]
        links = o.link_busy_L1AA[o.stop_N[chosen[:-1]], class_S[:-1], class_S[1:]]
        larger_S: Floats = np.maximum(o.busy_N[chosen], np.append(links, 0.0))
        return larger_S

    def improve(self, chosen: Ints, price_T: Floats, width: int, size: int, out_of_time: Callable[[], bool]) -> Ints:
        """The plan after one pass in which each `size` neighbouring stages were decoded anew, all others kept.

        Devices of the window and idle ones may go to it; its stages may become more or fewer. A window that holds the
        bottleneck is also asked to stay below it, for which its sum may grow by as much.
        """
        s = 0
        while (s == 0 or s + size <= len(chosen)) and not out_of_time():
            stop = min(s + size, len(chosen))
            busy_S = self.busy(chosen)
            bottleneck = float(busy_S.max())
            others = float(np.delete(busy_S, np.s_[max(s - 1, 0) : stop]).max(initial=0.0))
            second = float(np.sort(busy_S)[-2]) if len(busy_S) > 1 else 0.0
            limits = [bottleneck]
            if others < bottleneck:
                limits += [max(second, others), max(_SHORTER * bottleneck, others)]
            for limit in dict.fromkeys(limits):
                window = self._window(chosen, s, stop, limit)
                cutoff = (self._sum(chosen, s, stop) + bottleneck - limit) * (1 - _ROUNDING)
                found = self._decode(window, price_T, limit, cutoff, width).chosen
                if len(found):
                    chosen = np.concatenate([chosen[:s], found, chosen[stop:]])
                    break
            s += 1
        return chosen

    def _window(self, chosen: Ints, s: int, stop: int, limit: float) -> Window:
        """The window of stages s to stop − 1."""
        o = self.options
        J, S = len(o.need_J), len(chosen)
        group_S = o.group_N[chosen]
        class_S = o.class_G[group_S]
        outside_T = np.zeros_like(self.counts_T)
        outside = np.delete(group_S, np.s_[s:stop])
        np.add.at(outside_T, self.type_G[outside], self.taken_G[outside])
        lo = int(o.stop_N[chosen[s - 1]]) if s else 0
        front_JA = np.zeros((J, o.num_classes))
        if s:
            front_JA[:] = o.transfer_L1AA[lo, class_S[s - 1]]
            front_JA[:, o.link_busy_L1AA[lo, class_S[s - 1]] > limit] = np.inf
            for j in range(J):  # with j stages from the window on, do those before it still fit?
                need = o.need_J[np.minimum(j + np.arange(s)[::-1], J - 1)]
                if (o.fits_N[chosen[:s]] < need).any():
                    front_JA[j] = np.inf
        class_after = int(class_S[stop]) if stop < S else -1
        return Window(lo, int(o.stop_N[chosen[stop - 1]]), min(S - stop, J - 1), class_after, outside_T, front_JA)

    def _sum(self, chosen: Ints, s: int, stop: int) -> float:
        """Seconds of stages s to stop − 1 and of the transfers before, between and after them."""
        o = self.options
        class_S = o.class_G[o.group_N[chosen]]
        before = np.arange(max(s - 1, 0), min(stop, len(chosen) - 1))
        transfers = o.transfer_L1AA[o.stop_N[chosen[before]], class_S[before], class_S[before + 1]]
        return float(o.seconds_N[chosen[s:stop]].sum() + transfers.sum())
