"""Compiled beam over whole plans, from the last layer on, where what is before is known at prices of devices.

`counted.through` has the least Σ before every state, at prices; a label is a state with the stages from there to the
last layer, and the devices that these took. Labels of one level are looked at together, those with the least bounds are
kept. The last stages hold few microbatches, so they are the largest and take the most devices: they come first, and
small ones fill what is left.

Of two labels at one cut with one class of links and the same devices only the one with less Σ can become the best plan.
So where few labels come to less than the cutoff none is left out, and the beam says what no plan is below, though no
prices prove it (label setting with bounds: Dumitrescu and Boland, Networks 42, 2003). Where some are left out it says
what it would have been for want of room.

Letters as in `coarse.levels.counted`; M = labels, X = starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.levels.counted import Levels, Ways
from dejavu.search.coarse.relaxed import Packed
from dejavu.search.coarse.windows import Links

Ints = NDArray[np.int64]

_ROOM = 8  # times as many labels as are kept are found before only the best of them are
# Columns of a label: its parent, its cut, the configuration of the stage from there (its place in K), all devices.
_PARENT, _CUT, _HOW, _PACKED = range(4)
# Columns of its seconds: of whole plans, Σ so far; and from there on the price of the devices so far, at each of the
# prices.
_BOUND, _SO_FAR, _PRICED = range(3)


class Aim(NamedTuple):
    """Which plans are looked for: the seconds of the bottleneck and of Σ that they have at most.

    Attributes:
        width: labels of a level.
        num_starts: of a stage to a cut under one configuration, those with the least bounds.
        most_stages: that a plan can have; where the last level is open, which stands for all from it on.
    """

    limit: float
    cutoff: float
    width: int
    num_starts: int
    most_stages: int


class Prices(NamedTuple):
    """What is known at some prices, P of them.

    Attributes:
        price_PK: of configurations.
        spent_P: seconds of all devices, and what sums may err by.
        before_SA: the least Σ before each state that is left, with the first prices, for each class of links of the
            stage from there; see `counted.through`.
        others_QSA: the same at the other prices, Q = P − 1, rounded down to single precision: of many states they take
            most of a beam's memory.
        state_NL1: the state of each level and cut; −1: it is not left.
    """

    price_PK: Floats
    spent_P: Floats
    before_SA: Floats
    others_QSA: NDArray[np.float32]
    state_NL1: Ints


class Guide(NamedTuple):
    """What a beam reads.

    Attributes:
        aim, ways, links, levels, devices: see there; the ways are at the first prices.
        prices: at which labels have bounds, of which the highest counts.
    """

    aim: Aim
    ways: Ways
    links: Links
    levels: Levels
    devices: Packed
    prices: Prices


class Labels(NamedTuple):
    """In the columns above; written to. `first`: the number of the first one."""

    label_M4: Ints
    seconds_MY: Floats
    first: int


class Room(NamedTuple):
    """What is written to while a level is looked at.

    Attributes:
        found: labels one stage further.
        kept: places of the best of them.
        slots: a table of these by cut, class and devices; −1: free.
        first_L1, next_M: at each cut the first label of the level, and the next one after each; −1: there is none.
        start_X2, seconds_X: of stages to a cut under one configuration, with the state there; and Σ before them less
            that of the layers there.
    """

    found: Labels
    kept: Ints
    slots: Ints
    first_L1: Ints
    next_M: Ints
    start_X2: Ints
    seconds_X: Floats


class Least(NamedTuple):
    """Seconds of Σ, and which plan has them.

    Attributes:
        best: of the best plan so far, or the cutoff.
        below: labels whose bounds come to more are left out.
        left_out: the least bound of those that were, though they are below the best one.
        last, how: the best plan is this label with a stage of this configuration before it; −1: none was met.
    """

    best: float
    below: float
    left_out: float
    last: int
    how: int


def beam(guide: Guide, is_over: Callable[[], bool]) -> tuple[Ints, float]:
    """[configuration, start, stop; stage] of the plan with the least Σ that was met, in order; and a bound on Σ.

    No stages: none was met. No plan is below the bound, up to the cutoff, whether it was met or not.

    Args:
        is_over: asked at each level; what was met by then is said, and nothing is proved.
    """
    aim, N = guide.aim, len(guide.prices.state_NL1)
    most = aim.most_stages if guide.levels.is_open else N - 1
    label_M4, seconds_MY, room = _begun(guide)
    begin, end, least = 0, 1, Least(aim.cutoff, aim.cutoff, np.inf, -1, 0)
    for num_stages in range(1, most + 1):
        if is_over():
            least = least._replace(left_out=-np.inf)
            break
        labels = Labels(label_M4[begin:end], seconds_MY[begin:end], begin)
        num, least = _one_stage_further(guide, min(num_stages, N - 1), labels, room, least)
        if num == 0:
            break
        if end + num > len(label_M4):
            more = len(label_M4)
            label_M4 = np.concatenate((label_M4, np.empty((more, 4), np.int64)))
            seconds_MY = np.concatenate((seconds_MY, np.empty((more, seconds_MY.shape[1]))))
        label_M4[end : end + num], seconds_MY[end : end + num] = room.found.label_M4[:num], room.found.seconds_MY[:num]
        begin, end = end, end + num
    return _stages(guide.ways, label_M4, least, most), min(least.best, least.left_out)


def _begun(guide: Guide) -> tuple[Ints, Floats, Room]:
    """The label of no stages, the first one of all, and room for those of a level."""
    width, L1, Y = guide.aim.width, guide.prices.state_NL1.shape[1], _PRICED + len(guide.prices.spent_P)
    size, num_starts = _ROOM * width + L1, min(guide.aim.num_starts, L1)
    label_M4, seconds_MY = np.empty((4 * width + 1, 4), np.int64), np.empty((4 * width + 1, Y))
    label_M4[0], seconds_MY[0] = 0, 0.0
    label_M4[0, _CUT] = L1 - 1
    num_slots = 4
    while num_slots < 4 * width:
        num_slots *= 2
    room = Room(
        Labels(np.empty((size, 4), np.int64), np.empty((size, Y)), 0),
        np.empty(width, np.int64),
        np.empty(num_slots, np.int64),
        np.full(L1, -1, np.int64),
        np.empty(width, np.int64),
        np.empty((num_starts, 2), np.int64),
        np.empty(num_starts),
    )
    return label_M4, seconds_MY, room


@njit(cache=True, nogil=True)
def _stages(ways: Ways, label_M4: Ints, least: Least, most: int) -> Ints:
    stages = np.empty((3, most), np.int64)
    num, start, how, m = 0, 0, least.how, least.last
    while m >= 0:
        stages[0, num], stages[1, num], stages[2, num] = ways.among_K[how], start, label_M4[m, _CUT]
        num += 1
        start, how, m = label_M4[m, _CUT], label_M4[m, _HOW], label_M4[m, _PARENT] if m > 0 else -1
    return stages[:, :num].copy()


@njit(cache=True, nogil=True)
def _one_stage_further(guide: Guide, n: int, labels: Labels, room: Room, least: Least) -> tuple[int, Least]:
    """Write the labels of level n to the front of those found; how many."""
    label_M4, looked = labels.label_M4, np.flatnonzero(guide.levels.looked_NK[n])
    for m in range(len(label_M4) - 1, -1, -1):
        cut = label_M4[m, _CUT]
        room.next_M[m], room.first_L1[cut] = room.first_L1[cut], m
    num_found, least = 0, Least(least.best, least.best, least.left_out, least.last, least.how)
    for first in range(len(label_M4)):
        cut = label_M4[first, _CUT]
        if room.first_L1[cut] != first:
            continue
        room.first_L1[cut] = -1
        least_here, m = np.inf, first
        while m >= 0:
            least_here = min(least_here, labels.seconds_MY[m, _SO_FAR] + labels.seconds_MY[m, _PRICED])
            m = room.next_M[m]
        for k in map(int, looked):
            starts = _look_for_starts(guide, n, k, cut, least.below - least_here, (room.start_X2, room.seconds_X))
            m = first if starts[0] > 0 or starts[1] < np.inf else -1
            while m >= 0:
                if num_found + starts[0] > len(room.found.label_M4):
                    num_found, least = _best_of(guide, room, num_found, least)
                num_found, least = _continued(guide, k, labels, m, room, starts, num_found, least)
                m = room.next_M[m]
    return _best_of(guide, room, num_found, least)


@njit(cache=True, nogil=True)
def _look_for_starts(
    guide: Guide, n: int, k: int, cut: int, below: float, starts: tuple[Ints, Floats]
) -> tuple[int, float]:
    """Write down from which starts stages of level n to a cut have the least bounds, whatever comes after the cut.

    Returns how many, and the least of those that are left out: as they come to `below` with the price and the stage, or
    for want of room.
    """
    ways, levels, state_L1, (start_X2, seconds_X) = guide.ways, guide.levels, guide.prices.state_NL1[n], starts
    c, a, num, left_out = ways.among_K[k], ways.class_K[k], 0, np.inf
    below += guide.prices.spent_P[0] - ways.price_K[k] - ways.seconds_CL1[c, cut]
    for start in range(cut - 1, levels.band_N2[n, 0] - 1, -1):
        if min(levels.fitting_N1CL[n - 1, c, start], levels.busy_KL[k, start]) < cut:
            break  # nor does a longer one
        if state_L1[start] < 0:
            continue
        seconds = guide.prices.before_SA[state_L1[start], a] - ways.seconds_CL1[c, start]
        if seconds >= below:
            left_out = min(left_out, seconds)
            continue
        if num == len(start_X2):
            num -= 1
            left_out = min(left_out, seconds_X[num])
        x = num
        while x > 0 and seconds < seconds_X[x - 1]:
            seconds_X[x], start_X2[x] = seconds_X[x - 1], start_X2[x - 1]
            x -= 1
        seconds_X[x], start_X2[x, 0], start_X2[x, 1] = seconds, start, state_L1[start]
        num += 1
        if num == len(start_X2):
            below = min(below, seconds_X[num - 1])
    return num, left_out


@njit(cache=True, nogil=True)
def _continued(
    guide: Guide,
    k: int,
    labels: Labels,
    m: int,
    room: Room,
    starts: tuple[int, float],
    num_found: int,
    least: Least,
) -> tuple[int, Least]:
    """Write the labels that are one stage of configuration k before the m-th; the number of those found so far."""
    aim, ways, links, devices, spent_P = guide.aim, guide.ways, guide.links, guide.devices, guide.prices.spent_P
    found, start_X2, seconds_X = room.found, room.start_X2, room.seconds_X
    c, a, cut = ways.among_K[k], ways.class_K[k], labels.label_M4[m, _CUT]
    packed, seconds = labels.label_M4[m, _PACKED] + devices.packed_C[c], 0.0
    if (((devices.have | devices.guard) - packed) & devices.guard) != devices.guard:
        return num_found, least
    if cut < len(room.first_L1) - 1:
        after = ways.class_K[labels.label_M4[m, _HOW]]
        seconds = 2.0 * (links.latency_AA[a, after] + links.per_byte_AA[a, after] * links.bytes_L1[cut])
        if links.repeats * seconds > aim.limit:
            return num_found, least
    total = labels.seconds_MY[m, _SO_FAR] + seconds + ways.seconds_CL1[c, cut]
    priced = labels.seconds_MY[m, _PRICED] + guide.prices.price_PK[0, k]
    best, below, left_out, last, how = least
    left_out = min(left_out, total + priced - spent_P[0] + starts[1])
    for x in range(starts[0]):
        start, state = start_X2[x]
        bound, so_far = total + priced - spent_P[0] + seconds_X[x], total - ways.seconds_CL1[c, start]
        if bound >= below:
            left_out = min(left_out, bound)
            break  # and so do the others
        for p in range(1, len(spent_P)):
            priced_p = labels.seconds_MY[m, _PRICED + p] + guide.prices.price_PK[p, k]
            before = float(guide.prices.others_QSA[p - 1, state, a])
            bound = max(bound, so_far + priced_p - spent_P[p] + before)
        if bound >= below:
            left_out = min(left_out, bound)
            continue
        if so_far >= best:
            continue
        if start == 0:
            if not devices.use_all or packed == devices.have:
                best, below, last, how = so_far, min(below, so_far), labels.first + m, k
            continue
        label_4, seconds_Y = found.label_M4[num_found], found.seconds_MY[num_found]
        label_4[_PARENT], label_4[_CUT], label_4[_HOW], label_4[_PACKED] = labels.first + m, start, k, packed
        seconds_Y[_BOUND], seconds_Y[_SO_FAR] = bound, so_far
        for p in range(len(spent_P)):
            seconds_Y[_PRICED + p] = labels.seconds_MY[m, _PRICED + p] + guide.prices.price_PK[p, k]
        num_found += 1
    return num_found, Least(best, below, left_out, last, how)


@njit(cache=True, nogil=True)
def _best_of(guide: Guide, room: Room, num_found: int, least: Least) -> tuple[int, Least]:
    """Move the labels with the least bounds to the front, as many as there is room for; how many these are.

    Of those at one cut with the same devices and class the one with the least Σ; none that comes to the best plan's.
    """
    class_K, (label_M4, seconds_MY, _), kept, slots = guide.ways.class_K, room.found, room.kept, room.slots
    num, mask, below, left_out = 0, len(slots) - 1, least.below, least.left_out
    slots[:] = -1
    for i in np.argsort(seconds_MY[:num_found, _BOUND]):
        if seconds_MY[i, _BOUND] >= least.best:
            break
        cut, a, packed = label_M4[i, _CUT], class_K[label_M4[i, _HOW]], label_M4[i, _PACKED]
        slot = _hashed(cut, a, packed) & mask
        while slots[slot] >= 0:
            j = kept[slots[slot]]
            if label_M4[j, _CUT] == cut and label_M4[j, _PACKED] == packed and class_K[label_M4[j, _HOW]] == a:
                break
            slot = (slot + 1) & mask
        if slots[slot] >= 0:
            if seconds_MY[i, _SO_FAR] < seconds_MY[kept[slots[slot]], _SO_FAR]:
                kept[slots[slot]] = i
        elif num == len(kept):
            below, left_out = min(below, seconds_MY[i, _BOUND]), min(left_out, seconds_MY[i, _BOUND])
            break
        else:
            kept[num], slots[slot] = i, num
            num += 1
    label_M4[:num], seconds_MY[:num] = label_M4[kept[:num]], seconds_MY[kept[:num]]
    return num, Least(least.best, below, left_out, least.last, least.how)


@njit(cache=True, nogil=True)
def _hashed(cut: int, a: int, packed: int) -> int:
    mixed = (packed * 0x1E3779B97F4A7C15) ^ (cut * 0x3F58476D1CE4E5B9) ^ (a * 0x14D049BB133111EB)
    return mixed ^ (mixed >> 31)
