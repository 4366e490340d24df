"""One training with one fault: ours, and torchrun's restart from the last checkpoint under the same plan."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.elastic.faults import VICTIM, Fault
from benchmarks.elastic.prices import WORKLOAD, first_binding
from benchmarks.elastic.site import LAUNCHER, EmulatedHost, Site
from benchmarks.pipeline.plans import job_of
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.binding import Binding
from dejavu.launch.torchrun import MOST_RESTARTS
from dejavu.launch.warm import WarmHosts
from dejavu.migration import ClusterNow, Decision, RunningProblem
from dejavu.migration.changes import HostLost
from dejavu.migration.replanning import best_on
from dejavu.migration.training import ChangingTraining
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.job.progress import parse_progress
from dejavu.runtime.process import end_agent, named_parent, rank_environment
from dejavu.workload import ReplanSettings

FAULT_STEP = 25
COPIED_EVERY = 4  # steps; without replicas a snapshot goes over the link too
READY_SECONDS = 180.0
GIVEN_UP_SECONDS = 40.0  # without a step: nobody restarts it
POLL_SECONDS = 0.02
ROUNDS, STEPS = 2, 7  # of plans that are trained in turn


@dataclass
class Seen:
    """When steps were reported, the fault, and the first new step after it.

    Attributes:
        furthest: the last step that was reported.
        decided: the first change of plan after the fault.
        migrations_before: how many there were before the fault, because of other work on this machine.
    """

    furthest: int = -1
    fault_at: float | None = None
    furthest_at_fault: int = -1
    migrations_before: int = 0
    decided: Decision | None = None
    went_on_at: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How a training went through a fault; None: it did not, or there was nothing to go through.

    Attributes:
        seconds_to_next_step: from the fault; a host that comes has to start its agent first.
        seconds_from_noticing: from the moment the launcher knew of it.
        binding: after the fault; other work on this machine may have changed the plan again later.
    """

    seconds_to_next_step: float | None
    seconds_from_noticing: float | None
    steps_lost: int | None
    losses: tuple[float, ...]
    binding: Binding
    said: str


def ours(site: Site, running: RunningProblem, fault: Fault, num_steps: int, *, replicas: bool) -> Outcome:
    """Train on warm hosts, through the fault."""
    now = ClusterNow(running.cluster).after(*([HostLost(VICTIM)] if fault.comes else []))
    binding = first_binding(running, now, replicas=replicas)
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="dejavu-elastic-") as folder:
        settings = ReplanSettings(action="migrate", snapshot_every=1 if replicas else COPIED_EVERY)
        workload = WORKLOAD.model_copy(update={"num_steps": num_steps, "replan": settings})
        job = replace(job_of(workload, binding, num_steps), folder=folder)
        warm = WarmHosts(Path(folder), site.address(LAUNCHER))
        hosts = {name: EmulatedHost(site, name) for name in (*now.hosts, *([VICTIM] if fault.comes else []))}
        coming = [VICTIM] if fault.comes else []

        def on_step(step: int, loss: float) -> None:
            seen.furthest = max(seen.furthest, step)
            if seen.fault_at is None and step >= FAULT_STEP:
                seen.fault_at, seen.migrations_before = time.monotonic(), len(training.migrations)
                warm.add({name: hosts[name] for name in coming})
                fault.cause(site, hosts[VICTIM])
            if coming and seen.fault_at is not None and set(coming) <= warm.ready():
                hosts[coming.pop()].throttle()
            waits = seen.fault_at is not None and seen.went_on_at is None
            if waits and len(training.migrations) > seen.migrations_before:
                seen.went_on_at = time.monotonic()

        def on_decision(decision: Decision) -> None:
            if seen.fault_at is not None and seen.decided is None and not decision.stays:
                seen.decided = decision

        training = ChangingTraining(job, running, warm, now, fault.is_watched_for, on_step, on_decision)
        try:
            warm.add({name: hosts[name] for name in now.hosts})
            warm.wait(now.hosts, READY_SECONDS)
            for name in now.hosts:
                hosts[name].throttle()
            result = training.run()
        finally:
            warm.close()
    first = next(iter(result.migrations[seen.migrations_before :]), None)
    return Outcome(
        seconds_to_next_step=_between(seen),
        seconds_from_noticing=first.seconds if first is not None else None,
        steps_lost=first.steps_lost if first is not None else None,
        losses=result.losses,
        binding=seen.decided.chosen.binding if seen.decided else training.job.binding,
        said=" | ".join(map(str, result.migrations)) or "no change",
    )


def _between(seen: Seen) -> float | None:
    return None if seen.fault_at is None or seen.went_on_at is None else seen.went_on_at - seen.fault_at


