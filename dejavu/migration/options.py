"""Plans to go on with after a change: the running one, the running one without what was lost, and the best one.

Each is simulated at the prices of the cluster as it is now.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from dejavu.binding import Binding, Placement
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.migration.placing import Held, Move, moves, settled
from dejavu.migration.problem_now import ProblemNow
from dejavu.planning.candidates import LONG_WAITING, bind_by_steps, simulate_bound
from dejavu.planning.prices import under_gpipe_memory
from dejavu.planning.schedules import fits, under
from dejavu.planning.ways.nodes import as_plain, between_nodes, has_several, inside_one, over_nodes
from dejavu.plans import Answer, NoPlanError, NotFound, Obstacle, Plan, SearchResult, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts, Floats, PlanError
from dejavu.search import SEARCHES
from dejavu.simulation import simulate_plan


@dataclass(frozen=True)
class Option:
    """A plan on its devices, at the prices of the cluster as it is now.

    Attributes:
        what: for people: which one it is.
        step_seconds: simulated.
        moves: what has to move to get there.
        is_running: it is the running plan on the devices that it runs on.
    """

    what: str
    binding: Binding
    step_seconds: float
    moves: tuple[Move, ...]
    is_running: bool = False

    @property
    def moved_bytes(self) -> float:
        return sum(move.size_bytes for move in self.moves)


def state_bytes(priced: PricedProblem) -> Floats:
    """Return each layer's weights, gradients and optimizer state on one device."""
    costs = priced.problem.costs
    assert isinstance(costs, AdditiveCosts), "a workload's problem has additive costs"
    single = next(c for c, one in enumerate(priced.problem.configurations) if one.num_devices == 1)
    found: Floats = costs.fixed_bytes_CL[single]
    return found


def best(current: ProblemNow, held: Held, *, budget_seconds: float, seed: int) -> tuple[Option, SearchResult]:
    """Ask the exact search, and take the schedule under which its plan is fastest on the devices that it gets.

    Where that plan fits under no schedule the search is asked again, as the planner asks: for one that holds all of a
    step's microbatches, which fits under every schedule. Where its messages wait for links that are slower than the
    fastest between such devices, which the search takes, it is asked for plans that wait less, as the planner asks.

    Returns:
        The option, and the answer to the first question, whose bound is that of all plans.

    Raises:
        NoPlanError: no plan fits what is left, or none was found in time.
    """
    asking = _Asking(current, budget_seconds, seed)
    for priced in (current.priced, under_gpipe_memory(current.priced)):
        answer = asking.ask(priced)
        if not isinstance(answer, SearchResult) and not asking.answers:
            raise NoPlanError(answer, f"on what is left of {current.cluster.name}: {answer}")
        if asking.best is not None:
            break
    else:
        why = f"the best plan on what is left of {current.cluster.name} fits its memory under no allowed schedule"
        raise NoPlanError(NotFound("exact", Obstacle.NONE_CONSIDERED_FITS, why, asking.seconds), why)
    if asking.best.waiting > LONG_WAITING:
        for told in _waiting_less(current, priced):
            asking.ask(told)
    bound, bytes_L = asking.best, state_bytes(current.priced)
    binding = current.restored(settled(bound.binding, current.cluster, held, bytes_L))
    option = Option("the best plan on what is left", binding, bound.step_seconds, moves(binding, held, bytes_L))
    return option, asking.answers[0]


def _waiting_less(current: ProblemNow, priced: PricedProblem) -> Iterator[PricedProblem]:
    """Yield the problem with messages as they have to leave nodes that are filled rank by rank, and on one node."""
    cluster = current.cluster
    if not has_several(cluster):
        return
    apart = between_nodes(priced, cluster, current.transfers)
    yield over_nodes(priced, apart, cluster, [priced.problem.schedule]).priced
    yield from inside_one(priced, cluster)


class _Bound(NamedTuple):
    """A plan on devices.

    Attributes:
        step_seconds: simulated, with the links of its devices.
        waiting: how much longer it is than the plan's as it was found, with the fastest links between such devices.
    """

    step_seconds: float
    binding: Binding
    waiting: float


