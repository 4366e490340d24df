"""Options with prices on devices: the bound that they prove, the options that they leave, and the labels between.

Letters: N = options, L1 = cut positions, T = device types, K = sets of prices; see
`shared.suffix_table`, `exact.priced_stages` and `exact.labels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem, Stage
from dejavu.plans.stage_costs import Floats
from dejavu.search._base import Incumbent, TooLargeError
from dejavu.search.exact import labels, priced_stages
from dejavu.search.exact.cutting_planes import CuttingPlanes, Enough, PricedPlan
from dejavu.search.shared.options import Options

Ints = NDArray[np.int64]

_PRICE_PRECISION = 2e-4  # of the best price so far: bounds are found to this


@dataclass(frozen=True, eq=False)
class Rows:
    """Some of the options, with a limit on the bottleneck, as the compiled loops want them.

    Attributes:
        rows: which of all options these are.
        by_stop: the options in order of their stops, and where each stop's begin.
    """

    limit: float
    rows: Ints
    start_N: Ints
    stop_N: Ints
    class_N: Ints
    seconds_N: Floats
    fits_N: Ints
    use_NT: Ints
    packed_N: Ints
    first_L1: Ints
    by_stop: tuple[Ints, Ints]


@dataclass(frozen=True, eq=False)
class Found:
    """What a search by labels came to.

    Attributes:
        rows: the options of the cheapest plan with Σ below the cutoff, in order; empty if none was met.
        sum_seconds: its Σ.
        is_proved: whether every label was looked at, so that there is no cheaper one.
    """

    rows: Ints
    sum_seconds: float
    is_proved: bool


class PricedOptions:
    """A problem's options, and what prices on devices say of them. Plans that are met on the way are offered."""

    def __init__(self, problem: Problem, options: Options, best: Incumbent) -> None:
        self.problem, self.options, self.best = problem, options, best
        types = list(problem.device_counts)
        self.count_T = np.array([problem.device_counts[name] for name in types], dtype=np.int64)
        self._bits = 62 // len(types)
        if max(self.count_T) >= 1 << (self._bits - 1):
            raise TooLargeError(
                f"exact search counts at most {(1 << (self._bits - 1)) - 1} devices of each of {len(types)} types; "
                f"found {max(self.count_T)}"
            )
        use_CT = np.zeros((len(problem.configurations), len(types)), dtype=np.int64)
        for c, configuration in enumerate(problem.configurations):
            use_CT[c, types.index(configuration.kind)] = configuration.num_devices
        self._use_NT = use_CT[options.configuration_N]
        self._packed_N = self._use_NT @ (1 << (self._bits * np.arange(len(types), dtype=np.int64)))
        self._start_N = np.repeat(np.arange(problem.num_layers), np.diff(options.first_L1))
        self._class_N = options.class_G[options.group_N]
        self._planes = CuttingPlanes(self.count_T, len(self.count_T) if problem.use_all_devices else 0)
        stages, links = options.seconds_N.max(initial=0.0), options.transfer_L1AA.max(initial=0.0)
        self.most_sum_seconds = 1.01 * problem.num_layers * float(stages + links) + 1e-9  # no plan has more

    def rows(self, among: Ints | None, limit: float) -> Rows:
        """The options among these (None: all) that are no busier than the limit."""
        o, L = self.options, self.problem.num_layers
        rows = np.flatnonzero(o.busy_N <= limit) if among is None else among[o.busy_N[among] <= limit]
        start, stop = self._start_N[rows], o.stop_N[rows]
        order = np.argsort(stop, kind="stable")
        return Rows(
            limit=limit,
            rows=rows,
            start_N=start,
            stop_N=stop,
            class_N=self._class_N[rows],
            seconds_N=o.seconds_N[rows],
            fits_N=o.fits_N[rows],
            use_NT=self._use_NT[rows],
            packed_N=self._packed_N[rows],
            first_L1=np.searchsorted(start, np.arange(L + 1)),
            by_stop=(order, np.searchsorted(stop[order], np.arange(L + 2))),
        )

    def bound(self, rows: Rows, cutoff: float, prices_T: Floats) -> tuple[float, Floats]:
        """The best bound on Σ that prices prove, up to the cutoff, and the prices; inf: no plan has these options."""

        def cheapest(prices_T: Floats) -> PricedPlan | None:
            tables = priced_stages.downstream(self._stages(rows, prices_T), self.options.rules(rows.limit))
            chosen = priced_stages.follow(rows.stop_N, rows.class_N, *tables[1:])
            if not len(chosen):
                return None
            use_T = rows.use_NT[chosen].sum(axis=0)
            self.offer(rows.rows[chosen])
            sum_seconds = float(tables[1].min() - use_T @ prices_T)
            return PricedPlan(sum_seconds, self.bottleneck_seconds(rows.rows[chosen]), use_T)

        found = self._planes.bound(
            cheapest,
            allows=lambda plan: plan.bottleneck_seconds <= rows.limit,
            cutoff=cutoff,
            most_price=1e3 * float(rows.seconds_N.max(initial=0.0)) + 1e-12,
            enough=Enough(_PRICE_PRECISION * min(self.best.step_seconds, self.most_sum_seconds)),
            prices_T=prices_T,
            is_late=lambda: self.best.is_late,
        )
        return found.sum_seconds, found.prices_T

    def fixed(self, rows: Rows, cutoff: float, prices_T: Floats) -> Rows:
        """Without the options that no plan with Σ below the cutoff can have."""
        stages, rules = self._stages(rows, prices_T), self.options.rules(rows.limit)
        through_N = priced_stages.through(
            stages, rules.need_J, priced_stages.upstream(stages, rules), priced_stages.downstream(stages, rules)[0]
        )
        return self.rows(rows.rows[through_N - float(prices_T @ self.count_T) < cutoff], rows.limit)

    def labels(self, rows: Rows, cutoff: float, prices_T: Floats, beam: int, work: float) -> Found:
        """The plan with the least Σ below the cutoff, as far as the beam and the work go."""
        prices_KT = self._around(prices_T)
        chosen, sum_seconds, state = labels.search(
            labels.Stages(rows.start_N, rows.class_N, rows.seconds_N, rows.fits_N, rows.packed_N, *rows.by_stop),
            self.options.rules(rows.limit),
            self._worse(rows.limit),
            labels.Devices(
                count_T=self.count_T,
                bits=self._bits,
                use_all=self.problem.use_all_devices,
                prices_KT=prices_KT,
                upstream_KL1JA=np.stack([self._upstream(rows, prices) for prices in prices_KT]),
            ),
            labels.Effort(cutoff, beam, work),
        )
        found = Found(rows.rows[chosen], sum_seconds, state == labels.DONE)
        if len(chosen):
            self.offer(found.rows)
        return found

    def offer(self, rows: Ints) -> None:
        """Price the plan of these options, if there are so many devices."""
        over = self._use_NT[rows].sum(axis=0) - self.count_T
        if over.any() if self.problem.use_all_devices else (over > 0).any():
            return
        stages, start = [], 0
        for i in rows:
            stop = int(self.options.stop_N[i])
            stages.append(Stage(start, stop, self.problem.configurations[self.options.configuration_N[i]]))
            start = stop
        self.best.offer(Plan(tuple(stages), self.problem.schedule, self.problem.num_microbatches))

    def bottleneck_seconds(self, rows: Ints) -> float:
        """Of the plan of these options."""
        o, classes = self.options, self._class_N[rows]
        links = o.link_busy_L1AA[self._start_N[rows[1:]], classes[:-1], classes[1:]]
        return max(float(o.busy_N[rows].max()), float(links.max(initial=0.0)))

    def _stages(self, rows: Rows, prices_T: Floats) -> priced_stages.Stages:
        cost_N = rows.seconds_N + rows.use_NT @ prices_T
        return priced_stages.Stages(
            rows.start_N, rows.stop_N, rows.class_N, rows.fits_N, cost_N, rows.first_L1, *rows.by_stop
        )

    def _upstream(self, rows: Rows, prices_T: Floats) -> Floats:
        return priced_stages.upstream(self._stages(rows, prices_T), self.options.rules(rows.limit))

    def _around(self, prices_T: Floats) -> Floats:
        """[k, t] The best prices, and others beside them: they see sooner that a label leaves too few of some type."""
        least = 0.1 * float(np.abs(prices_T).mean())
        dearer = [prices_T + (np.abs(prices_T) + least) * one for one in np.eye(len(prices_T))]
        return np.array([prices_T, *dearer, 3.0 * prices_T])

    def _worse(self, limit: float) -> Floats:
        """[cut, a, b] How much dearer, at most, class a is after a cut than class b, for any stage before it."""
        o = self.options
        x = np.where(o.link_busy_L1AA <= limit, o.transfer_L1AA, np.inf)
        with np.errstate(invalid="ignore"):
            more = x[:, :, :, None] - x[:, :, None, :]
        more[np.isnan(more)] = -np.inf  # neither can be reached
        return np.ascontiguousarray(more.max(axis=1))
