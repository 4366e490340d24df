"""What happens to a host in the middle of a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.elastic.site import HOSTS, EmulatedHost, Site
from dejavu.migration import ClusterChange, ClusterNow, DeviceSlowed, HostAdded, HostLost, LinkSlowed

VICTIM = HOSTS[1]
LINK_SHARE, CORE_SHARE = 0.1, 0.5


@dataclass(frozen=True)
class Fault:
    """Something that happens to `VICTIM`.

    Attributes:
        cause: makes it happen.
        changes: of the cluster, as its planner should see them.
        comes: the host is absent until then.
        ends_ranks: whether a launcher without re-planning notices it at all.
        is_watched_for: it is seen in the ranks' passes; for the others nobody looks there, because other work on this
            machine is seen there as well.
    """

    name: str
    cause: Callable[[Site, EmulatedHost], None]
    changes: tuple[ClusterChange, ...] = ()
    comes: bool = False
    ends_ranks: bool = False
    is_watched_for: bool = False

    def after(self, now: ClusterNow) -> ClusterNow:
        return now.after(*self.changes)


FAULTS = (
    Fault("rank killed", lambda site, host: host.kill_rank(), ends_ranks=True),
    Fault("host killed", lambda site, host: host.kill(), (HostLost(VICTIM),), ends_ranks=True),
    Fault(
        "link cut to 1/10",
        lambda site, host: site.limit_link(host.name, LINK_SHARE),
        (LinkSlowed(VICTIM, 1 / LINK_SHARE),),
        is_watched_for=True,
    ),
    Fault(
        "device slowed to 1/2",
        lambda site, host: site.limit_core(host.name, CORE_SHARE),
        (DeviceSlowed(VICTIM, 0, 1 / CORE_SHARE),),
        is_watched_for=True,
    ),
    Fault("host added", lambda site, host: None, (HostAdded(VICTIM),), comes=True),
)
