"""Compiled loops over the cuts of one level: what stages cost, and minima over sliding windows.

By places of a band of cuts, B, from 0 on: so the compiler knows that none is below, and takes several at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.levels.lesser import lesser

Places = NDArray[np.uint32]
Stops = NDArray[np.int32] | NDArray[np.uint16]

_0, _1, _2, _3, _4 = np.arange(5, dtype=np.uint64)

NO_NAN = {"nnan", "nsz"}  # so that the compiler may look for the least of several numbers at once


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def reach(fitting_B: Stops, busy_B: Stops, first: int, last: int, end_B: Places) -> None:
    """Fill in the place before which stages from each place on stop; `first`: its cut; none stops after `last`."""
    begin, most = np.int32(first), np.int32(last)
    for b in range(len(fitting_B)):
        end_B[b] = min(min(np.int32(fitting_B[b]), np.int32(busy_B[b])), most) - begin


@njit(cache=True, nogil=True)
def reached(end_B: Places, skipped: int, spare_B: Places, begin_B: Places) -> None:
    """Fill in the first place whose stages stop after each place or later; not for those that are skipped.

    Args:
        end_B: as `reach` fills it; it does not fall.
        spare_B: is written to.
        begin_B: from the first that is not skipped on; in both there is room for one more than there are places.
    """
    b, num, before = _0, np.uint64(len(end_B)), np.uint64(skipped)
    most = np.uint32(num) - end_B[num - _1]
    for place in range(len(end_B) - 1):
        most = max(most, end_B[place + 1] - end_B[place])
    one_B, other_B = begin_B[: num + _1 - before], spare_B[: num + _1 - before]
    one_B[:] = 0
    while b + _4 <= num:  # of places that stop alike the last one stays
        first, second = max(np.uint64(end_B[b]), before) - before, max(np.uint64(end_B[b + _1]), before) - before
        third, fourth = max(np.uint64(end_B[b + _2]), before) - before, max(np.uint64(end_B[b + _3]), before) - before
        one_B[first], one_B[second], one_B[third], one_B[fourth] = b + _1, b + _2, b + _3, b + _4
        b += _4
    while b < num:
        one_B[max(np.uint64(end_B[b]), before) - before] = b + _1
        b += _1
    size = 1
    while size <= most and size < len(one_B):  # what is not filled in is as the last that is
        other_B[:size] = one_B[:size]
        _highest(one_B[size:], one_B[: len(one_B) - size], other_B[size:])
        one_B, other_B = other_B, one_B
        size *= 2
    begin_B[: len(one_B)] = one_B


@njit(cache=True, nogil=True)
def _highest(one_B: Places, other_B: Places, highest_B: Places) -> None:
    for b in range(len(highest_B)):
        highest_B[b] = max(one_B[b], other_B[b])


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def sums(one_B: Floats, other_B: Floats, times: float, sum_B: Floats) -> None:
    for b in range(len(other_B)):
        sum_B[b] = one_B[b] + times * other_B[b]


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def lowered(least_B: Floats, before_B: Floats, price: float, here_B: Floats) -> None:
    """What stages of one configuration cost, where that is less than what is here."""
    for b in range(len(here_B)):
        here_B[b] = lesser(here_B[b], least_B[b] - before_B[b] + price)


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def through(value_B: Floats, price: float, rest_B: Floats, here_B: Floats, through_B: Floats) -> float:
    """The same, and with what comes after; returns the least of that. The values are written to."""
    for b in range(len(here_B)):
        value_B[b] += price
        here_B[b] = lesser(here_B[b], value_B[b])
    for b in range(len(here_B)):
        value_B[b] += rest_B[b]
        through_B[b] = lesser(through_B[b], value_B[b])
    num = len(here_B)
    while num > 1:  # one after the other each would wait for the one before
        half = num // 2
        lower(value_B[:half], value_B[num - half : num])
        num -= half
    return float(value_B[0])


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def lower(value_B: Floats, other_B: Floats) -> None:
    """To other values, where these are less."""
    for b in range(len(value_B)):
        value_B[b] = lesser(value_B[b], other_B[b])


# A window is two parts: from a pivot on, where the least until each place is known, and before it, where the least of
# all is. A window that no longer reaches the pivot gets a new one, its first place. So each place is looked at twice,
# and there is nothing for the processor to guess, as in a queue that is kept in order. Four places at a time: one of
# them does not wait for the one before. Places are unsigned: otherwise each is asked whether it is negative.


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def least_ahead(value_B: Floats, end_B: Places, upto_B: Floats, least_B: Floats) -> None:
    """Fill least[b] with the least value from b on, until before end[b], which falls with b; inf: there is none.

    There may be more values than places that are asked for, not fewer than windows reach.
    """
    b = np.uint64(len(least_B))
    while b > _0:
        b -= _1
        pivot, end, i = b, np.uint64(end_B[b]), b
        least = np.inf
        while i + _4 <= end:
            two, other_two = lesser(value_B[i], value_B[i + _1]), lesser(value_B[i + _2], value_B[i + _3])
            upto_B[i], upto_B[i + _1] = lesser(least, value_B[i]), lesser(least, two)
            upto_B[i + _2], least = lesser(least, lesser(two, value_B[i + _2])), lesser(least, lesser(two, other_two))
            upto_B[i + _3] = least
            i += _4
        while i < end:
            least = lesser(least, value_B[i])
            upto_B[i] = least
            i += _1
        least_B[b], least = least, np.inf
        while b >= _4 and np.uint64(end_B[b - _4]) > pivot:
            one, two = value_B[b - _1], lesser(value_B[b - _1], value_B[b - _2])
            three, four = lesser(two, value_B[b - _3]), lesser(two, lesser(value_B[b - _3], value_B[b - _4]))
            least_B[b - _1] = lesser(lesser(least, one), upto_B[np.uint64(end_B[b - _1]) - _1])
            least_B[b - _2] = lesser(lesser(least, two), upto_B[np.uint64(end_B[b - _2]) - _1])
            least_B[b - _3] = lesser(lesser(least, three), upto_B[np.uint64(end_B[b - _3]) - _1])
            least = lesser(least, four)
            least_B[b - _4] = lesser(least, upto_B[np.uint64(end_B[b - _4]) - _1])
            b -= _4
        while b > _0 and np.uint64(end_B[b - _1]) > pivot:
            b -= _1
            least = lesser(least, value_B[b])
            least_B[b] = lesser(least, upto_B[np.uint64(end_B[b]) - _1])


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def least_behind(value_B: Floats, skipped: int, begin_B: Places, upto_B: Floats, least_B: Floats) -> None:
    """Fill least[b] with the least value from begin[b] on, which rises with b, until b; inf: there is none.

    As `least_ahead`, in the other direction. Places from the first that is not skipped on.
    """
    b, num, before = _0, np.uint64(len(value_B) - skipped), np.uint64(skipped)
    while b < num:
        pivot, end, i = before + b, np.uint64(begin_B[b]), before + b + _1
        least = np.inf
        while i >= end + _4:
            two, other_two = lesser(value_B[i - _1], value_B[i - _2]), lesser(value_B[i - _3], value_B[i - _4])
            upto_B[i - _1], upto_B[i - _2] = lesser(least, value_B[i - _1]), lesser(least, two)
            upto_B[i - _3], least = lesser(least, lesser(two, value_B[i - _3])), lesser(least, lesser(two, other_two))
            upto_B[i - _4] = least
            i -= _4
        while i > end:
            i -= _1
            least = lesser(least, value_B[i])
            upto_B[i] = least
        least_B[b], least = least, np.inf
        b += _1
        while b + _4 <= num and np.uint64(begin_B[b + _3]) <= pivot:
            i = before + b
            one, two = value_B[i], lesser(value_B[i], value_B[i + _1])
            three, four = lesser(two, value_B[i + _2]), lesser(two, lesser(value_B[i + _2], value_B[i + _3]))
            least_B[b] = lesser(lesser(least, one), upto_B[np.uint64(begin_B[b])])
            least_B[b + _1] = lesser(lesser(least, two), upto_B[np.uint64(begin_B[b + _1])])
            least_B[b + _2] = lesser(lesser(least, three), upto_B[np.uint64(begin_B[b + _2])])
            least = lesser(least, four)
            least_B[b + _3] = lesser(least, upto_B[np.uint64(begin_B[b + _3])])
            b += _4
        while b < num and np.uint64(begin_B[b]) <= pivot:
            least = lesser(least, value_B[before + b])
            least_B[b] = lesser(least, upto_B[np.uint64(begin_B[b])])
            b += _1
