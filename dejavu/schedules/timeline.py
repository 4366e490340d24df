"""A schedule carried out on paper: when each task runs, what it holds, and how old its weights are.

Ranks run their tasks in order, each when its input is there; a message takes its time and occupies nobody. So all
times are longest paths, for any number of copies of the model and of steps, which `dejavu.simulation` (one copy, one
step, shared links) has not. Where both apply they agree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.plans.schedule import Pass
from dejavu.schedules._base import UPDATE, PipelineSchedule, Task, WeightRule
from dejavu.simulation import StageSeconds

Orders = Sequence[Sequence[Task]]
Result = tuple[str, int, int, int]  # kind, copy, stage, microbatch
ACTIVATION, GRADIENT = "activation", "gradient"
_ARRIVES: dict[str, str] = {Pass.FORWARD: ACTIVATION, Pass.BACKWARD: GRADIENT, Pass.BACKWARD_INPUT: GRADIENT}
_PLACE: dict[str, int] = {
    Pass.FORWARD: 0,
    Pass.BACKWARD: 1,
    Pass.BACKWARD_INPUT: 2,
    Pass.BACKWARD_WEIGHT: 3,
    UPDATE: 4,
}
_CHANGE: dict[str, int] = {Pass.FORWARD: 1, Pass.BACKWARD: -1, Pass.BACKWARD_WEIGHT: -1}  # of what a stage holds


@dataclass(frozen=True)
class Timeline:
    """When each task of each rank begins and ends, in seconds from the beginning of the first step."""

    orders: tuple[tuple[Task, ...], ...]
    start_seconds: tuple[tuple[float, ...], ...]
    stop_seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Staleness:
    """How old the weights of a stage's gradients are, in updates of that stage, in the steady state.

    Attributes:
        forward_steps, backward_steps: between the weights that the pass met and those that the gradient is added to,
            on average.
        most_forward_steps: the most of any microbatch.
    """

    forward_steps: float
    backward_steps: float
    most_forward_steps: int


@dataclass(frozen=True)
class SimulatedSchedule:
    """What a schedule comes to on stages of given seconds and bytes.

    Attributes:
        step_seconds: from step to step: the whole step where it ends with a flush, in the steady state elsewhere.
        bubble_fraction: the share of that in which ranks run nothing, on average.
        in_flight_S: the most microbatches that a stage holds, in one copy of it.
        activations_P: the most that a rank holds, in microbatches through all its stages of one copy.
        weight_versions_P: copies of its share's weights that it holds at most.
        peak_bytes_P: its fixed bytes, the further versions of weights, and the most activations.
        staleness_S: of a stage's gradients.
    """

    timeline: Timeline
    step_seconds: float
    bubble_fraction: float
    in_flight_S: tuple[int, ...]
    activations_P: tuple[float, ...]
    weight_versions_P: tuple[float, ...]
    peak_bytes_P: tuple[float, ...]
    staleness_S: tuple[Staleness, ...]

    @cached_property
    def staleness_steps(self) -> float:
        """The most that any stage's gradients are old on average, in updates; 0 of synchronous schedules."""
        return max(stage.forward_steps for stage in self.staleness_S)


