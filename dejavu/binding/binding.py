"""A binding: each process's device, the step time, and the step times of other bindings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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

    Attributes:
        worker: the virtual worker whose pipeline it is in.
    """

    pipeline_rank: int
    replica: int
    shard: int
    device: Device
    worker: int = 0


@dataclass(frozen=True)
class VirtualWorker:
    """A pipeline beside others, with some examples of every batch (HetPipe, Park et al., USENIX ATC 2020).

    Attributes:
        num_examples: of one run of the schedule, consecutive ones; the first worker has the first.
    """

    plan: Plan
    num_examples: int

    def to_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "num_examples": self.num_examples}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VirtualWorker:
        return cls(Plan.from_dict(data["plan"]), data["num_examples"])


@dataclass(frozen=True)
class Binding:
    """The plan and its devices; a process's rank in the world is its place in `placements`.

    All times are of one step by the searches' cost model (`dejavu.plans.price`), with the links that are really used.

    Attributes:
        plan: with the device types that it is bound to, which may differ from those that the search named; of several
            virtual workers, the first one's.
        placements: those of one worker after those of another.
        order_step_seconds: the plan's own device types, in the order of the cluster file.
        random_best_step_seconds, random_mean_step_seconds: of random bindings; None where none of them fits.
        random_drawn, random_refused: how many random bindings there were, and how many of them put a rank where it
            does not fit; the two above exclude these.
        lower_bound_seconds: no binding takes less; `step_seconds` itself where all were compared; 0: nothing is known.
        reasons: a sentence for each pipeline rank: why it is where it is.
        workers: virtual workers, each with a pipeline of its own; empty: there is one pipeline.
    """

    plan: Plan
    placements: tuple[Placement, ...]
    step_seconds: float
    order_step_seconds: float
    random_best_step_seconds: float | None = None
    random_mean_step_seconds: float | None = None
    random_drawn: int = 1_000
    random_refused: int = 0
    lower_bound_seconds: float = 0.0
    reasons: tuple[str, ...] = ()
    workers: tuple[VirtualWorker, ...] = ()

    @property
    def pipelines(self) -> tuple[Binding, ...]:
        """Each virtual worker's pipeline by itself, in the order of the world's ranks; this one, if it is the only."""
        if not self.workers:
            return (self,)
        return tuple(
            replace(
                self,
                plan=worker.plan,
                placements=tuple(placed for placed in self.placements if placed.worker == number),
                workers=(),
            )
            for number, worker in enumerate(self.workers)
        )

    def plan_of(self, placed: Placement) -> Plan:
        """Return the plan that a process takes part in."""
        return self.workers[placed.worker].plan if self.workers else self.plan

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank of the world runs, by their numbers in its pipeline."""
        placed = self.placements[rank]
        return self.plan_of(placed).ranks[placed.pipeline_rank]

    def to_dict(self) -> dict[str, Any]:
        """Return the binding for JSON."""
        known = asdict(self) | {"plan": self.plan.to_dict(), "reasons": list(self.reasons)}
        del known["workers"]
        return known | ({"workers": [one.to_dict() for one in self.workers]} if self.workers else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Binding:
        placements = (Placement(**{**row, "device": Device(**row["device"])}) for row in data["placements"])
        return cls(
            **{
                **data,
                "plan": Plan.from_dict(data["plan"]),
                "placements": tuple(placements),
                "reasons": tuple(data["reasons"]),
                "workers": tuple(map(VirtualWorker.from_dict, data.get("workers", ()))),
            }
        )
