"""A running training's plan, improved from what its passes take: by gradient steps on A, or by the exact search.

Both see the same: reports of ranks correct the prices (`posterior`). Now and then the plan that these make best
competes with the running one by the rule of every re-plan: it has to win back what the change costs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from dejavu.binding import Binding
from dejavu.migration import options
from dejavu.migration.changes import ClusterNow
from dejavu.migration.joint.posterior import Posterior
from dejavu.migration.joint.relaxed import Variables
from dejavu.migration.joint.strategies import Strategies
from dejavu.migration.options import Option
from dejavu.migration.placing import Held, moves
from dejavu.migration.problem_now import ProblemNow, RunningProblem, problem_now
from dejavu.migration.replanning import BUDGET_SECONDS, Decision, Offered, Remaining, decide, held_now
from dejavu.plans import NoPlanError
from dejavu.plans.schedule import Pass
from dejavu.runtime.process.pace import Paced

How = Literal["search", "joint"]
LOOK_REPORTS = 10  # of each rank, until the first look at a plan
MOST_REPORTS = 160  # between two looks: twice as many after each that changed nothing
KEPT_REPORTS = 20  # whose steps count
STEPS_PER_REPORT = 20  # gradient steps on A after each of the last `LOOK_REPORTS` before a look: until it has cooled
LOOKED_AT = 4  # candidates of A's that are simulated, cheapest first
WHAT = {"search": "the best plan by measured passes", "joint": "the plan that A has learnt"}


@dataclass
class _Tried:
    """A binding that ran.

    Attributes:
        step_seconds: the last that it took.
        ratio: of the measured step to the simulated one, at the prices of the last look.
    """

    binding: Binding
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    ratio: float | None = None

    @property
    def median_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None


class Improvement:
    """Learns prices from the running plan, and says which plan they make best.

    Args:
        how: `joint`: by gradient steps on A between reports; `search`: by the exact search, at every look.
        steps_per_report: gradient steps on A.

    Attributes:
        decided_seconds: processor seconds of this thread for A and for looks, so far.
    """

    def __init__(self, running: RunningProblem, how: How, seed: int, steps_per_report: int = STEPS_PER_REPORT) -> None:
        self._running, self._how, self._seed, self._steps = running, how, seed, steps_per_report
        self._posterior = Posterior(running)
        self._types = {(one.host, one.index): one.type_name for one in running.cluster.devices()}
        self._tried: list[_Tried] = []
        self._variables: Variables | None = None
        self._seen: dict[int, Paced] = {}
        self._reports, self._wait = 0, LOOK_REPORTS
        self._kept: list[float] = []  # of each change so far: how much of the gain that was predicted came true
        # Of the last change: the plan, the step before, and after as predicted.
        self._promised: tuple[Binding, float, float] | None = None
        self.decided_seconds = 0.0

    def begin(self, binding: Binding) -> None:
        """Learn from another attempt, under this binding; A starts from it."""
        if self._promised is not None and not _alike(self._promised[0], binding):
            self._promised = None  # its host was lost before the first look: what runs now promised nothing
        self._tried.append(_Tried(binding))
        self._variables, self._seen, self._reports, self._wait = None, {}, 0, LOOK_REPORTS

    def see(self, paced: Mapping[int, Paced], now: ClusterNow) -> None:
        """Take in the last steps that ranks reported; those that were seen before, and a rank's first, are left out."""
        tried, is_new = self._tried[-1], False
        for rank, one in paced.items():
            before, self._seen[rank] = self._seen.get(rank), one
            if before is None or one.step <= before.step:
                continue
            if not is_new:
                self._posterior.drift()
            is_new = True
            self._learn(tried.binding, rank, one)
            if rank == 0:
                self._reports += 1
                tried.step_seconds.append((one.began_seconds - before.began_seconds) / (one.step - before.step))
        if is_new and self._how == "joint" and self._reports > self._wait - LOOK_REPORTS:
            began = time.thread_time()
            strategies = self.strategies(tried.binding, now)
            if self._variables is None or self._variables.logits_LN.shape != strategies.shape:
                self._variables = Variables(strategies, self._seed)
            self._variables.descend(strategies, self._steps)
            self.decided_seconds += time.thread_time() - began

    def _learn(self, binding: Binding, rank: int, one: Paced) -> None:
        placed, plan = binding.placements[rank], binding.plan
        seat = placed.device.host, placed.device.index
        for s in plan.ranks[placed.pipeline_rank]:
            stage = plan.stages[s]
            usual = replace(stage, configuration=replace(stage.configuration, device_type=self._types[seat]))
            passes = [row for row in one.passes if row.stage == s]
            for direction, ways in enumerate(((Pass.FORWARD,), tuple(set(Pass) - {Pass.FORWARD}))):
                seconds = 0.0
                for way in ways:  # a backward pass may run in two parts, and in all runs of the schedule
                    took = [row.stop_seconds - row.start_seconds for row in passes if row.direction == way]
                    seconds += median(took) * len(took) if took else 0.0
                self._posterior.see(usual, direction, seat, seconds / plan.num_microbatches)

    def prices(self, now: ClusterNow) -> tuple[RunningProblem, ClusterNow]:
        """Return the prices as they are believed now, and the cluster with the devices that are slower or faster."""
        slowness = {seat: factor for seat, factor in self._posterior.slowness.items() if seat not in now.absent}
        return self._posterior.corrected(), replace(now, slowness=slowness)

    def strategies(self, binding: Binding, now: ClusterNow) -> Strategies:
        """Return what layers cost on the devices of the running ranks, and on idle ones, as is believed now."""
        running, believed = self.prices(now)
        return Strategies.of(running, binding, believed)

    @property
    def is_due(self) -> bool:
        """Whether enough was measured since the last look."""
        return self._reports >= self._wait

    @property
    def step_seconds(self) -> float | None:
        """The median step of this attempt; None: none was measured."""
        return self._tried[-1].median_seconds if self._tried else None

    @property
    def is_uneven(self) -> bool:
        """Whether a device is slower or faster than others of its type."""
        return bool(self._posterior.slowness)

    def decide(self, now: ClusterNow, remaining: Remaining) -> Decision:
        """Look for a better plan; the decision's steps are simulated ones, times what measured ones are over those.

        A plan that ran has its own ratio of measured to simulated steps, any other the running plan's. Of the gain of
        one that never ran, as much is believed as earlier changes kept, on average; the first is believed.
        """
        start, began = time.perf_counter(), time.thread_time()
        self._reports = 0
        binding = self._tried[-1].binding
        running, believed = self.prices(now)
        current = problem_now(running, believed)
        held = held_now(current, binding)
        stay = options.as_it_is(current, binding, held)
        assert stay is not None, "a plan that runs has all of its devices"
        found, bound = self._found(current, held, stay, now)
        tried = self._tried[-1]
        self._keep_account(tried)
        tried.ratio = tried.median_seconds / stay.step_seconds if tried.median_seconds else 1.0
        stay = replace(stay, step_seconds=tried.ratio * stay.step_seconds)
        found = stay if found is None else self._measured(found, stay, tried.ratio)
        offered = Offered(found, stay, self._earlier(current, held), bound, start)
        decision = decide(offered, current, binding, remaining)
        self._variables = None  # the next look's starts from the running plan as well
        if decision.stays:
            self._wait = min(2 * self._wait, MOST_REPORTS)
        else:
            self._promised = (decision.chosen.binding, stay.step_seconds, decision.chosen.step_seconds)
        self.decided_seconds += time.thread_time() - began
        return replace(decision, reasons=(self._said(), *decision.reasons))

    def _found(self, current: ProblemNow, held: Held, stay: Option, now: ClusterNow) -> tuple[Option | None, float]:
        """Return the plan to compete with the running one, and a bound on all plans' price; None: there is none."""
        if self._how == "search":
            try:
                found, answer = options.best(current, held, budget_seconds=BUDGET_SECONDS, seed=self._seed)
            except NoPlanError:
                return None, 0.0
            return replace(found, what=WHAT[self._how]), answer.lower_bound_seconds
        return self._learnt(current, held, now), 0.0

    def _learnt(self, current: ProblemNow, held: Held, now: ClusterNow) -> Option | None:
        """Return the best of A's likeliest plan, its neighbours and the running plan's; None: none fits."""
        if self._variables is None:
            return None
        strategies = self.strategies(self._tried[-1].binding, now)
        likeliest = self._variables.likeliest(strategies)
        near = [likeliest, *strategies.neighbours(likeliest), *strategies.neighbours(strategies.running_L)]
        best: Option | None = None
        for assigned_L in sorted(near, key=strategies.price)[:LOOKED_AT]:
            plan, placements = strategies.plan(assigned_L, current.priced.problem.schedule)
            option = options.on_devices(WHAT[self._how], current, plan, placements, held)
            if option is not None and (best is None or option.step_seconds < best.step_seconds):
                best = option
        return best

    def _earlier(self, current: ProblemNow, held: Held) -> tuple[Option, ...]:
        """Return the plans that ran before, each at its own ratio: a change that was no gain is taken back."""
        found = []
        for k, tried in enumerate(self._tried[:-1]):
            again = any(_alike(tried.binding, later.binding) for later in self._tried[k + 1 :])
            option = None if again or not tried.ratio else options.as_it_is(current, tried.binding, held)
            if option is not None:
                step_seconds = (tried.ratio or 1.0) * option.step_seconds
                moved = moves(option.binding, held, options.state_bytes(current.priced))
                found.append(
                    replace(
                        option, what="a plan that ran before", step_seconds=step_seconds, moves=moved, is_running=False
                    )
                )
        return tuple(found)

    def _keep_account(self, tried: _Tried) -> None:
        """Take note, at the first look after a change, of how much of the predicted gain it kept."""
        if self._promised is not None and (after := tried.median_seconds) is not None:
            _, before, predicted = self._promised
            self._kept.append(min(max((before - after) / (before - predicted), 0.0), 1.0))
            self._promised = None

    def _measured(self, option: Option, stay: Option, ratio: float) -> Option:
        """Return an option with the step that it is believed to take."""
        own = [tried.ratio for tried in self._tried if tried.ratio and _alike(tried.binding, option.binding)]
        if own:
            return replace(option, step_seconds=own[-1] * option.step_seconds)
        gain = stay.step_seconds - ratio * option.step_seconds
        kept = (1.0 + sum(self._kept)) / (1 + len(self._kept))
        return replace(option, step_seconds=stay.step_seconds - (kept * gain if gain > 0 else gain))

    def _said(self) -> str:
        least, most = self._posterior.factors
        others = [f"device {index} of {host} {x:.2g} ×" for (host, index), x in self._posterior.slowness.items()]
        beside = f", and beside the others of its type {', '.join(others)}" if others else ""
        return f"measured: layers' passes take {least:.2g} to {most:.2g} × their prices{beside}"


def _alike(a: Binding, b: Binding) -> bool:
    """Return whether two bindings put the same layers in the same way on the same devices."""

    def seen(binding: Binding) -> tuple[object, ...]:
        stages = (replace(one, configuration=replace(one.configuration, device_type="")) for one in binding.plan.stages)
        seats = ((p.pipeline_rank, p.replica, p.shard, p.device.host, p.device.index) for p in binding.placements)
        return (binding.plan.schedule, *stages, *sorted(seats))

    return seen(a) == seen(b)
