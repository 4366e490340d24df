"""Sums of what a plan pays for devices and of a microbatch's way through it, over every plan: loops over cuts.

Letters: C = configurations, G = classes of them whose messages cost the same, L = layers, L1 = L + 1 cuts, N = stages
that may be in a plan, S = numbers of stages, R = stages by how many are after them, W = ways of a link, V = prices of
devices, K = sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import Integers

ROUNDING = 1e-9  # what is as little above a limit may be another order of summing
_MOST_STAGES = 2_500_000  # that are kept; of more nothing is asked
_WAYS = range(-1, 3)  # powers of two: what a way through the model counts in sums, of all devices by the limit

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
        price_VC, have_V: what a stage pays for its devices, and what all may cost.
        by_work: it pays for its part of the limit alone: its rank has others.
    """

    price_VC: Floats
    have_V: Floats
    by_work: bool


class Sums(NamedTuple):
    """What a plan pays for its devices and a microbatch's way through it, in sums that have a most within a limit.

    Wide stages are fast, narrow ones few devices: the fewest devices and the shortest way are those of different plans,
    and each sum is of one. The first is of the way alone.

    Attributes:
        price_KC, way_K: what a configuration and a second of the way count.
        most_K: of a plan within the limit.
        alone_K, twice_K: which sum has the same prices alone; which has them and the way twice: none, -1.
        latest: the limit.
        by_work: see `Paid`.
    """

    price_KC: Floats
    way_K: Floats
    most_K: Floats
    alone_K: Integers
    twice_K: Integers
    latest: float
    by_work: bool

    @classmethod
    def of(cls, paid: Paid, limit: float) -> Sums:
        latest = limit * (1.0 + ROUNDING)
        price, way, most, alone, twice = [0.0 * paid.price_VC[0]], [1.0], [latest], [-1], [-1]
        for price_C, have in zip(paid.price_VC, paid.have_V, strict=True):
            first, ways = len(way), [0.0, *(have / latest * 2.0**k for k in _WAYS)]
            price += [price_C] * len(ways)
            way += ways
            most += [have + one * latest for one in ways]
            alone += [first] * len(ways)
            twice += [-1, *range(first + 2, len(way)), -1][: len(ways)]
        most_K = np.array(most) * (1.0 + ROUNDING)
        return cls(np.array(price), np.array(way), most_K, np.array(alone), np.array(twice), latest, paid.by_work)


class Stages(NamedTuple):
    """Stages that may be in a plan, in the order of where they begin.

    Attributes:
        configuration_N, class_N: theirs.
        start_N, stop_N: the first layer, and the one after the last.
        fits_N: microbatches in flight that the stage has memory for.
        forward_N, backward_N: of a microbatch; until the input's gradient.
        work_N: of all microbatches, both passes.
        once_N: what is done once a step.
    """

    configuration_N: Integers
    class_N: Integers
    start_N: Integers
    stop_N: Integers
    fits_N: Integers
    forward_N: Floats
    backward_N: Floats
    work_N: Floats
    once_N: Floats

    def of(self, kept_N: Mask | Integers) -> Stages:
        columns: list[Any] = [of_N[kept_N] for of_N in self]
        return Stages(*columns)


class Heads(NamedTuple):
    """The least sums before a cut, whatever the plan.

    Attributes:
        there_L1GK: with a microbatch's way forward until a stage of the class that begins there has its input.
        round_L1GK: the same, and its way back from there to the first stage, where it has to go back.
        left_L1GK: both for the stages before, of which the last is of the class, without the messages across the cut.
    """

    there_L1GK: Floats
    round_L1GK: Floats
    left_L1GK: Floats


