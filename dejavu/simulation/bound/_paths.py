"""Paths through one step: for any plan with these ranks, the step takes at least a path's actions and messages.

Torch's list of actions is one for a schedule, a number of ranks and a number of microbatches, whatever the stages hold.
Actions and messages that wait for one another make a graph without cycles; sharing devices and links only delays, so
the step is at least the longest path, and so at least *any* path: a sum, linear in the stages' times. What a rank's
device has to do between its first work and its last is such a sum as well.
Suffixes as in `_action_table` and `_prefix_sums`; 5 = passes, 3 = a message's parts, N = lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NOTHING,
    PER_STEP,
    ActionTable,
    Integers,
)


class Times(NamedTuple):
    """What the stages of one plan take.

    Attributes:
        stage_S5: each stage's passes, and what it does once.
        cut_S3: the parts of a message, one way, across the cut after each stage; nothing after the last.
    """

    stage_S5: Floats
    cut_S3: Floats


class Line(NamedTuple):
    """How often each time counts in a lower bound on the step: Σ count · time ≤ step, whatever the plan."""

    stage_S5: Floats
    cut_S3: Floats

    def seconds(self, times: Times) -> float:
        """Of one plan."""
        return float((self.stage_S5 * times.stage_S5).sum() + (self.cut_S3 * times.cut_S3).sum())


def longest_path(order: ActionTable, times: Times) -> tuple[float, Line]:
    """The longest path of a plan's step, were nothing shared."""
    S = len(order.rank_S)
    line = Line(np.zeros((S, 5)), np.zeros((S, 3)))
    return longest(order, times.stage_S5, times.cut_S3, line.stage_S5, line.cut_S3), line


