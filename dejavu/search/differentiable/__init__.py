"""Architecture parameters by gradient, as DARTS does for networks, on a smoothed dynamic program over pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dejavu.plans import Answer, Obstacle, Plan, Problem, price
from dejavu.plans.stage_costs import Floats
from dejavu.search._base import Incumbent, Search
from dejavu.search.differentiable.decode import Decoder
from dejavu.search.shared import suffix_table
from dejavu.search.shared.compiling import tiny_problem
from dejavu.search.shared.options import Ints, Options, check_number_of_options

if TYPE_CHECKING:
    from dejavu.search.differentiable.relaxed import Relaxed

_HIGHEST_LIMIT = 1.03  # of the best plan's bottleneck: the first limit that prices are decoded for
_LIMIT_STEP = 0.03  # from limit to limit; restarts are apart by fractions of it
_LIMITS_PER_RESTART = 6  # the last at 0.88 to 0.85 of the best plan's bottleneck
_WITH_PRIOR = 3  # every third decoding takes the parameters as well as the prices
_LIMIT_LADDER = (0.9, 0.7, 0.5, 0.35)  # of the best step time: bottlenecks that the first plans are asked for
_BILL_LADDER = (0.3, 0.1)  # of the best step time: what all devices together cost while the first plans are decoded
_FIRST_BILLS = (1.0, 10.0, 0.1)  # of the least Σ on any devices: the same, before there is a plan
_FIRST_WIDTHS = (30, 300, 3_000)  # states of the beam for the first plans; wider while none was found
_TINY_STATES = 30_000  # options × ways to leave devices: below, every state is tried, for every bottleneck
_TINY_WIDTH = 2_000  # states of the beam that tries them all
_ELITE = 3  # plans that are improved window by window
_WINDOWS = (2, 3)  # neighbouring stages that are decoded anew together
_PROGRESS = 1e-4  # a round that gains less, relative, is in vain
_ROUNDING = 1e-9  # a bound of complete decodings holds up to this, relative
_LEAST_SECONDS = 0.3  # with less left no descent begins: the beam's plans are all there is
_SEEDS_APART = 1_000_003  # between the seeds of rounds


@dataclass(frozen=True)
class Differentiable(Search):
    """Gradient descent on relaxed plans, many at once, each rounded by a beam that its prices guide.

    Architecture parameters A (restarts × blocks of layers × groups of configurations) go through a softmax; cuts are
    relaxed by a smoothed dynamic program (log-sum-exp for min) whose expectations are differentiable; device counts and
    memory are constraints with multipliers; the maximum over stages is a norm; all cools down together. The idea of
    parameters is DARTS's (Liu et al., ICLR 2019), that of smoothed programs Mensch and Blondel's (ICML 2018).

    What a restart has learnt, prices of devices and preferences of layers, is decoded by a beam over suffixes of plans
    that counts devices and memory exactly, so every plan is feasible; the best few are improved window by window.

    Proves nothing, except where a problem is so small that the beam tries everything. Choose it for a near-optimal plan
    of some hundred layers in seconds where the exact search does not end.

    Attributes:
        num_restarts: rows of the batched tensor; None: 32 on a CPU, 256 where there is a GPU, which is then used.
        num_steps: gradient steps of each restart; 0: parameters and prices stay random, to see what the gradient adds.
        num_decoded: restarts that are rounded, the least relaxed loss first.
        beam_width: states that the beam keeps at each cut in the first round; in the nth n times as many.
        max_blocks: blocks of layers that the relaxation cuts between; the beam knows all cuts.
        num_rounds: descents, each pruned by the best plan so far; ends after one that gains nothing.
        incumbent: a plan to start from, of another search; half of the restarts lean towards it.
        max_options_bytes: problems with more stages to list are refused.
    """

    name: ClassVar[str] = "differentiable"
    num_restarts: int | None = None
    num_steps: int = 20
    num_decoded: int = 16
    beam_width: int = 100
    max_blocks: int = 24
    num_rounds: int = 5
    incumbent: Plan | None = None
    max_options_bytes: float = 4 * 2**30

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        check_number_of_options(problem, self.name, self.max_options_bytes)
        if self.incumbent is not None:
            best.offer(self.incumbent)
        with best.clock_stopped():
            _load_compiled_loops()
        if best.step_seconds == 0:  # no plan is cheaper, and prices in units of this one would be none
            return best.result(0.0)
        rounding = _Rounding(problem, Decoder(problem, Options.of(problem)), best)
        if rounding.try_everything():
            if best.plan is None:
                return best.infeasible(
                    "no plan fits the devices and their memory: all ways to cut and to spread were tried"
                )
            return best.result(best.step_seconds * (1 - _ROUNDING))
        if rounding.first_plans():
            return best.infeasible("no plan fits the devices and their memory: no state of the beam was dropped")
        if best.plan is None:
            late = best.remaining_seconds < 0
            obstacle = Obstacle.OUT_OF_TIME if late else Obstacle.NONE_CONSIDERED_FITS
            return best.not_found(obstacle, "no plan that fits was met; the beam dropped states that may lead to one")
        for number in range(self.num_rounds):
            if best.remaining_seconds < _LEAST_SECONDS or best.step_seconds == 0:
                break
            before = best.step_seconds
            self._round(rounding, best, number, seed)
            if best.step_seconds > before * (1 - _PROGRESS):
                break
        return best.result(lower_bound_seconds=0.0)

    def _round(self, rounding: _Rounding, best: Incumbent, number: int, seed: int) -> None:
        """Descend, decode, improve."""
        relaxed = self._learnt(rounding, best, number, seed)
        width = self.beam_width * (1 + number)
        for place, r in enumerate(np.argsort(relaxed.loss_R, kind="stable")[: self.num_decoded]):
            for k in range(_LIMITS_PER_RESTART):
                if best.remaining_seconds < 0:
                    return
                # Hardly any plan's bottleneck is the limit itself, so that every limit counts: no two are the same.
                part = _HIGHEST_LIMIT - _LIMIT_STEP * (k + place / self.num_decoded)
                limit = part * rounding.bottleneck_seconds
                floor = limit - _LIMIT_STEP * rounding.bottleneck_seconds
                prior_LG = relaxed.prior_RLG[r] if (k + place) % _WITH_PRIOR == 0 else None
                rounding.decode(relaxed.price_RT[r], limit, floor, width, prior_LG)
        rounding.improve(width)

    def _learnt(self, rounding: _Rounding, best: Incumbent, number: int, seed: int) -> Relaxed:
        """What the restarts of a round learn by descending."""
        with best.clock_stopped():  # torch takes a second to load, once in a process, and not for the smallest budgets
            from dejavu.search.differentiable.relaxed import Relaxation
            from dejavu.search.differentiable.torch_threads import one_thread
        decoder = rounding.decoder
        with one_thread():
            relaxation = Relaxation(
                decoder.options, decoder.counts_T, decoder.type_G, decoder.taken_G, best.step_seconds, self.max_blocks
            )
            lean_L = rounding.groups_of(best.plan) if self.incumbent is not None else None
            point = relaxation.start(self.num_restarts, seed + _SEEDS_APART * number, rounding.value_T, lean_L)
            return relaxation.descend(point, self.num_steps, lambda: best.remaining_seconds < _LEAST_SECONDS / 2)


class _Rounding:
    """Decodes prices for one problem, offers what it finds, and remembers the best few with their prices.

    Attributes:
        decoder: of the problem.
        value_T: what a device of each type is worth, all devices together 1.
        bottleneck_seconds: of the best plan.
    """

    def __init__(self, problem: Problem, decoder: Decoder, best: Incumbent) -> None:
        o = decoder.options
        self.decoder, self._problem, self._best = decoder, problem, best
        least_L1, bottleneck_L1 = suffix_table.chain_bounds(o.first_L1, o.stop_N, o.seconds_N, o.busy_N)
        self.value_T = decoder.values(least_L1)
        self._least_sum, self._least_bottleneck = float(least_L1[-1]), float(bottleneck_L1[-1])
        self._elite: list[tuple[float, tuple[int, ...], Floats]] = []  # price, options, prices of devices
        self.bottleneck_seconds = np.inf
        if best.plan is not None:
            parts = price(problem, best.plan)
            fill = sum(parts.stage_seconds) + sum(parts.transfer_seconds)
            self.bottleneck_seconds = best.step_seconds - fill

    def decode(
        self, price_T: Floats, limit: float, floor: float, width: int, prior_LG: Floats | None = None
    ) -> tuple[Ints, bool]:
        """One decoding, offered: the plan's options, if any, and whether nothing was dropped.

        Only plans better than the best are looked for, and that only if their bottleneck is not below the floor.
        """
        cutoff = self._best.step_seconds - max(floor, self._least_bottleneck)
        found = self.decoder.whole(price_T, limit, cutoff, width, prior_LG)
        if len(found.chosen):
            self._offer(found.chosen, price_T)
        return found.chosen, found.is_complete

    def _offer(self, chosen: Ints, price_T: Floats) -> float:
        before = self._best.step_seconds
        seconds = self._best.offer(self.decoder.plan(chosen))
        if seconds < before:
            self.bottleneck_seconds = float(self.decoder.busy(chosen).max())
        entry = (seconds, tuple(int(i) for i in chosen), price_T)
        if all(entry[1] != other[1] for other in self._elite):
            self._elite = sorted([*self._elite, entry], key=lambda e: e[:2])[:_ELITE]
        return seconds

    def try_everything(self) -> bool:
        """For a tiny problem, the cheapest plan under every bottleneck.

        Returns:
            Whether that was done to the end: if there is no plan then, it is proved that there is none.
        """
        o = self.decoder.options
        if len(o.stop_N) * o.num_device_vectors > _TINY_STATES:
            return False
        limit, free_T = np.inf, np.zeros(len(self.decoder.counts_T))
        while not self._best.is_late:
            chosen, complete = self.decode(free_T, limit, 0.0, _TINY_WIDTH)
            if not complete:
                return False
            if not len(chosen):
                return True
            limit = np.nextafter(float(self.decoder.busy(chosen).max()), 0.0)
        return False

    def first_plans(self) -> bool:
        """Plans at prices by the speed of device types, for a ladder of bottlenecks.

        Returns:
            Whether it is proved that there is no plan: no stages cover the layers, or a beam under no limit ended
            empty, and dropped nothing.
        """
        if self._least_sum == np.inf:  # no stages cover the layers, whatever the devices: nothing to price them by
            return True
        for width in _FIRST_WIDTHS:
            for bill in _FIRST_BILLS:
                if self._best.plan is None and (width == _FIRST_WIDTHS[0] or self._best.remaining_seconds > 0):
                    chosen, complete = self.decode(bill * self._least_sum * self.value_T, np.inf, 0.0, width)
                    if complete and not len(chosen):
                        return True
        if self._best.plan is None:
            return False
        for part in _LIMIT_LADDER:
            for bill in _BILL_LADDER:
                if self._best.remaining_seconds < 0:
                    return False
                now = self._best.step_seconds
                self.decode(bill * now * self.value_T, part * now, 0.0, _FIRST_WIDTHS[0])
        return False

    def improve(self, width: int) -> None:
        """Window by window, the best few plans, until nothing improves."""
        for before, options, price_T in list(self._elite):
            chosen = np.array(options, dtype=np.int64)
            while self._best.remaining_seconds > 0:
                for window in _WINDOWS:
                    chosen = self.decoder.improve(chosen, price_T, width, window, lambda: self._best.is_late)
                after = self._offer(chosen, price_T)
                if after > before * (1 - _PROGRESS):
                    break
                before = after

    def groups_of(self, plan: Plan | None) -> Ints:
        """The group that each layer is in; −1 where the plan's configuration is in none."""
        o = self.decoder.options
        group_of = dict(zip(o.configuration_N.tolist(), o.group_N.tolist(), strict=True))
        group_L = np.full(self._problem.num_layers, -1, dtype=np.int64)
        for stage in plan.stages if plan is not None else ():
            group_L[stage.start : stage.stop] = group_of.get(self._problem.index(stage.configuration), -1)
        return group_L


@cache
def _load_compiled_loops() -> None:
    """Compile, or load from numba's cache, on a problem of two layers."""
    problem = tiny_problem(num_layers=2)
    _Rounding(problem, Decoder(problem, Options.of(problem)), Incumbent(problem, "", np.inf)).try_everything()