def torchrun(site: Site, running: RunningProblem, fault: Fault, num_steps: int, *, replicas: bool) -> Outcome:
    """Train with torch's elastic agents, one on each host: they restart all ranks from the last checkpoint."""
    binding = first_binding(running, ClusterNow(running.cluster), replicas=replicas)
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="dejavu-torchrun-") as folder, ExitStack() as stack:
        workload = WORKLOAD.model_copy(update={"num_steps": num_steps})
        job = replace(job_of(workload, binding, num_steps), folder=folder)
        path = job.write()
        names = list(dict.fromkeys(placed.device.host for placed in binding.placements))
        hosts = {name: EmulatedHost(site, name) for name in names}
        agents = [stack.enter_context(_agent(site, hosts[name], names, path)) for name in names]
        resumed = _follow(job, agents, hosts, seen, fault, site)
        losses = _losses(job)
    lost = None if resumed is None else seen.furthest_at_fault + 1 - resumed
    said = "the run ends" if resumed is None else f"restart from the checkpoint of step {resumed}"
    return Outcome(_between(seen), _between(seen), lost, losses if resumed is not None else (), binding, said)


@contextmanager
def _agent(site: Site, host: EmulatedHost, names: Sequence[str], path: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [
        *("--nproc-per-node=1", *site.emulation.meeting(host.name, names), f"--max-restarts={MOST_RESTARTS}"),
        *("--monitor-interval=0.2", "-m", "dejavu.runtime.worker", str(path)),
    ]
    with path.with_name(f"agent-{host.name}.log").open("wb") as log:
        agent = subprocess.Popen(
            site.inside(host.name, [sys.executable, "-m", "dejavu.launch.agent", *words]),
            env={**rank_environment(), **named_parent(), **site.emulation.environment(host.name)},
            stdout=log,
            stderr=log,
        )
        host.processes.append(psutil.Process(agent.pid))
        try:
            yield agent
        finally:
            host.kill()
            end_agent(agent)


def _follow(
    job: TrainingJob,
    agents: Sequence[subprocess.Popen[bytes]],
    hosts: dict[str, EmulatedHost],
    seen: Seen,
    fault: Fault,
    site: Site,
) -> int | None:
    """Follow the steps through the fault; return the step that the training went on from."""
    read, throttled, resumed, last = 0, False, None, time.monotonic()
    while any(agent.poll() is None for agent in agents):
        rows = job.progress_path.read_bytes().splitlines(keepends=True) if job.progress_path.exists() else []
        for row in filter(None, map(parse_progress, (line for line in rows[read:] if line.endswith(b"\n")))):
            read, last, step = read + 1, time.monotonic(), row[0]
            if not throttled:  # all hosts run ranks
                throttled = True
                for host in hosts.values():
                    host.throttle()
            if seen.fault_at is not None and resumed is None and step <= seen.furthest:
                resumed = step
            if resumed is not None and seen.went_on_at is None:
                seen.went_on_at = time.monotonic()
            seen.furthest = max(seen.furthest, step)
            if seen.fault_at is None and step >= FAULT_STEP:
                seen.fault_at, seen.furthest_at_fault = time.monotonic(), seen.furthest
                fault.cause(site, hosts[VICTIM])
        if seen.fault_at is not None and time.monotonic() - last > GIVEN_UP_SECONDS:
            return None
        time.sleep(POLL_SECONDS)
    return resumed


def _losses(job: TrainingJob) -> tuple[float, ...]:
    rows = (parse_progress(line) for line in job.progress_path.read_bytes().splitlines())
    found = dict(row for row in rows if row)
    return tuple(found[step] for step in sorted(found))


def throughput(
    site: Site, running: RunningProblem, fault: Fault, bindings: dict[str, Binding]
) -> tuple[dict[str, float | None], Binding]:
    """Train bindings and the best one for the cluster after the fault in turn, A B A B, while the fault lasts.

    Returns:
        Each binding's throughput over that of the best one, and that one.
    """
    now = fault.after(ClusterNow(running.cluster))
    fresh = best_on(running, now).binding
    can = {
        name: binding
        for name, binding in bindings.items()
        if {placed.device.host for placed in binding.placements} <= set(now.hosts)
    }
    found: dict[str, list[float]] = {"fresh": [], **{name: [] for name in can}}
    order = [("fresh", fresh), *can.items()] * ROUNDS
    jobs = [job_of(WORKLOAD, binding, STEPS) for _, binding in order]
    for (name, _), trained in zip(order, train_in_turn(jobs, emulation=site.emulation), strict=True):
        found[name] += trained.step_seconds
    seconds = {name: median(steps) for name, steps in found.items()}
    return {name: seconds["fresh"] / seconds[name] if name in seconds else None for name in bindings}, fresh


def row_of(
    who: str, fault: Fault, replicas: bool, outcome: Outcome | None, share: float | None, expected: Sequence[float]
) -> dict[str, Any]:
    """Return a row of the table."""
    difference = None
    if outcome is not None and outcome.losses:
        difference = max(abs(a - b) for a, b in zip(outcome.losses, expected[: len(outcome.losses)], strict=True))
    return {
        "fault": fault.name,
        "replicas": "replicas" if replicas else "none",
        "who": who,
        "seconds_to_next_step": outcome and outcome.seconds_to_next_step,
        "seconds_from_noticing": outcome and outcome.seconds_from_noticing,
        "steps_lost": outcome and outcome.steps_lost,
        "throughput_over_fresh_optimum": share,
        "worst_loss_difference": difference,
        "said": outcome.said if outcome else "it is not noticed",
    }
