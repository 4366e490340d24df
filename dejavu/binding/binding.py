"""A binding: each process's device, the step time, and the step times of other bindings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dejavu.cluster import Device
from dejavu.foundation.errors import DejavuError
from dejavu.plans import Plan


class BindError(DejavuError):
    """The cluster lacks devices that the plan asks for, or they lack memory."""


@dataclass(frozen=True)
class Placement:
    """One process: its pipeline rank (whose stages it runs), which replica and tensor-parallel shard it is, and where.

    Replica r and shard t of T run on device r·T + t of their pipeline rank.
    """

    pipeline_rank: int
    replica: int
    shard: int
    device: Device


@dataclass(frozen=True)
class Binding:
    """The plan and its devices; a process's rank in the world is its place in `placements`.

    All times are of one step by the searches' cost model (`dejavu.plans.price`), with the links that are really used.

    Attributes:
        plan: with the device types that it is bound to, which may differ from those that the search named.
        order_step_seconds: the plan's own device types, in the order of the cluster file.
        random_best_step_seconds, random_mean_step_seconds: of random bindings; None where none of them fits.
        random_refused: how many random bindings put a rank where it does not fit; the two above exclude them.
        lower_bound_seconds: no binding takes less; `step_seconds` itself where all were compared; 0: nothing is known.
        reasons: a sentence for each pipeline rank: why it is where it is.
    """

    plan: Plan
    placements: tuple[Placement, ...]
    step_seconds: float
    order_step_seconds: float
    random_best_step_seconds: float | None = None
    random_mean_step_seconds: float | None = None
    random_refused: int = 0
    lower_bound_seconds: float = 0.0
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the binding for JSON."""
        return asdict(self) | {"plan": self.plan.to_dict(), "reasons": list(self.reasons)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Binding:
        placements = (Placement(**{**row, "device": Device(**row["device"])}) for row in data["placements"])
        return cls(
            **{
                **data,
                "plan": Plan.from_dict(data["plan"]),
                "placements": tuple(placements),
                "reasons": tuple(data["reasons"]),
            }
        )
