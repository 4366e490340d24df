"""Orders of passes by list scheduling: a pipeline rank that is free takes the most urgent pass that can run.

For schedules that torch has no class for. An order that somebody could carry out has no cycle of waiting, so whoever
runs each rank's passes in this order, each when its input is there, never blocks, whatever passes and messages take.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = 0, 1


class ListedPass(NamedTuple):
    """One pass of one microbatch through one stage."""

    stage: int
    direction: int  # FORWARD or BACKWARD
    microbatch: int


def list_scheduled(
    rank_S: Sequence[int],
    num_microbatches: int,
    *,
    most_in_flight: int,
    forward_seconds_S: Sequence[float],
    backward_seconds_S: Sequence[float],
) -> tuple[tuple[ListedPass, ...], ...]:
    """Return each rank's passes in the order in which it begins them, by a simulation without messages.

    A free rank takes a backward pass first, since that frees activations and lets the others end; of forward passes the
    one through the latest stage, since its microbatch is the nearest to its backward pass; and then the earliest
    microbatch. A microbatch enters the first stage while fewer than `most_in_flight` have entered and not left.

    Args:
        rank_S: which rank runs each of the S stages; every rank from 0 on runs at least one.
        forward_seconds_S, backward_seconds_S: one microbatch through each stage, in any unit.
    """
    S, P = len(rank_S), max(rank_S) + 1
    waiting: list[list[tuple[int, int, ListedPass]]] = [[] for _ in range(P)]
    orders: list[list[ListedPass]] = [[] for _ in range(P)]
    running: list[tuple[float, int, ListedPass]] = []
    is_free, entered, left, now = [True] * P, 0, 0, 0.0

    def offer(one: ListedPass) -> None:
        urgency = (0, one.microbatch) if one.direction == BACKWARD else (S - one.stage, one.microbatch)
        heapq.heappush(waiting[rank_S[one.stage]], (*urgency, one))

    while left < num_microbatches:
        while entered < min(num_microbatches, left + most_in_flight):
            offer(ListedPass(0, FORWARD, entered))
            entered += 1
        for rank in range(P):
            if is_free[rank] and waiting[rank]:
                one = heapq.heappop(waiting[rank])[-1]
                seconds = (backward_seconds_S if one.direction else forward_seconds_S)[one.stage]
                heapq.heappush(running, (now + seconds, rank, one))
                orders[rank].append(one)
                is_free[rank] = False
        now = running[0][0]
        while running and running[0][0] <= now:  # all that end together, before anybody chooses anew
            _, rank, (stage, direction, microbatch) = heapq.heappop(running)
            is_free[rank] = True
            if direction == FORWARD and stage + 1 < S:
                offer(ListedPass(stage + 1, FORWARD, microbatch))
            elif direction == FORWARD:
                offer(ListedPass(stage, BACKWARD, microbatch))
            elif stage:
                offer(ListedPass(stage - 1, BACKWARD, microbatch))
            else:
                left += 1
    return tuple(map(tuple, orders))


def wave_orders(rank_S: Sequence[int], num_microbatches: int) -> tuple[tuple[ListedPass, ...], ...]:
    """Return the passes of wave-like pipelines, which go there and back over the ranks (Hanayo, Liu et al. SC 2023).

    The paper makes its action lists by such rules and a table of ours need not be its own; what is the same: at most as
    many microbatches are under way as there are ranks, and where passes of a stage take as long forward as backward,
    the bubble of W waves and B microbatches, a multiple of P ranks, is (P − 1) / (2WB + P − 1).

    Both passes count alike here: orders by what passes take fill the ranks earlier and wait longer at the end.
    """
    ones = [1.0] * len(rank_S)
    return list_scheduled(
        rank_S,
        num_microbatches,
        most_in_flight=max(rank_S) + 1,
        forward_seconds_S=ones,
        backward_seconds_S=ones,
    )


def few_orders(
    num_ranks: int, num_microbatches: int, in_flight: Callable[[int, int, int], int]
) -> tuple[tuple[ListedPass, ...], ...]:
    """Return each rank's passes, one stage on each, also of fewer microbatches than ranks.

    A rank runs as many forward passes as microbatches may be in flight there, and then a backward and a forward pass in
    turn: 1F1B or GPipe, by the rule. Torch's own lists want a microbatch for each rank.

    Args:
        in_flight: as of a `Schedule`.
    """
    B, orders = num_microbatches, []
    for rank in range(num_ranks):
        ahead, order = in_flight(rank, num_ranks, B), []
        for m in range(B + ahead):
            if m >= ahead:
                order.append(ListedPass(rank, BACKWARD, m - ahead))
            if m < B:
                order.append(ListedPass(rank, FORWARD, m))
        orders.append(tuple(order))
    return tuple(orders)


class TwoWayPass(NamedTuple):
    """One pass of one microbatch through one stage of one of two copies of the model, in opposite directions.

    Attributes:
        copy: 0 goes down the ranks, 1 goes up: rank r of P runs its stage P − 1 − r.
        microbatch: of the step; the first half of each unit of P goes down.
        number: of the microbatch in its copy.
    """

    stage: int
    direction: int  # FORWARD or BACKWARD
    microbatch: int
    copy: int
    number: int


def both_ways_orders(num_ranks: int, num_microbatches: int) -> tuple[tuple[TwoWayPass, ...], ...]:
    """Return each rank's passes of Chimera (Li and Hoefler, SC 2021): 1F1B down the ranks and 1F1B up the ranks.

    With as many microbatches as ranks the two fill each other's bubbles without a conflict (section 3.1); more are run
    as so many such units, the next begun in the end of the one before (section 3.5, direct concatenation).

    Args:
        num_ranks, num_microbatches: even numbers.
    """
    P = num_ranks
    slots: list[list[tuple[int, TwoWayPass]]] = [[] for _ in range(P)]
    for microbatch in range(num_microbatches):
        # In slots of one pass each: a unit of P microbatches, half down and half up in turn, begins every 2P slots.
        unit, place = divmod(microbatch, P)
        half = min(P, num_microbatches - unit * P) // 2
        copy, m = divmod(place, half)
        number = unit * (P // 2) + m
        for s in range(P):
            row = slots[P - 1 - s if copy else s]
            row.append((2 * P * unit + s + 2 * m, TwoWayPass(s, FORWARD, microbatch, copy, number)))
            row.append((2 * P * unit + 2 * P - 1 - s + 2 * m, TwoWayPass(s, BACKWARD, microbatch, copy, number)))
    return tuple(tuple(one for _, one in sorted(row)) for row in slots)
