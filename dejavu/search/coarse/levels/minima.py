"""Compiled loops over the cuts of one level: transfers between classes of links, and minima over sliding windows.

Letters as in `coarse.levels.counted`; B = classes of links that are known in a transfer, or places of a band of cuts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.windows import Links

Ints = NDArray[np.int64]
Stops = NDArray[np.int32] | NDArray[np.uint16]

Flags = NDArray[np.bool_]

_TOGETHER = 16  # cuts
NO_NAN = {"nnan", "nsz"}  # so that the compiler may look for the least of several numbers at once


class Crossing(NamedTuple):
    """Transfers at cuts between a class of links that is known, b, and each other class, a.

    Attributes:
        repeats, bytes_L1: as of `Links`.
        latency_BA, per_byte_BA: seconds of a message, and for each byte.
        order_B: all classes, each after those in its row.
        row_B: each class's row: to no class is a transfer from one of them dearer than from those after it.
    """

    repeats: float
    bytes_L1: Floats
    latency_BA: Floats
    per_byte_BA: Floats
    order_B: Ints
    row_B: Ints


@njit(cache=True, nogil=True)
def crossing(links: Links, is_after: bool) -> Crossing:
    """`is_after`: the known class is the one after a cut."""
    latency_BA, per_byte_BA = links.latency_AA.copy(), links.per_byte_AA.copy()
    B = len(latency_BA)
    for b in range(B):
        for a in range(B if is_after else 0):
            latency_BA[b, a], per_byte_BA[b, a] = links.latency_AA[a, b], links.per_byte_AA[a, b]
    order_B, num_rows = np.argsort(per_byte_BA.sum(axis=1)), 0
    row_B, last_B = np.zeros(B, np.int64), np.zeros(B, np.int64)
    for b in order_B:
        row = 0
        while row < num_rows and not (
            (latency_BA[last_B[row]] <= latency_BA[b]).all() and (per_byte_BA[last_B[row]] <= per_byte_BA[b]).all()
        ):
            row += 1
        num_rows = max(num_rows, row + 1)
        row_B[b], last_B[row] = row, b
    return Crossing(links.repeats, links.bytes_L1, latency_BA, per_byte_BA, order_B, row_B)


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def transferred(limit: float, crossing: Crossing, cut: int, here_A: Floats, least_A: Floats, to_A: Floats) -> None:
    """to[a]: the least of here[b] with the transfer at a cut.

    What is no cheaper than one before it in its row makes nothing cheaper; `least_A`: of each row, written to.
    """
    repeats, bytes_L1, latency_BA, per_byte_BA, order_B, row_B = crossing
    size = bytes_L1[cut]
    to_A[:], least_A[:] = np.inf, np.inf
    for b in order_B:
        if not here_A[b] < least_A[row_B[b]]:
            continue
        least_A[row_B[b]] = here_A[b]
        latency_A, per_byte_A = latency_BA[b], per_byte_BA[b]
        for a in range(len(to_A)):
            seconds = 2.0 * (latency_A[a] + per_byte_A[a] * size)
            total = here_A[b] + seconds if repeats * seconds <= limit else np.inf
            to_A[a] = min(to_A[a], total)


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def transfers(
    limit: float, crossing: Crossing, alive_L1: Flags, low: int, high: int, here_AB: Floats, to_AL1: Floats
) -> None:
    """The same at all cuts from `low` to `high` that are alive, to which `here` belongs; inf at the others.

    A few cuts at a time: of each class the numbers of neighbouring cuts lie next to each other in memory.
    """
    A = len(here_AB)
    here_WA, to_WA, least_A = np.empty((_TOGETHER, A)), np.empty((_TOGETHER, A)), np.empty(A)
    for begin in range(low, high + 1, _TOGETHER):
        width = min(_TOGETHER, high + 1 - begin)
        for a in range(A):
            for w in range(width):
                here_WA[w, a] = here_AB[a, begin - low + w]
        for w in range(width):
            if alive_L1[begin + w]:
                transferred(limit, crossing, begin + w, here_WA[w], least_A, to_WA[w])
            else:
                to_WA[w] = np.inf
        for a in range(A):
            for w in range(width):
                to_AL1[a, begin + w] = to_WA[w, a]


# Loops over a band of cuts, by places from 0 on: so the compiler knows that none is below, and takes several at once.


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
