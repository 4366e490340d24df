"""Compiled beam over whole plans, from the first layer on, where what is left to do is known with its memory.

`counted.downstream` has the least Σ from every state on, at prices of devices; a label is a state that was reached,
with the devices it took. Labels of one level are looked at together. Each of several prices bounds what a label comes
to, with the devices that are left: the most of them tells which labels run out of devices of one type. It proves
nothing.

Letters as in `coarse.levels.counted`; M = labels, J = prices of devices, J1 and J2 = with one and two columns more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.guided import Devices
from dejavu.search.coarse.levels.counted import Levels, Ways
from dejavu.search.coarse.windows import Links

Ints = NDArray[np.int64]

_STOPS = 3  # of a stage from one state under one configuration, those with the least bounds
_ROOM = 8  # times as many labels as are kept are found before only the best of them are
# Columns of a label: its parent, its cut, the configuration of the stage that ends there (its place in K), its devices.
_PARENT, _CUT, _HOW, _PACKED = range(4)


class Aim(NamedTuple):
    """Which plans are looked for: the seconds of the bottleneck and of Σ that they have at most; labels of a level."""

    limit: float
    cutoff: float
    width: int


class Guide(NamedTuple):
    """What a beam reads: see there.

    Attributes:
        price_JK, spent_J: of the devices of a stage of each configuration, and of all devices.
        rest_JNAL1: as `counted.downstream` fills it at each of these prices.
    """

    aim: Aim
    ways: Ways
    links: Links
    levels: Levels
    devices: Devices
    price_JK: Floats
    spent_J: Floats
    rest_JNAL1: Floats


class Found(NamedTuple):
    """Labels one stage further; written to.

    Attributes:
        label_M4: in the columns above.
        seconds_MJ2: the least Σ of a plan that goes on from there, Σ so far, and each price of the devices so far.
    """

    label_M4: Ints
    seconds_MJ2: Floats


@njit(cache=True, nogil=True)
def beam(guide: Guide) -> Ints:
    """[configuration, start, stop; stage] of the plan with the least Σ that was met, in order; no stages: none was."""
    aim, ways, levels = guide.aim, guide.ways, guide.levels
    J, N, _, L1 = guide.rest_JNAL1.shape
    label_M4 = np.zeros((N * aim.width + 1, 4), np.int64)
    seconds_MJ1 = np.zeros((N * aim.width + 1, J + 1))  # Σ so far, and each price of the devices so far
    room = _ROOM * aim.width + len(ways.among_K) * _STOPS  # what one label may be continued by, and more
    found = Found(np.empty((room, 4), np.int64), np.empty((room, J + 2)))
    kept = np.empty(aim.width, np.int64)
    count, begin, end = 1, 1, 1  # the first label is the beginning of every plan
    best, last, last_how = aim.cutoff, -1, 0
    for n in range(N - 1, 0, -1):
        num_found, most = 0, best
        for m in range(begin - 1, end):
            at = 0 if m == begin - 1 else m  # the beginning, of plans with n stages
            if at == 0 and not levels.alive_NL1[n, 0]:
                continue
            before = num_found
            num_found = _continued(guide, n, at, label_M4[at], seconds_MJ1[at], most, found, num_found)
            for i in range(before, num_found):
                is_whole = found.label_M4[i, _CUT] == L1 - 1
                if is_whole and found.seconds_MJ2[i, 1] < best and _uses_enough(guide.devices, found.label_M4[i]):
                    best, last, last_how = found.seconds_MJ2[i, 1], at, found.label_M4[i, _HOW]
                    most = min(most, best)
            if num_found >= _ROOM * aim.width:
                num_found = _best_of(found, num_found, most, L1 - 1, kept)
                if num_found == aim.width:
                    most = min(most, found.seconds_MJ2[num_found - 1, 0])
        begin = count
        end = count = begin + _best_of(found, num_found, best, L1 - 1, kept)
        label_M4[begin:end], seconds_MJ1[begin:end] = (
            found.label_M4[: end - begin],
            found.seconds_MJ2[: end - begin, 1:],
        )
    stages = np.empty((3, N), np.int64)
    num = 0
    if last >= 0:
        how, stop = last_how, L1 - 1
        m = last
        while True:
            stages[0, num], stages[1, num], stages[2, num] = ways.among_K[how], label_M4[m, _CUT], stop
            num += 1
            if m == 0:
                break
            how, stop, m = label_M4[m, _HOW], label_M4[m, _CUT], label_M4[m, _PARENT]
    return stages[:, :num][:, ::-1].copy()


@njit(cache=True, nogil=True)
def _uses_enough(devices: Devices, label_4: Ints) -> bool:
    """Whether a whole plan leaves no device idle, where none may be."""
    return not devices.use_all or label_4[_PACKED] == devices.have


@njit(cache=True, nogil=True)
def _best_of(found: Found, num_found: int, most: float, last_cut: int, kept: Ints) -> int:
    """Move the labels with the least bounds to the front, as many as `kept` has room for; how many these are.

    Of those at one cut with the same devices one; none of whole plans; none that comes to `most`.
    """
    label_M4, seconds_MJ2 = found
    num = 0
    for i in np.argsort(seconds_MJ2[:num_found, 0]):
        if num == len(kept) or seconds_MJ2[i, 0] >= most:
            break
        is_new = label_M4[i, _CUT] != last_cut
        for k in range(num):
            if not is_new:
                break
            j = kept[k]
            is_new = label_M4[j, _CUT] != label_M4[i, _CUT] or label_M4[j, _PACKED] != label_M4[i, _PACKED]
        if is_new:
            kept[num] = i
            num += 1
    label_M4[:num], seconds_MJ2[:num] = label_M4[kept[:num]], seconds_MJ2[kept[:num]]
    return num


@njit(cache=True, nogil=True)
def _continued(
    guide: Guide, n: int, at: int, label_4: Ints, seconds_J1: Floats, best: float, found: Found, num_found: int
) -> int:
    """Write the labels one stage further than the one at `at`, of level n − 1; their number so far."""
    aim, ways, links, levels, devices, price_JK, spent_J, rest_JNAL1 = guide
    label_M4, seconds_MJ2 = found
    packed_C, guard, have, _, _ = devices
    cut, before = label_4[_CUT], ways.class_K[label_4[_HOW]]
    bound_3, stop_3 = np.empty(_STOPS), np.empty(_STOPS, np.int64)
    for k in np.flatnonzero(levels.looked_NK[n]):
        c, a = ways.among_K[k], ways.class_K[k]
        packed = label_4[_PACKED] + packed_C[c]
        if (((have | guard) - packed) & guard) != guard:
            continue
        seconds = 0.0
        if at > 0:
            seconds = 2.0 * (links.latency_AA[before, a] + links.per_byte_AA[before, a] * links.bytes_L1[cut])
            if links.repeats * seconds > aim.limit:
                continue
        total = seconds_J1[0] + seconds - ways.seconds_CL1[c, cut]
        priced = seconds_J1[1] + price_JK[0, k] - spent_J[0]
        bound_3[:] = np.inf
        for stop in range(cut + 1, min(levels.fitting_N1CL[n - 1, c, cut], levels.busy_KL[k, cut]) + 1):
            bound = total + ways.seconds_CL1[c, stop] + priced + rest_JNAL1[0, n - 1, a, stop]
            if bound < bound_3[_STOPS - 1]:
                i = _STOPS - 1
                while i > 0 and bound < bound_3[i - 1]:
                    bound_3[i], stop_3[i] = bound_3[i - 1], stop_3[i - 1]
                    i -= 1
                bound_3[i], stop_3[i] = bound, stop
        for i in range(_STOPS):
            if bound_3[i] >= best:
                break
            stop = stop_3[i]
            so_far = total + ways.seconds_CL1[c, stop]
            most = max(bound_3[i], so_far)
            for j in range(len(spent_J)):
                priced = seconds_J1[1 + j] + price_JK[j, k]
                most = max(most, so_far + priced - spent_J[j] + rest_JNAL1[j, n - 1, a, stop])
                seconds_MJ2[num_found, 2 + j] = priced
            if most < best:
                label_M4[num_found, _PARENT], label_M4[num_found, _CUT] = at, stop
                label_M4[num_found, _HOW], label_M4[num_found, _PACKED] = k, packed
                seconds_MJ2[num_found, 0], seconds_MJ2[num_found, 1] = most, so_far
                num_found += 1
    return num_found
