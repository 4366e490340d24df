"""Pipeline schedules by torch's names: which class runs them, in what order, and how many microbatches they hold.

A *pipeline rank* is a place in the pipeline: the group of devices that runs the same stages. Under most schedules it
runs one stage; under the others several, which split the model finer and shorten the bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import Family, named
from dejavu.foundation.units import plural
from dejavu.plans.orders import FORWARD, ListedPass, few_orders, wave_orders


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
        torch_name: its name for `torch.distributed.pipelining.schedules.get_schedule_class`; empty: torch has no class
            for it, and `orders` lists its passes.
        in_flight: (stage, num_stages, num_microbatches) -> microbatches whose activations the stage holds at once;
            for schedules of several stages a rank, at most so many.
        stages_per_rank: how many stages a pipeline rank runs.
        microbatches_per_rank: a step has so many for each pipeline rank at least.
        placement: `loop`: rank r of w runs stages r, r + w, …; `v`: stages r and 2w − 1 − r; `wave`: there and back
            again over the ranks, as often as there are pairs of stages on a rank.
        searched_as: the schedule with one stage per rank whose price and memory rule the searches use instead.
        splits_backward: the backward pass runs in two parts (input and weight gradients).
        orders: (rank of each stage, num_microbatches) -> each rank's passes; None: torch lists them.
        by_default: a planner that may use every schedule (`auto`) considers it; the others are chosen by their names.
    """

    name: str
    torch_name: str
    in_flight: Callable[[int, int, int], int]
    stages_per_rank: int = 1
    placement: Literal["loop", "v", "wave"] = "loop"
    searched_as: str = "1f1b"
    splits_backward: bool = False
    orders: Callable[[Sequence[int], int], Sequence[Sequence[ListedPass]]] | None = None
    by_default: bool = True
    microbatches_per_rank: int = 1

    def num_ranks(self, num_stages: int) -> int:
        """Return the number of pipeline ranks for so many stages.

        Raises:
            InputError: the stages do not divide into ranks.
        """
        if num_stages % self.stages_per_rank:
            raise InputError(
                f"schedule {self.name} runs {self.stages_per_rank} stages on each pipeline rank; "
                f"{plural(num_stages, 'stage')} cannot be divided so"
            )
        return num_stages // self.stages_per_rank

    def rank_of(self, stage: int, num_stages: int) -> int:
        """Return the pipeline rank that runs the stage."""
        ranks = self.num_ranks(num_stages)
        turns_back = self.placement != "loop" and stage // ranks % 2 == 1
        return ranks - 1 - stage % ranks if turns_back else stage % ranks

    def stages_of(self, rank: int, num_stages: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in the model's order."""
        return self.ranks(num_stages)[rank]

    def ranks(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Return the stages of every pipeline rank, in the model's order."""
        return _ranks(self, num_stages)


@lru_cache(maxsize=1024)
def _ranks(schedule: Schedule, num_stages: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(schedule.num_ranks(num_stages))]
    for stage in range(num_stages):
        found[schedule.rank_of(stage, num_stages)].append(stage)
    return tuple(map(tuple, found))


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_microbatches, num_stages - stage)


def _all(stage: int, num_stages: int, num_microbatches: int) -> int:
    return num_microbatches


def _both_ways(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_microbatches, num_stages)


def _ranks_of_2(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_microbatches, num_stages // 2)


def _ranks_of_4(stage: int, num_stages: int, num_microbatches: int) -> int:
    return min(num_microbatches, num_stages // 4)


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
            Schedule(
                "dualpipe_v",
                "DualPipeV",
                _both_ways,
                stages_per_rank=2,
                placement="v",
                splits_backward=True,
                microbatches_per_rank=2,
            ),
            Schedule("interleaved_1f1b_4", "Interleaved1F1B", _all, stages_per_rank=4, by_default=False),
            Schedule(
                "hanayo", "", _ranks_of_2, stages_per_rank=2, placement="wave", orders=wave_orders, by_default=False
            ),
            Schedule(
                "hanayo_2", "", _ranks_of_4, stages_per_rank=4, placement="wave", orders=wave_orders, by_default=False
            ),
        )
    },
)


CHIMERA = "chimera"  # 1F1B in both directions; no member, as two copies of the model are on the ranks
OF_FEW = ("1f1b", "gpipe")  # run fewer microbatches than ranks where sequences come in slices


def default_schedules() -> tuple[str, ...]:
    """Return the schedules that a planner considers where it may use every one."""
    return tuple(name for name, schedule in SCHEDULES.items() if schedule.by_default)


