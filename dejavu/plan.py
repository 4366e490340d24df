"""What a search is asked (`Problem`), what it answers (`Plan`), and the one price that all searches share.

Arrays and records only: nothing here knows where a cost comes from.
Shape suffixes: L = layers, L1 = L + 1 cut positions (0 and L are the ends), C = stage configurations.
A stage holds layers `start` to `stop`, `stop` not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from dejavu.errors import DejavuError
from dejavu.schedule import schedule_named
from dejavu.stage_costs import AdditiveCosts, DenseCosts, Floats, PlanError


class DoesNotFitError(DejavuError):
    """A stage needs more memory than its devices have; the message names the stage and what it needs."""


@dataclass(frozen=True)
class StageConfiguration:
    """How one stage is spread over devices.

    Attributes:
        device_type: the kind of device; a stage never mixes kinds.
        num_nodes, devices_per_node: the mesh; their product is what the stage takes from the cluster.
        data_parallel, tensor_parallel: degrees; their product is the number of devices.
        recompute: activations inside the stage are computed again in the backward pass instead of kept.
        zero_level: 0 to 3, what the data-parallel replicas shard (Rajbhandari et al., SC 2020).
    """

    device_type: str
    num_nodes: int = 1
    devices_per_node: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1
    recompute: bool = False
    zero_level: int = 0

    def __post_init__(self) -> None:
        if self.data_parallel * self.tensor_parallel != self.num_devices:
            raise PlanError(
                f"{self}: data parallel {self.data_parallel} × tensor parallel {self.tensor_parallel} "
                f"must equal its {self.num_devices} devices"
            )

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        parts = [f"{self.num_devices} × {self.device_type}"]
        if self.data_parallel > 1:
            parts.append(f"dp {self.data_parallel}")
        if self.tensor_parallel > 1:
            parts.append(f"tp {self.tensor_parallel}")
        if self.recompute:
            parts.append("recompute")
        if self.zero_level:
            parts.append(f"ZeRO-{self.zero_level}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Stage:
    """Layers `start` to `stop` (not included) under one configuration."""

    start: int
    stop: int
    configuration: StageConfiguration

    def __str__(self) -> str:
        return f"layers {self.start}–{self.stop - 1} on {self.configuration}"


@dataclass(frozen=True)
class Plan:
    """Stages in order, the schedule that runs them, and into how many microbatches a step is split."""

    stages: tuple[Stage, ...]
    schedule: str
    num_microbatches: int

    @property
    def cuts(self) -> tuple[int, ...]:
        """The inner cut positions."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Which stages each pipeline rank runs; one each under most schedules."""
        schedule, S = schedule_named(self.schedule), len(self.stages)
        return tuple(schedule.stages_of(rank, S) for rank in range(schedule.num_ranks(S)))

    def rank_configuration(self, rank: int) -> StageConfiguration:
        """How a pipeline rank is spread over devices: as its stages are.

        Raises:
            PlanError: its stages differ in that.
        """
        stages = schedule_named(self.schedule).stages_of(rank, len(self.stages))
        found = {self.stages[s].configuration for s in stages}
        if len(found) != 1:
            raise PlanError(
                f"stages {list(stages)} share the devices of pipeline rank {rank} under {self.schedule}; "
                f"wanted one configuration, found {'; '.join(sorted(map(str, found)))}"
            )
        return found.pop()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        stages = (
            Stage(row["start"], row["stop"], StageConfiguration(**row["configuration"])) for row in data["stages"]
        )
        return cls(tuple(stages), data["schedule"], data["num_microbatches"])


