"""Torch's runtime with the passes of two copies of the model, in opposite directions."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    _Action,
    _add_reduce_grad,
    _add_unshard_reshard,
)

from dejavu.plans import orders
from dejavu.runtime.stage import ListedSchedule, torch_index


class BothWaysSchedule(ListedSchedule):
    """Chimera's order: each copy numbers its own microbatches, half of a run's, and torch its stages in one row.

    Torch lists messages between neighbouring stages of one row, so they are listed here.
    """

    def _listed(self, name: str, num_microbatches: int) -> dict[int, list[Any]]:
        kinds, num_stages = {orders.FORWARD: FORWARD, orders.BACKWARD: FULL_BACKWARD}, self.pp_group_size
        return {
            rank: [
                _Action(torch_index(one.stage, one.copy, num_stages), kinds[one.direction], one.number) for one in order
            ]
            for rank, order in enumerate(orders.both_ways_orders(num_stages, 2 * num_microbatches))
        }

    def _prepare(self) -> None:
        P = self.pp_group_size
        places = ((s, copy) for copy in range(2) for s in range(P))
        self.stage_index_to_group_rank = {torch_index(s, c, P): P - 1 - s if c else s for s, c in places}
        summed = {
            rank: _add_reduce_grad(_add_unshard_reshard(list(listed)), self._n_microbatches)  # type: ignore[arg-type]
            for rank, listed in self._compute_order.items()
        }
        self.pipeline_order_with_comms = self._with_messages(summed)

    def _with_messages(self, compute: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """List messages as torch does: who sends lists both ends, so between two ranks they arrive in their order."""
        rank_of, found = self.stage_index_to_group_rank, {rank: list[Any]() for rank in compute}
        waiting, arrived = {rank: list(listed) for rank, listed in compute.items()}, set[Any]()
        while any(waiting.values()):
            is_moving = False
            for rank, listed in waiting.items():
                if not listed or not self._is_there(listed[0], arrived):
                    continue
                action = listed.pop(0)
                found[rank].append(action)
                is_moving = True
                if action.computation_type not in (FORWARD, FULL_BACKWARD):
                    continue
                goes_on = action.computation_type is FORWARD
                to = action.stage_index + (1 if goes_on else -1)
                if to in rank_of:
                    send, receive = (SEND_F, RECV_F) if goes_on else (SEND_B, RECV_B)
                    found[rank].append(action._replace(computation_type=send))
                    arriving = _Action(to, receive, action.microbatch_index)
                    found[rank_of[to]].append(arriving)
                    arrived.add(arriving)
            assert is_moving, "both_ways_orders can be carried out"
        return found

    def _is_there(self, action: Any, arrived: set[Any]) -> bool:
        """Return whether an action's input is on its rank, if it waits for one."""
        if action.computation_type not in (FORWARD, FULL_BACKWARD):
            return True
        goes_on = action.computation_type is FORWARD
        before = action.stage_index + (-1 if goes_on else 1)
        waits = before in self.stage_index_to_group_rank
        return (
            not waits or _Action(action.stage_index, RECV_F if goes_on else RECV_B, action.microbatch_index) in arrived
        )


def half_of(batch: torch.Tensor, copy: int) -> torch.Tensor:
    """Return the examples of a run that one of the copies has."""
    half = len(batch) // 2
    return batch[half:] if copy else batch[:half]
