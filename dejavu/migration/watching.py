"""Slower devices and links, seen in when ranks' passes ran.

A device's slowness is the time inside its passes over what the running problem prices them at, divided by the same
ratio while it was as usual: so it compares across plans. A message takes from the end of a pass on one rank to the
beginning of the same microbatch's on the other, if that one waited for it. Hosts' clocks differ, but the difference
cancels in the sum of an activation's way there and a gradient's way back; of a step's microbatches the fastest in
each direction was waited for. Which host's link is slow is not clear from that: hosts are then asked to try each other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from dejavu.binding import Binding
from dejavu.migration.changes import ClusterChange, ClusterNow, DeviceSlowed, LinkSlowed, Seat
from dejavu.migration.reposing import RunningProblem
from dejavu.plans import Stage
from dejavu.plans.schedule import Pass
from dejavu.runtime.process.pace import Paced

USUAL_REPORTS = 5  # from which it is learnt what is usual; the first step of an attempt, which sets up, is left out
DEBOUNCED_REPORTS = 10  # in a row that have to agree before anything is said
SLOW = 1.35  # times the usual; below, other work on the machine may be the reason
RECOVERED = 1.15
SLOW_LINK, RECOVERED_LINK = 3.0, 1.7  # a message's time varies more than a pass's
Tried = Mapping[str, Mapping[str, float]]  # by host: the seconds of a message from each other host


@dataclass
class _Ratio:
    """One device or link: its measured seconds over its price.

    Attributes:
        usual: while it was as usual; None: not learnt yet.
    """

    usual: float | None = None
    learnt: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=DEBOUNCED_REPORTS))

    def add(self, ratio: float) -> None:
        if self.usual is None:
            self.learnt.append(ratio)
            if len(self.learnt) == USUAL_REPORTS:
                self.usual = median(self.learnt)
        else:
            self.last.append(ratio / self.usual)

    def changed(self, known: float) -> float | None:
        """Return the new slowness, if all of the last reports agree that it is not the known one."""
        if len(self.last) < DEBOUNCED_REPORTS:
            return None
        if known != 1 and max(self.last) < RECOVERED:
            return 1.0
        slower, faster = min(self.last) > SLOW * known, max(self.last) < known / SLOW and min(self.last) > SLOW
        return median(self.last) if slower or faster else None


def link_changes(usual: Tried, tried: Tried, now: ClusterNow) -> list[ClusterChange]:
    """Return the hosts whose links to all others have become slower, or as fast as usual.

    A slow link between two hosts belongs to the one that has no usual one.
    """
    found: list[ClusterChange] = []
    for host in sorted({*tried} & {*usual}):
        ratios = [
            tried[a][b] / usual[a][b]
            for a, b in ((host, other) for other in tried if other != host)
            if b in tried[a] and b in usual.get(a, {})
        ]
        if not ratios:
            continue
        known, factor = now.link_slowness.get(host, 1.0), min(ratios)
        if known == 1 and factor > SLOW_LINK and not found:
            found.append(LinkSlowed(host, factor))
        elif known != 1 and factor < RECOVERED_LINK:
            found.append(LinkSlowed(host, 1.0))
    return found


class Watching:
    """Learns what is usual, and says what is not."""

    def __init__(self, running: RunningProblem) -> None:
        self._running = running
        self._types = {(device.host, device.index): device.type_name for device in running.cluster.devices()}
        self._devices: defaultdict[Seat, _Ratio] = defaultdict(self._of_another)
        self._links: defaultdict[frozenset[str], _Ratio] = defaultdict(_Ratio)
        self._seen: dict[Hashable, int] = {}
        self._binding: Binding | None = None

    def begin(self, binding: Binding) -> None:
        """Watch another attempt."""
        self._binding = binding
        self._seen.clear()
        for ratio in (*self._devices.values(), *self._links.values()):
            ratio.last.clear()

    def see(self, paced: Mapping[int, Paced]) -> None:
        """Take in the last steps that the ranks reported; those that were seen before are left out."""
        assert self._binding
        for rank, one in paced.items():
            if self._is_new(rank, one.step):
                seat = self._seat(rank)
                self._devices[seat].add(one.busy_seconds / self._expected_seconds(rank))
        for a, b in self._neighbours():
            if a in paced and b in paced and paced[a].step == paced[b].step and self._is_new((a, b), paced[a].step):
                pair = frozenset((self._seat(a)[0], self._seat(b)[0]))
                seconds = message_seconds(paced[a], paced[b])
                if len(pair) == 2 and seconds is not None:
                    self._links[pair].add(seconds / self._message_seconds(a))

    def changes(self, now: ClusterNow) -> list[ClusterChange]:
        """Return the devices that have become slower, or as fast as usual."""
        found = ((seat, ratio.changed(now.slowness.get(seat, 1.0))) for seat, ratio in self._devices.items())
        return [DeviceSlowed(*seat, factor) for seat, factor in found if factor is not None]

    @property
    def suspects_links(self) -> bool:
        """Whether all of the last messages between two hosts took much longer than usual."""
        return any(
            len(ratio.last) == DEBOUNCED_REPORTS and min(ratio.last) > SLOW_LINK for ratio in self._links.values()
        )

    def forget_links(self) -> None:
        """Take what messages take now as usual: what is slow is known."""
        self._links.clear()

    def _of_another(self) -> _Ratio:
        """Return the ratio of a device that was never watched: what is usual of the others is of this one."""
        usual = [other.usual for other in self._devices.values() if other.usual is not None]
        return _Ratio(median(usual) if usual else None)

    def _is_new(self, what: Hashable, step: int) -> bool:
        """Return whether this step was not seen before; the first one of an attempt counts as seen."""
        before, self._seen[what] = self._seen.get(what), step
        return before is not None and step > before

    def _seat(self, rank: int) -> Seat:
        assert self._binding
        device = self._binding.placements[rank].device
        return device.host, device.index

    def _usual(self, rank: int, s: int) -> Stage:
        """Return a stage on devices of the rank's type, as they usually are."""
        assert self._binding
        stage = self._binding.plan.stages[s]
        return replace(stage, configuration=replace(stage.configuration, device_type=self._types[self._seat(rank)]))

    def _expected_seconds(self, rank: int) -> float:
        assert self._binding
        plan, priced = self._binding.plan, self._running.priced
        stages = (self._usual(rank, s) for s in plan.ranks[self._binding.placements[rank].pipeline_rank])
        return plan.num_microbatches * sum(sum(priced.passes_seconds(stage)) for stage in stages)

    def _message_seconds(self, rank: int) -> float:
        """Price a message from the rank's stage to the next, there and back."""
        assert self._binding
        s = self._binding.plan.ranks[self._binding.placements[rank].pipeline_rank][0]
        problem, (a, b) = self._running.priced.problem, (self._usual(rank, s), self._usual(rank, s + 1))
        return problem.transfer_seconds(a.stop, problem.index(a.configuration), problem.index(b.configuration))

    def _neighbours(self) -> list[tuple[int, int]]:
        """List ranks that exchange messages with one other only: it is clear who waited for whom."""
        assert self._binding
        plan = self._binding.plan
        if any(len(stages) > 1 for stages in plan.ranks):
            return []
        degrees = [
            (one.data_parallel, one.tensor_parallel) for one in map(plan.rank_configuration, range(len(plan.ranks)))
        ]
        rank_of = {(placed.pipeline_rank, placed.replica): rank for rank, placed in enumerate(self._binding.placements)}
        return [
            (rank_of[place, replica], rank_of[place + 1, replica])
            for place, (before, after) in enumerate(itertools.pairwise(degrees))
            if before == after and before[1] == 1
            for replica in range(before[0])
        ]


def message_seconds(before: Paced, after: Paced) -> float | None:
    """Measure a message there and back between two neighbouring ranks in one step, of one stage each."""

    def ends(paced: Paced, way: set[Pass]) -> dict[int, tuple[float, float]]:
        began = paced.began_seconds
        return {
            one.microbatch: (began + one.start_seconds, began + one.stop_seconds)
            for one in paced.passes
            if one.direction in way
        }

    backward = {Pass.BACKWARD, Pass.BACKWARD_INPUT}
    there = [ends(paced, {Pass.FORWARD}) for paced in (before, after)]
    back = [ends(paced, backward) for paced in (after, before)]
    gaps = [
        min((second[m][0] - first[m][1] for m in first if m in second), default=None) for first, second in (there, back)
    ]
    if gaps[0] is None or gaps[1] is None:
        return None
    return max(gaps[0] + gaps[1], 0.0)
