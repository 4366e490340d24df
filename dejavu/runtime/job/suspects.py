"""A replica whose gradients are not like the others': told to the operator, who can look at its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejavu.foundation.units import plural


@dataclass(frozen=True)
class Suspect:
    """A replica of a stage that was among the most suspected far more often than chance does it, or was far off.

    Attributes:
        stage, replica, rank: of the plan, of the stage, and of the world.
        host, device: where it runs.
        first_step, last_step: of those in which it was among the most suspected.
        num_steps: how many these were, of `watched_steps`.
        suspicion: its median suspicion over the replicas' median; None: its gradient was finite in no such step.
        num_not_finite: in how many steps its gradient was not finite.
        layers: by whose gradients, where layers are judged by themselves; empty: by the stage's whole gradient.
    """

    stage: int
    replica: int
    rank: int
    host: str
    device: int
    first_step: int
    last_step: int
    num_steps: int
    watched_steps: int
    suspicion: float | None
    num_not_finite: int = 0
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        by = f", in {', '.join(self.layers)}" if self.layers else ""
        much = "" if self.suspicion is None else f", {self.suspicion:.2g} times as far off as the median replica"
        garbage = f", not finite in {self.num_not_finite}" if self.num_not_finite else ""
        return (
            f"stage {self.stage}: the gradients of replica {self.replica} (rank {self.rank} on {self.host}, device "
            f"{self.device}{by}) were the least like the others' in {self.num_steps} of "
            f"{plural(self.watched_steps, 'step')}, {self.first_step + 1} to {self.last_step + 1}{much}{garbage}; its "
            "device may be faulty, or its data differ: try the stage without it"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Suspect:
        return cls(**{**data, "layers": tuple(data["layers"])})
