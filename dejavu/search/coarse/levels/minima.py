"""Compiled loops over the cuts of one level: what stages cost, and minima over sliding windows.

By places of a band of cuts, B, from 0 on: so the compiler knows that none is below, and takes several at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats

Ints = NDArray[np.int64]
Stops = NDArray[np.int32] | NDArray[np.uint16]

NO_NAN = {"nnan", "nsz"}  # so that the compiler may look for the least of several numbers at once


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def reach(fitting_B: Stops, busy_B: Stops, first: int, end_B: Ints) -> None:
    """Fill the places before which stages from each cut on stop."""
    for b in range(len(fitting_B)):
        end_B[b] = min(np.int64(fitting_B[b]), np.int64(busy_B[b])) - first


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def sums(one_B: Floats, other_B: Floats, times: float, sum_B: Floats) -> None:
    for b in range(len(other_B)):
        sum_B[b] = one_B[b] + times * other_B[b]


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def lowered(least_B: Floats, before_B: Floats, price: float, here_B: Floats) -> None:
    """What stages of one configuration cost, where that is less than what is here."""
    for b in range(len(here_B)):
        here_B[b] = min(here_B[b], least_B[b] - before_B[b] + price)


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def through(value_B: Floats, price: float, rest_B: Floats, here_B: Floats, through_B: Floats) -> float:
    """The same, and with what comes after; returns the least of that."""
    least = np.inf
    for b in range(len(here_B)):
        total = value_B[b] + price
        here_B[b] = min(here_B[b], total)
        whole = total + rest_B[b]
        through_B[b] = min(through_B[b], whole)
        least = min(least, whole)
    return least


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def least_ahead(value_B: Floats, end_B: Ints, upto_B: Floats, least_B: Floats) -> None:
    """Fill least[b] with the least value from b on, until before end[b], which falls with b; inf: there is none.

    There may be more values than places that are asked for, or fewer.

    A window is two parts: from a pivot on, where the least until each place is known, and before it, where the least of
    all is. A window that no longer reaches the pivot gets a new one, its first place. So each place is looked at twice,
    and there is nothing for the processor to guess, as in a queue that is kept in order.
    """
    B, num_values = len(least_B), len(value_B)
    pivot, least = num_values, np.inf
    for back in range(B):
        b = B - 1 - back
        end = min(end_B[b], num_values)
        if end > pivot:
            least = min(least, value_B[b])
            least_B[b] = min(least, upto_B[end - 1])
            continue
        pivot, least, until = b, np.inf, np.inf
        for place in range(b, end):
            until = min(until, value_B[place])
            upto_B[place] = until
        least_B[b] = until


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def least_behind(value_B: Floats, end_B: Ints, after_B: Ints, upto_B: Floats, least_B: Floats) -> None:
    """Fill least[b] with the least value of the places until b whose ends, which rise, are beyond b; inf: no such.

    As `least_ahead`, in the other direction. Where windows begin is noted before, in `after_B`.
    """
    B = len(least_B)
    after_B[: B + 1] = 0
    for place in range(B):
        after_B[min(end_B[place], B)] = place + 1  # of places that end alike the last one stays
    pivot, least, begin = -1, np.inf, 0
    for b in range(B):
        begin = max(begin, after_B[b])
        if begin <= pivot:
            least = min(least, value_B[b])
            least_B[b] = min(least, upto_B[begin])
            continue
        pivot, least, until = b, np.inf, np.inf
        for place in range(b, begin - 1, -1):
            until = min(until, value_B[place])
            upto_B[place] = until
        least_B[b] = until