def torch_actions(
    schedule: Schedule, num_stages: int, num_microbatches: int, num_slices: int = 1
) -> dict[int, list[Any]]:
    """Torch's own compute actions by pipeline rank, without its bubbles; no process group is needed.

    Where torch has no class for the schedule, its own `orders` as torch's actions, for torch's runtime.

    Of sequences in slices each pass is one of every slice (`slice_by_slice`), and torch takes a slice for a microbatch.
    So 1F1B and GPipe may have fewer microbatches than ranks then, if there are as many slices of all or more: torch's
    own lists have too many of them, so these are listed here (`few_orders`).

    The only place that makes a schedule of torch without stages, as torch's own visualizer does: that one makes a mock
    of the whole stage, which takes 100 times as long as the list. A pair that torch overlaps on a GPU (forward of one
    microbatch, backward of another) is listed as its two parts, which torch's runtime runs one after the other.

    Raises:
        InputError: the schedule does not run so few or so many microbatches or stages.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    ranks, name = schedule.num_ranks(num_stages), schedule.name
    if num_slices > 1:
        if schedule.splits_backward:
            raise InputError(
                f"slices under {name}, which runs the backward pass in two parts, and a slice's gradient of keys and "
                "values is passed on in one; wanted a schedule of whole backward passes, or no slices"
            )
        if num_microbatches < ranks <= num_microbatches * num_slices and name in OF_FEW:
            few = few_orders(ranks, num_microbatches, schedule.in_flight)
            return {rank: slice_by_slice(_as_torch(order), num_slices) for rank, order in enumerate(few)}
        whole = torch_actions(schedule, num_stages, num_microbatches)
        return {rank: slice_by_slice(order, num_slices) for rank, order in whole.items()}
    asked = f"{plural(num_microbatches, 'microbatch')} for {plural(num_stages, 'stage')} under {name}"
    least = ranks * schedule.microbatches_per_rank
    if num_microbatches < least:
        raise InputError(f"{asked}; wanted {least} or more")
    if schedule.orders is not None:
        rank_S = [schedule.rank_of(stage, num_stages) for stage in range(num_stages)]
        return {rank: _as_torch(order) for rank, order in enumerate(schedule.orders(rank_S, num_microbatches))}
    kind: Any = get_schedule_class(schedule.torch_name)
    stages: Any = SimpleNamespace(num_stages=num_stages, group_size=ranks, group_rank=0, submod=None)
    if issubclass(kind, PipelineScheduleMulti):  # torch takes minutes to add many messages
        kind = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda self, actions: None})
        stages = [stages] * schedule.stages_per_rank
    try:
        orders = kind(stages, num_microbatches).pipeline_order
    except ValueError as error:
        raise InputError(f"{asked}: {error}") from None
    found = {rank: _parts(orders[rank]) for rank in range(ranks)}
    return found if schedule.stages_per_rank > 1 else {rank: _numbered(order) for rank, order in found.items()}


def slice_by_slice(order: Sequence[Any], num_slices: int) -> list[Any]:
    """Return torch's actions with each pass as one of every slice of its sequences, which torch takes for microbatches.

    Forward in their order, backward in reverse. As the slices of a pass follow each other, whoever could carry out the
    order of whole sequences can carry out this one.
    """
    found = []
    for action in order:
        goes_back = action.computation_type.name != "FORWARD"
        slices = range(num_slices)[::-1] if goes_back else range(num_slices)
        found += [action._replace(microbatch_index=action.microbatch_index * num_slices + k) for k in slices]
    return found


def _as_torch(order: Sequence[ListedPass]) -> list[Any]:
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    kinds = [_ComputationType.FORWARD if p.direction == FORWARD else _ComputationType.FULL_BACKWARD for p in order]
    return [_Action(p.stage, kind, p.microbatch) for p, kind in zip(order, kinds, strict=True)]


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


def actions(name: str, num_stages: int, num_microbatches: int, num_slices: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return torch's own order of compute actions, one row for each pipeline rank; see `torch_actions`."""
    return actions_of(named(SCHEDULES, name), num_stages, num_microbatches, num_slices)


@lru_cache(maxsize=64)  # keyed by the schedule itself: another one may be registered under its name later
def actions_of(
    schedule: Schedule, num_stages: int, num_microbatches: int, num_slices: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of a schedule that need not be in `SCHEDULES`."""
    passes = {
        "FORWARD": Pass.FORWARD,
        "FULL_BACKWARD": Pass.BACKWARD,
        "BACKWARD_INPUT": Pass.BACKWARD_INPUT,
        "BACKWARD_WEIGHT": Pass.BACKWARD_WEIGHT,
    }
    return tuple(
        tuple(Action(a.stage_index, passes[a.computation_type.name], a.microbatch_index) for a in order)
        for order in torch_actions(schedule, num_stages, num_microbatches, num_slices).values()
    )


def allowed_microbatches(name: str, num_stages: int, num_microbatches: int, num_slices: int = 1) -> bool:
    """Return whether the schedule runs so many microbatches, each in so many slices, through so many stages."""
    try:
        actions(name, num_stages, num_microbatches, num_slices)
    except InputError:
        return False
    return True
