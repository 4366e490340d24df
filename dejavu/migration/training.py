"""A training through all changes of its cluster: start, follow, decide, move, go on."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dejavu.foundation.processes.files import write_json
from dejavu.launch.launcher import OnLoss, first_said, report
from dejavu.launch.preflight import check_job
from dejavu.launch.warm import Run, StartsAgent, WarmHosts
from dejavu.migration.changes import ClusterChange, ClusterNow, DeviceLost, HostAdded, HostLost, Seat
from dejavu.migration.joint import Improvement
from dejavu.migration.problem_now import RunningProblem
from dejavu.migration.replanning import RESTART_SECONDS, Decision, Remaining, replan
from dejavu.migration.starting import copies_wanted, newest_start
from dejavu.migration.watching import Watching, link_changes
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.job.migration import Gain, Migration
from dejavu.runtime.process.failures import LaunchError, RankError, failures_path, read_failures
from dejavu.runtime.process.heartbeat import heartbeats, read_beats
from dejavu.runtime.snapshots import Start, is_due
from dejavu.runtime.state import checkpoint_step, complete_checkpoints
from dejavu.watching.links import Tried, fastest
from dejavu.workload.models import layers_of

POLL_SECONDS = 0.02
WATCH_SECONDS = 0.1
SETTLING_SECONDS = 10.0  # after a change, before another because of a slower device or link: no going to and fro
TRY_SECONDS = 10.0  # between two tries of links
COME_SECONDS = 5.0  # between two questions for hosts that have come
READY_SECONDS = 120.0  # for agents to import what ranks run
MOST_IN_VAIN = 3  # attempts in a row that got no further than the one before
MOST_DEATHS = 2  # of ranks by a signal on one device, without a step between them, before the device counts as lost


@dataclass(frozen=True)
class _Ended:
    """All ranks have finished."""


@dataclass(frozen=True)
class _Failed:
    """A rank or a host failed."""


@dataclass
class _Open:
    """A migration that has not reached a new step yet."""

    decision: Decision
    reason: str
    step: int
    began: float
    steps_lost: int
    gain: Gain | None


@dataclass
class ChangingTraining:
    """Trains a job on warm hosts while its cluster changes, and while its plan is improved, where that is wanted.

    Attributes:
        job: its binding is that of the last attempt.
        now: the cluster as it is; hosts of its file that are absent are used once they have a warm agent.
        watches: for slower devices and links.
        on_step: (step, loss), as ranks report them.
        on_decision: called with every decision, also where the running plan stays.
        come: asked every few seconds for hosts that can be reached now, and have no agent yet.
        on_evaluation: (step, loss on what is held out), as ranks report them.
    """

    job: TrainingJob
    running: RunningProblem
    hosts: WarmHosts
    now: ClusterNow
    watches: bool = True
    on_step: OnLoss = lambda step, loss: None
    on_decision: Callable[[Decision], None] = lambda decision: None
    come: Callable[[], Mapping[str, StartsAgent]] = dict
    on_evaluation: OnLoss = lambda step, loss: None
    migrations: list[Migration] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._attempt, self._bindings = -1, dict[int, TrainingJob]()
        self._watching = Watching(self.running)
        self._watched = self._settled = self._asked = 0.0
        self._read_bytes = 0
        self._done = self.job.first_step
        self._open: _Open | None = None
        self._usual_links: Tried = {}
        self._tried_at = 0.0
        self._restart_seconds = RESTART_SECONDS
        self._lost_hosts: dict[int, list[str]] = {}
        self._deaths: Counter[Seat] = Counter()
        self._given_up: set[str] = set()  # hosts none of whose devices runs ranks any more, though their agents live
        self._in_vain, self._furthest, self._was_slowed = 0, -1, False
        how, self._saved = self.job.workload.replan.improve, complete_checkpoints(self.job.checkpoints)[-1:]
        self._improving = None if how == "never" else Improvement(self.running, how, self.job.workload.seed)

    def run(self) -> TrainingResult:
        """Train to the job's last step.

        Raises:
            NoPlanError: no plan fits what is left of the cluster.
            LaunchError: no agent started, or ranks failed again and again; `RankError`: by themselves.
        """
        self._prepare()
        self._begin(None)
        while not isinstance(event := self._follow(), _Ended):
            self._begin(self._changed(event))
        return self._result()

    @property
    def improving_seconds(self) -> float:
        """The processor seconds that looking for a better plan took so far."""
        return 0.0 if self._improving is None else self._improving.decided_seconds

    def _prepare(self) -> None:
        job = self.job
        check_job(job)
        known = {(device.host, device.index) for device in self.running.cluster.devices()}
        for placed in job.binding.placements:
            if (seat := (placed.device.host, placed.device.index)) not in known:
                raise LaunchError(
                    f"the plan uses device {seat[1]} of {seat[0]}, which {self.running.cluster.name} has not"
                )
        folder = Path(job.folder)
        for stale in (job.result_path, job.warnings_path, failures_path(folder), *folder.glob("error-*-*")):
            stale.unlink(missing_ok=True)
        shutil.rmtree(heartbeats(folder), ignore_errors=True)
        self._read_bytes = job.progress_path.stat().st_size if job.progress_path.exists() else 0
        wanted = {placed.device.host for placed in job.binding.placements}
        # Loads the compiled loops of search and simulation, while the agents import.
        replan(self.running, job.binding, self.now, self._remaining())
        if missing := wanted - self.hosts.wait(wanted, READY_SECONDS):
            raise LaunchError(f"no agent answers on {', '.join(sorted(missing))}; see ranks-HOST.log in {folder}")
        if self.watches:
            self._usual_links = self.hosts.try_links()

    def _begin(self, start: Start | None) -> None:
        self._attempt += 1
        self._bindings[self._attempt] = self.job
        ranks: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        binding = self.job.binding
        for rank, placed in enumerate(binding.placements):
            ranks.setdefault(placed.device.host, []).append((rank, binding.plan.ranks[placed.pipeline_rank]))
        order = Run(
            attempt=self._attempt,
            job=str(self.job.write()),
            ranks={host: tuple(rows) for host, rows in ranks.items()},
            urls=dict(self.hosts.urls),
            every_steps=self.job.workload.replan.snapshot_every,
            copies=copies_wanted(binding),
            start=start,
        )
        self._watching.begin(binding)
        if self._improving is not None:
            self._improving.begin(binding)
        self.hosts.run(order)

    def _follow(self) -> _Ended | _Failed | Decision:
        """Follow an attempt until it ends, fails, or should change."""
        places = self.job.binding.placements
        ranks = range(len(places))
        used = {placed.device.host for placed in places}
        while True:
            self._report()
            ended = self.hosts.ended(self._attempt, ranks)
            if len(ended) == len(places) and not any(ended.values()):
                return _Ended()
            if any(ended.values()) or used - self.hosts.alive():
                return _Failed()
            if (decision := self._wanted()) is not None:
                return decision
            time.sleep(POLL_SECONDS)

    def _wanted(self) -> Decision | None:
        """Return a decision to change, if the cluster has changed and that pays."""
        if self._open is not None or time.monotonic() < self._watched + WATCH_SECONDS:
            return None
        self._watched = time.monotonic()
        if self._watched > self._asked + COME_SECONDS:
            self._asked = self._watched
            self.hosts.add(self.come())
        changes: list[ClusterChange] = []
        if self.watches or self._improving is not None:
            paced = self.hosts.pace(self._attempt, range(len(self.job.binding.placements)))
            self._watching.see(paced)
            if self._improving is not None:
                self._improving.see(paced, self.now)
        if self.watches and time.monotonic() > self._settled:
            # What makes a device slower is one of the numbers that an improvement learns.
            changes += [] if self._improving is not None else self._watching.changes(self.now)
            changes += self._link_changes()
        self._forget_lost_spares()
        ready = self.hosts.ready() - set(self.now.hosts) - self._given_up
        come = [HostAdded(host) for host in sorted(ready) if self.now.seats_of(host)]
        if come and self.watches:  # what is usual of their links is learnt now, too
            self._usual_links = fastest(self._usual_links, self.hosts.try_links())
        changes += come
        if not changes:
            return self._improved()
        self.now = self.now.after(*changes)
        self._was_slowed = self._was_slowed or bool(self.now.slowness or self.now.link_slowness)
        decision = self._replanned(changes)
        self.on_decision(decision)
        return None if decision.stays else decision

    def _replanned(self, changes: Sequence[ClusterChange]) -> Decision:
        """Plan anew after changes of the cluster, at the prices as they are known now."""
        running, now = self.running, self.now
        if self._improving is not None:
            running, now = self._improving.prices(now)
        return replan(running, self.job.binding, now, self._remaining(), changes)

    def _improved(self) -> Decision | None:
        """Return a decision to change to a better plan for the same cluster; one to stay is not told."""
        if self._improving is None:
            return None
        is_saved = self._is_saved()  # asked at every look: a checkpoint of long ago is not just complete
        if not (self._improving.is_due and is_saved):
            return None
        decision = self._improving.decide(self.now, self._remaining())
        self._was_slowed = self._was_slowed or self._improving.is_uneven
        if decision.stays:
            return None
        self.on_decision(decision)
        return decision

    def _is_saved(self) -> bool:
        """Return whether hardly a step would have to be done again: a snapshot or a new checkpoint is just complete."""
        if every := self.job.workload.replan.snapshot_every:
            return is_due(self._done, every)
        before, self._saved = self._saved, complete_checkpoints(self.job.checkpoints)[-1:]  # older ones are deleted
        return self._saved != before

    def _forget_lost_spares(self) -> None:
        """Take note of hosts that are lost and run nothing; they may come again."""
        used = {placed.device.host for placed in self.job.binding.placements}
        if lost := self.hosts.names - self.hosts.alive() - used:
            self.hosts.drop(lost)
            self._given_up -= lost
            self.now = self.now.after(*map(HostLost, lost))

    def _link_changes(self) -> list[ClusterChange]:
        """Let hosts try their links, where steps have become slow or links were."""
        if time.monotonic() < self._tried_at + TRY_SECONDS:
            return []
        if not (self._watching.suspects_links or self.now.link_slowness):
            return []
        found = link_changes(self._usual_links, self.hosts.try_links(), self.now)
        self._tried_at = time.monotonic()
        return found

    def _remaining(self) -> Remaining:
        steps = max(1, self.job.last_step - self._done)
        return Remaining(steps, self.job.workload.replan.margin, self._restart_seconds)

    def _changed(self, event: _Failed | Decision) -> Start | None:
        """End the attempt, decide how it goes on, and return the state that it goes on from."""
        began = time.monotonic()
        gain = self._expected_gain(event)
        self._measure_gain()
        found = self.hosts.stop()
        self._report()
        beats = read_beats(self.job.folder, self._attempt)
        common = min((beats[rank].step for rank in beats), default=-1) + 1
        done = min(common, self._done) if len(beats) == len(self.job.binding.placements) else 0
        lost = {placed.device.host for placed in self.job.binding.placements} - set(found)
        reasons: list[str] = []
        if isinstance(event, _Failed) or lost:
            decision, reasons = self._after_failure(lost)
        else:
            decision = event
        names = [builder.name for builder in layers_of(self.job.workload)]
        start = newest_start(found, {k: job.binding for k, job in self._bindings.items()}, names)
        complete = complete_checkpoints(self.job.checkpoints)
        saved = checkpoint_step(complete[-1]) if complete else self.job.first_step
        if start is not None and start.step < saved:
            start = None
        step = start.step if start is not None else saved
        reason = "; ".join((*reasons, str(decision)))
        self._open = _Open(decision, reason, step, began, max(0, done - step), gain)
        self.job = replace(self.job, binding=decision.chosen.binding)
        return start

    def _after_failure(self, lost: set[str]) -> tuple[Decision, list[str]]:
        """Decide how the training goes on without what failed; raise what would only fail again."""
        told = [] if lost else [one for one in read_failures(self.job.folder) if one.attempt == self._attempt]
        changes: list[ClusterChange] = [HostLost(host) for host in sorted(lost)]
        if lost:
            self._lost_hosts[self._attempt] = sorted(lost)
        self._in_vain = 0 if self._done > self._furthest else self._in_vain + 1
        if self._done > self._furthest:
            self._deaths.clear()
        self._furthest = max(self._furthest, self._done)
        for failure in told:
            device = self.job.binding.placements[failure.rank].device
            self._deaths[device.host, device.index] += failure.by_signal
            if self._deaths[device.host, device.index] >= MOST_DEATHS:
                changes.append(DeviceLost(device.host, device.index))
        if not changes and (self._in_vain >= MOST_IN_VAIN or (self._in_vain and not any(f.by_signal for f in told))):
            raise self._error()
        self.now = self.now.after(*changes)
        self._give_up(changes)
        decision = self._replanned(changes)
        self.on_decision(decision)
        return decision, list(map(str, told))

    def _give_up(self, changes: Sequence[ClusterChange]) -> None:
        """Take note of hosts that have no device left after these changes, and of those whose agents went, too."""
        lost = {change.host for change in changes if isinstance(change, DeviceLost)} - set(self.now.hosts)
        gone = {change.host for change in changes if isinstance(change, HostLost)}
        self._given_up = (self._given_up | lost) - gone

    def _report(self) -> None:
        """Report the steps that ranks have written since, and close the migration that they end."""

        def on_step(step: int, loss: float) -> None:
            self._done = max(self._done, step + 1)
            if self._open is not None and step >= self._open.step:
                self._close(self._open)
            self.on_step(step, loss)

        self._read_bytes = report(self.job.progress_path, self._read_bytes, on_step, self.on_evaluation)

    def _close(self, migration: _Open) -> None:
        decision, seconds = migration.decision, time.monotonic() - migration.began
        self._open, self._settled = None, time.monotonic() + SETTLING_SECONDS
        if not decision.moves:
            self._restart_seconds = seconds
        self.migrations.append(
            Migration(
                step=migration.step,
                reason=migration.reason,
                from_plan=decision.before.plan,
                to_plan=decision.chosen.binding.plan,
                seconds=seconds,
                steps_lost=migration.steps_lost,
                gain=migration.gain,
            )
        )

    def _expected_gain(self, event: _Failed | Decision) -> Gain | None:
        """Return what a change for a better plan promises."""
        if self._improving is None or isinstance(event, _Failed) or event.changes:
            return None
        before = self._improving.step_seconds
        return None if before is None else Gain(before, event.chosen.step_seconds)

    def _measure_gain(self) -> None:
        """Take note of what the last change for a better plan brought, if enough steps followed."""
        if self._improving is None or not self.migrations or (after := self._improving.step_seconds) is None:
            return
        if (gain := self.migrations[-1].gain) is not None and gain.after_seconds is None:
            self.migrations[-1] = replace(self.migrations[-1], gain=replace(gain, after_seconds=after))

    def _result(self) -> TrainingResult:
        self._report()
        self._measure_gain()
        if not self.job.result_path.exists():
            raise self._error()
        result = TrainingResult.from_dict(json.loads(self.job.result_path.read_text()))
        result = replace(
            result,
            failures=tuple(self._failures()),
            warnings=self.job.warnings(),
            migrations=tuple(self.migrations),
            was_slowed=self._was_slowed,
        )
        write_json(self.job.result_path, result.to_dict())
        return result

    def _failures(self) -> list[str]:
        """Say what ended each attempt: where a host was lost, its ranks' neighbours failed only because of that."""
        lost = [(k, f"attempt {k}: host {host} is lost") for k, hosts in self._lost_hosts.items() for host in hosts]
        own = [(one.attempt, str(one)) for one in read_failures(self.job.folder) if one.attempt not in self._lost_hosts]
        return [text for _, text in sorted(lost + own, key=lambda pair: pair[0])]

    def _error(self) -> LaunchError:
        told = "".join(f"\n{failure}" for failure in self._failures())
        what = f"the training did not finish (the ranks' output is in {self.job.folder}/ranks-*.log)"
        if self.job.errors() and not any(one.by_signal for one in read_failures(self.job.folder)[-1:]):
            return RankError(f"{what}; {first_said(self.job)}{told}")
        return LaunchError(f"{what}{told}")
