"""A training goes on through changes of its cluster with the losses of an unbroken one: real ranks, real faults."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.pipeline.emulation import EmulationError, enter, slowed
from benchmarks.pipeline.plans import by_hand, job_of
from dejavu.binding import Binding
from dejavu.launch.warm import LocalHost, WarmHosts
from dejavu.launch.warm.board import SEAT
from dejavu.migration import ClusterNow, Decision, RunningProblem
from dejavu.migration.changes import HostLost
from dejavu.migration.training import ChangingTraining
from dejavu.plans import StageConfiguration
from dejavu.runtime.job import TrainingResult
from dejavu.workload import ReplanSettings, Workload
from dejavu.workload.models import layers_of
from tests.changing import running_problem
from tests.conftest import TINY
from tests.launching import DRAW, TOLERANCE, largest_difference, once, ranks, runtime_processes
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration
WORKLOAD = TINY.model_copy(update={"num_steps": 60, "checkpoint_every": 25, "replan": ReplanSettings(action="migrate")})
HOSTS = ("alpha", "beta", "gamma", "delta")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process of a launch outlives it, nor what it kept in memory."""
    yield
    psutil.wait_procs(runtime_processes(), timeout=PATIENCE_SECONDS)
    assert not runtime_processes()


def running(num_hosts: int) -> RunningProblem:
    """The workload's layers at made-up prices."""
    names = [builder.name for builder in layers_of(WORKLOAD)]
    return running_problem(names, HOSTS[:num_hosts], WORKLOAD.num_microbatches, replicas=(1, 2))


def bound(bounds: tuple[int, ...], replicas: int, num_hosts: int) -> Binding:
    """Stages between these cuts, replicas on hosts of their own."""
    configuration = StageConfiguration("core", replicas, 1, replicas)
    made = by_hand("1f1b", bounds, [configuration] * (len(bounds) - 1), WORKLOAD.num_microbatches)
    places = [
        replace(place, device=replace(place.device, host=HOSTS[k % num_hosts], group="g", index=0))
        for k, place in enumerate(made.placements)
    ]
    return replace(made, placements=tuple(places))


def agents() -> dict[str, psutil.Process]:
    """The agents of these tests, by their host."""
    found = {}
    for process in runtime_processes():
        with suppress(psutil.NoSuchProcess):  # those of the test before are ending
            if "dejavu.launch.warm.agent" in process.cmdline() and process.ppid() == os.getpid():  # and no zygote
                found[json.loads(process.environ()[SEAT])["host"]] = process
    return found