def stages_within(times: Times, latest: float, most_stages: int) -> Stages | None:
    """Return the stages of every configuration that do their work until then, of plans with so many at most.

    None: they are too many to look at.
    """
    C, L1 = times.forward_CL1.shape
    start_N, stop_N = np.triu_indices(L1, 1)
    if most_stages < 3:
        ends_N = np.add(start_N == 0, stop_N == L1 - 1, dtype=np.int64)
        start_N, stop_N = start_N[ends_N >= 3 - most_stages], stop_N[ends_N >= 3 - most_stages]
    found, num_found, B = [], 0, times.num_microbatches
    for c in range(C):
        work_N = times.work_CL1[c, stop_N] - times.work_CL1[c, start_N] + 2 * B * times.pass_C[c]
        is_in_time_N = (work_N <= latest) & (times.fits_CLL1[c, start_N, stop_N] > 0)
        start_M, stop_M = start_N[is_in_time_N], stop_N[is_in_time_N]
        num_found += len(start_M)
        if num_found > _MOST_STAGES:
            return None
        every = Stages(
            configuration_N=np.full(len(start_M), c, np.int32),
            class_N=np.full(len(start_M), times.class_C[c], np.int32),
            start_N=start_M.astype(np.int32),
            stop_N=stop_M.astype(np.int32),
            fits_N=times.fits_CLL1[c, start_M, stop_M].astype(np.int32),
            forward_N=times.forward_CL1[c, stop_M] - times.forward_CL1[c, start_M] + times.pass_C[c],
            backward_N=times.backward_CL1[c, stop_M] - times.backward_CL1[c, start_M] + times.pass_C[c],
            work_N=work_N[is_in_time_N],
            once_N=times.step_CL1[c, stop_M] - times.step_CL1[c, start_M] + times.step_C[c],
        )
        found.append(every)
    columns: list[Any] = [np.concatenate(of_N) for of_N in zip(*found, strict=True)]
    together = Stages(*columns)
    return together.of(np.argsort(together.start_N, kind="stable"))


def prices_of(sums: Sums, stages: Stages) -> Floats:
    """Return what each stage counts in each sum, besides the way through it; shape [N, K]."""
    price_NK: Floats = sums.price_KC.T[stages.configuration_N]
    busy_N = (stages.work_N + stages.once_N) / sums.latest
    return price_NK * busy_N[:, None] if sums.by_work else price_NK


@njit(cache=True, nogil=True)
def heads(times: Times, sums: Sums, stages: Stages, price_NK: Floats, turns: bool) -> Heads:
    """The least sums up to each cut.

    Args:
        turns: whether two stages on one rank may be neighbours.
    """
    (_, L1, G, _), K, N = times.wire_WL1GG.shape, len(sums.way_K), len(stages.start_N)
    there_L1GK, round_L1GK = np.full((L1, G, K), np.inf), np.full((L1, G, K), np.inf)
    out_L1GK, left_L1GK = np.full((L1, G, K), np.inf), np.full((L1, G, K), np.inf)
    there_L1GK[0], round_L1GK[0] = 0.0, 0.0
    both, i = 2.0 if times.returns else 1.0, 0
    for start in range(L1 - 1):
        for g in range(G):  # the stages before end here
            if left_L1GK[start, g, 0] == np.inf:
                continue
            for h in range(G):
                message = _least_message(times, start, g, h, turns)
                for k in range(K):
                    way = sums.way_K[k] * message
                    there_L1GK[start, h, k] = min(there_L1GK[start, h, k], out_L1GK[start, g, k] + way)
                    round_L1GK[start, h, k] = min(round_L1GK[start, h, k], left_L1GK[start, g, k] + both * way)
        while i < N and stages.start_N[i] == start:
            g, stop, forward = stages.class_N[i], stages.stop_N[i], stages.forward_N[i]
            there_and_back = forward + (stages.backward_N[i] if times.returns else 0.0)
            for k in range(K):
                out = there_L1GK[start, g, k] + price_NK[i, k] + sums.way_K[k] * forward
                left = round_L1GK[start, g, k] + price_NK[i, k] + sums.way_K[k] * there_and_back
                out_L1GK[stop, g, k] = min(out_L1GK[stop, g, k], out)
                left_L1GK[stop, g, k] = min(left_L1GK[stop, g, k], left)
            i += 1
    return Heads(there_L1GK, round_L1GK, left_L1GK)