class _Asking:
    """Asks the exact search, and keeps the fastest of its plans under the allowed schedules, on their devices."""

    def __init__(self, current: ProblemNow, budget_seconds: float, seed: int) -> None:
        self.current, self.budget_seconds, self.seed = current, budget_seconds, seed
        self.answers: list[SearchResult] = []
        self.best: _Bound | None = None

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.answers)

    def ask(self, priced: PricedProblem) -> Answer:
        left_seconds = max(self.budget_seconds - self.seconds, 0.0)
        answer = SEARCHES["exact"]().run(priced.problem, budget_seconds=left_seconds, seed=self.seed)
        if isinstance(answer, SearchResult):
            self.answers.append(answer)
            self._try(as_plain(answer.plan))
        return answer

    def _try(self, plan: Plan) -> None:
        """Bind the plan under every schedule under which it may be faster than the best so far."""
        for by_types_seconds, changed in sorted(_under_schedules(self.current, plan), key=lambda pair: pair[0]):
            if self.best is not None and by_types_seconds >= self.best.step_seconds:
                return
            now = self.current
            bound = bind_by_steps(now.priced, changed, now.cluster, seed=self.seed, compares=True)
            simulated = simulate_bound(now.priced, bound, now.cluster)
            seconds = simulated.step_seconds
            if fits(now.priced, bound.plan, simulated) and (self.best is None or seconds < self.best.step_seconds):
                self.best = _Bound(seconds, bound, seconds / by_types_seconds - 1)


def _under_schedules(current: ProblemNow, plan: Plan) -> list[tuple[float, Plan]]:
    """Return the plan under every allowed schedule that runs it and under which it fits, with its simulated step.

    Messages take the fastest links between devices of its types.
    """
    found: list[tuple[float, Plan]] = []
    for name in current.schedules:
        try:
            changed = under(current.priced, plan, name)
            simulated = simulate_plan(current.priced, changed)
        except InputError:  # too few layers for the stages of this schedule
            continue
        if fits(current.priced, changed, simulated):
            found.append((simulated.step_seconds, changed))
    return found


def on_devices(
    what: str, current: ProblemNow, plan: Plan, placements: tuple[Placement, ...], held: Held
) -> Option | None:
    """Return a plan of one stage a rank on these devices, under the fastest schedule; None: it fits under none."""
    placements = tuple(replace(one, device=current.devices[one.device.host, one.device.index]) for one in placements)
    kinds = [
        current.slowest(one.device.type_name for one in placements if one.pipeline_rank == rank).name
        for rank in range(len(plan.stages))
    ]
    stages = (
        replace(stage, configuration=replace(stage.configuration, device_type=kind))
        for stage, kind in zip(plan.stages, kinds, strict=True)
    )
    named_now, found = replace(plan, stages=tuple(stages)), list[Option]()
    for name in current.schedules:
        try:
            changed = under(current.every, named_now, name)
        except InputError:  # too few layers for the stages of this schedule
            continue
        option = _option(what, current, changed, placements, held)
        found += [option] if option is not None else []
    return min(found, key=lambda option: option.step_seconds, default=None)


def as_it_is(current: ProblemNow, running: Binding, held: Held) -> Option | None:
    """Return the running plan on the same devices; None: one of them is lost."""
    try:
        devices = [current.devices[placed.device.host, placed.device.index] for placed in running.placements]
    except KeyError:
        return None
    placements = tuple(replace(placed, device=dev) for placed, dev in zip(running.placements, devices, strict=True))
    option = _option("the running plan", current, running.plan, placements, held)
    return option and replace(option, is_running=True)