def simulate_schedule(
    schedule: PipelineSchedule,
    stages: Sequence[StageSeconds],
    num_microbatches: int,
    *,
    weight_bytes: Sequence[float] = (),
) -> SimulatedSchedule:
    """Simulate the schedule on so many stages, over several steps where it does not flush.

    Args:
        stages: in the model's order, `stages_per_rank` for each rank. Their `per_step_seconds` is one update, their
            `fixed_bytes` what one copy holds with one version of its weights.
        weight_bytes: of a version of each stage's weights; empty: none is counted.

    Raises:
        InputError: the stages do not divide into ranks, or the schedule has no order for so many microbatches.
    """
    S = len(stages)
    if not S or S % schedule.stages_per_rank or len(weight_bytes) not in (0, S):
        raise InputError(
            f"{S} stages, {len(weight_bytes)} sizes of weights; wanted a multiple of {schedule.stages_per_rank} "
            "stages, and a size for each or none"
        )
    num_ranks = S // schedule.stages_per_rank
    schedule.check(num_ranks, num_microbatches)
    ends = 0 if schedule.is_synchronous else -(-2 * num_ranks // num_microbatches) + 2  # steps that fill or drain
    num_steps = 1 if schedule.is_synchronous else 2 * ends + 6
    orders = schedule.orders(num_ranks, num_microbatches, num_steps, stages)
    found = timeline(schedule, orders, stages)
    step_seconds = _step_seconds(found, num_microbatches, num_steps, ends)
    per_update = schedule.microbatches_per_update(num_microbatches)
    work = schedule.num_copies * sum(num_microbatches / per_update * stage.per_step_seconds for stage in stages)
    work += num_microbatches * sum(_pass_seconds(orders, s, stages[s]) for s in range(S))
    versions, staleness = _weights(schedule, orders, S, num_microbatches, num_steps)
    held = [_held(schedule, row, stages, weight_bytes or [0.0] * S, versions) for row in orders]
    return SimulatedSchedule(
        timeline=found,
        step_seconds=step_seconds,
        bubble_fraction=max(0.0, 1.0 - work / (num_ranks * step_seconds)) if step_seconds > 0 else 0.0,
        in_flight_S=_in_flight(orders, S),
        activations_P=tuple(one[0] for one in held),
        weight_versions_P=tuple(one[1] for one in held),
        peak_bytes_P=tuple(one[2] for one in held),
        staleness_S=staleness,
    )


def timeline(schedule: PipelineSchedule, orders: Orders, stages: Sequence[StageSeconds]) -> Timeline:
    """Return when each task runs.

    Raises:
        DejavuError: the orders wait for each other for ever.
    """
    S, P = len(stages), len(orders)
    rank_of = {(c, s): schedule.rank_of(s, P, c) for c in range(schedule.num_copies) for s in range(S)}
    joined = _joined(schedule, orders)
    there: dict[Result, float] = {}  # when a result is at the rank that made it
    place, starts, stops = [0] * P, [list[float]() for _ in range(P)], [list[float]() for _ in range(P)]
    waiting, ready = defaultdict[Result, list[int]](list), list(range(P))
    while ready:
        rank = ready.pop()
        while place[rank] < len(orders[rank]):
            task = orders[rank][place[rank]]
            inputs = joined.get(task, ()) if task.kind == UPDATE else _inputs(task, S)
            missing = [one for one in inputs if one not in there]
            if missing:
                waiting[missing[0]].append(rank)
                break
            start = stops[rank][-1] if stops[rank] else 0.0
            for one in inputs:
                apart = rank_of[one[1], one[2]] != rank and task.kind != UPDATE
                delay = stages[min(one[2], task.stage)].transfer_seconds if apart else 0.0
                start = max(start, there[one] + delay)
            stop = start + stages[task.stage].passes_seconds[_PLACE[task.kind]]
            starts[rank].append(start)
            stops[rank].append(stop)
            place[rank] += 1
            result = (_ARRIVES.get(task.kind, task.kind), task.copy, task.stage, task.number)
            there[result] = stop
            ready += waiting.pop(result, [])
    if any(place[rank] < len(orders[rank]) for rank in range(P)):
        raise DejavuError(f"the orders of {P} ranks wait for each other for ever")
    return Timeline(tuple(map(tuple, orders)), tuple(map(tuple, starts)), tuple(map(tuple, stops)))


def _inputs(task: Task, S: int) -> tuple[Result, ...]:
    """Return what a pass waits for; what its own rank did before stands before it in its order."""
    if task.kind == Pass.FORWARD and task.stage:
        return ((ACTIVATION, task.copy, task.stage - 1, task.number),)
    if task.kind in (Pass.BACKWARD, Pass.BACKWARD_INPUT) and task.stage + 1 < S:
        return ((GRADIENT, task.copy, task.stage + 1, task.number),)
    return ()


def _joined(schedule: PipelineSchedule, orders: Orders) -> dict[Task, tuple[Result, ...]]:
    """Return what updates wait for where the model has several copies: the last gradients of the stage's others."""
    if schedule.num_copies == 1:
        return {}
    last: dict[tuple[int, int, int], Result] = {}  # by stage, update and copy
    for order in orders:
        pending: dict[tuple[int, int], Result] = {}
        for task in order:
            own = (task.copy, task.stage)
            if task.kind == UPDATE:
                last[task.stage, task.number, task.copy] = pending[own]
            elif _ARRIVES[task.kind] == GRADIENT:
                pending[own] = (GRADIENT, *own, task.number)
    copies = range(schedule.num_copies)
    updates = {Task(s, UPDATE, number, copy): (s, number) for s, number, copy in last}
    return {task: tuple(last[(*at, c)] for c in copies if c != task.copy) for task, at in updates.items()}


def _pass_seconds(orders: Orders, stage: int, seconds: StageSeconds) -> float:
    """Return what one microbatch's passes through a stage take on average, split or whole, as the orders have them."""
    count = Counter(task.kind for row in orders for task in row if task.stage == stage and task.kind != UPDATE)
    return sum(n * seconds.passes_seconds[_PLACE[kind]] for kind, n in count.items()) / count[Pass.FORWARD]


def _step_seconds(found: Timeline, num_microbatches: int, num_steps: int, ends: int) -> float:
    done = [0.0] * num_steps  # when the last backward pass of each step, and whatever follows in its flush, is done
    for order, stops in zip(found.orders, found.stop_seconds, strict=True):
        for task, stop in zip(order, stops, strict=True):
            if task.kind != UPDATE:
                step = task.number // num_microbatches
                done[step] = max(done[step], stop)
    if not ends:
        return max(stops[-1] for stops in found.stop_seconds)
    return (done[num_steps - 1 - ends] - done[ends]) / (num_steps - 1 - 2 * ends)


def _in_flight(orders: Orders, S: int) -> tuple[int, ...]:
    most = [0] * S
    for order in orders:
        held = Counter[tuple[int, int]]()
        for task in order:
            held[task.copy, task.stage] += _CHANGE.get(task.kind, 0)
            most[task.stage] = max(most[task.stage], held[task.copy, task.stage])
    return tuple(most)


def _held(
    schedule: PipelineSchedule,
    order: Sequence[Task],
    stages: Sequence[StageSeconds],
    weight_bytes: Sequence[float],
    versions: dict[tuple[int, int], int],
) -> tuple[float, float, float]:
    """Return a rank's most activations in microbatches, versions of its share's weights, and bytes."""
    held = most = 0
    held_bytes = most_bytes = 0.0
    for task in order:
        held += _CHANGE.get(task.kind, 0)
        held_bytes += _CHANGE.get(task.kind, 0) * stages[task.stage].activation_bytes
        most, most_bytes = max(most, held), max(most_bytes, held_bytes)
    own = sorted({(task.copy, task.stage) for task in order})
    kept = [versions[one] for one in own]
    fixed = sum(stages[s].fixed_bytes + (versions[c, s] - 1) * weight_bytes[s] for c, s in own)
    return most / schedule.stages_per_rank, sum(kept) / schedule.stages_per_rank, fixed + most_bytes


def uses(schedule: PipelineSchedule, order: Sequence[Task], num_microbatches: int) -> Iterator[tuple[Task, int, int]]:
    """Yield a rank's tasks, each with the number of updates before it and the version of the weights that it meets.

    Version v is the weights after v updates; an update meets the version that it changes.

    Raises:
        DejavuError: a task wants a version that is not there yet.
    """
    done, met = Counter[tuple[int, int]](), dict[tuple[int, int, int], int]()
    for task in order:
        own = (task.copy, task.stage)
        newest = version = done[own]
        if task.kind == UPDATE:
            done[own] += 1
        elif schedule.weights is WeightRule.DOUBLE_BUFFERED:
            version = max(task.number // num_microbatches - 1, 0)
        elif task.kind != Pass.FORWARD and schedule.weights is not WeightRule.NEWEST:
            version = met[(*own, task.number)]
        if version > newest:
            raise DejavuError(f"{task} wants version {version} of the weights, and {newest} is the newest")
        if task.kind == Pass.FORWARD:
            met[(*own, task.number)] = version
        yield task, newest, version


def _weights(
    schedule: PipelineSchedule, orders: Orders, S: int, num_microbatches: int, num_steps: int
) -> tuple[dict[tuple[int, int], int], tuple[Staleness, ...]]:
    """Return the most versions that each copy of a stage holds at once, and how old its gradients are."""
    most: dict[tuple[int, int], int] = {}
    ages: list[list[tuple[int, int]]] = [[] for _ in range(S)]
    steady = num_microbatches * (num_steps // 2)  # microbatches from here on
    for order in orders:
        rows = list(uses(schedule, order, num_microbatches))
        last = dict[tuple[int, int, int], int]()  # where a version of a stage is met for the last time
        for i, (task, _, version) in enumerate(rows):
            last[task.copy, task.stage, version] = i
        first_of: dict[tuple[int, int, int], int] = {}
        pending = defaultdict[tuple[int, int], list[tuple[int, int, int]]](list)
        alive = defaultdict[tuple[int, int], set[int]](lambda: {0})
        for i, (task, newest, version) in enumerate(rows):
            own = (task.copy, task.stage)
            if task.kind == Pass.FORWARD:
                first_of[(*own, task.number)] = version
            elif task.kind in (Pass.BACKWARD, Pass.BACKWARD_WEIGHT):
                pending[own].append((task.number, first_of[(*own, task.number)], version))
            else:
                if task.kind == UPDATE:
                    ages[task.stage] += [(newest - f, newest - b) for m, f, b in pending.pop(own, []) if m >= steady]
                    alive[own].add(newest + 1)
            top = newest + (task.kind == UPDATE)
            alive[own] = {v for v in alive[own] if v == top or last.get((*own, v), -1) > i}
            most[own] = max(most.get(own, 1), len(alive[own] | {version} if task.kind != UPDATE else alive[own]))
    return most, tuple(_staleness(one) for one in ages)


def _staleness(ages: Sequence[tuple[int, int]]) -> Staleness:
    if not ages:
        return Staleness(0.0, 0.0, 0)
    forward, backward = zip(*ages, strict=True)
    return Staleness(sum(forward) / len(ages), sum(backward) / len(ages), max(forward))