@njit(cache=True, nogil=True)
def tails(times: Times, sums: Sums, stages: Stages, price_NK: Floats, turns: bool) -> Floats:
    """The least sums after each cut, by the class of the stage before it: a microbatch's way there and back."""
    (_, L1, G, _), K = times.wire_WL1GG.shape, len(sums.way_K)
    after_L1GK, here_GK, i = np.full((L1, G, K), np.inf), np.empty((G, K)), len(stages.start_N) - 1
    after_L1GK[L1 - 1] = 0.0
    for cut in range(L1 - 2, -1, -1):
        here_GK[:] = np.inf
        while i >= 0 and stages.start_N[i] == cut:
            g, stop, way = stages.class_N[i], stages.stop_N[i], stages.forward_N[i] + stages.backward_N[i]
            for k in range(K):
                here_GK[g, k] = min(here_GK[g, k], after_L1GK[stop, g, k] + price_NK[i, k] + sums.way_K[k] * way)
            i -= 1
        for h in range(G):
            if here_GK[h, 0] == np.inf:
                continue
            for g in range(G):
                way = 2.0 * _least_message(times, cut, g, h, turns)
                for k in range(K):
                    after_L1GK[cut, g, k] = min(after_L1GK[cut, g, k], here_GK[h, k] + sums.way_K[k] * way)
    return after_L1GK


@njit(cache=True, nogil=True)
def _least_message(times: Times, cut: int, g: int, h: int, turns: bool) -> float:
    """A message across the cut, where its direction and whether it leaves its rank are not known."""
    least: float = 0.0 if turns and g == h else times.message_WL1GG[0, cut, g, h]
    for way in range(1, len(times.message_WL1GG)):
        least = min(least, times.message_WL1GG[way, cut, g, h])
    return least


@njit(cache=True, nogil=True)
def keeping(
    times: Times,
    sums: Sums,
    stages: Stages,
    price_NK: Floats,
    around: tuple[Heads, Floats],
    asked: tuple[Mask, int, int],
) -> Mask:
    """Which stages a plan within the limit may have, by each of the sums.

    A stage waits for the first gradient, and after its last forward pass for that microbatch's: each time so long as
    the way through the stages after it is longer than the passes that it has to do meanwhile.

    Args:
        around: the least sums before it, and after it by the cut and its class.
        asked: the configurations; how many forward passes it may do before it can have a gradient; how many
            microbatches it has memory for at least.
    """
    (before, after_L1GK), (may_C, ahead, held) = around, asked
    there_L1GK, round_L1GK, kept_N = before.there_L1GK, before.round_L1GK, np.zeros(len(price_NK), np.bool_)
    way_K, most_K, alone_K, twice_K, returns = sums.way_K, sums.most_K, sums.alone_K, sums.twice_K, times.returns
    is_twice = returns and ahead < times.num_microbatches
    for i in range(len(kept_N)):
        g, start, stop, work = stages.class_N[i], stages.start_N[i], stages.stop_N[i], stages.work_N[i]
        if after_L1GK[stop, g, 0] == np.inf or work > sums.latest or stages.fits_N[i] < held:
            continue
        if not may_C[stages.configuration_N[i]]:
            continue
        forward, backward, once = stages.forward_N[i], stages.backward_N[i], stages.once_N[i]
        meanwhile = (ahead - 1) * (min(forward, backward) if returns else forward)
        both, is_kept = (ahead - 1) * (forward + backward), True
        for k in range(len(way_K)):
            way, after = way_K[k], after_L1GK[stop, g, k]
            waits = max(after - way * meanwhile, after_L1GK[stop, g, alone_K[k]] if k > 0 else 0.0)
            if is_twice and k == 0:
                waits = max(waits, 2.0 * after - both)
            elif is_twice and twice_K[k] > 0:
                waits = max(waits, after_L1GK[stop, g, twice_K[k]] - way * both)
            own = price_NK[i, k] + way * work + waits
            if round_L1GK[start, g, k] + own > most_K[k] or there_L1GK[start, g, k] + own + way * once > most_K[k]:
                is_kept = False
                break
        kept_N[i] = is_kept
    return kept_N


