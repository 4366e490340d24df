"""Pipeline schedules by torch's names: which class runs them, in what order, and how many microbatches they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dejavu.errors import InputError


class Pass(StrEnum):
    """Which part of the work on one microbatch an action does."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Action(NamedTuple):
    """One compute action of one rank: this pass of this microbatch through this stage."""

    stage: int
    direction: Pass
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule.

    Attributes:
        name: what a person writes, in a workload and in a plan.
        torch_name: what `torch.distributed.pipelining.schedules.get_schedule_class` calls it.
        in_flight: (stage, num_stages, num_microbatches) -> microbatches whose activations the stage holds at once.
    """

    name: str
    torch_name: str
    in_flight: Callable[[int, int, int], int]


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_microbatches, num_stages - stage)


def _all(stage: int, num_stages: int, num_microbatches: int) -> int:
    return num_microbatches


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule("1f1b", "1F1B", _one_forward_one_backward),
    "gpipe": Schedule("gpipe", "GPipe", _all),
}


def schedule_named(name: str) -> Schedule:
    """The schedule that a person named.

    Raises:
        InputError: there is none of that name.
    """
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}; wanted one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def actions(name: str, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Torch's own order of compute actions, a list for each rank; no process group is needed.

    The only place that touches torch's private visualizer. Torch 2.13 lists 1F1B's forwards of the last rank as
    microbatches 1 to B instead of 0 to B − 1; its runtime takes them in order, as is done here.

    Raises:
        InputError: fewer microbatches than stages, which torch's schedules refuse.
    """
    if num_microbatches < num_stages:
        raise InputError(f"{num_microbatches} microbatches for {num_stages} stages; wanted at least one for each stage")
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _ComputationType

    kinds = {_ComputationType.FORWARD: Pass.FORWARD, _ComputationType.FULL_BACKWARD: Pass.BACKWARD}
    ranks: list[list[Action]] = []
    for order in get_schedule_ops(schedule_named(name).torch_name, num_stages, num_microbatches):
        done: Counter[tuple[int, Pass]] = Counter()
        rank: list[Action] = []
        for step in order:
            if step is None or step.computation_type not in kinds:
                continue
            key = (step.stage_index, kinds[step.computation_type])
            rank.append(Action(*key, done[key]))
            done[key] += 1
        ranks.append(rank)
    return ranks