def without_lost(current: ProblemNow, running: Binding, held: Held) -> Iterator[Option]:
    """Yield the running plan without the replicas that are lost, and a lost rank's neighbours in its place.

    Nothing else moves. For each place of the cut between the neighbours that take over there is a plan.
    """
    plan = running.plan
    if named(SCHEDULES, plan.schedule).stages_per_rank != 1:
        return
    left: list[list[Placement]] = [[] for _ in plan.ranks]
    for placed in running.placements:
        if (device := current.devices.get((placed.device.host, placed.device.index))) is not None:
            left[placed.pipeline_rank].append(replace(placed, device=device))
    stages: list[tuple[Stage, list[Placement]]] = []
    for stage, own in zip(plan.stages, left, strict=True):
        known = _with_replicas(current, stage.configuration, own)
        if known is None:
            return
        stages.append((replace(stage, configuration=known[0]), known[1]))
    for taken in _taken_over(stages):
        placements = (replace(placed, pipeline_rank=rank) for rank, (_, own) in enumerate(taken) for placed in own)
        changed = replace(plan, stages=tuple(stage for stage, _ in taken))
        option = _option("what is left takes over", current, changed, tuple(placements), held)
        if option is not None:
            yield option


def _with_replicas(
    current: ProblemNow, before: StageConfiguration, left: Sequence[Placement]
) -> tuple[StageConfiguration, list[Placement]] | None:
    """Return the configuration of the replicas that are whole, and these; None: no such one is priced."""
    whole = [
        shards
        for _, group in itertools.groupby(left, key=lambda placed: placed.replica)
        if len(shards := list(group)) == before.tensor_parallel
    ]
    if not whole:
        return before, []
    kind = current.slowest(placed.device.type_name for shards in whole for placed in shards)
    nodes = {(placed.device.group, placed.device.node_index) for shards in whole for placed in shards}
    count = len(whole) * before.tensor_parallel
    if count % len(nodes):
        return None
    after = replace(
        before,
        device_type=kind.name,
        num_nodes=len(nodes),
        devices_per_node=count // len(nodes),
        data_parallel=len(whole),
        zero_level=before.zero_level if len(whole) > 1 else 0,
        context_parallel=gcd(before.context_parallel, len(whole)),
    )
    if after not in current.every.problem.configurations:
        return None
    return after, [replace(placed, replica=replica) for replica, shards in enumerate(whole) for placed in shards]


Staffed = list[tuple[Stage, list[Placement]]]


def _taken_over(stages: Staffed) -> Iterator[Staffed]:
    """Yield every way in which the neighbours of stages without a device take over their layers."""
    lost = next((s for s, (_, own) in enumerate(stages) if not own), None)
    if lost is None:
        yield stages
        return
    gone, before, after = stages[lost][0], stages[:lost], stages[lost + 1 :]
    for cut in range(gone.start, gone.stop + 1):
        if (cut > gone.start and not before) or (cut < gone.stop and not after):
            continue
        head = [*before[:-1], (replace(before[-1][0], stop=cut), before[-1][1])] if before else []
        tail = [(replace(after[0][0], start=cut), after[0][1]), *after[1:]] if after else []
        yield from _taken_over([*head, *tail])


def _option(what: str, current: ProblemNow, plan: Plan, placements: tuple[Placement, ...], held: Held) -> Option | None:
    """Return this plan on these devices; None: it is not priced, or does not fit."""
    names: dict[int, set[str]] = {}
    for placed in placements:
        names.setdefault(placed.pipeline_rank, set()).add(placed.device.type_name)
    of_stage = {s: current.slowest(names[rank]).name for rank, stages in enumerate(plan.ranks) for s in stages}
    stages = [
        replace(stage, configuration=replace(stage.configuration, device_type=of_stage[s]))
        for s, stage in enumerate(plan.stages)
    ]
    changed = replace(plan, stages=tuple(stages))
    binding = Binding(changed, placements, 0.0, 0.0)
    try:
        simulated = simulate_bound(current.every, binding, current.cluster)
    except (PlanError, InputError):
        return None
    if not fits(current.every, changed, simulated):
        return None
    seconds = simulated.step_seconds
    binding = replace(binding, step_seconds=seconds, order_step_seconds=seconds)
    return Option(what, binding, seconds, moves(binding, held, state_bytes(current.priced)))
