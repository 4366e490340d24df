"""Slower devices and links, seen in when ranks' passes ran.

A device's slowness is the time inside its passes over what the running problem prices them at, divided by the same
ratio while it was as usual: so it compares across plans. Steps that take longer than usual are a suspicion that a link
has become slower, which activations, gradients or the replicas' sums wait for: hosts are then asked to try each other,
which says whose link it is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from dejavu.binding import Binding
from dejavu.migration.changes import ClusterChange, ClusterNow, DeviceSlowed, LinkSlowed, Seat
from dejavu.migration.problem_now import RunningProblem
from dejavu.plans import Stage
from dejavu.runtime.process.pace import Paced
from dejavu.watching.links import Tried, slow_links

USUAL_REPORTS = 5  # from which it is learnt what is usual; the first step of an attempt, which sets up, is left out
DEBOUNCED_REPORTS = 10  # in a row that have to agree before anything is said
SLOW = 1.35  # times the usual; below, other work on the machine may be the reason
RECOVERED = 1.15
SLOW_STEP = 1.2  # a suspicion only, which costs a message between any two hosts


@dataclass
class _Ratio:
    """Measured seconds over a price, or over anything that stays.

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
    """Return the hosts whose links to all others have become slower, or as fast as usual."""
    return [LinkSlowed(host, factor) for host, factor in slow_links(usual, tried, now.link_slowness).items()]


class Watching:
    """Learns what is usual, and says what is not."""

    def __init__(self, running: RunningProblem) -> None:
        self._running = running
        self._types = {(device.host, device.index): device.type_name for device in running.cluster.devices()}
        self._devices: defaultdict[Seat, _Ratio] = defaultdict(self._of_another)
        self._steps, self._seen = _Ratio(), dict[int, Paced]()
        self._binding: Binding | None = None

    def begin(self, binding: Binding) -> None:
        """Watch another attempt."""
        self._binding = binding
        self._steps, self._seen = _Ratio(), {}
        for ratio in self._devices.values():
            ratio.last.clear()

    def see(self, paced: Mapping[int, Paced]) -> None:
        """Take in the last steps that the ranks reported; those that were seen before are left out."""
        assert self._binding
        for rank, one in paced.items():
            before, self._seen[rank] = self._seen.get(rank), one
            if before is None or one.step <= before.step:  # the first of an attempt, or seen already
                continue
            self._devices[self._seat(rank)].add(one.busy_seconds / self._expected_seconds(rank))
            if rank == 0:
                self._steps.add((one.began_seconds - before.began_seconds) / (one.step - before.step))

    def changes(self, now: ClusterNow) -> list[ClusterChange]:
        """Return the devices that have become slower, or as fast as usual."""
        found = ((seat, ratio.changed(now.slowness.get(seat, 1.0))) for seat, ratio in self._devices.items())
        return [DeviceSlowed(*seat, factor) for seat, factor in found if factor is not None]

    @property
    def suspects_links(self) -> bool:
        """Whether all of the last steps took longer than this attempt's first ones."""
        return len(self._steps.last) == DEBOUNCED_REPORTS and min(self._steps.last) > SLOW_STEP

    def _of_another(self) -> _Ratio:
        """Return the ratio of a device that was never watched: what is usual of the others is of this one."""
        usual = [other.usual for other in self._devices.values() if other.usual is not None]
        return _Ratio(median(usual) if usual else None)

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