@njit(cache=True, nogil=True)
def fewest(times: Times, sums: Sums, stages: Stages, price_NK: Floats, before: Heads, places: Places) -> Mask:
    """Whether there are plans of 1, 2, … stages that keep the limit as far as is looked at."""
    (_, L1, G, _), K = times.wire_WL1GG.shape, len(sums.way_K)
    fits_S = np.zeros(len(places.may_RC), np.bool_)
    # After a cut, where the stage before is of the class: the least sums.
    after_L1GK = np.full((L1, G, K), np.inf)
    after_L1GK[L1 - 1] = 0.0
    for r in range(len(fits_S)):
        ahead = times.ahead_R[r]
        asked = places.may_RC[r], ahead, 1 if sums.by_work else ahead
        kept_N = keeping(times, sums, stages, price_NK, (before, after_L1GK), asked)
        here_L1GK = np.full((L1, G, K), np.inf)
        for i in np.flatnonzero(kept_N):
            g, start, stop = stages.class_N[i], stages.start_N[i], stages.stop_N[i]
            fits_S[r] |= start == 0
            way = stages.forward_N[i] + stages.backward_N[i]
            for k in range(K):
                here = after_L1GK[stop, g, k] + price_NK[i, k] + sums.way_K[k] * way
                here_L1GK[start, g, k] = min(here_L1GK[start, g, k], here)
        if places.shared_R[r] == 0:
            after_L1GK = here_L1GK
            continue
        spare_GG = sums.latest - (places.shared_R[r] - 1) * times.num_microbatches * times.least_GG
        link = times.wire_WL1GG[places.way_R[r]], times.message_WL1GG[places.way_R[r]], times.num_microbatches
        after_L1GK, is_any = _across(link, before.left_L1GK, spare_GG, sums, here_L1GK)
        if not is_any:
            break
    return fits_S


@njit(cache=True, nogil=True)
def _across(
    link: tuple[Floats, Floats, int], left_L1GK: Floats, spare_GG: Floats, sums: Sums, here_L1GK: Floats
) -> tuple[Floats, bool]:
    """The sums after each cut, from those of the stages that begin there; whether there is any.

    Args:
        left_L1GK: see `Heads`.
        spare_GG: what of the limit other cuts' messages between the same ranks leave.
    """
    (wire_L1GG, message_L1GG, B), (L1, G, K), is_any = link, here_L1GK.shape, False
    after_L1GK = np.full((L1, G, K), np.inf)
    for cut in range(1, L1 - 1):
        for h in range(G):
            if here_L1GK[cut, h, 0] == np.inf:
                continue
            for g in range(G):
                message, wire = message_L1GG[cut, g, h], wire_L1GG[cut, g, h]
                if B * wire > spare_GG[g, h]:
                    continue
                waits, is_late = message + (B - 1) * wire + message, False
                for k in range(K):
                    whole = left_L1GK[cut, g, k] + sums.way_K[k] * waits + here_L1GK[cut, h, k]
                    is_late |= whole > sums.most_K[k]
                if is_late:
                    continue
                is_any = True
                for k in range(K):
                    here = here_L1GK[cut, h, k] + sums.way_K[k] * 2.0 * message
                    after_L1GK[cut, g, k] = min(after_L1GK[cut, g, k], here)
    return after_L1GK, is_any
