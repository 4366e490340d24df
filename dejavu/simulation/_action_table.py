"""Torch's action lists as arrays: who runs what in which order, and which message each action waits for and sends.

Shape suffixes: P = pipeline ranks, S = stages, A = actions (all ranks', one rank after the other, each in its order),
K = routes (cut k carries activations on route 2k and gradients on route 2k + 1), C = channels (ordered pairs of ranks
that exchange anything), M = messages (a route's microbatches, one route after the other), 1 = one more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation import user_cache
from dejavu.foundation.errors import InputError
from dejavu.plans import orders
from dejavu.plans.schedule import Pass, Schedule, actions_of

Integers = NDArray[np.int64]

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER, _STORED = "schedules", np.dtype("<i4")  # in the user's cache

NOTHING = -1  # in place of a message or a microbatch that there is not
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, PER_STEP = range(
    5
)  # PER_STEP: what a stage does at the end of a step
CODES = {
    Pass.FORWARD: FORWARD,
    Pass.BACKWARD: BACKWARD,
    Pass.BACKWARD_INPUT: BACKWARD_INPUT,
    Pass.BACKWARD_WEIGHT: BACKWARD_WEIGHT,
}


class ActionTable(NamedTuple):
    """One schedule's step for so many stages and microbatches, without any times.

    Attributes:
        stage_A, pass_A, microbatch_A: the actions; after each rank's stands one PER_STEP for each of its stages.
        first_P1: where a rank's actions begin; the last is A.
        input_A: the message that an action waits for.
        output_A: the message that it sends when it is done.
        rank_S: where a stage runs.
        channel_K: which channel a route uses; NOTHING where both stages are on one rank.
        from_C, to_C: a channel's two ranks.
        queue_M, first_C1: each channel's messages in the order in which they are sent, one channel after the other.
        num_microbatches: B; of sequences in slices these, numbered through.
        num_slices: of each sequence; 1: none.
    """

    stage_A: Integers
    pass_A: Integers
    microbatch_A: Integers
    first_P1: Integers
    input_A: Integers
    output_A: Integers
    rank_S: Integers
    channel_K: Integers
    from_C: Integers
    to_C: Integers
    queue_M: Integers
    first_C1: Integers
    num_microbatches: int
    num_slices: int = 1


@lru_cache(maxsize=16)  # megabytes each where there are many microbatches
def action_table(schedule: Schedule, num_stages: int, num_microbatches: int, num_slices: int = 1) -> ActionTable:
    """The schedule's actions as arrays; they are shared, not to be written to.

    An action waits for messages only: what it needs of its own rank (its forward, its backward_input, the stage before
    on the same rank) stands earlier in its rank's list.

    Raises:
        InputError: the schedule does not run so few or so many microbatches or stages.
    """
    facts = [schedule.torch_name or schedule.name, schedule.stages_per_rank, schedule.placement]  # a list depends on
    key = [code_of_lists(), *facts, num_stages, num_microbatches, num_slices]
    kept = user_cache.load(_FOLDER, key)
    if kept is not None:
        return _read(kept)
    with _garbage_left():
        listed = actions_of(schedule, num_stages, num_microbatches, num_slices)
    rank_S = [schedule.rank_of(stage, num_stages) for stage in range(num_stages)]
    made = _table(listed, rank_S, num_microbatches * num_slices, num_slices)
    user_cache.save(_FOLDER, key, _written(made))
    return made


@lru_cache(maxsize=16)
def both_ways_table(num_ranks: int, num_microbatches: int) -> ActionTable:
    """The actions of Chimera: the copy that goes up the ranks has stages P to 2P − 1, on the ranks in reverse.

    Between stages P − 1 and P there is no message: both are on the last rank. Microbatches are numbered as ranks number
    them: first those that go down, then those that go up.

    Raises:
        InputError: there is an odd number of ranks or microbatches.
    """
    P, B = num_ranks, num_microbatches
    if P % 2 or B % 2:
        raise InputError(f"chimera with {P} stages and {B} microbatches; wanted even numbers of both")
    kinds = {orders.FORWARD: Pass.FORWARD, orders.BACKWARD: Pass.BACKWARD}
    listed = [
        [(one.stage + P * one.copy, kinds[one.direction], one.number + one.copy * B // 2) for one in order]
        for order in orders.both_ways_orders(P, B)
    ]
    return _table(listed, [*range(P), *reversed(range(P))], B)


def _table(
    listed: Sequence[Sequence[tuple[int, Pass, int]]], ranks: Sequence[int], num_microbatches: int, num_slices: int = 1
) -> ActionTable:
    num_stages, rank_S = len(ranks), np.array(ranks)
    rows, lengths = [], []
    for rank, order in enumerate(listed):
        stages, passes, microbatches = zip(*order, strict=True)
        own = tuple(stage for stage, where in enumerate(ranks) if where == rank)
        rows.append([
            np.array(stages + own),
            np.array([*map(CODES.__getitem__, passes), *[PER_STEP] * len(own)]),
            np.array(microbatches + (NOTHING,) * len(own)),
        ])  # fmt: skip
        lengths.append(len(order) + len(own))
    stage_A, pass_A, microbatch_A = (np.concatenate(column).astype(np.int64) for column in zip(*rows, strict=True))

    channel_K, pairs = _channels(rank_S)
    route_of = np.append(channel_K, NOTHING)  # the last entry answers for routes beyond the ends
    activation, gradient = pass_A == FORWARD, (pass_A == BACKWARD) | (pass_A == BACKWARD_INPUT)

    def message(cut_A: Integers, direction: int, sent_A: NDArray[np.bool_]) -> Integers:
        inner_A = sent_A & (cut_A >= 0) & (cut_A < num_stages - 1)
        route_A = np.where(inner_A, 2 * cut_A + direction, -1)
        return np.where(route_of[route_A] >= 0, route_A * num_microbatches + microbatch_A, NOTHING)

    input_A = np.maximum(message(stage_A - 1, 0, activation), message(stage_A, 1, gradient))
    output_A = np.maximum(message(stage_A, 0, activation), message(stage_A - 1, 1, gradient))
    sent = output_A[output_A >= 0]
    channel = channel_K[sent // num_microbatches]
    return ActionTable(
        stage_A=stage_A,
        pass_A=pass_A,
        microbatch_A=microbatch_A,
        first_P1=np.append(0, np.cumsum(lengths)),
        input_A=input_A,
        output_A=output_A,
        rank_S=rank_S,
        channel_K=channel_K,
        from_C=pairs[:, 0].copy(),
        to_C=pairs[:, 1].copy(),
        queue_M=sent[np.argsort(channel, kind="stable")],
        first_C1=np.searchsorted(np.sort(channel), np.arange(len(pairs) + 1)),
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


@cache
def code_of_lists() -> list[str]:
    """The code that decides a listing: torch's lists, and what is made of them here."""
    import torch

    pipelining = Path(torch.__file__).parent / "distributed" / "pipelining"
    folders = (pipelining, _PACKAGE / "plans", _PACKAGE / "simulation")
    texts = [user_cache.text_hash(folder.glob("*.py")) for folder in folders]
    return [*texts, str(torch.__version__), str(torch.version.git_version), sys.version]


