"""Planning anew for a cluster that changed: the prices, what stays where it is, and whether a change pays."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dejavu.binding import Binding, bind, bind_in_order
from dejavu.foundation.processes.files import write_json
from dejavu.init import Draw
from dejavu.launch.launcher import _failed
from dejavu.migration import (
    ClusterNow,
    DeviceLost,
    DeviceSlowed,
    HostAdded,
    HostLost,
    LinkSlowed,
    Remaining,
    RunningProblem,
    replan,
)
from dejavu.migration.changes import ClusterChange
from dejavu.migration.options import as_it_is
from dejavu.migration.placing import held_by
from dejavu.migration.problem_now import problem_now
from dejavu.migration.replanning import best_on
from dejavu.migration.training import ChangingTraining
from dejavu.planning import PlanRequest, Prices
from dejavu.planning.prices import under_gpipe_memory
from dejavu.planning.schedules import fits, under
from dejavu.plans import NoPlanError, Plan, SearchResult, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem, SlicePrices
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.job.migration import Migration
from dejavu.runtime.process.failures import Failure, RankError, write_failure
from dejavu.search import SEARCHES
from dejavu.simulation import simulate_plan
from dejavu.workload import ReplanSettings, Workload
from tests.changing import running_problem
from tests.conftest import TINY
from tests.launching import job_of
from tests.test_planning import WORKLOAD, of_nodes

L, B = 12, 8


def running_on(
    num_hosts: int, per_host: int = 1, replicas: tuple[int, ...] = (1,), state_bytes: float = 1e6
) -> RunningProblem:
    """L equal layers of 10 ms, on hosts of equal devices; replicas are on hosts of their own."""
    hosts = tuple(f"h{k}" for k in range(num_hosts))
    layers = tuple(f"l{k}" for k in range(L))
    return running_problem(layers, hosts, B, per_host=per_host, replicas=replicas, state_bytes=state_bytes)


def bound(running: RunningProblem) -> Binding:
    return best_on(running, ClusterNow(running.cluster)).binding


def hosts_of(binding: Binding) -> list[str]:
    return [placed.device.host for placed in binding.placements]


REMAINING = Remaining(steps=1000)


def test_nothing_changed_and_nothing_changes() -> None:
    running = running_on(4)
    binding, now = bound(running), ClusterNow(running.cluster)
    current = problem_now(running, now)
    assert current.priced.problem.configurations == running.priced.problem.configurations
    assert np.array_equal(current.priced.forward_seconds_CL, running.priced.forward_seconds_CL)
    assert current.cluster.fingerprint == running.cluster.fingerprint
    decision = replan(running, binding, now, REMAINING)
    assert decision.stays and decision.chosen.binding.plan == binding.plan and not decision.moves
    assert decision.reasons == (decision.reasons[0],) and "still the best" in decision.reasons[0]


def test_a_lost_host_leaves_the_best_plan_for_the_others_and_their_stages_in_place() -> None:
    running = running_on(4)
    binding = bound(running)
    lost = hosts_of(binding)[1]
    now = ClusterNow(running.cluster).after(HostLost(lost))
    decision = replan(running, binding, now, REMAINING, [HostLost(lost)])
    fresh = best_on(running, now)
    assert decision.chosen.step_seconds == pytest.approx(fresh.step_seconds)
    assert lost not in hosts_of(decision.chosen.binding) and not decision.stays
    assert decision.lower_bound_seconds <= fresh.step_seconds
    assert str(decision).startswith(f"host {lost} is lost; ") and "of state move" in str(decision)
    held = held_by(binding)
    wanted = held_by(decision.chosen.binding)
    least = min(
        sum(len(wanted[a] - held.get(b, frozenset())) for a, b in zip(wanted, order, strict=True))
        for order in itertools.permutations(wanted)
    )
    assert sum(move.stop - move.start for move in decision.moves) == least


def test_few_steps_are_left_to_the_neighbours_and_many_to_the_best_plan() -> None:
    """With 12 layers on 4 hosts, and the last lost: 3-3-6 leaves the large layers 6 to 8 where they are, 4-4-4 not."""
    running = running_on(4)
    costs = running.priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    costs = replace(costs, fixed_bytes_CL=np.where((np.arange(L) >= 6) & (np.arange(L) < 9), 3e8, 1e6)[None])
    running = replace(running, priced=replace(running.priced, problem=replace(running.priced.problem, costs=costs)))
    binding = bound(running)
    lost = HostLost(hosts_of(binding)[-1])
    now = ClusterNow(running.cluster).after(lost)
    few = replan(running, binding, now, replace(REMAINING, steps=1), [lost])
    many = replan(running, binding, now, replace(REMAINING, steps=10_000), [lost])
    assert few.chosen.moved_bytes < many.chosen.moved_bytes
    assert few.chosen.step_seconds > many.chosen.step_seconds
    assert "less has to move" in str(few)


def test_a_lost_replica_s_mate_goes_on_where_that_is_best() -> None:
    running = running_on(4, replicas=(1, 2), state_bytes=8e7)
    stages = tuple(Stage(a, b, StageConfiguration("core", 2, 1, 2)) for a, b in ((0, 6), (6, 12)))
    plan = Plan(stages, "1f1b", B)
    binding = bind(running.priced.problem, plan, running.cluster)
    lost = HostLost(hosts_of(binding)[3])
    decision = replan(running, binding, ClusterNow(running.cluster).after(lost), replace(REMAINING, steps=1), [lost])
    assert not decision.moves
    assert [stage.configuration.data_parallel for stage in decision.chosen.binding.plan.stages] == [2, 1]


def test_a_slow_device_is_planned_around_and_back_when_it_recovers() -> None:
    running = running_on(3)
    binding = bound(running)
    host = hosts_of(binding)[1]
    slowed = DeviceSlowed(host, 0, 2.0)
    now = ClusterNow(running.cluster).after(slowed)
    decision = replan(running, binding, now, REMAINING, [slowed])
    plan = decision.chosen.binding.plan
    of_host = {placed.device.host: plan.stages[placed.pipeline_rank] for placed in decision.chosen.binding.placements}
    assert of_host[host].stop - of_host[host].start < 4
    assert decision.chosen.step_seconds == pytest.approx(best_on(running, now).step_seconds)
    slow_type = of_host[host].configuration.device_type
    assert slow_type != "core" and host in slow_type, "what is remembered is not of this type"
    back = now.after(DeviceSlowed(host, 0, 1.0))
    assert back == ClusterNow(running.cluster)
    after = replan(running, decision.chosen.binding, back, REMAINING)
    assert after.chosen.binding.plan == binding.plan
    few = replan(running, binding, now, replace(REMAINING, steps=2), [slowed])
    assert few.stays and "the running plan stays" in str(few)
    slight = ClusterNow(running.cluster).after(DeviceSlowed(host, 0, 1.01))
    assert replan(running, binding, slight, replace(REMAINING, steps=10**9)).stays, "less than the margin"


def test_a_slow_mate_slows_its_whole_stage_as_long_as_the_plan_stays() -> None:
    running = running_on(2, replicas=(1, 2))
    plan = Plan((Stage(0, L, StageConfiguration("core", 2, 1, 2)),), "1f1b", B)
    binding = bind(running.priced.problem, plan, running.cluster)
    before = simulate_plan(running.priced, plan).step_seconds
    now = ClusterNow(running.cluster).after(DeviceSlowed("h1", 0, 3.0))
    stays = replan(running, binding, now, replace(REMAINING, steps=1))
    assert stays.stays and stays.chosen.step_seconds == pytest.approx(3 * before, rel=0.01)


def test_a_slow_link_takes_as_much_longer_between_stages_and_replicas() -> None:
    running = running_on(3, replicas=(1, 2))
    current = problem_now(running, ClusterNow(running.cluster).after(LinkSlowed("h2", 10.0)))
    problem = current.priced.problem
    single = [c for c, one in enumerate(problem.configurations) if one.num_devices == 1]
    usual, slow = (problem.link_seconds_per_byte_CC[single[0], c] for c in single)
    assert (usual, slow) == (pytest.approx(1e-9), pytest.approx(1e-8))
    assert not any(one.num_devices > 1 and "h2" in one.device_type for one in problem.configurations)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_zero_sends_in_passes_takes_as_much_longer_over_a_slow_link(level: int) -> None:
    """Of the plan that runs: what a search may take has no such stages."""
    running = running_on(2, replicas=(1, 2, 2))
    problem = running.priced.problem
    one, two, _ = problem.configurations
    zero = replace(two, zero_level=level)
    more_CL = np.array([[0.0], [0.0], [0.003 if level > 1 else 0.0]]) * np.ones((1, L))
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    costs = replace(costs, seconds_CL=costs.seconds_CL + 2 * more_CL)
    priced = replace(
        running.priced,
        problem=replace(problem, configurations=(one, replace(two, zero_level=1), zero), costs=costs),
        forward_seconds_CL=running.priced.forward_seconds_CL + more_CL,
        backward_seconds_CL=running.priced.backward_seconds_CL + more_CL,
    )
    running = replace(running, priced=priced)
    plan = Plan((Stage(0, L, zero),), "1f1b", B)
    usual = simulate_plan(priced, plan).step_seconds
    now = ClusterNow(running.cluster).after(LinkSlowed("h1", 10.0))
    binding = bind(priced.problem, plan, running.cluster)
    found = as_it_is(problem_now(running, now), binding, held_by(binding))
    sent = 2 * B * L * 0.003 if level > 1 else 0.0
    assert found is not None and found.step_seconds == pytest.approx(usual + 9 * sent)


@pytest.mark.parametrize(
    "change", [DeviceSlowed("h1", 1, 3.0), LinkSlowed("h2", 10.0), DeviceLost("h0", 0), HostLost("h2")], ids=str
)
def test_slices_are_those_of_each_kind_of_device(change: ClusterChange) -> None:
    running = running_on(3, per_host=2, replicas=(1, 2))
    before = running.priced
    each_NCL = np.stack([0.5 * before.forward_seconds_CL, 1.5 * before.forward_seconds_CL])
    slices = SlicePrices((4, 4), each_NCL, 2 * each_NCL)
    running = replace(running, priced=replace(before, slices=slices))
    now = ClusterNow(running.cluster).after(change)
    for found in (problem_now(running, now).priced, problem_now(running, now).every):
        assert found.slices is not None
        assert np.allclose(found.slices.forward_seconds_NCL.mean(axis=0), found.forward_seconds_CL)
        assert np.allclose(found.slices.backward_seconds_NCL, 2 * found.slices.forward_seconds_NCL)


@pytest.mark.parametrize("per_host", [1, 2])
def test_of_a_cluster_that_is_gone_there_is_no_plan(per_host: int) -> None:
    running = running_on(2, per_host=per_host)
    lost = [HostLost("h0"), *(DeviceLost("h1", index) for index in range(per_host))]
    with pytest.raises(NoPlanError, match="no device of cluster test is left"):
        replan(running, bound(running), ClusterNow(running.cluster).after(*lost), REMAINING, lost)


class StandingAgents:
    """Hosts whose agents live and are idle; what a `ChangingTraining` asks of them while it looks at its cluster."""

    def __init__(self, *names: str) -> None:
        self.names, self.living = set(names), set(names)

    def add(self, come: object) -> None: ...

    def ready(self) -> set[str]:
        return self.names & self.living

    def alive(self) -> set[str]:
        return self.living

    def drop(self, lost: set[str]) -> None:
        self.names -= lost


def test_a_host_whose_devices_were_given_up_has_not_come_while_its_agent_lives(tmp_path: Path) -> None:
    """It has when the agent has gone and another one is there."""
    running = running_on(2)
    binding = bind(running.priced.problem, Plan((Stage(0, L, StageConfiguration("core")),), "1f1b", B), running.cluster)
    (used,) = hosts_of(binding)
    (other,) = {"h0", "h1"} - {used}
    job = TrainingJob(Workload(num_steps=9), binding, Draw(), None, 0, 9, str(tmp_path))
    agents, told = StandingAgents(used, other), list[str]()
    training = ChangingTraining(
        job, running, agents, ClusterNow(running.cluster), watches=False, on_decision=lambda one: told.append(str(one))
    )  # type: ignore[arg-type]
    training.now = training.now.after(DeviceLost(other, 0))
    training._give_up([DeviceLost(other, 0)])

    def looked() -> str:
        training._watched = 0.0
        training._wanted()
        return " ".join(told)

    assert "has come" not in looked() and set(training.now.hosts) == {used}
    agents.living = {used}
    looked()
    agents.names = agents.living = {used, other}
    assert f"host {other} has come" in looked() and set(training.now.hosts) == {used, other}


@pytest.mark.parametrize("slow", ["h0", "h1", "h2", "h3"])
def test_a_slower_link_is_seen_of_a_host_that_has_come_as_of_the_others(slow: str, tmp_path: Path) -> None:
    """What is usual was tried at the start alone, among the hosts of the first plan: of others nothing was known."""
    running = running_on(4)
    hosts = [f"h{k}" for k in range(4)]
    now = ClusterNow(running.cluster).after(*map(HostLost, hosts[2:]))
    binding, agents = best_on(running, now).binding, StandingAgents(*hosts[:2])
    seconds = dict.fromkeys(hosts, 0.01)  # of a message from or to each

    def try_links() -> dict[str, dict[str, float]]:
        living = sorted(agents.living)
        return {a: {b: max(seconds[a], seconds[b]) for b in living if b != a} for a in living}

    agents.pace, agents.try_links = lambda attempt, ranks: {}, try_links  # type: ignore[attr-defined]
    job = TrainingJob(Workload(num_steps=9), binding, Draw(), None, 0, 9, str(tmp_path))
    training = ChangingTraining(job, running, agents, now)  # type: ignore[arg-type]
    training._usual_links = try_links()
    watching = SimpleNamespace(suspects_links=False, see=lambda paced: None, changes=lambda now: [])
    training._watching = watching  # type: ignore[assignment]

    def look() -> None:
        training._watched = training._settled = 0.0
        training._tried_at = -1e9
        training._wanted()

    look()
    for late in hosts[2:]:
        agents.names = agents.living = agents.living | {late}
        look()
    assert set(training.now.hosts) == set(hosts) and not training.now.link_slowness
    watching.suspects_links = True
    seconds[slow] *= 10
    look()
    assert training.now.link_slowness == {slow: 10.0}
    seconds[slow] /= 10
    look()
    assert not training.now.link_slowness


def only_as_it_runs(how: str) -> tuple[RunningProblem, Binding]:
    """A plan on two hosts that no search finds where these differ, or looks for: what each device has room for."""
    running = running_on(2, replicas=(1, 2))
    problem, costs = running.priced.problem, running.priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    one, both = problem.configurations
    if how == "a stage on both":
        costs = replace(costs, capacity_bytes_C=np.array([1.0, 2.0**30]))
        plan, schedules = Plan((Stage(0, L, both),), "1f1b", B), ("1f1b",)
    else:  # the first layer and the last on one, what is between them on the other
        held_L = np.array([8.0, 5.0, *[0.0] * (L - 4), 5.0, 2.0])
        nothing = {name: np.zeros((2, L)) for name in ("activation_bytes_CL", "temporary_bytes_CL")}
        costs = replace(costs, fixed_bytes_CL=np.stack([held_L] * 2), capacity_bytes_C=np.full(2, 10.0), **nothing)
        stages = (Stage(a, b, one) for a, b in itertools.pairwise((0, 1, L // 2, L - 1, L)))
        plan, schedules = Plan(tuple(stages), "zbv", B), ("zbv",)
    priced = replace(running.priced, problem=replace(problem, costs=costs))
    running = replace(running, priced=priced, schedules=schedules)
    return running, bind_in_order(plan, running.cluster)


@pytest.mark.parametrize("how", ["a stage on both", "two stages on each"])
@pytest.mark.parametrize(
    "changes",
    [(), (DeviceSlowed("h0", 0, 3.0),), (LinkSlowed("h1", 4.0),), (HostLost("h1"), HostAdded("h1"))],
    ids=lambda changes: ", ".join(map(str, changes)),
)
def test_the_running_plan_goes_on_where_no_other_is_found(changes: tuple[ClusterChange, ...], how: str) -> None:
    """It was an error when a device of the only stage became slower, or nothing had changed."""
    running, binding = only_as_it_runs(how)
    now = ClusterNow(running.cluster).after(*changes)
    decision = replan(running, binding, now, Remaining(100), changes)
    assert decision.stays and {placed.device.host for placed in decision.chosen.binding.placements} == {"h0", "h1"}
    stays_alone = how == "two stages on each" or any(isinstance(one, DeviceSlowed | LinkSlowed) for one in changes)
    assert ("as no other was found that fits" in str(decision)) == stays_alone
    assert decision.lower_bound_seconds <= decision.chosen.step_seconds
    with pytest.raises(NoPlanError):
        replan(running, binding, now.after(HostLost("h1")), Remaining(100), changes)


FULLER = [one.name for one in SCHEDULES.values() if one.by_default and one.stages_per_rank > 1]


@pytest.mark.parametrize("name", FULLER)
def test_a_plan_is_found_where_the_search_s_fits_under_no_schedule(name: str) -> None:
    """Searches count what 1F1B holds; others hold more, up to all microbatches of a step."""
    running = running_on(3)
    asked_again = 0
    for seed in range(60):
        priced = of_unlike_layers(running.priced, seed)
        own, now = replace(running, priced=priced, schedules=("gpipe", name)), ClusterNow(running.cluster)
        first, roomy = (
            SEARCHES["exact"]().run(one.problem, budget_seconds=10.0) for one in (priced, under_gpipe_memory(priced))
        )
        if isinstance(roomy, SearchResult):
            assert isinstance(first, SearchResult)
            best_on(own, now)  # under GPipe, if no other
            asked_again += not fitting(priced, first.plan, own.schedules)
    assert asked_again


def of_unlike_layers(priced: PricedProblem, seed: int) -> PricedProblem:
    """Layers that take and hold different amounts, on devices that have room for some of them."""
    draw, costs = np.random.default_rng(seed), priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    times_L = draw.choice([1.0, 1.0, 2.0, 5.0, 11.0], L)
    held = replace(
        costs,
        seconds_CL=costs.seconds_CL * times_L,
        activation_bytes_CL=draw.choice([0.0, 0.1, 0.5, 1.0], (1, L)),
        fixed_bytes_CL=draw.choice([0.0, 0.0, 1.0, 4.0, 8.0], (1, L)),
        temporary_bytes_CL=np.zeros((1, L)),
        capacity_bytes_C=draw.choice([18.0, 24.0, 30.0], 1),
    )
    return replace(
        priced,
        problem=replace(priced.problem, costs=held),
        forward_seconds_CL=priced.forward_seconds_CL * times_L,
        backward_seconds_CL=priced.backward_seconds_CL * times_L,
    )


def fitting(priced: PricedProblem, plan: Plan, schedules: tuple[str, ...]) -> list[str]:
    """Return the schedules under which the plan fits."""
    plans = [under(priced, plan, name) for name in schedules]
    return [one.schedule for one in plans if fits(priced, one, simulate_plan(priced, one))]


def test_a_host_that_comes_is_used_where_it_pays() -> None:
    running = running_on(3)
    now = ClusterNow(running.cluster).after(HostLost("h2"))
    binding = best_on(running, now).binding
    assert set(hosts_of(binding)) == {"h0", "h1"} == set(now.hosts)
    added = HostAdded("h2")
    decision = replan(running, binding, now.after(added), REMAINING, [added])
    assert set(hosts_of(decision.chosen.binding)) == {"h0", "h1", "h2"}
    assert replan(running, binding, now.after(added), replace(REMAINING, steps=3), [added]).stays


def test_a_device_of_several_is_lost_and_the_others_keep_their_numbers() -> None:
    running = running_on(2, per_host=2)
    binding = bound(running)
    lost = DeviceLost("h0", 0)
    decision = replan(running, binding, ClusterNow(running.cluster).after(lost), REMAINING, [lost])
    seats = {(placed.device.host, placed.device.index) for placed in decision.chosen.binding.placements}
    assert seats == {("h0", 1), ("h1", 0), ("h1", 1)}
    assert {stage.configuration.device_type for stage in decision.chosen.binding.plan.stages} == {"core"}
    with pytest.raises(NoPlanError, match=r"."):
        tight = running.priced.problem.costs
        assert isinstance(tight, AdditiveCosts)
        costs = replace(tight, capacity_bytes_C=np.full(1, 4.5e6))
        small = replace(running, priced=replace(running.priced, problem=replace(running.priced.problem, costs=costs)))
        replan(small, binding, ClusterNow(running.cluster).after(lost), REMAINING)


@pytest.mark.parametrize("seed", range(40))
def test_every_device_is_of_its_own_kind_whichever_are_slower_or_lost(seed: int) -> None:
    """Of a node's devices 0 and 2 that are as slow, and 1 that is slower, plans took one for the other."""
    rng = random.Random(seed)
    running = running_on(rng.randint(1, 3), per_host=rng.randint(2, 4))
    now = ClusterNow(running.cluster)
    for device in running.cluster.devices():
        if rng.random() < 0.6:
            now = now.after(DeviceSlowed(device.host, device.index, rng.choice([1.5, 2.0, 3.0])))
        if rng.random() < 0.1:
            now = now.after(DeviceLost(device.host, device.index))
        if rng.random() < 0.1:
            now = now.after(LinkSlowed(device.host, 4.0))
    if not now.hosts:
        return
    current, seats = problem_now(running, now), set()
    for device in current.cluster.devices():
        own, kind = current.origin[device.host, device.index], current.kinds[device.type_name]
        assert own.type_name == device.type_name and current.devices[own.host, own.index] == own
        assert kind.slowness == now.slowness.get((own.host, own.index), 1.0)
        assert kind.link_slowness == now.link_slowness.get(own.host, 1.0)
        seats.add((own.host, own.index))
    assert seats == {(one.host, one.index) for one in running.cluster.devices()} - now.absent
    binding = best_on(running, now).binding
    for placed in binding.placements:
        stage = binding.plan.stages[placed.pipeline_rank]
        slow = now.slowness.get((placed.device.host, placed.device.index), 1.0)
        assert (f"{slow:.2g} × as slow" in stage.configuration.device_type) == (slow != 1)


