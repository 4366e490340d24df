"""Compiled loops over problems of thousands of layers whose costs are sums: no list of stages, only windows of cuts.

Under a limit on the bottleneck the stages that may start at a layer reach to some furthest stop, which never moves away
as the start moves forward, and a stage's seconds are a difference of prefix sums: the cheapest way to each stop is a
minimum over a sliding window, one step for each stop and configuration.

Letters: C = configurations, L = layers, L1 = cut positions, A = link classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats

Ints = NDArray[np.int64]


class Costs(NamedTuple):
    """What stages take: differences of sums over layers, as far as they are given up to each cut.

    Attributes:
        busy_CL1, per_step_C: seconds that a stage is busy in a step besides the fill; what it is whatever its layers.
        fixed_CL1, active_CL1, step_CL1: bytes always, of a microbatch in flight, and at the end of a step.
        scratch_CL: bytes while a layer runs: a stage needs its largest.
        capacity_C: bytes of a device.
        end_CL: the first layer from `start` on that cannot be part of any stage.
        early: of what is between a stage's last two cuts, so much counts as if it were not part of it.
    """

    busy_CL1: Floats
    per_step_C: Floats
    fixed_CL1: Floats
    active_CL1: Floats
    step_CL1: Floats
    scratch_CL: Floats
    capacity_C: Floats
    end_CL: Ints
    early: float = 0.0


class Stages(NamedTuple):
    """The stages to choose from, and what they cost.

    Attributes:
        price_C, class_C: seconds for the devices of a stage, and its link class.
        seconds_CL1: of the layers, summed from the first.
        furthest_CL: see `furthest_stops`.
        among_K: the configurations that are looked at.
    """

    price_C: Floats
    class_C: Ints
    seconds_CL1: Floats
    furthest_CL: Ints
    among_K: Ints


class Links(NamedTuple):
    """What crosses a cut.

    Attributes:
        repeats: microbatches − 1, by which a link's seconds count in the bottleneck.
        latency_AA, per_byte_AA: seconds of a message between two classes, and for each byte.
        bytes_L1: of the message at a cut.
    """

    repeats: float
    latency_AA: Floats
    per_byte_AA: Floats
    bytes_L1: Floats


class Choices(NamedTuple):
    """How the cheapest plan is followed back; written to.

    Attributes:
        choice_AL1: [a, stop] the configuration of the last stage, of class a.
        start_CL1: [c, stop] where that of configuration c begins; −1: none can stop there.
        class_before_AL1: [a, cut] the class before a stage of class a.
        to_AL1: [a, cut] the least Σ of all before it, prices and the transfer to a stage of class a included.
    """

    choice_AL1: NDArray[np.int32]
    start_CL1: NDArray[np.int32]
    class_before_AL1: NDArray[np.int32]
    to_AL1: Floats


@njit(cache=True, nogil=True)
def furthest_stops(
    limit: float, most_in_flight: float, costs: Costs, among_K: Ints, after_L1: Ints, furthest_CL: Ints
) -> bool:
    """furthest[c, start]: no stage from there stops later that is no busier than the limit and fits its memory.

    A stage has at least as many stages after it as the layers after it need, and as `after_L1` says of its stop, so it
    holds at least one microbatch more than that, up to the most that a schedule asks for (1: memory does not depend on
    the place). Returns whether there is a stage from every layer.
    """
    busy_CL1, per_step_C, fixed_CL1, active_CL1, step_CL1, scratch_CL, capacity_C, end_CL, _ = costs
    C, L = scratch_CL.shape
    large = np.empty((C, L), np.int64)  # [top:end] layers of a window, each with more scratch than all those before it
    top, end, right = np.zeros(C, np.int64), np.zeros(C, np.int64), np.full(C, L)
    # The fewest stages from a cut on, as the windows alone have it (no cut asks for more than those before it, so the
    # furthest stop leads to it), and with what is known of the cut, which may be more at later cuts.
    fewest, after = np.zeros(L + 1, np.int64), np.zeros(L + 1, np.int64)
    for start in range(L - 1, -1, -1):
        reached = start
        for c in among_K:
            # A layer with no more scratch than one before it is the largest of no window that has both.
            while end[c] > top[c] and scratch_CL[c, large[c, end[c] - 1]] <= scratch_CL[c, start]:
                end[c] -= 1
            large[c, end[c]] = start
            end[c] += 1
            # What a stage takes grows with its layers, and how many microbatches it holds depends on its stop alone: a
            # stop that was too far for a later start is too far for this one.
            right[c] = min(right[c], end_CL[c, start])
            while right[c] > start:
                stop = right[c]
                while large[c, top[c]] >= stop:
                    top[c] += 1
                need = min(after[stop] + 1, most_in_flight)
                free = capacity_C[c] - (fixed_CL1[c, stop] - fixed_CL1[c, start])
                working = scratch_CL[c, large[c, top[c]]] + need * (active_CL1[c, stop] - active_CL1[c, start])
                if (
                    busy_CL1[c, stop] - busy_CL1[c, start] + per_step_C[c] <= limit
                    and working <= free
                    and step_CL1[c, stop] - step_CL1[c, start] <= free
                ):
                    break
                right[c] -= 1
            if right[c] == start:  # not even this layer alone: the window begins anew
                top[c] = end[c]
            furthest_CL[c, start] = right[c]
            reached = max(reached, right[c])
        if reached == start:
            return False
        fewest[start] = fewest[reached] + 1
        after[start] = max(fewest[start], after_L1[start])
    return True


@njit(cache=True, nogil=True)
def cheapest(limit: float, stages: Stages, links: Links, choices: Choices) -> tuple[float, int]:
    """The least Σ of seconds, transfers and prices of stages that reach no further than they may; inf if none do.

    And the class of the last stage.
    """
    price_C, class_C, seconds_CL1, furthest_CL, among_K = stages
    repeats, latency_AA, per_byte_AA, bytes_L1 = links
    choice_AL1, start_CL1, class_before_AL1, to_AL1 = choices
    C, L = furthest_CL.shape
    A = len(latency_AA)
    to_AL1[:] = np.inf
    to_AL1[:, 0] = 0.0
    start_CL1[:] = -1
    queue = np.empty((C, L + 1), np.int64)  # [head:tail] starts, each cheaper than those after it
    head, tail = np.zeros(C, np.int64), np.zeros(C, np.int64)
    here_A = np.empty(A)
    for stop in range(1, L + 1):
        here_A[:] = np.inf
        start = stop - 1
        for c in among_K:
            a = class_C[c]
            value = to_AL1[a, start] - seconds_CL1[c, start]
            # A start that is no cheaper than a later one is dropped: the furthest stop never moves away as starts move
            # forward, so the later one reaches as far, at no more.
            if value < np.inf:
                last = tail[c]
                while last > head[c] and not (
                    to_AL1[a, queue[c, last - 1]] - seconds_CL1[c, queue[c, last - 1]] < value
                ):
                    last -= 1
                queue[c, last] = start
                tail[c] = last + 1
            # Starts that do not reach this stop reach no later one.
            while head[c] < tail[c] and furthest_CL[c, queue[c, head[c]]] < stop:
                head[c] += 1
            if head[c] < tail[c]:
                at = queue[c, head[c]]
                total = to_AL1[a, at] - seconds_CL1[c, at] + seconds_CL1[c, stop] + price_C[c]
                start_CL1[c, stop] = at
                if total < here_A[a]:
                    here_A[a] = total
                    choice_AL1[a, stop] = c
        if stop == L:
            return here_A.min(), int(here_A.argmin())
        for b in range(A):  # what ends here, with the transfer to a stage of each class after it
            if here_A[b] == np.inf:
                continue
            for a in range(A):
                seconds = 2.0 * (latency_AA[b, a] + per_byte_AA[b, a] * bytes_L1[stop])
                if repeats * seconds <= limit and here_A[b] + seconds < to_AL1[a, stop]:
                    to_AL1[a, stop] = here_A[b] + seconds
                    class_before_AL1[a, stop] = b
    return np.inf, 0


@njit(cache=True, nogil=True)
def downstream(limit: float, more: float, stages: Stages, links: Links, to_AL1: Floats) -> tuple[Floats, Floats]:
    """The other way round: the least Σ with prices of the stages from each cut on, each stage costing `more`.

    Returns:
        here_AL1: [a, cut] the first of these stages is of class a.
        through_C: the least of a whole plan with a stage of each configuration; `to_AL1` is what is before.
    """
    price_C, class_C, seconds_CL1, furthest_CL, among_K = stages
    repeats, latency_AA, per_byte_AA, bytes_L1 = links
    C, L = furthest_CL.shape
    A = len(latency_AA)
    rest_AL1 = np.full((A, L + 1), np.inf)  # [a, cut] all after it, and the transfer from a stage of class a
    rest_AL1[:, L] = 0.0
    here_AL1, through_C = np.full((A, L + 1), np.inf), np.full(C, np.inf)
    queue = np.empty((C, L + 1), np.int64)  # [head:tail] stops, each cheaper than those after it
    head, tail = np.zeros(C, np.int64), np.zeros(C, np.int64)
    for start in range(L - 1, -1, -1):
        stop = start + 1
        for c in among_K:
            a = class_C[c]
            value = rest_AL1[a, stop] + seconds_CL1[c, stop]
            # A stop that is no cheaper than an earlier one is dropped: starts that reach it reach the earlier one too.
            if value < np.inf:
                last = tail[c]
                while last > head[c] and not (
                    rest_AL1[a, queue[c, last - 1]] + seconds_CL1[c, queue[c, last - 1]] < value
                ):
                    last -= 1
                queue[c, last] = stop
                tail[c] = last + 1
            # A stop that is too far for this start is too far for all that come before it.
            while head[c] < tail[c] and queue[c, head[c]] > furthest_CL[c, start]:
                head[c] += 1
            if head[c] < tail[c]:
                at = queue[c, head[c]]
                total = rest_AL1[a, at] + (seconds_CL1[c, at] - seconds_CL1[c, start]) + price_C[c] + more
                here_AL1[a, start] = min(here_AL1[a, start], total)
                through_C[c] = min(through_C[c], to_AL1[a, start] + total)
        for b in range(A if start > 0 else 0):
            if here_AL1[b, start] == np.inf:
                continue
            for a in range(A):
                seconds = 2.0 * (latency_AA[a, b] + per_byte_AA[a, b] * bytes_L1[start])
                if repeats * seconds <= limit:
                    rest_AL1[a, start] = min(rest_AL1[a, start], here_AL1[b, start] + seconds)
    return here_AL1, through_C
