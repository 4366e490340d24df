"""Pipeline schedules by torch's names: which class runs them, in what order, and how many microbatches they hold.

A *pipeline rank* is a place in the pipeline: the group of devices that runs the same stages. Under most schedules it
runs one stage; under the others several, which split the model finer and shorten the bubble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import Family, named


class Pass(StrEnum):
    """The part of a microbatch's work that an action does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"  # the gradient of the stage's input, which the upstream stage waits for
    BACKWARD_WEIGHT = "backward_weight"  # the gradients of the weights, which no other stage waits for


PARTS = (Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)  # of a backward pass


class Action(NamedTuple):
    """One compute action of one pipeline rank: this pass of this microbatch through this stage."""

    stage: int
    direction: Pass
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule.

    Attributes:
        name: as written in a workload and in a plan.
        torch_name: its name for `torch.distributed.pipelining.schedules.get_schedule_class`.
        in_flight: (stage, num_stages, num_microbatches) -> microbatches whose activations the stage holds at once;
            for schedules of several stages a rank, at most so many.
        stages_per_rank: how many stages a pipeline rank runs.
        placement: `loop`: rank r of w runs stages r, r + w, …; `v`: stages r and 2w − 1 − r.
        searched_as: the schedule with one stage per rank whose price and memory rule the searches use instead.
        splits_backward: the backward pass runs in two parts (input and weight gradients).
    """

    name: str
    torch_name: str
    in_flight: Callable[[int, int, int], int]
    stages_per_rank: int = 1
    placement: Literal["loop", "v"] = "loop"
    searched_as: str = "1f1b"
    splits_backward: bool = False

    def num_ranks(self, num_stages: int) -> int:
        """Return the number of pipeline ranks for so many stages.

        Raises:
            InputError: the stages do not divide into ranks.
        """
        if num_stages % self.stages_per_rank:
            raise InputError(
                f"schedule {self.name} runs {self.stages_per_rank} stages on each pipeline rank; "
                f"{num_stages} stages do not divide so"
            )
        return num_stages // self.stages_per_rank

    def rank_of(self, stage: int, num_stages: int) -> int:
        """Return the pipeline rank that runs the stage."""
        ranks = self.num_ranks(num_stages)
        return num_stages - 1 - stage if self.placement == "v" and stage >= ranks else stage % ranks

    def stages_of(self, rank: int, num_stages: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in the model's order."""
        return tuple(stage for stage in range(num_stages) if self.rank_of(stage, num_stages) == rank)


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_microbatches, num_stages - stage)


def _all(stage: int, num_stages: int, num_microbatches: int) -> int:
    return num_microbatches


def _both_ways(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_microbatches, num_stages)


SCHEDULES: Family[Schedule] = Family(
    "schedule",
    {
        schedule.name: schedule
        for schedule in (
            Schedule("1f1b", "1F1B", _one_forward_one_backward),
            Schedule("gpipe", "GPipe", _all, searched_as="gpipe"),
            Schedule("interleaved_1f1b", "Interleaved1F1B", _all, stages_per_rank=2),
            Schedule("looped_bfs", "LoopedBFS", _all, stages_per_rank=2, searched_as="gpipe"),
            Schedule("interleaved_zero_bubble", "InterleavedZeroBubble", _all, stages_per_rank=2, splits_backward=True),
            Schedule("zbv", "ZBVZeroBubble", _both_ways, stages_per_rank=2, placement="v", splits_backward=True),
            Schedule("dualpipe_v", "DualPipeV", _both_ways, stages_per_rank=2, placement="v", splits_backward=True),
        )
    },
)


def torch_actions(schedule: Schedule, num_stages: int, num_microbatches: int) -> dict[int, list[Any]]:
    """Torch's own compute actions by pipeline rank, without its bubbles; no process group is needed.

    The only place that touches torch's private visualizer. A pair that torch overlaps on a GPU (forward of one
    microbatch, backward of another) is listed as its two parts, which torch's runtime runs one after the other.

    Raises:
        InputError: the schedule does not run so few or so many microbatches or stages.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    ranks, name = schedule.num_ranks(num_stages), schedule.name
    kind: Any = get_schedule_class(schedule.torch_name)
    if issubclass(kind, PipelineScheduleMulti):  # torch takes minutes to add many messages
        kind = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda self, actions: None})
    if num_microbatches < ranks:
        raise InputError(
            f"{num_microbatches} microbatches for {num_stages} stages under {name}; wanted {ranks} or more"
        )
    try:
        orders = get_schedule_ops(kind, ranks, num_microbatches, num_stages_per_rank=schedule.stages_per_rank)
    except ValueError as error:
        raise InputError(f"{num_microbatches} microbatches for {num_stages} stages under {name}: {error}") from None
    found = {rank: _parts(order) for rank, order in enumerate(orders)}
    return found if schedule.stages_per_rank > 1 else {rank: _numbered(order) for rank, order in found.items()}


def _parts(order: list[Any]) -> list[Any]:
    listed = [action for action in order if action is not None and action.computation_type.name != "REDUCE_GRAD"]
    return [part for action in listed for part in (action.sub_actions or (action,))]


def _numbered(order: list[Any]) -> list[Any]:
    """Renumber the microbatches: torch 2.13 lists 1F1B's forwards of the last rank as 1 to B, but runs 0 to B − 1."""
    done: dict[tuple[int, Any], int] = {}
    numbered = []
    for action in order:
        key = (action.stage_index, action.computation_type)
        numbered.append(action._replace(microbatch_index=done.setdefault(key, 0)))
        done[key] += 1
    return numbered


def actions(name: str, num_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return torch's own order of compute actions, one row for each pipeline rank; see `torch_actions`."""
    return actions_of(named(SCHEDULES, name), num_stages, num_microbatches)


@lru_cache(maxsize=64)  # keyed by the schedule itself: another one may be registered under its name later
def actions_of(schedule: Schedule, num_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of a schedule that need not be in `SCHEDULES`."""
    passes = {
        "FORWARD": Pass.FORWARD,
        "FULL_BACKWARD": Pass.BACKWARD,
        "BACKWARD_INPUT": Pass.BACKWARD_INPUT,
        "BACKWARD_WEIGHT": Pass.BACKWARD_WEIGHT,
    }
    return tuple(
        tuple(Action(a.stage_index, passes[a.computation_type.name], a.microbatch_index) for a in order)
        for order in torch_actions(schedule, num_stages, num_microbatches).values()
    )


def allowed_microbatches(name: str, num_stages: int, num_microbatches: int) -> bool:
    """Return whether the schedule runs so many microbatches through so many stages."""
    try:
        actions(name, num_stages, num_microbatches)
    except InputError:
        return False
    return True
