"""A bound that asks how few devices would do for every rank and every link to do its part within a limit.

Where the fewest are more than there are, no plan's step is within the limit. Each stage and each message has to be done
in time with the least that must come before it and after it; so plans are built from their last stage on, with only two
numbers to remember at each cut: the fewest devices so far, and the shortest way of a microbatch through what is left.
That takes milliseconds for plans with every number of ranks at once, before any table over a plan's own stages is made.
Letters: C = configurations, G = classes of them whose messages cost the same, L = layers, L1 = L + 1 cuts, T = kinds of
devices, P = numbers of ranks, S = numbers of stages, R = stages by how many are after them, W = ways of a link.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from dejavu.foundation.compiled import njit
from dejavu.foundation.registry import named
from dejavu.plans.schedule import SCHEDULES, Schedule
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PER_STEP, Integers
from dejavu.simulation.bound._prefix_sums import BoundProblem

_MOST_STEPS = 150_000_000  # of the loops for one limit, about; with more nothing is asked
_MOST_LIMITS = 40
_NEAR = 1.01  # limits are tried until bounds are known so well, the least first
_ROUNDING = 1e-9  # what is as little above a limit may be another order of summing


Mask = NDArray[np.bool_]


class Times(NamedTuple):
    """What stages and messages take, for plans of one schedule.

    Attributes:
        num_microbatches: B.
        ahead_R: at most so many forward passes a stage does before it can have a gradient.
        forward_CL1, backward_CL1: of a microbatch, summed from the first layer; backward until the input's gradient.
        work_CL1: of all microbatches, both passes.
        step_CL1, step_C: what is done once a step.
        pass_C: what every pass takes besides.
        wire_WL1GG, message_WL1GG: one message: how long it keeps its link to itself; until it is there. W: to the rank
            after, and where links are directed to the rank before.
        least_GG: how long the shortest message between two ranks of the classes keeps its link, across any cut.
        returns: whether a stage's last pass is one whose gradient goes on to the first stage.
        class_C: of the configurations.
        fits_CLL1: microbatches in flight that a stage has memory for.
    """

    num_microbatches: int
    ahead_R: Integers
    forward_CL1: Floats
    backward_CL1: Floats
    work_CL1: Floats
    step_CL1: Floats
    step_C: Floats
    pass_C: Floats
    wire_WL1GG: Floats
    message_WL1GG: Floats
    least_GG: Floats
    returns: bool
    class_C: Integers
    fits_CLL1: NDArray[np.int32]


class Places(NamedTuple):
    """What is known of stages by how many are after them.

    Attributes:
        may_RC: which configurations such a stage may have.
        shared_R: of the cut before it: how many cuts' messages go between its two ranks; 0: its stages are on one rank.
        way_R: of the same messages: see `Times.wire_WL1GG`.
    """

    may_RC: Mask
    shared_R: Integers
    way_R: Integers


class Paid(NamedTuple):
    """Prices of devices.

    Attributes:
        price_C, have: what a stage pays for its devices, and what all may cost.
        by_work: it pays for its part of the limit alone: its rank has others.
    """

    price_C: Floats
    have: float
    by_work: bool


class Heads(NamedTuple):
    """The least that comes before a cut, whatever the plan.

    Attributes:
        there_L1G: a microbatch's way forward until a stage of the class that begins there has its input.
        round_L1G: the same, and its way back from there to the first stage, where it has to go back.
        left_L1G: both for the stages before, of which the last is of the class, without the messages across the cut.
    """

    there_L1G: Floats
    round_L1G: Floats
    left_L1G: Floats


def fewest_devices_seconds(problem: BoundProblem, schedule: str, floor_P: Floats, best_seconds: float) -> Floats:
    """Return a bound on plans of the schedule with 1, 2, … ranks: `floor_P`, where nothing above it is proved.

    Args:
        floor_P: bounds that are known.
        best_seconds: no bound is wanted above it.
    """
    kind = named(SCHEDULES, schedule)
    each, num_ranks = kind.stages_per_rank, len(floor_P)
    C, L = problem.prices.sum_5CL1.shape[1], problem.priced.problem.num_layers
    levels = each * num_ranks * (1 if problem.choices is None else (num_ranks + 1) / 2)
    if not num_ranks or not np.isfinite(best_seconds) or C * L * L * levels > _MOST_STEPS:
        return floor_P
    if problem.choices is None and kind.placement != "loop":  # where the order of ranks turns is not known at once
        return floor_P
    times = _times(problem, kind, num_ranks)
    heads = Heads(*_heads(times, kind.placement != "loop"))
    together, reached = list(_together(problem, kind, num_ranks)), _Reached(problem, times, by_work=each > 1)
    low_P, high_P, limit = floor_P.copy(), np.full(num_ranks, np.inf), best_seconds
    for _ in range(_MOST_LIMITS):
        is_late_P = low_P >= limit
        for ranks, places in together:
            if ((low_P[ranks] < limit) & (limit < high_P[ranks])).any():
                fits_S = np.zeros(len(places.may_RC), np.bool_)
                for inside_C, prices in reached.within(limit):
                    there = places._replace(may_RC=places.may_RC & inside_C)
                    fits_S |= np.all(
                        [np.isfinite(_fewest(times, heads, there, paid, limit)) for paid in prices], axis=0
                    )
                is_late_P[ranks] |= ~fits_S[each - 1 :: each][ranks]
        low_P = np.where(is_late_P, np.maximum(low_P, limit), low_P)
        high_P = np.where(is_late_P, high_P, np.minimum(high_P, limit))
        open_P = np.where(high_P > low_P * _NEAR, low_P, np.inf)
        least = int(open_P.argmin())
        if open_P[least] >= best_seconds:
            break
        limit = (low_P[least] + high_P[least]) / 2
    if each > 1:
        low_P[0] = floor_P[0]  # one rank sends no messages between its stages
    return np.minimum(low_P, best_seconds)


def _together(problem: BoundProblem, kind: Schedule, num_ranks: int) -> Iterator[tuple[slice, Places]]:
    """Yield which numbers of ranks are looked at together, and the places of their stages."""
    each, C = kind.stages_per_rank, len(problem.prices.class_C)
    if problem.choices is None:
        ones = np.ones(num_ranks * each, np.int64)
        yield slice(num_ranks), Places(np.ones((num_ranks * each, C), np.bool_), ones, 0 * ones)
        return
    is_directed = problem.prices.message_L1GGM.shape[3] > 3
    for ranks in range(1, num_ranks + 1):
        S = ranks * each
        rank_S = [kind.rank_of(s, S) for s in range(S)]
        may = [problem.choices.of(rank, ranks) for rank in rank_S]
        ends = [frozenset(pair) for pair in itertools.pairwise(rank_S)]
        number = Counter(ends)
        shared = [1, *(number[pair] if len(pair) == 2 else 0 for pair in ends)]
        goes_back = [0, *(int(b == a - 1 and is_directed) for a, b in itertools.pairwise(rank_S))]
        found = map(np.array, (may[::-1], shared[::-1], goes_back[::-1]))
        yield slice(ranks - 1, ranks), Places(*found)


def _times(problem: BoundProblem, kind: Schedule, num_ranks: int) -> Times:
    prices, B = problem.prices, problem.num_microbatches
    sum_5CL1, is_whole = prices.sum_5CL1, not kind.splits_backward
    parts_CL1 = sum_5CL1[BACKWARD_INPUT] + sum_5CL1[BACKWARD_WEIGHT]
    layers_CL = np.diff(sum_5CL1[BACKWARD], axis=1)
    if not is_whole:  # the first stage's backward pass is whole
        layers_CL = np.minimum(layers_CL, np.diff(parts_CL1, axis=1))
    work_CL = B * (np.diff(sum_5CL1[FORWARD], axis=1) + layers_CL)
    message_WL1GGM = np.stack(np.split(prices.message_L1GGM, prices.message_L1GGM.shape[3] // 3, axis=3))
    wire_WL1GG = message_WL1GGM[..., :2].sum(axis=-1)
    least_GG = wire_WL1GG[:, 1:-1].min(axis=(0, 1), initial=np.inf)
    C, L = work_CL.shape
    fits_CLL1 = problem.max_in_flight_CLL1
    rest = range(1, num_ranks * kind.stages_per_rank + 1)
    is_plain = kind.stages_per_rank == 1
    return Times(
        num_microbatches=B,
        ahead_R=np.array([kind.in_flight(0, r, B) if is_plain else B for r in rest]),
        forward_CL1=sum_5CL1[FORWARD],
        backward_CL1=sum_5CL1[BACKWARD if is_whole else BACKWARD_INPUT],
        work_CL1=np.pad(np.cumsum(work_CL, axis=1), ((0, 0), (1, 0))),
        step_CL1=sum_5CL1[PER_STEP],
        step_C=prices.per_step_C,
        pass_C=prices.pass_C,
        wire_WL1GG=wire_WL1GG,
        message_WL1GG=message_WL1GGM.sum(axis=-1),
        least_GG=np.minimum(least_GG, least_GG.T),
        returns=is_whole,
        class_C=prices.class_C,
        fits_CLL1=np.full((C, L, L + 1), B, np.int32) if fits_CLL1 is None else fits_CLL1,
    )


class _Reached:
    """Which configurations can be in one plan within a limit, and what they pay for devices.

    A plan's ranks are a chain, and each link of it has to be fast enough for all its messages: so all of them are on
    one side of those that are not. Two sites with a slow line between are then two clusters, of which a plan has one;
    devices' prices alone allow half of a plan here, and half of one there.
    """

    def __init__(self, problem: BoundProblem, times: Times, *, by_work: bool) -> None:
        self._problem, self._times, self._by_work = problem, times, by_work
        self._paid_on = dict[bytes, tuple[Paid, ...]]()

    def within(self, limit: float) -> Iterator[tuple[Mask, tuple[Paid, ...]]]:
        """Yield the configurations of each side, with prices of which any will do."""
        times = self._times
        is_fast_GG = times.num_microbatches * times.least_GG <= limit * (1.0 + _ROUNDING)
        num_sides, side_G = connected_components(is_fast_GG, directed=False)
        for side in range(num_sides):
            inside_C = side_G[times.class_C] == side
            key = inside_C.tobytes()
            if key not in self._paid_on:
                self._paid_on[key] = tuple(_paid(self._problem, times, inside_C, by_work=self._by_work))
            yield inside_C, self._paid_on[key]


def _paid(problem: BoundProblem, times: Times, inside_C: Mask, *, by_work: bool) -> Iterator[Paid]:
    """Yield prices for these configurations: shares of each kind's devices; shares of the work that they could do."""
    kinds = _scarce(problem.prices.use_CT[inside_C], problem.prices.count_T)
    use_CT, count_T = problem.prices.use_CT[:, kinds].astype(float), problem.prices.count_T[kinds]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares_T = np.where(count_T > 0, 1.0 / count_T, 1.0)
    yield Paid(use_CT @ shares_T, float(count_T @ shares_T), by_work)
    if len(kinds) > 1:
        work_CL = np.diff(times.work_CL1, axis=1)
        taken_CL = np.where(problem.possible_CL & inside_C[:, None], work_CL, np.inf)
        speeds_T = np.zeros(len(kinds))
        for kind in range(len(kinds)):
            uses = use_CT[:, kind]
            least_L = (taken_CL[uses > 0] * uses[uses > 0, None]).min(axis=0, initial=np.inf)
            speeds_T[kind] = np.isfinite(least_L).sum() / max(float(least_L[np.isfinite(least_L)].sum()), 1e-300)
        yield Paid(use_CT @ speeds_T, float(count_T @ speeds_T), by_work)


