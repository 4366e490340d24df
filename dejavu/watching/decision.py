"""The plan that is there against the one that a search found for the changed cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dejavu.foundation.units import format_seconds, told_apart


class Decided(StrEnum):
    """What comes of a look at a changed cluster."""

    PLANNED = "planned"  # the new plan takes the place of the one that is there
    KEPT = "kept"  # the plan that is there stays: a new one gains less than the margin
    NOTIFIED = "notified"  # the new plan is only said; the one that is there stays while it can run
    NONE = "no plan"  # none was found for the changed cluster, or there is none to plan for


@dataclass(frozen=True)
class Decision:
    """A decision and what it rests on.

    Attributes:
        at: when, ISO 8601 in UTC.
        model: of the workload.
        change: what differs from the cluster of the plan that is there.
        old_fingerprint, new_fingerprint: of the two clusters; old is empty where no plan was there, and
            new where there is no cluster: its file is wrong, or none of its hosts is there.
        old_step_seconds: predicted for the plan that is there on the changed cluster; None: it cannot run there.
        new_step_seconds: predicted for the new plan; None: there is none.
        margin: the least gain that is worth a change.
        decided: one of `Decided`.
        why: a sentence.
        run: id of the flow run.
        lacked_in: where a cost was not known, the state of the cost database in which it was not; else empty.
    """

    at: str
    model: str
    change: str
    old_fingerprint: str
    new_fingerprint: str
    old_step_seconds: float | None
    new_step_seconds: float | None
    margin: float
    decided: str
    why: str
    run: str
    lacked_in: str = ""

    @property
    def gain(self) -> float | None:
        """Share by which the new plan's step is shorter; None: one of the two is no plan for this cluster."""
        old, new = self.old_step_seconds, self.new_step_seconds
        return None if old is None or new is None else 1 - new / old


def decide(
    action: str, old_step_seconds: float | None, new_step_seconds: float, margin: float, *, is_followed: bool = False
) -> tuple[Decided, str]:
    """Decide between the plan that is there and a new one, both as predicted on the changed cluster.

    Args:
        action: of `ReplanSettings`.
        old_step_seconds: None: the plan that is there cannot run on the changed cluster.
        is_followed: a training runs that follows its cluster by itself.
    """
    step = f"the new plan's step is predicted at {format_seconds(new_step_seconds)}"
    if old_step_seconds is not None:
        gain = 1 - new_step_seconds / old_step_seconds
        if gain < 0:
            return Decided.KEPT, f"{step}, {told_apart(-gain, 0.0, _percent)[0]} over the plan that is there"
        if gain == 0:  # mostly it is the same plan: no gain, whatever the margin
            return Decided.KEPT, f"{step}, as long as the plan's that is there"
        if gain < margin:
            found, least = told_apart(gain, margin, _percent)
            return Decided.KEPT, f"{step}, {found} under the plan that is there: less than the margin of {least}"
        compared = f"{step}, {_percent(gain)} under the plan that is there"
    else:
        compared = f"the plan that is there cannot run on what is left; {step}"
    if action == "notify":
        return Decided.NOTIFIED, f"{compared}; `replan: {{action: notify}}` changes nothing by itself"
    if action == "migrate" and is_followed:
        return Decided.PLANNED, f"{compared}; a training that runs follows the devices that it sees by itself"
    return Decided.PLANNED, f"{compared}; later changes are compared with it"


def _percent(share: float, digits: int = 3) -> str:
    return f"{share:.{digits - 2}%}"
