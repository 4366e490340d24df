"""Compiled beam over whole plans, from the last layer on, where what is before is known at prices of devices.

`counted.through` has the least Σ before every state, at prices; a label is a state with the stages from there to the
last layer, and the devices that these took. Labels of one level are looked at together. The last stages hold few
microbatches, so they are the largest and take the most devices: they come first, and small ones fill what is left. It
proves nothing.

Letters as in `coarse.levels.counted`; M = labels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.levels.counted import Levels, Ways
from dejavu.search.coarse.relaxed import Packed
from dejavu.search.coarse.windows import Links

Ints = NDArray[np.int64]

_STARTS = 3  # of a stage to one state under one configuration, those with the least bounds
_ROOM = 8  # times as many labels as are kept are found before only the best of them are
# Columns of a label: its parent, its cut, the configuration of the stage from there (its place in K), all devices.
_PARENT, _CUT, _HOW, _PACKED = range(4)
_BOUND, _SO_FAR, _PRICED = range(3)  # columns of its seconds: of whole plans, Σ so far, the price of the devices so far


class Aim(NamedTuple):
    """Which plans are looked for: the seconds of the bottleneck and of Σ that they have at most; labels of a level.

    Attributes:
        most_stages: that a plan can have; where the last level is open, which stands for all from it on.
    """

    limit: float
    cutoff: float
    width: int
    most_stages: int


class Guide(NamedTuple):
    """What a beam reads.

    Attributes:
        aim, ways, links, levels, devices: see there.
        spent: seconds of all devices at the prices.
        before_NAL1: as `counted.through` fills it.
        first_KL4: see `_look_for_starts`; last the level of which they are. Zeros at first; written to.
    """

    aim: Aim
    ways: Ways
    links: Links
    levels: Levels
    devices: Packed
    spent: float
    before_NAL1: Floats
    first_KL4: NDArray[np.int32]


class Found(NamedTuple):
    """Labels one stage further; written to. In the columns above."""

    label_M4: Ints
    seconds_M3: Floats


@njit(cache=True, nogil=True)
def beam(guide: Guide) -> Ints:
    """[configuration, start, stop; stage] of the plan with the least Σ that was met, in order; no stages: none was."""
    aim, ways = guide.aim, guide.ways
    N, _, L1 = guide.before_NAL1.shape
    most = aim.most_stages if guide.levels.is_open else N - 1
    label_M4, seconds_M3 = np.empty((most * aim.width + 1, 4), np.int64), np.empty((most * aim.width + 1, 3))
    label_M4[0], seconds_M3[0] = 0, 0.0
    room = _ROOM * aim.width + len(ways.among_K) * _STARTS  # what one label may be continued by, and more
    found = Found(np.empty((room, 4), np.int64), np.empty((room, 3)))
    kept = np.empty(aim.width, np.int64)
    label_M4[0, _CUT] = L1 - 1
    begin, end = 0, 1
    best, last, last_how = aim.cutoff, -1, 0
    for num_stages in range(1, most + 1):
        n, num_found, below = min(num_stages, N - 1), 0, best
        for m in range(begin, end):
            before = num_found
            num_found = _continued(guide, n, m, label_M4[m], seconds_M3[m], below, found, num_found)
            for i in range(before, num_found):
                is_whole = found.label_M4[i, _CUT] == 0
                if is_whole and found.seconds_M3[i, _SO_FAR] < best and _uses_enough(guide.devices, found.label_M4[i]):
                    best, last, last_how = found.seconds_M3[i, _SO_FAR], m, found.label_M4[i, _HOW]
                    below = min(below, best)
            if num_found >= _ROOM * aim.width:
                num_found = _best_of(found, num_found, below, kept)
                if num_found == aim.width:
                    below = min(below, found.seconds_M3[num_found - 1, _BOUND])
        begin, end = end, end + _best_of(found, num_found, best, kept)
        label_M4[begin:end], seconds_M3[begin:end] = found.label_M4[: end - begin], found.seconds_M3[: end - begin]
    stages = np.empty((3, most), np.int64)
    num, start, how, m = 0, 0, last_how, last
    while m >= 0:
        stages[0, num], stages[1, num], stages[2, num] = ways.among_K[how], start, label_M4[m, _CUT]
        num += 1
        start, how, m = label_M4[m, _CUT], label_M4[m, _HOW], label_M4[m, _PARENT] if m > 0 else -1
    return stages[:, :num].copy()


@njit(cache=True, nogil=True)
def _uses_enough(devices: Packed, label_4: Ints) -> bool:
    """Whether a whole plan leaves no device idle, where none may be."""
    return not devices.use_all or label_4[_PACKED] == devices.have


@njit(cache=True, nogil=True)
def _best_of(found: Found, num_found: int, most: float, kept: Ints) -> int:
    """Move the labels with the least bounds to the front, as many as `kept` has room for; how many these are.

    Of those at one cut with the same devices one; none of whole plans; none that comes to `most`.
    """
    label_M4, seconds_M3 = found
    num = 0
    for i in np.argsort(seconds_M3[:num_found, _BOUND]):
        if num == len(kept) or seconds_M3[i, _BOUND] >= most:
            break
        is_new = label_M4[i, _CUT] != 0
        for k in range(num):
            if not is_new:
                break
            j = kept[k]
            is_new = label_M4[j, _CUT] != label_M4[i, _CUT] or label_M4[j, _PACKED] != label_M4[i, _PACKED]
        if is_new:
            kept[num] = i
            num += 1
    label_M4[:num], seconds_M3[:num] = label_M4[kept[:num]], seconds_M3[kept[:num]]
    return num


@njit(cache=True, nogil=True)
def _continued(
    guide: Guide, n: int, at: int, label_4: Ints, seconds_3: Floats, best: float, found: Found, num_found: int
) -> int:
    """Write the labels of level n that are one stage before the one at `at`; their number so far."""
    aim, ways, links, levels, devices, spent, before_NAL1, first_KL4 = guide
    label_M4, seconds_M3 = found
    cut, last_cut, after = label_4[_CUT], before_NAL1.shape[2] - 1, ways.class_K[label_4[_HOW]]
    for k in np.flatnonzero(levels.looked_NK[n]):
        c, a = ways.among_K[k], ways.class_K[k]
        packed = label_4[_PACKED] + devices.packed_C[c]
        if (((devices.have | devices.guard) - packed) & devices.guard) != devices.guard:
            continue
        seconds = 0.0
        if cut < last_cut:
            seconds = 2.0 * (links.latency_AA[a, after] + links.per_byte_AA[a, after] * links.bytes_L1[cut])
            if links.repeats * seconds > aim.limit:
                continue
        if first_KL4[k, cut, _STARTS] != n:
            _look_for_starts(guide, n, int(k), cut)
        total = seconds_3[_SO_FAR] + seconds + ways.seconds_CL1[c, cut]
        priced = seconds_3[_PRICED] + ways.price_K[k]
        for i in range(_STARTS):
            start = first_KL4[k, cut, i]
            if start < 0:
                break
            so_far = total - ways.seconds_CL1[c, start]
            bound = so_far + priced - spent + before_NAL1[n, a, start]
            if bound >= best:
                break
            label_M4[num_found, _PARENT], label_M4[num_found, _CUT] = at, start
            label_M4[num_found, _HOW], label_M4[num_found, _PACKED] = k, packed
            seconds_M3[num_found, _BOUND], seconds_M3[num_found, _SO_FAR] = max(bound, so_far), so_far
            seconds_M3[num_found, _PRICED] = priced
            num_found += 1
    return num_found


@njit(cache=True, nogil=True)
def _look_for_starts(guide: Guide, n: int, k: int, cut: int) -> None:
    """Write down from which starts stages of level n to a cut have the least bounds, whatever comes after the cut."""
    _, ways, _, levels, _, _, before_NAL1, first_KL4 = guide
    c, a, first_4 = ways.among_K[k], ways.class_K[k], first_KL4[k, cut]
    first_4[:_STARTS], first_4[_STARTS] = -1, n
    least_3 = np.full(_STARTS, np.inf)
    for start in range(cut - 1, levels.band_N2[n, 0] - 1, -1):
        if min(levels.fitting_N1CL[n - 1, c, start], levels.busy_KL[k, start]) < cut:
            break  # nor does a longer one
        seconds = before_NAL1[n, a, start] - ways.seconds_CL1[c, start]
        if seconds < least_3[_STARTS - 1]:
            i = _STARTS - 1
            while i > 0 and seconds < least_3[i - 1]:
                least_3[i], first_4[i] = least_3[i - 1], first_4[i - 1]
                i -= 1
            least_3[i], first_4[i] = seconds, start
