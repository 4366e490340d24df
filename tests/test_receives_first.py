"""Over gloo all receives are posted when a step begins: nothing else of a schedule changes, no message is mistaken."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import RECV_B, RECV_F, SEND_B, SEND_F, _add_send_recv

from dejavu.plans.schedule import SCHEDULES, torch_actions
from dejavu.runtime.both_ways.schedule import BothWaysSchedule
from dejavu.runtime.stage import receives_first, torch_index
from tests.test_schedules import PIPELINE_SCHEDULES, sizes

RECEIVED, SENT = {RECV_F: SEND_F, RECV_B: SEND_B}, (SEND_F, SEND_B)
Lists = dict[int, list[Any]]


def one_way(name: str, num_ranks: int, num_microbatches: int) -> tuple[Lists, dict[int, int]]:
    schedule = SCHEDULES[name]
    S = num_ranks * schedule.stages_per_rank
    rank_S = {s: schedule.rank_of(s, S) for s in range(S)}
    return _add_send_recv(torch_actions(schedule, S, num_microbatches), rank_S.__getitem__, S), rank_S


def both_ways(num_ranks: int, num_microbatches: int) -> tuple[Lists, dict[int, int]]:
    P, schedule = num_ranks, BothWaysSchedule.__new__(BothWaysSchedule)
    schedule.pp_group_size = P
    rank_S = {torch_index(s, copy, P): P - 1 - s if copy else s for copy in range(2) for s in range(P)}
    schedule.stage_index_to_group_rank = rank_S
    return schedule._with_messages(schedule._listed("1f1b", num_microbatches // 2)), rank_S


CASES = [
    (f"{one.runs_as} {P} × {B}", one_way(one.runs_as, P, B))
    for one in PIPELINE_SCHEDULES.values()
    if one.runs_as
    for P, B in sizes(one)
] + [(f"chimera {P} × {B}", both_ways(P, B)) for P in (2, 4, 6) for B in (2, 4, 8, 10)]


@pytest.mark.parametrize(("listed", "rank_of"), [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_receives_are_posted_first_and_in_the_order_in_which_messages_are_sent(
    listed: Lists, rank_of: dict[int, int]
) -> None:
    """Between two ranks gloo gives the first message that is sent to the first receive that is posted."""
    sent, received = defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list)
    for rank, before in listed.items():
        actions = receives_first(before)
        first = [a for a in before if a.computation_type in RECEIVED]
        assert actions[: len(first)] == first
        assert actions[len(first) :] == [a for a in before if a.computation_type not in RECEIVED]
        for action in actions:
            kind, s, microbatch = action.computation_type, action.stage_index, action.microbatch_index
            if kind in RECEIVED:
                received[rank_of[s - 1 if kind is RECV_F else s + 1], rank].append((RECEIVED[kind], s, microbatch))
            elif kind in SENT:
                to = s + 1 if kind is SEND_F else s - 1
                sent[rank, rank_of[to]].append((kind, to, microbatch))
    assert sent == received and sent