def _scarce(use_CT: Integers, count_T: Integers) -> Integers:
    """Return the kinds of devices but those of which there is enough wherever there is enough of another."""
    kept = list(range(len(count_T)))
    for kind in range(len(count_T)):
        others = [other for other in kept if other != kind and count_T[other] <= count_T[kind]]
        if any((use_CT[:, kind] <= use_CT[:, other]).all() for other in others):
            kept.remove(kind)
    return np.array(kept)


@njit(cache=True, nogil=True)
def _heads(times: Times, turns: bool) -> tuple[Floats, Floats, Floats]:
    """The shortest ways to each cut; see `Heads`.

    Args:
        turns: whether two stages on one rank may be neighbours.
    """
    C, L1 = times.forward_CL1.shape
    W, _, G, _ = times.wire_WL1GG.shape
    there_L1G, round_L1G = np.full((L1, G), np.inf), np.full((L1, G), np.inf)
    out_L1G, left_L1G = np.full((L1, G), np.inf), np.full((L1, G), np.inf)
    there_L1G[0, :] = round_L1G[0, :] = 0.0
    for start in range(L1 - 1):
        for g in range(G):  # the stages before end here
            for h in range(G):
                message = 0.0 if turns and g == h else times.message_WL1GG[0, start, g, h]
                if W > 1:
                    message = min(message, times.message_WL1GG[1, start, g, h])
                there_L1G[start, h] = min(there_L1G[start, h], out_L1G[start, g] + message)
                back = message if times.returns else 0.0
                round_L1G[start, h] = min(round_L1G[start, h], left_L1G[start, g] + message + back)
        for c in range(C):
            g = times.class_C[c]
            for stop in range(start + 1, L1):
                if times.fits_CLL1[c, start, stop] < 1:
                    continue
                forward = times.forward_CL1[c, stop] - times.forward_CL1[c, start] + times.pass_C[c]
                back = 0.0
                if times.returns:
                    back = times.backward_CL1[c, stop] - times.backward_CL1[c, start] + times.pass_C[c]
                out_L1G[stop, g] = min(out_L1G[stop, g], there_L1G[start, g] + forward)
                left_L1G[stop, g] = min(left_L1G[stop, g], round_L1G[start, g] + forward + back)
    return there_L1G, round_L1G, left_L1G


