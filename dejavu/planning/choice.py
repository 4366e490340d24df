"""A plan that was chosen, and everything it was chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dejavu.cluster import Cluster
from dejavu.plan import Answer, Infeasible, NoPlanError, Plan, Price, SearchResult, price
from dejavu.planning.schedules import fits, under_schedules
from dejavu.problem import Posed
from dejavu.simulate import Simulation, play_posed
from dejavu.workload import AUTO

EVEN = "uniform"
CLOSE = 1e-3  # a gap below which a plan counts as the best, as a fraction


@dataclass(frozen=True)
class Considered:
    """What one search answered for one number of microbatches."""

    search: str
    num_microbatches: int
    posed: Posed
    answer: Answer

    @property
    def result(self) -> SearchResult | None:
        """None where there is no plan."""
        return self.answer if isinstance(self.answer, SearchResult) else None

    @property
    def failure(self) -> str:
        """Why there is no plan; empty where there is one."""
        return "" if isinstance(self.answer, SearchResult) else str(self.answer)

    @property
    def proved_infeasible(self) -> bool:
        """No plan exists, which is more than that none was found."""
        return isinstance(self.answer, Infeasible)

    @cached_property
    def simulation(self) -> Simulation:
        """The plan, played in torch's own order of actions."""
        return play_posed(self.posed, self.found.plan)

    @property
    def found(self) -> SearchResult:
        """The answer; there must be one."""
        assert self.result is not None
        return self.result

    @property
    def lower_bound_seconds(self) -> float:
        """No plan of so many microbatches is cheaper; inf where there is none."""
        return float("inf") if isinstance(self.answer, Infeasible) else self.answer.lower_bound_seconds


class PricedPlan(NamedTuple):
    """A plan, part by part.

    Attributes:
        headroom_bytes: memory that stays free on a device of each stage.
    """

    price: Price
    capacity_bytes: tuple[float, ...]
    num_devices: int

    @property
    def headroom_bytes(self) -> tuple[float, ...]:
        return tuple(has - needs for has, needs in zip(self.capacity_bytes, self.price.peak_bytes, strict=True))