@njit(cache=True, nogil=True)
def longest(order: ActionTable, time_S5: Floats, time_S3: Floats, count_S5: Floats, count_S3: Floats) -> float:
    """The longest path's seconds; how often everything is on it is added to the counts, if these are not empty.

    Messages of a channel are sent one after the other, and received so: their order is that of the sender's actions.
    """
    stage_A, pass_A, _, first_P1, input_A, output_A, rank_S, channel_K, from_C, _, _, _, B, _ = order
    A, P = len(stage_A), len(first_P1) - 1
    stop_A = np.zeros(A)
    waited_A = np.zeros(A, np.bool_)  # for its message, rather than for its rank
    M = len(channel_K) * B
    left_M, arrived_M = np.zeros(M), np.full(M, -1.0)
    queued_M, delayed_M = np.zeros(M, np.bool_), np.zeros(M, np.bool_)  # after the message before: sent, received
    sender_M, before_M = np.full(M, NOTHING), np.full(M, NOTHING)
    last_C = np.full(len(from_C), NOTHING)
    next_P = first_P1[:-1].copy()
    done = 0
    while done < A:
        for rank in range(P):
            while next_P[rank] < first_P1[rank + 1]:
                i = next_P[rank]
                start = stop_A[i - 1] if i > first_P1[rank] else 0.0
                m = input_A[i]
                if m != NOTHING and arrived_M[m] < 0.0:
                    break
                if m != NOTHING and arrived_M[m] > start:
                    start, waited_A[i] = arrived_M[m], True
                stop_A[i] = start + time_S5[stage_A[i], pass_A[i]]
                next_P[rank] += 1
                done += 1
                m = output_A[i]
                if m == NOTHING:
                    continue
                c, cut = channel_K[m // B], m // B // 2
                before, sent = last_C[c], stop_A[i]
                sender_M[m], before_M[m], last_C[c] = i, before, m
                if before != NOTHING and left_M[before] > sent:
                    sent, queued_M[m] = left_M[before], True
                left_M[m] = sent + time_S3[cut, 0] + time_S3[cut, 1]
                taken = left_M[m]
                if before != NOTHING and arrived_M[before] > taken:
                    taken, delayed_M[m] = arrived_M[before], True
                arrived_M[m] = taken + time_S3[cut, 2]
    i = np.argmax(stop_A)
    seconds: float = stop_A[i]
    if len(count_S5) == 0:
        return seconds
    while True:
        count_S5[stage_A[i], pass_A[i]] += 1.0
        if waited_A[i]:
            m = input_A[i]
            count_S3[m // B // 2, 2] += 1.0
            while delayed_M[m]:
                m = before_M[m]
                count_S3[m // B // 2, 2] += 1.0
            count_S3[m // B // 2, 0] += 1.0
            count_S3[m // B // 2, 1] += 1.0
            while queued_M[m]:
                m = before_M[m]
                count_S3[m // B // 2, 0] += 1.0
                count_S3[m // B // 2, 1] += 1.0
            i = sender_M[m]
        elif i > first_P1[rank_S[stage_A[i]]]:
            i -= 1
        else:
            return seconds


def busy_lines(order: ActionTable) -> list[Line]:
    """For each rank: what must be done before its device has any work, and all of that device's work.

    The first forward of rank r waits for that of every stage before; then its device does each of its actions and its
    part of each of its messages, at most one second's work a second however they share it; all of it before the step
    ends.
    """
    return [_busy(order, rank) for rank in range(len(order.first_P1) - 1)]


def drained_lines(order: ActionTable) -> list[Line]:
    """For each rank that sends gradients: what must be done until its first stage's last one is at the first stage.

    The gradient has to go through every stage before: until it is sent, the device has done all that is listed before
    it, received all inputs of that, and sent what this stage sent on.
    """
    lines = [_drained(order, rank) for rank in range(len(order.first_P1) - 1)]
    return [line for line in lines if line is not None]


def _busy(order: ActionTable, rank: int) -> Line:
    line = _head(order, rank)
    own = np.arange(order.first_P1[rank], order.first_P1[rank + 1])
    np.add.at(line.stage_S5, (order.stage_A[own], order.pass_A[own]), 1.0)
    for message_A, part in ((order.output_A, 0), (order.input_A, 2)):
        sent = message_A[own][message_A[own] != NOTHING]
        np.add.at(line.cut_S3, (sent // order.num_microbatches // 2, part), 1.0)
    return line


def _drained(order: ActionTable, rank: int) -> Line | None:
    """None where no gradient goes to another rank."""
    first, stop = order.first_P1[rank], order.first_P1[rank + 1]
    B = order.num_microbatches
    stage = int(order.stage_A[first])  # its first stage
    own = np.arange(first, stop)
    is_gradient = (order.pass_A[own] == BACKWARD) | (order.pass_A[own] == BACKWARD_INPUT)
    sends = own[is_gradient & (order.stage_A[own] == stage) & (order.output_A[own] != NOTHING)]
    if not len(sends):
        return None
    line = _head(order, rank)
    until = np.arange(first, sends[-1] + 1)
    np.add.at(line.stage_S5, (order.stage_A[until], order.pass_A[until]), 1.0)
    received = order.input_A[until][order.input_A[until] != NOTHING]
    np.add.at(line.cut_S3, (received // B // 2, 2), 1.0)
    line.cut_S3[stage - 1, 0] += len(sends) - 1  # its gradients go in turn: those before the last are sent
    if (order.output_A[until] // B // 2 == stage).any():  # and what it sent on has been answered by a gradient
        line.cut_S3[stage, 0] += B
    microbatch, i = order.microbatch_A[sends[-1]], int(sends[-1])
    while order.output_A[i] != NOTHING:
        line.cut_S3[order.output_A[i] // B // 2] += 1.0
        i = int(np.flatnonzero(order.input_A == order.output_A[i])[0])
        assert order.microbatch_A[i] == microbatch
        line.stage_S5[order.stage_A[i], order.pass_A[i]] += 1.0
    rest = np.arange(i + 1, order.first_P1[order.rank_S[order.stage_A[i]] + 1])
    np.add.at(line.stage_S5, (order.stage_A[rest], order.pass_A[rest]), 1.0)
    return line


def _head(order: ActionTable, rank: int) -> Line:
    """Until the rank's first input leaves the wire: from then on its device can have work."""
    S = len(order.rank_S)
    line = Line(np.zeros((S, 5)), np.zeros((S, 3)))
    stage = int(order.stage_A[order.first_P1[rank]])
    line.stage_S5[:stage, FORWARD] = 1.0
    apart = order.rank_S[:-1] != order.rank_S[1:]
    line.cut_S3[:stage] = apart[:stage, None]
    if stage:
        line.cut_S3[stage - 1, 2] = 0.0
    return line


def max_in_flight(order: ActionTable) -> Integers:
    """The most microbatches that each stage holds at once; as `Simulation.in_flight`."""
    most_S = np.zeros(len(order.rank_S), np.int64)
    for stages, held_SA in _held_by_rank(order):
        most_S[stages] = held_SA.max(axis=1)
    return most_S


def most_together(order: ActionTable) -> Integers:
    """How many each stage holds when its rank's stages hold the most together."""
    held_S = np.zeros(len(order.rank_S), np.int64)
    for stages, held_SA in _held_by_rank(order):
        held_S[stages] = held_SA[:, held_SA.sum(axis=0).argmax()]
    return held_S


def _held_by_rank(order: ActionTable) -> Iterator[tuple[Integers, Integers]]:
    """Of each rank, its stages and [s, a] how many microbatches the s-th of them holds with its action a."""
    change_A = (order.pass_A == FORWARD).astype(np.int64)
    change_A -= (order.pass_A == BACKWARD) | (order.pass_A == BACKWARD_WEIGHT)
    for rank, (start, stop) in enumerate(itertools.pairwise(order.first_P1)):
        stages = np.flatnonzero(order.rank_S == rank)
        yield stages, np.cumsum(change_A[start:stop] * (order.stage_A[start:stop] == stages[:, None]), axis=1)


__all__ = [
    "PER_STEP",
    "Line",
    "Times",
    "busy_lines",
    "drained_lines",
    "longest",
    "longest_path",
    "max_in_flight",
    "most_together",
]
