"""The data of the page and the table: the records of a run, and the few numbers derived from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol

from dejavu.binding import Binding
from dejavu.cluster import Cluster
from dejavu.cost import CostTable
from dejavu.cost.ranges import Range
from dejavu.cost.rates import tokens_in_a_step
from dejavu.foundation.units import plural
from dejavu.launch.comparison import Comparison
from dejavu.planning import Candidate, Choice, Considered
from dejavu.planning.candidates import sums_of
from dejavu.planning.sentences import NAMES, scope, what_the_formula_says, why_slower
from dejavu.plans import Plan, Price
from dejavu.report.alternatives import Alternative, alternatives, source_row
from dejavu.report.timeline import IDLE, Timeline, Work, measured_timeline, simulated_timeline
from dejavu.report.topology import LinkUse, links_used
from dejavu.runtime.job import TrainingResult
from dejavu.simulation import Simulation, StageSeconds, stages_of, trace_rows
from dejavu.simulation.bound import CLOSE
from dejavu.timing.events import measured_events, waited_messages
from dejavu.timing.training_times import StageTimes, slowest_of_stages
from dejavu.trials import TrialResult, Trials
from dejavu.workload import Workload


@dataclass(frozen=True)
class StageReport:
    """One stage, predicted next to measured; measured numbers are None where no step was measured.

    Attributes:
        rank: the pipeline rank that runs it.
        layers: its first and last, by name and number.
        devices: of all its ranks.
        predicted: one microbatch, and the per-step work (gradient synchronization and optimizer).
        predicted_backward_seconds: of a backward pass as it ran: whole, or its two parts together.
        forward_seconds, backward_seconds, optimizer_seconds: measured, of its slowest rank.
        predicted_peak_bytes: of its rank; nan where the costs only say whether that fits.
        peak_bytes: measured, of its largest rank.
        capacity_bytes: of one device.
        headroom_bytes: what is predicted to stay free of it.
    """

    stage: int
    rank: int
    layers: str
    devices: str
    predicted: StageSeconds
    predicted_backward_seconds: float
    forward_seconds: float | None
    backward_seconds: float | None
    optimizer_seconds: float | None
    predicted_peak_bytes: float
    peak_bytes: int | None
    capacity_bytes: int
    headroom_bytes: float


class Migration(Protocol):
    """A change of plan, or of the ranks under the same plan, while a training ran."""

    @property
    def step(self) -> int:
        """How many steps had been trained in the state that it went on from."""

    @property
    def reason(self) -> str:
        """What changed, and why this plan."""

    @property
    def from_plan(self) -> Plan: ...

    @property
    def to_plan(self) -> Plan: ...

    @property
    def seconds(self) -> float:
        """From when the change was seen to the next new step."""

    @property
    def steps_lost(self) -> int:
        """Steps that had to be trained again."""

    @property
    def gain(self) -> object:
        """A sentence, as text: the step before, as predicted and as measured; None: it was not for a faster step."""


class Compared(NamedTuple):
    """One predicted time beside the measured one; `work` is None for the whole step."""

    work: Work | None
    name: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """As a fraction of what was measured; negative: it took longer than predicted."""
        return self.predicted_seconds / self.measured_seconds - 1.0


@dataclass(frozen=True, eq=False)
class ReportData:
    """The records of one run.

    Attributes:
        workload: with the plan's number of microbatches.
        choice: the plan that was chosen, and everything it was chosen from.
        bound: the plan as bound to devices, simulated.
        step_seconds_without_feedback: the prediction without measurements of earlier trainings.
        tried: the trials of initial weights.
        comparison: the chosen plan and the best baseline, measured in turn; None: not measured.
        training: None where nothing was trained.
        reference_difference: largest difference between the pipeline's first losses and single-process training's.
        migrations: changes of plan during the training, in order.
    """

    workload: Workload
    cluster: Cluster
    choice: Choice
    binding: Binding
    bound: Candidate
    step_seconds_without_feedback: float | None = None
    tried: Trials | None = None
    comparison: Comparison | None = None
    training: TrainingResult | None = None
    torchrun_line: str = ""
    reference_difference: float | None = None
    migrations: Sequence[Migration] = ()

    @property
    def plan(self) -> Plan:
        return self.binding.plan

    @property
    def table(self) -> CostTable:
        """What each layer costs on each type of device, as earlier trainings correct it."""
        return self.choice.prices.table_of(self.plan.num_microbatches)

    @property
    def price(self) -> Price:
        """Price of the bound plan, part by part."""
        return self.bound.price

    @property
    def simulation(self) -> Simulation:
        return self.bound.simulation

    @cached_property
    def predicted_stages(self) -> tuple[StageSeconds, ...]:
        """The seconds that the simulation used, of one run of the schedule, of whole microbatches.

        Of two copies of the model, a stage's work once a step is its part of what its rank does, which has a stage of
        the other copy too: of a rank's work an equal part is measured for each of its stages.
        """
        priced, plan = self.bound.priced, self.plan
        rows = stages_of(priced, plan, sums_of(priced, self.binding, self.cluster))
        once = [fmean(rows[s].per_step_seconds for s in own) for own in plan.seats_of_ranks] if plan.both_ways else None
        found = []
        for s in range(len(plan.stages)):
            row = rows[s].of_one_run(priced.accumulate).of_whole(plan.num_slices)
            found.append(replace(row, per_step_seconds=once[s]) if once else row)
        return tuple(found)

    @property
    def trials(self) -> tuple[TrialResult, ...] | None:
        return self.tried.results if self.tried else None

    @property
    def winner(self) -> TrialResult | None:
        return self.tried.winner if self.tried else None

    @property
    def other_bindings(self) -> dict[str, float | None]:
        """Step times of other bindings in seconds, by the same formula as the binding's; None where none fits."""
        found = self.binding
        return {
            "in the order of the cluster file": found.order_step_seconds,
            f"the best of {found.random_drawn:,} random ones": found.random_best_step_seconds,
            f"the mean of {found.random_drawn:,} random ones": found.random_mean_step_seconds,
        }

    @property
    def baseline(self) -> Candidate | None:
        """The best plan that people make without a planner; None where none fits."""
        row = self.choice.best_baseline
        return row.best if row is not None else None

    @property
    def baseline_name(self) -> str:
        """The baseline's name for people."""
        row = self.choice.best_baseline
        return NAMES[row.search] if row is not None else "baseline"

    @property
    def predicted_step_seconds(self) -> float:
        """One step, simulated in the schedule's own order of actions and corrected by remembered steps."""
        return self.bound.step_seconds

    @cached_property
    def step_range(self) -> Range:
        """The 90 % range of the predicted step."""
        return self.choice.step_range(self.bound)

    @property
    def rate_range(self) -> tuple[Range, str]:
        """The 90 % range of what is trained a second, and what that is: tokens, or samples."""
        tokens = tokens_in_a_step(self.workload)
        if tokens is None:
            return self.step_range.of_rate(self.workload.batch_size), "samples"
        return self.step_range.of_rate(tokens), "tokens"

    @property
    def baseline_step_seconds(self) -> float | None:
        """The best baseline's step, predicted likewise."""
        return self.baseline.step_seconds if self.baseline else None

    @property
    def step_error(self) -> float | None:
        """How far the prediction is from what was measured, as a fraction of that; negative: the step was slower."""
        return self._error(self.predicted_step_seconds)

    @property
    def step_error_without_feedback(self) -> float | None:
        """The same error, of the prediction without measurements of earlier trainings."""
        return self._error(self.step_seconds_without_feedback)

    def _error(self, predicted_seconds: float | None) -> float | None:
        if self.training is None or self.training.step_seconds is None or predicted_seconds is None:
            return None
        return predicted_seconds / self.training.step_seconds - 1.0

    @property
    def remembers(self) -> bool:
        """Whether earlier trainings changed the prediction."""
        before = self.step_seconds_without_feedback
        return before is not None and abs(before / self.predicted_step_seconds - 1.0) > 1e-9

    @property
    def measured_bubble_fraction(self) -> float | None:
        """Share of the pipeline ranks' time in the training's last step in which they ran nothing; None without one."""
        found = self.timelines.get("measured")
        return found.share(*IDLE) if found is not None else None

    @cached_property
    def timelines(self) -> Mapping[str, Timeline]:
        """One step, simulated and, if one was measured, the training's last one."""
        runs = self.workload.accumulate
        what = "simulated" if runs == 1 else f"simulated, each pass that of all {runs} runs of the schedule"
        found = {what: simulated_timeline(self.simulation, len(self.plan.stages))}
        measured = measured_timeline(self.binding, self.training) if self.training is not None else None
        return found if measured is None else found | {"measured": measured}

    @property
    def rank_devices(self) -> tuple[str, ...]:
        """Each pipeline rank's first device, and how many it has besides."""
        found: dict[int, list[str]] = {}
        for placed in sorted(self.binding.placements, key=lambda placed: placed.pipeline_rank):
            found.setdefault(placed.pipeline_rank, []).append(f"{placed.device.host}:{placed.device.index}")
        return tuple(own[0] + (f" and {len(own) - 1} more" if own[1:] else "") for own in found.values())

    @property
    def rank_capacity_bytes(self) -> tuple[int, ...]:
        """Of one device of each pipeline rank."""
        plan, types = self.plan, self.cluster.device_types
        return tuple(types[plan.rank_configuration(rank).device_type].memory_bytes for rank in range(len(plan.ranks)))

    @property
    def rank_measured_bytes(self) -> tuple[int | None, ...]:
        """The most that a device of each pipeline rank held; None on CPUs, where a process holds other things too."""
        rows = self.training.stages if self.training is not None and self.cluster.kind != "cpu" else ()
        peaks = (
            [row.peak_bytes for row in rows if row.stage in stages and row.pipeline_rank in (None, rank)]
            for rank, stages in enumerate(self.plan.ranks)
        )
        return tuple(max(own, default=None) for own in peaks)

    @cached_property
    def links(self) -> tuple[LinkUse, ...]:
        """What a step sends between pipeline ranks, the busiest link first."""
        return links_used(self.binding, self.cluster, self.bound.priced, self.simulation)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The plan of this run beside every baseline and other search."""
        return alternatives(self.choice, self.bound, self.comparison)

    @property
    def source_row(self) -> Considered:
        """The search's answer that the plan of this run came from."""
        return source_row(self.choice, self.comparison)

    @cached_property
    def compared(self) -> tuple[Compared, ...]:
        """Every time that was both predicted and measured: the step, and of each stage its passes and its optimizer."""
        if self.training is None or self.training.step_seconds is None:
            return ()
        step = Compared(None, "the whole step", self.predicted_step_seconds, self.training.step_seconds)
        rows = (row for s, predicted in enumerate(self.predicted_stages) for row in self._compared_stage(s, predicted))
        return (step, *(row for row in rows if row.predicted_seconds > 0 and row.measured_seconds > 0))

    def _compared_stage(self, s: int, predicted: StageSeconds) -> Iterator[Compared]:
        assert self.training is not None
        times = [row for row in self.training.stages if row.stage == s]
        forward, backward, of_input, of_weights, once = predicted.passes_seconds
        for work, seconds, name in (
            (Work.FORWARD, forward, "forward_seconds"),
            (Work.BACKWARD, backward, "backward_seconds"),
            (Work.INPUT_GRADIENT, of_input, "backward_input_seconds"),
            (Work.WEIGHT_GRADIENT, of_weights, "backward_weight_seconds"),
            (Work.ONCE, once, "optimizer_seconds"),
        ):
            measured_seconds = max((getattr(row, name) for row in times), default=0.0)
            yield Compared(work, f"{work} of stage {s}", seconds, measured_seconds)

    @property
    def median_error(self) -> float | None:
        """Median of how far the passes' predictions are off, either way; None where none was measured."""
        errors = [abs(row.error) for row in self.compared if row.work not in (None, Work.ONCE)]
        return median(errors) if errors else None

    @property
    def trace(self) -> dict[str, Any]:
        """One step for Perfetto: as simulated, and next to it as measured."""
        found = self.simulation.to_trace()
        for row in found["traceEvents"]:
            if "stage" in row["args"]:  # the simulation numbers those of two copies of the model through
                row["args"]["stage"] %= len(self.plan.stages)
        if self.training is not None:
            passes = self.training.last_step_passes
            events = measured_events(self.binding, passes) + waited_messages(self.binding, passes)
            found["traceEvents"] += trace_rows(events, 1, "measured")
        return found

    @property
    def speedup(self) -> float | None:
        """The best baseline's predicted step over the plan's."""
        return self.baseline_step_seconds / self.predicted_step_seconds if self.baseline_step_seconds else None

    @property
    def why_slower(self) -> str:
        """Where the plan is predicted to be slower than the best baseline: why that was not taken; else nothing."""
        if self.baseline is None or self.speedup is None or self.speedup >= 1 - CLOSE:
            return ""
        return why_slower(self.bound, self.baseline)

    @property
    def lower_bound_seconds(self) -> float:
        """No plan is simulated below this, under any allowed schedule and number of microbatches; 0: nothing proved."""
        return min(self.choice.simulated_lower_bound_seconds, self.simulation.step_seconds)

    @property
    def gap(self) -> float | None:
        """How much of the simulated step the best plan could save at most; None where nothing was proved."""
        return self.choice.gap_of(self.bound)

    @property
    def within(self) -> str:
        """To which ways of spreading a stage the bound applies, where not all of them were allowed."""
        return scope(self.choice)

    @property
    def formula(self) -> str:
        """The cost model's own optimum, in a sentence."""
        return what_the_formula_says(self.choice)

    @property
    def num_predicted(self) -> int:
        return self.table.num_prices - self.table.num_known

    @property
    def prices_by_source(self) -> dict[str, int]:
        return dict(Counter(str(source) for source in self.table.sources).most_common())

    @property
    def losses(self) -> tuple[float, ...]:
        """All losses, one after another: the winning trial's, then the training's, where none between them is lost."""
        return self._losses_before + (self.training.losses if self.training is not None else ())

    @property
    def _losses_before(self) -> tuple[float, ...]:
        """The winning trial's losses, up to the step from which the training's are known; none where some are lost."""
        before = self.winner.losses if self.winner else ()
        if self.training is None:
            return before
        return before[: self.training.first_step] if len(before) >= self.training.first_step else ()

    @property
    def first_loss_step(self) -> int:
        """The step of `losses[0]`, counted from 1: a training that was resumed does not know its trials' losses."""
        if self.training is None:
            return 1
        return 1 + self.training.first_step - len(self._losses_before)

    @property
    def num_trained_steps(self) -> int:
        """How many steps the last loss comes after, those of the winning trial and of earlier runs included."""
        return self.first_loss_step - 1 + len(self.losses)

    @property
    def said_of_losses(self) -> str:
        """The first and the last loss, in words."""
        began = "at first" if self.first_loss_step == 1 else f"in step {self.first_loss_step}"
        after = plural(self.num_trained_steps, "step")
        return f"{self.losses[0]:.4f} {began}, {self.losses[-1]:.4f} after {after}"

    @property
    def stages(self) -> tuple[StageReport, ...]:
        return tuple(self._stage(s) for s in range(len(self.plan.stages)))

    def _stage(self, s: int) -> StageReport:
        stage, names = self.plan.stages[s], self.table.layers
        ranks = self.plan.ranks
        times = slowest_of_stages(self.training.stages).get(s) if self.training else None
        capacity_bytes = self.cluster.device_types[stage.configuration.device_type].memory_bytes
        rank = next(rank for rank, stages in enumerate(ranks) if s in stages)
        return StageReport(
            stage=s,
            rank=rank,
            layers=_span(names[stage.start], names[stage.stop - 1], stage.start, stage.stop),
            devices=self._devices(s),
            predicted=self.predicted_stages[s],
            predicted_backward_seconds=predicted_backward_seconds(self.predicted_stages[s], times),
            forward_seconds=times.forward_seconds if times else None,
            backward_seconds=times.all_backward_seconds if times else None,
            optimizer_seconds=times.optimizer_seconds if times else None,
            predicted_peak_bytes=self.price.peak_bytes[rank],
            peak_bytes=times.peak_bytes if times else None,
            capacity_bytes=capacity_bytes,
            headroom_bytes=capacity_bytes - self.price.peak_bytes[rank],
        )

    def _devices(self, s: int) -> str:
        """Name the devices that a stage is on; with two copies of the model those of the other one's as well."""
        plan, S, said = self.plan, len(self.plan.stages), list[tuple[int, str]]()
        for seat in (s, S + s) if plan.both_ways else (s,):
            rank = next(rank for rank, seats in enumerate(plan.seats_of_ranks) if seat in seats)
            if any(rank == other for other, _ in said):  # the middle stage of an odd number
                continue
            on = [one.device for one in self.binding.placements if one.pipeline_rank == rank]
            names = ", ".join(f"{device.host}:{device.index}" for device in on)
            said.append((rank, f"{names} ({plan.seats[seat].configuration})"))
        return "; the other copy's on ".join(sentence for _, sentence in said)


def predicted_backward_seconds(predicted: StageSeconds, times: StageTimes | None) -> float:
    """Return the prediction to compare with a stage's measured backward pass: the whole pass, or its two parts.

    The runtime's own work is in each part, so the parts together take more than the whole.
    """
    if times and times.is_split:
        _, _, of_input, of_weights, _ = predicted.passes_seconds
        return of_input + of_weights
    return predicted.backward_seconds


def _span(first: str, last: str, start: int, stop: int) -> str:
    return f"{start} ({first})" if stop - start == 1 else f"{start}–{stop - 1} ({first} … {last})"