@dataclass(frozen=True, eq=False)
class Problem:
    """What a search is asked.

    Attributes:
        layers: the L names, for messages and plans.
        configurations: the C ways in which a stage may be spread.
        device_counts: how many devices of each type the cluster has.
        costs: of any stage under any configuration.
        cut_bytes_L1: what crosses a cut before layer k, one microbatch, forward; the gradient that returns is as large.
        link_latency_seconds_CC, link_seconds_per_byte_CC: between neighbouring stages of two configurations.
        schedule: its name; it decides how many microbatches a stage holds.
        num_microbatches: B, in one step.
        use_all_devices: every device must be used (Alpa's rule); otherwise devices may stay idle.
        max_stages: no plan may have more stages; None: as many as there are layers.
    """

    layers: tuple[str, ...]
    configurations: tuple[StageConfiguration, ...]
    device_counts: Mapping[str, int]
    costs: AdditiveCosts | DenseCosts
    cut_bytes_L1: Floats
    link_latency_seconds_CC: Floats
    link_seconds_per_byte_CC: Floats
    schedule: str
    num_microbatches: int
    use_all_devices: bool = False
    max_stages: int | None = None

    def __post_init__(self) -> None:
        L, C = len(self.layers), len(self.configurations)
        if not L or not C:
            raise PlanError(f"a problem needs layers and configurations; found {L} and {C}")
        if self.costs.num_layers != L or self.costs.num_configurations != C:
            raise PlanError(
                f"costs are for {self.costs.num_configurations} configurations × {self.costs.num_layers} layers; "
                f"wanted {C} × {L}"
            )
        if self.num_microbatches < 1:
            raise PlanError(f"num_microbatches is {self.num_microbatches}; wanted ≥ 1")
        if self.max_stages is not None and self.max_stages < 1:
            raise PlanError(f"max_stages is {self.max_stages}; wanted ≥ 1, or None for no bound")
        if schedule_named(self.schedule).stages_per_rank > 1:
            raise PlanError(
                f"a search prices one stage on each pipeline rank; {self.schedule} runs several: "
                f"wanted {schedule_named(self.schedule).searched_as}"
            )
        for name, shape in (
            ("cut_bytes_L1", (L + 1,)),
            ("link_latency_seconds_CC", (C, C)),
            ("link_seconds_per_byte_CC", (C, C)),
        ):
            table = getattr(self, name)
            if table.shape != shape:
                raise PlanError(f"{name} has shape {table.shape}; wanted {shape}")
            if not np.isfinite(table).all() or (table < 0).any():
                raise PlanError(f"{name} holds a value that is negative or not finite")
        for configuration in self.configurations:
            if configuration.device_type not in self.device_counts:
                raise PlanError(
                    f"configuration {configuration} asks for {configuration.device_type!r}; "
                    f"the cluster has {', '.join(self.device_counts)}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def most_stages(self) -> int:
        """The most stages that a plan can have, whatever the devices: one for each layer, and `max_stages`."""
        return self.num_layers if self.max_stages is None else min(self.num_layers, self.max_stages)

    @cached_property
    def _index(self) -> dict[StageConfiguration, int]:
        return {configuration: c for c, configuration in enumerate(self.configurations)}

    def index(self, configuration: StageConfiguration) -> int:
        """Which of the C configurations this is."""
        if configuration not in self._index:
            raise PlanError(f"configuration {configuration} is none of the problem's")
        return self._index[configuration]

    def transfer_seconds(self, cut: int, c: int, next_c: int) -> float:
        """The activation forward and its gradient back across a cut, one microbatch."""
        return 2.0 * float(
            self.link_latency_seconds_CC[c, next_c] + self.link_seconds_per_byte_CC[c, next_c] * self.cut_bytes_L1[cut]
        )

    def in_flight(self, stage: int, num_stages: int) -> int:
        return schedule_named(self.schedule).in_flight(stage, num_stages, self.num_microbatches)


@dataclass(frozen=True, eq=False)
class Price:
    """What a plan costs, part by part.

    Attributes:
        step_seconds: fill and drain, plus what the busiest stage or link does besides.
        stage_seconds: one microbatch through each of the S stages, forward and backward.
        transfer_seconds: one microbatch across each of the S − 1 cuts, both ways.
        once_seconds: each stage's gradient synchronization and optimizer.
        peak_bytes: on a device of each stage; nan where the problem only says whether it fits.
        bubble_fraction: share of the stages' time spent waiting.
    """

    step_seconds: float
    stage_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    once_seconds: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    bubble_fraction: float


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A plan, and what was proved about better ones.

    Attributes:
        plan, step_seconds: the best plan found and its price.
        lower_bound_seconds: no plan of the problem is cheaper (what was proved; 0 if nothing).
        search: who found it.
        seconds: how long the search took, of processor time as its budget counts it.
        history: (seconds by that clock, best price so far), for the convergence plot.
    """

    plan: Plan
    step_seconds: float
    lower_bound_seconds: float
    search: str
    seconds: float
    history: tuple[tuple[float, float], ...] = field(default=())

    @property
    def gap(self) -> float:
        """How far the plan can be from the best, of its price: 1 where nothing was proved, 0 for a free plan."""
        return 1.0 - self.lower_bound_seconds / self.step_seconds if self.step_seconds > 0 else 0.0


class Obstacle(StrEnum):
    """Why a search that proved nothing has no plan."""

    OUT_OF_TIME = "out of time"
    TOO_LARGE = "too large"  # for this search, or of a form that it does not take
    NONE_CONSIDERED_FITS = "none considered fits"  # of the plans that this search looks at; others may


@dataclass(frozen=True)
class Infeasible:
    """It is proved that the problem has no plan.

    Attributes:
        proof: a sentence for people: what is too large, and what would do.
    """

    search: str
    proof: str
    seconds: float

    def __str__(self) -> str:
        return self.proof


@dataclass(frozen=True)
class NotFound:
    """No plan was found, which says nothing about whether there is one.

    Attributes:
        reason: a sentence for people.
        lower_bound_seconds: no plan of the problem is cheaper, if it has any.
    """

    search: str
    obstacle: Obstacle
    reason: str
    seconds: float
    lower_bound_seconds: float = 0.0

    def __str__(self) -> str:
        return self.reason


Answer = SearchResult | Infeasible | NotFound


class NoPlanError(DejavuError):
    """A plan was wanted and there is none.

    Attributes:
        answer: what the search said instead, whose sentence is the message unless a longer one is given.
    """

    def __init__(self, answer: Infeasible | NotFound, message: str = "") -> None:
        super().__init__(message or str(answer))
        self.answer = answer

    def __reduce__(self) -> tuple[type[NoPlanError], tuple[Infeasible | NotFound, str]]:
        return type(self), (self.answer, str(self))  # to other processes, as exceptions go


def solved(answer: Answer) -> SearchResult:
    """The answer as a plan, for callers that have no use for another outcome.

    Raises:
        NoPlanError: it is none.
    """
    if isinstance(answer, SearchResult):
        return answer
    raise NoPlanError(answer)


def check(problem: Problem, plan: Plan) -> None:
    """Validate `plan` against `problem`: every layer once and in order, within stage and device counts and memory.

    Raises:
        PlanError: it is not; the message names the stage.
        DoesNotFitError: a stage exceeds its memory.
    """
    at = 0
    for stage in plan.stages:
        if stage.start != at or stage.stop <= stage.start:
            raise PlanError(f"{stage} does not begin where the stage before it ends (layer {at})")
        at = stage.stop
    if at != problem.num_layers:
        raise PlanError(f"the plan's stages end at layer {at}; the problem has {problem.num_layers}")
    if (plan.schedule, plan.num_microbatches) != (problem.schedule, problem.num_microbatches):
        raise PlanError(f"the plan is for {plan.schedule} × {plan.num_microbatches} microbatches, not the problem's")
    if problem.max_stages is not None and len(plan.stages) > problem.max_stages:
        raise PlanError(f"the plan has {len(plan.stages)} stages; the problem wants at most {problem.max_stages}")
    used: dict[str, int] = dict.fromkeys(problem.device_counts, 0)
    for stage in plan.stages:
        used[stage.configuration.device_type] += stage.configuration.num_devices
    for name, count in used.items():
        have = problem.device_counts[name]
        if count > have or (problem.use_all_devices and count != have):
            raise PlanError(f"the plan uses {count} × {name}; the cluster has {have}")
    for s, stage in enumerate(plan.stages):
        c = problem.index(stage.configuration)
        for name, cost in (("seconds", problem.costs.stage_seconds), ("once_seconds", problem.costs.once_seconds)):
            seconds = cost(stage.start, stage.stop, c)
            if not np.isfinite(seconds):
                raise PlanError(f"{stage} is not possible: its {name} is {seconds}; wanted a finite number")
        held = problem.in_flight(s, len(plan.stages))
        if problem.costs.max_in_flight(stage.start, stage.stop, c) < held:
            raise DoesNotFitError(
                f"{stage} does not fit its memory with {held} microbatches in flight: it needs "
                f"{problem.costs.peak_bytes(stage.start, stage.stop, c, held):,.0f} bytes"
            )


def is_valid(problem: Problem, plan: Plan) -> bool:
    """Whether `check` accepts the plan."""
    try:
        check(problem, plan)
    except (PlanError, DoesNotFitError):
        return False
    return True


def price(problem: Problem, plan: Plan) -> Price:
    """The one price of a plan, for every search; a plan that is not the problem's is refused.

    With t_s the stages' seconds for one microbatch, o_s what each does once a step and x_k the transfers' seconds,
    step = Σ t + Σ x + max over stages and links of ((B − 1) · t_s + o_s, (B − 1) · x_k).
    Without o and x this is Alpa's objective (Zheng et al., OSDI 2022, eq. 2); a link is one more resource of the
    pipeline, as in PipeDream (Narayanan et al., SOSP 2019); a fast stage's synchronization hides behind slow ones.
    """
    check(problem, plan)
    index = [problem.index(stage.configuration) for stage in plan.stages]
    spans = [(stage.start, stage.stop, c) for stage, c in zip(plan.stages, index, strict=True)]
    stages = tuple(problem.costs.stage_seconds(*span) for span in spans)
    once = tuple(problem.costs.once_seconds(*span) for span in spans)
    transfers = tuple(
        problem.transfer_seconds(plan.stages[s + 1].start, index[s], index[s + 1]) for s in range(len(spans) - 1)
    )
    repeats = plan.num_microbatches - 1
    busiest = max(*(repeats * t + o for t, o in zip(stages, once, strict=True)), repeats * max(transfers, default=0.0))
    total = sum(stages) + sum(transfers) + busiest
    busy = plan.num_microbatches * sum(stages) + sum(once)
    return Price(
        step_seconds=total,
        stage_seconds=stages,
        transfer_seconds=transfers,
        once_seconds=once,
        peak_bytes=tuple(
            problem.costs.peak_bytes(*span, problem.in_flight(s, len(spans))) for s, span in enumerate(spans)
        ),
        bubble_fraction=1.0 - busy / (len(stages) * total) if total > 0 else 0.0,
    )


def step_seconds(problem: Problem, plan: Plan) -> float:
    """The objective of every search; see `price`."""
    return price(problem, plan).step_seconds