def test_a_margin_is_a_share_or_per_cent() -> None:
    assert ReplanSettings.model_validate({"margin": "3%"}) == ReplanSettings(margin=0.03)
    assert ReplanSettings().action == "notify"
    for wrong in ("3", "x%", 1.5, "-1%"):
        with pytest.raises(ValueError, match="margin"):
            ReplanSettings.model_validate({"margin": wrong})


@pytest.mark.parametrize("was_slowed", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_times_are_told_of_a_plan_only_where_all_steps_ran_under_it_on_usual_devices(
    was_slowed: bool, changed: bool
) -> None:
    plan = bound(running_on(2)).plan
    other = replace(plan, num_microbatches=2 * plan.num_microbatches)
    migration = Migration(3, "host h1 is lost", plan, other if changed else plan, 1.0, 0)
    result = TrainingResult(0, (1.0,), 0.5, (), 0, None, "", migrations=(migration,), was_slowed=was_slowed)
    assert TrainingResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert result.kept_its_plan == (not was_slowed and not changed)
    assert result.of_its_plan.step_seconds == (0.5 if result.kept_its_plan else None)


@pytest.mark.parametrize("nodes", [(8, 8, 7), (8, 7, 7), (7, 7), (4, 2, 2), (3, 3, 2), (8, 1)], ids=str)
def test_plans_of_odd_and_unequal_nodes_can_be_placed_whatever_is_lost(nodes: tuple[int, ...], tmp_path: Path) -> None:
    """Hosts in any order, or a device; the problem is the one that the running plan was found in."""
    workload = Workload.model_validate(WORKLOAD).model_copy(
        update={"model_options": {"num_blocks": 3, "width": 4096, "num_heads": 16}, "sequence_length": 512}
    )
    cluster = of_nodes(nodes, tmp_path)
    prices = Prices(PlanRequest(workload, cluster, tmp_path / "rows", microbatches=(B,), schedules=("1f1b",)))
    for one in prices.problems(B):
        used = set(one.problem.configurations)
        running = RunningProblem.of(prices, B, used)
        assert running.priced is one
        for gone in (*itertools.permutations(cluster.devices()[0 :: max(nodes)], 1), ()):
            now = ClusterNow(cluster).after(*(DeviceLost(device.host, device.index) for device in gone))
            check_placed(running, now)
        for first, then in itertools.permutations(now.hosts, 2):
            now = ClusterNow(cluster).after(HostLost(first))
            check_placed(running, now)
            if len(nodes) > 2:
                check_placed(running, now.after(HostLost(then)))
        best = best_on(running, now).binding
        assert len({placed.device for placed in best.placements}) == len(best.placements)


def check_placed(running: RunningProblem, now: ClusterNow) -> None:
    """Draw stages of what searches may take, until no more devices are left, and place them."""
    found, rng = problem_now(running, now), np.random.default_rng(0)
    problem = found.priced.problem
    for _ in range(5):
        stages, left = list[Stage](), dict(problem.device_counts)
        ways = [one for one in problem.configurations if not one.recompute and not one.zero_level]
        while fitting := [one for one in ways if one.num_devices <= left[one.device_type]]:
            one = fitting[rng.integers(len(fitting))]
            stages.append(Stage(len(stages), len(stages) + 1, one))
            left[one.device_type] -= one.num_devices
        binding = bind_in_order(Plan(tuple(stages), "gpipe", 64), found.cluster)
        assert len({placed.device for placed in binding.placements}) == sum(
            one.configuration.num_devices for one in stages
        )


@pytest.mark.parametrize("named", [True, False], ids=["names it", "does not"])
@pytest.mark.parametrize("steps", [(), (3,), (3, 6)])
def test_a_training_that_ends_by_its_own_error_names_its_last_checkpoint(
    steps: tuple[int, ...], named: bool, tmp_path: Path
) -> None:
    """Whether or not it follows its cluster; once, where the rank's own error has it."""
    job = job_of(TINY, tmp_path)
    for step in steps:
        (job.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (job.checkpoints / f"step-{step:08d}" / "COMPLETE.json").write_text("{}")
    last = str(job.checkpoints / f"step-{max(steps):08d}") if steps else "there is no checkpoint yet"
    job.error_path(0, 1).write_text(f"image 7 is none{f'; the last is {job.checkpoints}/x' if named else ''}")
    write_failure(job.folder, Failure(0, 1, (1,), "localhost", 1))
    for error in (ChangingTraining._error(SimpleNamespace(job=job, _failures=list)), _failed(job, 1)):  # type: ignore[arg-type]
        assert isinstance(error, RankError) and "image 7 is none" in str(error)
        assert (last in str(error)) == (not named)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_warnings_that_come_after_the_result_are_in_it(late: int, tmp_path: Path) -> None:
    """As of the last copy of a checkpoint, which no rank waits for."""
    job, said = job_of(TINY, tmp_path), [f"the checkpoints are not copied: {k}" for k in range(late)]
    result = TrainingResult(0, (1.0,), None, (), 0, None, "", warnings=("step 2: odd",))
    write_json(job.result_path, result.to_dict())
    job.warnings_path.write_text("".join(f"{line}\n" for line in ("step 2: odd", *said)))
    told = {"_report": list, "_measure_gain": list, "_failures": list, "migrations": [], "_was_slowed": False}
    found = ChangingTraining._result(SimpleNamespace(job=job, **told))  # type: ignore[arg-type]
    assert found.warnings == ("step 2: odd", *said)
    assert TrainingResult.from_dict(json.loads(job.result_path.read_text())) == found