def _written(made: ActionTable) -> bytes:
    """The arrays one after the other, after the two numbers and their lengths."""
    arrays = made[:-2]
    lengths = [made.num_microbatches, made.num_slices, *map(len, arrays)]
    return np.concatenate([np.array(lengths), *arrays]).astype(_STORED).tobytes()


def _read(payload: bytes) -> ActionTable:
    counts = [int(one) for one in np.frombuffer(payload, _STORED, count=len(ActionTable._fields))]
    numbers, lengths = np.frombuffer(payload, _STORED)[len(counts) :].astype(np.int64), counts[2:]
    ends = np.cumsum(lengths)
    arrays = [numbers[end - length : end].copy() for end, length in zip(ends, lengths, strict=True)]
    return ActionTable._make([*arrays, *counts[:2]])


@contextmanager
def _garbage_left() -> Iterator[None]:
    """No search for garbage meanwhile: hundreds of thousands of new tuples set off many, most of the time taken."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _channels(rank_S: Integers) -> tuple[Integers, Integers]:
    """Each route's channel, and each channel's (sender, receiver)."""
    before, after = rank_S[:-1], rank_S[1:]
    ends_K2 = np.stack([before, after, after, before], axis=1).reshape(-1, 2)
    apart = ends_K2[:, 0] != ends_K2[:, 1]
    pairs, channel = np.unique(ends_K2[apart], axis=0, return_inverse=True)
    channel_K = np.full(len(ends_K2), NOTHING)
    channel_K[apart] = channel.reshape(-1)
    return channel_K, pairs