class Scheduled(NamedTuple):
    """The chosen plan's devices under one schedule, which may cut the layers finer."""

    plan: Plan
    simulation: Simulation


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen, and everything it was chosen from.

    Attributes:
        considered: in the order in which they were asked.
        chosen: the cheapest of them by the searches' one price.
    """

    model: str
    cluster: Cluster
    considered: tuple[Considered, ...]
    chosen: Considered

    @classmethod
    def of(cls, model: str, cluster: Cluster, considered: Sequence[Considered]) -> Choice:
        """The cheapest answer.

        Raises:
            NoPlanError: there is none; the message is that of the most microbatches.
        """
        answers = [row for row in considered if row.result]
        if not answers:
            searched = [row for row in considered if row.search != EVEN] or list(considered)
            last = max(reversed(searched), key=lambda row: row.num_microbatches)
            others = sorted({row.num_microbatches for row in considered} - {last.num_microbatches})
            tried = f" (nor in {', '.join(map(str, others))})" if others else ""
            assert not isinstance(last.answer, SearchResult)
            raise NoPlanError(last.answer, f"in {last.num_microbatches} microbatches{tried}: {last.failure}")
        chosen = min(answers, key=lambda row: row.found.step_seconds)
        return cls(model, cluster, tuple(considered), chosen)

    @property
    def plan(self) -> Plan:
        return self.chosen.found.plan

    @property
    def step_seconds(self) -> float:
        return self.chosen.found.step_seconds

    @property
    def lower_bound_seconds(self) -> float:
        """No plan of any number of microbatches that was considered is cheaper."""
        counts = {row.num_microbatches for row in self.considered}
        return min(self.step_seconds, *(self.bound_seconds(count) for count in counts))

    def bound_seconds(self, num_microbatches: int) -> float:
        """No plan of so many microbatches is cheaper; inf where there is none."""
        return max(row.lower_bound_seconds for row in self.considered if row.num_microbatches == num_microbatches)

    @property
    def gap_percent(self) -> float:
        """How far the chosen plan can be from the best, of its own price."""
        return 100.0 * (1.0 - self.lower_bound_seconds / self.step_seconds)

    @property
    def uniform_step_seconds(self) -> float | None:
        """Of the best even split over all numbers of microbatches; None where none fits."""
        found = [row.result.step_seconds for row in self.considered if row.search == EVEN and row.result]
        return min(found, default=None)

    @cached_property
    def schedules(self) -> tuple[Scheduled, ...]:
        """The chosen plan under every schedule that can run it in its memory, the fastest as played first."""
        posed = self.chosen.posed
        played = [Scheduled(plan, play_posed(posed, plan)) for plan in under_schedules(posed, self.plan, AUTO)]
        holding = [one for one in played if fits(posed, one.plan, one.simulation)] or played[:1]
        return tuple(sorted(holding, key=lambda one: one.simulation.step_seconds))

    def priced(self, row: Considered) -> PricedPlan:
        """The plan that an answer gave."""
        plan, types = row.found.plan, self.cluster.device_types
        configurations = [stage.configuration for stage in plan.stages]
        return PricedPlan(
            price(row.posed.problem, plan),
            tuple(float(types[how.device_type].memory_bytes) for how in configurations),
            sum(how.num_devices for how in configurations),
        )

    def best_of(self, search: str) -> Considered | None:
        """The search's own cheapest answer."""
        answers = [row for row in self.considered if row.search == search and row.result]
        return min(answers, key=lambda row: row.found.step_seconds, default=None)

    @property
    def reason(self) -> str:
        """Why this plan, in a sentence or two."""
        counts = sorted({row.num_microbatches for row in self.considered})
        among = f"over {len(counts)} numbers of microbatches" if len(counts) > 1 else f"in {counts[0]} microbatches"
        even = self.uniform_step_seconds
        gain = (
            "no even split fits" if even is None else f"{even / self.step_seconds:.2f} × as fast as the best even split"
        )
        proof = f"no plan is more than {self.gap_percent:.1f}% cheaper"
        if self.lower_bound_seconds <= 0:
            proof = "nothing is proved about better ones"
        elif self.gap_percent < 100 * CLOSE:
            proof = "it is proved that none is cheaper"
        return f"The cheapest plan {among}: {gain}, and {proof}. {self._idle()}"

    def _idle(self) -> str:
        used, total = self.priced(self.chosen).num_devices, self.cluster.num_devices
        if used == total:
            return f"All {total} devices are used."
        sure = "more would be slower" if self.gap_percent < 100 * CLOSE else "no plan was found where more are faster"
        return f"{used} of {total} devices; {sure}."

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        problem, plan, found = self.chosen.posed.problem, self.plan, self.priced(self.chosen)
        parts = (found.price.stage_seconds, found.price.peak_bytes, found.capacity_bytes)
        return {
            "step_seconds": self.step_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "gap_percent": self.gap_percent,
            "uniform_step_seconds": self.uniform_step_seconds,
            "simulated_step_seconds": self.chosen.simulation.step_seconds,
            "bubble_fraction": found.price.bubble_fraction,
            "devices_used": found.num_devices,
            "devices": self.cluster.num_devices,
            "stages": [
                {
                    "layers": {
                        "start": stage.start,
                        "stop": stage.stop,
                        "names": list(problem.layers[stage.start : stage.stop]),
                    },
                    "configuration": asdict(stage.configuration),
                    "device_type": stage.configuration.device_type,
                    "seconds": seconds,
                    "peak_bytes": peak_bytes,
                    "capacity_bytes": capacity_bytes,
                }
                for stage, seconds, peak_bytes, capacity_bytes in zip(plan.stages, *parts, strict=True)
            ],
            "schedule": plan.schedule,
            "microbatches": plan.num_microbatches,
            "schedules": [
                {
                    "schedule": one.plan.schedule,
                    "cuts": list(one.plan.cuts),
                    "simulated_step_seconds": one.simulation.step_seconds,
                    "bubble_fraction": one.simulation.bubble_fraction,
                }
                for one in self.schedules
            ],
            "search": self.chosen.search,
            "reason": self.reason,
            "considered": [self._row(row) for row in self.considered],
        }

    def _row(self, row: Considered) -> dict[str, Any]:
        found, plan = row.result, row.result and self.priced(row)
        return {
            "search": row.search,
            "microbatches": row.num_microbatches,
            "step_seconds": found and found.step_seconds,
            "lower_bound_seconds": None if row.proved_infeasible else row.lower_bound_seconds,
            "simulated_step_seconds": found and row.simulation.step_seconds,
            "stages": found and len(found.plan.stages),
            "devices": plan and plan.num_devices,
            "bubble_fraction": plan and plan.price.bubble_fraction,
            "search_seconds": found and found.seconds,
            "chosen": row is self.chosen,
            "failure": row.failure or None,
        }
