"""The decision after a change: which plan takes the least time for the steps that are left, moving included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dejavu.binding import Binding
from dejavu.cluster import Cluster
from dejavu.foundation import units
from dejavu.migration import options
from dejavu.migration.changes import ClusterChange, ClusterNow
from dejavu.migration.options import Option
from dejavu.migration.placing import Held, Move, held_by
from dejavu.migration.problem_now import ProblemNow, RunningProblem, problem_now
from dejavu.plans import NoPlanError

RESTART_SECONDS = 2.0  # of ranks that are forked, until their first step; a training measures its own
BUDGET_SECONDS = 2.0  # of the exact search, which takes milliseconds where few devices make a small table


@dataclass(frozen=True)
class Remaining:
    """What is left of a training, and what decides whether a change pays.

    Attributes:
        steps: still to train.
        margin: a plan that would be faster by a smaller share is not worth a change.
        restart_seconds: of all ranks, whatever they run.
    """

    steps: int
    margin: float = 0.03
    restart_seconds: float = RESTART_SECONDS


@dataclass(frozen=True)
class Decision:
    """How a training goes on after a change.

    Attributes:
        changes: what happened.
        chosen: the plan to go on with, on its devices.
        considered: all options, the fastest step first.
        move_seconds: predicted, of the chosen one: its state over the links, and the restart.
        lower_bound_seconds: proved: no plan on what is left is cheaper by the searches' cost model.
        reasons: sentences.
        seconds: that the decision took.
    """

    changes: tuple[ClusterChange, ...]
    before: Binding
    chosen: Option
    considered: tuple[Option, ...]
    move_seconds: float
    lower_bound_seconds: float
    reasons: tuple[str, ...]
    seconds: float

    @property
    def moves(self) -> tuple[Move, ...]:
        return self.chosen.moves

    @property
    def stays(self) -> bool:
        """Whether the running plan goes on as it is."""
        return self.chosen.is_running

    def __str__(self) -> str:
        return "; ".join((*map(str, self.changes), *self.reasons))


@dataclass(frozen=True)
class Offered:
    """What a decision is about.

    Attributes:
        best: the plan that was found for the cluster as it is; None: none was.
        stay: the running one; None: a device of it is lost.
        others: further ones.
        lower_bound_seconds: proved of all plans, by the searches' cost model.
        began: when the decision began, by `time.perf_counter`.
    """

    best: Option | None
    stay: Option | None
    others: tuple[Option, ...]
    lower_bound_seconds: float
    began: float


def replan(
    running: RunningProblem,
    binding: Binding,
    now: ClusterNow,
    remaining: Remaining,
    changes: Sequence[ClusterChange] = (),
    *,
    budget_seconds: float = BUDGET_SECONDS,
    seed: int = 0,
) -> Decision:
    """Decide how a training goes on after changes of its cluster.

    The exact search is asked for the best plan on what is left. It competes with the running plan, where all of its
    devices are still there, and with the running plan without what is lost: for the steps that are left, each takes
    its simulated steps, and what it has to move once. Where all devices of the running plan are there, it stays unless
    the gain exceeds the margin. Equal times: what moves less. Where the search finds no plan that fits under an allowed
    schedule, the running one may: with several stages on a rank it need not be one that searches look for.

    Args:
        binding: the running one.
        now: the cluster after the changes.
        changes: for the sentences.

    Raises:
        NoPlanError: no plan fits what is left, or none was found and the running one cannot go on.

    Source: the objective is ours; planning anew for what is left, and moving only what has to, as
    [Varuna](https://arxiv.org/abs/2111.04007) and [Oobleck](https://arxiv.org/abs/2309.08125) do for equal devices.
    """
    began = time.perf_counter()
    current = problem_now(running, now)
    held = held_now(current, binding)
    stay = options.as_it_is(current, binding, held)
    others = () if stay else tuple(options.without_lost(current, binding, held))
    found: Option | None = None
    bound_seconds = 0.0
    try:
        found, answer = options.best(current, held, budget_seconds=budget_seconds, seed=seed)
        bound_seconds = answer.lower_bound_seconds
    except NoPlanError:
        if stay is None and not others:
            raise
    offered = Offered(found, stay, others, bound_seconds, began)
    return decide(offered, current, binding, remaining, changes)


def held_now(current: ProblemNow, binding: Binding) -> Held:
    """Return the layers whose state is on the hosts that are there."""
    present = {seat[0] for seat in current.devices}
    return {host: layers for host, layers in held_by(binding).items() if host in present}


def decide(
    offered: Offered,
    current: ProblemNow,
    binding: Binding,
    remaining: Remaining,
    changes: Sequence[ClusterChange] = (),
) -> Decision:
    """Choose by the rule of `replan`."""
    held, found, stay = held_now(current, binding), offered.best, offered.stay
    listed = [*([found] if found else []), *([stay] if stay else []), *offered.others]

    def total_seconds(option: Option) -> float:
        return remaining.steps * option.step_seconds + _move_seconds(option, current.cluster, held, remaining)

    chosen = min(listed, key=lambda option: (total_seconds(option), option.moved_bytes))
    if stay is not None and chosen.step_seconds >= (1 - remaining.margin) * stay.step_seconds:
        chosen = stay
    move_seconds = _move_seconds(chosen, current.cluster, held, remaining)
    return Decision(
        changes=tuple(changes),
        before=binding,
        chosen=replace(chosen, binding=current.usual(chosen.binding)),
        considered=tuple(sorted(listed, key=lambda option: option.step_seconds)),
        move_seconds=move_seconds,
        lower_bound_seconds=offered.lower_bound_seconds,
        reasons=_reasons(chosen, found, stay, remaining),
        seconds=time.perf_counter() - offered.began,
    )


def _move_seconds(option: Option, cluster: Cluster, held: Held, remaining: Remaining) -> float:
    """Predict what a change to this option takes: every host receives what it lacks at the same time as the others."""
    if option.is_running:
        return 0.0
    arriving: dict[str, float] = {}
    for move in option.moves:
        arriving[move.host] = arriving.get(move.host, 0.0) + move.size_bytes
    groups = {device.host: device.group for device in cluster.devices()}
    slowest = 0.0
    for host, size_bytes in arriving.items():
        links = [
            link.bytes_per_second
            for names, link in cluster.links_between.items()
            if groups[host] in names and any(other != host for other in held)
        ]
        slowest = max(slowest, size_bytes / min(links) if links else 0.0)
    return remaining.restart_seconds + slowest


def _reasons(chosen: Option, found: Option | None, stay: Option | None, remaining: Remaining) -> tuple[str, ...]:
    step = f"a step is predicted to take {units.format_seconds(chosen.step_seconds)}"
    if found is None and chosen.is_running:
        return (f"the running plan stays, as no other was found that fits: {step}",)
    if found is not None and chosen.is_running:
        gain = 1 - found.step_seconds / chosen.step_seconds
        if gain <= 0:
            return (f"the running plan is still the best: {step}",)
        gained = units.format_seconds(remaining.steps * (chosen.step_seconds - found.step_seconds), 2)
        change = units.format_seconds(remaining.restart_seconds, 2)
        return (
            f"the running plan stays: the best one would be {gain:.1%} faster, over {remaining.steps} steps "
            f"{gained}, with a margin of {100 * remaining.margin:.3g}% and a change of {change} or more",
        )
    said = [f"{chosen.what}: {step}"]
    if stay is not None:
        gain = 1 - chosen.step_seconds / stay.step_seconds
        said[0] += f", {gain:.0%} less than the running plan's {units.format_seconds(stay.step_seconds)}"
    elif found is None:
        said[0] += ", and no other plan was found that fits"
    elif chosen is not found:
        slower = chosen.step_seconds / found.step_seconds - 1
        said[0] += f", {slower:.1%} above the best plan's, and less has to move"
    said.append(f"{units.format_bytes(chosen.moved_bytes)} of state move" if chosen.moves else "no state has to move")
    return tuple(said)


def best_on(running: RunningProblem, now: ClusterNow, *, budget_seconds: float = BUDGET_SECONDS) -> Option:
    """Return the best plan for a cluster as it is now, as if nothing ran yet.

    Raises:
        NoPlanError: no plan fits.
    """
    current = problem_now(running, now)
    found, _ = options.best(current, {}, budget_seconds=budget_seconds, seed=0)
    return replace(found, binding=current.usual(found.binding))