@njit(cache=True, nogil=True)
def _fewest(times: Times, heads: Heads, places: Places, paid: Paid, limit: float) -> Floats:
    """The least cost of plans of 1, 2, … stages that keep the limit as far as is looked at; inf where there is none."""
    _, L1, G, _ = times.wire_WL1GG.shape
    found_S, latest = np.full(len(places.may_RC), np.inf), limit * (1.0 + _ROUNDING)
    # After a cut, where the stage before is of the class: the cheapest way, and the shortest of a microbatch and back.
    cost_L1G, round_L1G = np.full((L1, G), np.inf), np.full((L1, G), np.inf)
    cost_L1G[L1 - 1, :] = round_L1G[L1 - 1, :] = 0.0
    for r in range(len(found_S)):
        here_L1G, way_L1G = np.full((L1, G), np.inf), np.full((L1, G), np.inf)
        asked = places.may_RC[r], paid, times.ahead_R[r], latest
        found_S[r] = _stages(times, heads, asked, (cost_L1G, round_L1G), (here_L1G, way_L1G))
        if places.shared_R[r] == 0:
            cost_L1G[:], round_L1G[:] = here_L1G, way_L1G
            continue
        spare_GG = latest - (places.shared_R[r] - 1) * times.num_microbatches * times.least_GG
        link = times.wire_WL1GG[places.way_R[r]], times.message_WL1GG[places.way_R[r]], times.num_microbatches
        if not _messages(link, heads, (latest, spare_GG), (here_L1G, way_L1G), (cost_L1G, round_L1G)):
            break
    return found_S