def lose(host: str) -> None:
    """Everything that runs on a host ends at once."""
    agent = agents()[host]
    for process in (agent, *agent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def train(
    binding: Binding,
    folder: Path,
    num_hosts: int,
    on_step: Callable[[int, float], None],
    hosts: WarmHosts | None = None,
    absent: tuple[str, ...] = (),
    workload: Workload = WORKLOAD,
    watches: bool = False,
) -> tuple[TrainingResult, list[Decision]]:
    folder.mkdir(exist_ok=True)
    job = replace(job_of(workload, binding, workload.num_steps, DRAW), folder=str(folder))
    problem = running(num_hosts)
    now = ClusterNow(problem.cluster).after(*map(HostLost, absent))
    warm, decisions = hosts or WarmHosts(folder), list[Decision]()
    try:
        warm.add({name: LocalHost() for name in now.hosts})
        training = ChangingTraining(job, problem, warm, now, watches, on_step, decisions.append)
        return training.run(), decisions
    finally:
        warm.close()


def test_a_killed_rank_goes_on_from_memory(tmp_path: Path) -> None:
    binding = bound((0, 2, 5), 1, 2)
    result, _ = train(binding, tmp_path, 2, once(lambda: ranks()[1].kill(), 12))
    (migration,) = result.migrations
    assert result.failures == ("attempt 0: rank 1 (stage 1 on beta) was ended by SIGKILL",)
    assert migration.from_plan == migration.to_plan == binding.plan
    assert 11 <= migration.step <= 20 and migration.steps_lost <= 1, "the last checkpoint is of step 0"
    assert len(result.losses) == WORKLOAD.num_steps
    assert largest_difference(WORKLOAD, result.losses) < TOLERANCE


def test_a_lost_host_leaves_its_replica_s_mate(tmp_path: Path) -> None:
    binding = bound((0, 2, 5), 2, 4)
    result, decisions = train(binding, tmp_path, 4, once(lambda: lose("beta"), 12))
    (migration,) = result.migrations
    assert result.failures == ("attempt 0: host beta is lost",)
    assert "host beta is lost; " in migration.reason and migration.steps_lost == 0
    (decision,) = decisions
    assert "beta" not in {placed.device.host for placed in decision.chosen.binding.placements}
    assert largest_difference(WORKLOAD, result.losses) < TOLERANCE


@pytest.mark.slow
def test_a_lost_host_without_a_replica_lives_on_in_its_neighbour_s_memory(tmp_path: Path) -> None:
    result, decisions = train(bound((0, 1, 3, 5), 1, 3), tmp_path, 3, once(lambda: lose("beta"), 12))
    (migration,) = result.migrations
    assert migration.step >= 11 and migration.steps_lost <= 1
    assert {placed.device.host for placed in decisions[0].chosen.binding.placements} == {"alpha", "gamma"}
    assert decisions[0].moves
    assert largest_difference(WORKLOAD, result.losses) < TOLERANCE


@pytest.mark.slow
def test_a_host_that_comes_is_taken_in(tmp_path: Path) -> None:
    """It is there from the beginning, but the plan was made without it."""
    warm = WarmHosts(tmp_path)
    warm.add({"gamma": LocalHost()})
    warm.wait({"gamma"}, PATIENCE_SECONDS)
    long = WORKLOAD.model_copy(update={"num_steps": 200})
    result, decisions = train(
        bound((0, 2, 5), 1, 2), tmp_path, 3, lambda step, loss: None, hosts=warm, absent=("gamma",), workload=long
    )
    (migration,) = result.migrations
    assert "host gamma has come" in migration.reason and migration.steps_lost <= 1
    assert "gamma" in {placed.device.host for placed in decisions[-1].chosen.binding.placements}
    assert largest_difference(long, result.losses) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("how", ["joint", "search"])
def test_a_plan_that_is_improved_keeps_its_losses(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with one layer on one host and four on the other; a change is made to cost nothing."""
    monkeypatch.setattr("dejavu.migration.joint.improving.LOOK_REPORTS", 4)
    monkeypatch.setattr("dejavu.migration.training.RESTART_SECONDS", 0.0)
    improved = ReplanSettings.model_validate({"action": "migrate", "improve": how})
    long = WORKLOAD.model_copy(update={"num_steps": 250, "replan": improved})  # on busy cores looks come late
    result, decisions = train(bound((0, 1, 5), 1, 2), tmp_path, 2, lambda step, loss: None, workload=long)
    assert result.migrations and all(one.gain is not None and one.changes_plan for one in result.migrations)
    assert all(migration.steps_lost <= 1 for migration in result.migrations)
    undone = len(decisions) - len(result.migrations)  # the last change may be decided as the training ends
    assert 0 <= undone <= 1, "looks that change nothing are not told"
    assert "measured: " in str(decisions[0]) and "were predicted" in str(result.migrations[0])
    assert not result.kept_its_plan
    assert TrainingResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert largest_difference(long, result.losses) < TOLERANCE


@pytest.mark.slow
def test_a_device_that_becomes_slow_is_planned_around(tmp_path: Path) -> None:
    """It gets a third of a core, as ranks see it in the wall-clock time of their passes."""
    long = WORKLOAD.model_copy(update={"num_steps": 500})
    with ExitStack() as stack:
        try:
            group = stack.enter_context(slowed("test", 0.33))
        except EmulationError as error:
            pytest.skip(str(error))

        def slow_down() -> None:
            enter(group, ranks()[1].pid)

        binding = bound((0, 2, 5), 1, 2)
        result, decisions = train(binding, tmp_path, 2, once(slow_down, 60), workload=long, watches=True)
    assert any("device 0 of beta takes" in str(decision) for decision in decisions)
    assert result.migrations and all(migration.steps_lost <= 1 for migration in result.migrations)
    assert result.was_slowed and not result.kept_its_plan, "its times are none of the devices as they usually are"
    assert largest_difference(long, result.losses) < 10 * TOLERANCE