@njit(cache=True, nogil=True)
def _stages(
    times: Times,
    heads: Heads,
    asked: tuple[Mask, Paid, int, float],
    after: tuple[Floats, Floats],
    here: tuple[Floats, Floats],
) -> float:
    """Fill the ways from stages with so many after them; return the cost where such a stage is the first."""
    (may_C, paid, ahead, latest), (cost_L1G, round_L1G), (here_L1G, way_L1G) = asked, after, here
    most, first = paid.have * (1.0 + _ROUNDING), np.inf
    L1, B = len(cost_L1G), times.num_microbatches
    for c in np.flatnonzero(may_C):
        g, beside = times.class_C[c], times.pass_C[c]
        for stop in range(1, L1):
            if cost_L1G[stop, g] == np.inf:
                continue
            for start in range(stop - 1, -1, -1):
                work = times.work_CL1[c, stop] - times.work_CL1[c, start] + 2 * B * beside
                if work > latest:
                    break
                there, back = heads.there_L1G[start, g], heads.round_L1G[start, g]
                once = times.step_CL1[c, stop] - times.step_CL1[c, start] + times.step_C[c]
                if times.fits_CLL1[c, start, stop] < (1 if paid.by_work else ahead) or there + work + once > latest:
                    continue
                forward = times.forward_CL1[c, stop] - times.forward_CL1[c, start] + beside
                if back + work + max(0.0, round_L1G[stop, g] - (ahead - 1) * forward) > latest:
                    continue
                cost = cost_L1G[stop, g] + paid.price_C[c] * ((work + once) / latest if paid.by_work else 1.0)
                if cost > most:
                    continue
                if start == 0:
                    first = min(first, cost)
                    continue
                backward = times.backward_CL1[c, stop] - times.backward_CL1[c, start] + beside
                here_L1G[start, g] = min(here_L1G[start, g], cost)
                way_L1G[start, g] = min(way_L1G[start, g], round_L1G[stop, g] + forward + backward)
    return first


@njit(cache=True, nogil=True)
def _messages(
    link: tuple[Floats, Floats, int],
    heads: Heads,
    until: tuple[float, Floats],
    here: tuple[Floats, Floats],
    after: tuple[Floats, Floats],
) -> bool:
    """Fill the ways after each cut from those of the stages that begin there; return whether there is any.

    Args:
        until: the limit, and what of it other cuts' messages between the same ranks leave.
    """
    (latest, spare_GG), (here_L1G, way_L1G), (cost_L1G, round_L1G) = until, here, after
    (wire_L1GG, message_L1GG, B), (L1, G), is_any = link, here_L1G.shape, False
    cost_L1G[:], round_L1G[:] = np.inf, np.inf
    for cut in range(1, L1 - 1):
        for h in range(G):
            if here_L1G[cut, h] == np.inf:
                continue
            for g in range(G):
                message, wire = message_L1GG[cut, g, h], wire_L1GG[cut, g, h]
                waits = message + (B - 1) * wire + message
                if B * wire > spare_GG[g, h] or heads.left_L1G[cut, g] + waits + way_L1G[cut, h] > latest:
                    continue
                cost_L1G[cut, g] = min(cost_L1G[cut, g], here_L1G[cut, h])
                round_L1G[cut, g] = min(round_L1G[cut, g], way_L1G[cut, h] + 2.0 * message)
                is_any = True
    return is_any
