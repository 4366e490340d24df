"""Measuring beside other work: layers, first predictions, and whether memory helps.

    python -m benchmarks.measuring --json measuring.json

Three questions, each with competitors that this benchmark starts and ends itself (`benchmarks.competitors`):

- Layers measured beside one competitor for each core, over the same layers measured without, in turn.
- The default GPT's first prediction: an empty database, all that prices need measured without and beside these
  competitors, and the plan that is fastest when simulated. A prediction is of a quiet machine, so it is held against
  the undisturbed steps of a training without competitors. What a training of the same plan beside an unpredictable
  competitor reports stands beside it, with its own words on how disturbed it was.
- Ten runs in a row that share a database, without a competitor and beside an unpredictable one: measure what is
  missing, plan, predict with and without what earlier runs taught, train, remember. A plan is changed only for a gain
  larger than what is uncertain. In how many is the error with memory not larger than without?

What else runs on the machine disturbs the quiet half as well: the table says what share of each was disturbed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks._report import report
from benchmarks.competitors import an_unpredictable_one, one_for_each_core
from dejavu import planning
from dejavu.binding import bind
from dejavu.cluster import Cluster, this_machine
from dejavu.cost.trainings.remember import remember
from dejavu.cost.trainings.steps import StepFactor, is_surely_faster, remembered_plans, step_factor
from dejavu.foundation.errors import InputError
from dejavu.foundation.strict_yaml import load
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest
from dejavu.planning.schedules import under
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.profiles import MOST_DISTURBED_SHARE, Measurement, ProfileDatabase
from dejavu.profiling.layers import Conditions, measure_layers
from dejavu.profiling.measuring import least_samples
from dejavu.profiling.profiler import Profiler
from dejavu.runtime.job import TrainingJob
from dejavu.simulation import simulate_plan
from dejavu.timing.step_times import StepTimes
from dejavu.workload import TrialSettings, Workload

DIGITS = Path(__file__).parents[1] / "examples" / "workloads" / "digits.yaml"
RUNS = 10
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        rounds: of layers and of first predictions, without and beside competitors in turn.
        num_steps: of each training.
        apart: ten runs without a competitor and ten beside one, not ten with one in every second.
    """

    workloads: tuple[Workload, ...]
    rounds: int
    num_steps: int
    apart: bool


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
    quick: Annotated[bool, typer.Option(help="some three minutes in place of ten")] = False,
    seed: Annotated[int, typer.Option(help="of the competitor that starts and stops")] = 0,
) -> None:
    """Measure layers, predictions and memory without and beside competitors."""
    gpt = Workload(trials=TrialSettings(count=0))
    size = Size((gpt,), 1, 8, False) if quick else Size((gpt, load(DIGITS, Workload).value), 2, 16, True)
    layers = [row for workload in size.workloads for row in _layer_rows(workload, size.rounds)]
    steps = [row for number in range(size.rounds) for row in _first_predictions(gpt, size, seed + number)]
    series = ["without", "unpredictable"] if size.apart else ["every second"]
    runs = [row for name in series for row in _runs_in_a_row(gpt, size, name, seed)]
    off = [abs(row["busy_over_quiet_percent"]) for row in layers]
    summary = {
        "busy_over_quiet_median_percent": median(off),
        "busy_over_quiet_worst_percent": max(off),
        "step_error_quiet_median_percent": median(_errors(steps, "without")),
        "step_error_busy_median_percent": median(_errors(steps, "one for each core")),
        "memory_helps_of_ten": min(sum(row["helps"] for row in runs if row["series"] == name) for name in series),
        "seed": seed,
        "cores": len(os.sched_getaffinity(0)),
    }
    report("Measuring beside other work", [*layers, *steps, *runs], summary, json_path)


def _errors(rows: list[Row], beside: str) -> list[float]:
    return [abs(row["error_percent"]) for row in rows if row["competitors"] == beside]


# Layers


def _layer_rows(workload: Workload, rounds: int) -> Iterator[Row]:
    """Every pass of every distinct layer, the median of the rounds."""
    graph, found = capture(workload), dict[str, dict[tuple[str, str], list[Measurement]]]()
    for number in range(rounds):
        for name, competitors in (("quiet", nullcontext), ("busy", one_for_each_core)):
            _say(f"layers of {workload.model}, {name}, round {number + 1} of {rounds}")
            with competitors():
                for row in _measured(workload, graph):
                    found.setdefault(name, {}).setdefault((row.name, str(row.direction)), []).append(row)
    for key, quiet in found["quiet"].items():
        busy = found["busy"][key]
        seconds = [median(row.seconds for row in rows) for rows in (quiet, busy)]
        yield {
            "what": f"{workload.model}, {key[0]}, {key[1]}",
            "quiet_ms": 1e3 * seconds[0],
            "busy_ms": 1e3 * seconds[1],
            "busy_over_quiet_percent": 100 * (seconds[1] / seconds[0] - 1),
            "quiet_disturbed_share": max(row.disturbed_share or 0.0 for row in quiet),
            "busy_disturbed_share": max(row.disturbed_share or 0.0 for row in busy),
        }


def _measured(workload: Workload, graph: Graph) -> list[Measurement]:
    """The last row of each pass: a layer that was disturbed all the while was measured again."""
    (device_type,) = this_machine().device_counts
    signatures = list(dict.fromkeys(layer.signature for layer in graph.layers))
    rows = measure_layers(workload, graph, signatures, device_type, Conditions(2))
    return list({(row.subject, row.direction): row for row in rows if row.kind == "layer"}.values())


# Steps


def _under_every_schedule(priced: PricedProblem, plan: Plan) -> Iterator[Plan]:
    """The plan's devices under each schedule that can run them."""
    for name in SCHEDULES:
        with suppress(InputError):
            yield under(priced, plan, name)


@dataclass(frozen=True)
class Prices:
    """What one database says of the workload: without what trainings taught, and with it."""

    workload: Workload
    cluster: Cluster
    graph: Graph
    database: ProfileDatabase
    fresh: PricedProblem
    corrected: PricedProblem

    @classmethod
    def measured(cls, workload: Workload, cluster: Cluster, folder: Path) -> Prices:
        """Measure what is missing, and price."""
        graph, database = capture(workload, cluster.kind), ProfileDatabase(folder)
        Profiler(graph, workload, cluster, database).run()
        prices = planning.Prices(PlanRequest(workload, cluster, folder, Parallelism.one_device()))
        count = workload.num_microbatches
        return cls(workload, cluster, graph, database, prices.fresh.priced(count), prices.priced(count))

    def predicted(self, plan: Plan) -> tuple[float, StepFactor]:
        """Seconds of a step with what trainings taught."""
        factor = step_factor(self.graph, plan, self.database, partial(_simulated, self.corrected))
        return _simulated(self.corrected, plan) * factor.factor, factor

    def fastest(self) -> Plan:
        """Two stages under any schedule: the one that was trained and is fastest, unless another surely is faster."""
        (device_type,) = self.cluster.device_counts
        configuration, L = StageConfiguration(device_type), len(self.graph.layers)
        by_hand = [
            Plan((Stage(0, cut, configuration), Stage(cut, L, configuration)), "1f1b", self.workload.num_microbatches)
            for cut in range(1, L)
        ]
        first = min(by_hand, key=partial(_simulated, self.corrected))
        best = min(_under_every_schedule(self.corrected, first), key=lambda plan: self.predicted(plan)[0])
        trained = remembered_plans(self.graph, self.database)
        if not trained:
            return best
        kept = min(trained, key=lambda plan: self.predicted(plan)[0])
        return best if is_surely_faster(*self.predicted(best), *self.predicted(kept)) else kept

    def train(self, plan: Plan, num_steps: int, *, keep: bool = False) -> StepTimes:
        """The plan, for so many steps; remembered if asked to."""
        with tempfile.TemporaryDirectory(prefix="dejavu-training-") as folder:
            job = TrainingJob(
                workload=self.workload.model_copy(update={"num_steps": num_steps, "checkpoint_every": num_steps}),
                binding=bind(self.fresh.problem, plan, self.cluster),
                draw=Draw(),
                start_from=None,
                first_step=0,
                last_step=num_steps,
                folder=folder,
                least_sample_seconds=least_samples(self.database),
            )
            result = launch(job)
            assert result.step_times is not None
            if keep:
                remember(job.workload, job.binding, result.times, self.graph, self.database)
            return result.step_times


def _simulated(priced: PricedProblem, plan: Plan) -> float:
    return simulate_plan(priced, plan).step_seconds


def _first_predictions(workload: Workload, size: Size, seed: int) -> Iterator[Row]:
    conditions: dict[str, AbstractContextManager[None]] = {
        "without": nullcontext(),
        "one for each core": one_for_each_core(),
    }
    for name, competitors in conditions.items():
        with tempfile.TemporaryDirectory(prefix="dejavu-measuring-") as folder:
            _say(f"first prediction, competitors: {name}")
            with competitors:
                prices = Prices.measured(workload, this_machine(), Path(folder))
            plan = prices.fastest()
            predicted, truth = _simulated(prices.fresh, plan), prices.train(plan, size.num_steps)
            with an_unpredictable_one(seed):
                beside = prices.train(plan, size.num_steps)
        yield {
            "what": f"first prediction, {plan.schedule}, cuts {list(plan.cuts)}",
            "competitors": name,
            "predicted_ms": 1e3 * predicted,
            "measured_ms": 1e3 * truth.seconds,
            "error_percent": 100 * (predicted / truth.seconds - 1),
            "measured_disturbed_share": truth.disturbed_share,
            "beside_unpredictable_ms": 1e3 * beside.seconds,
            "beside_unpredictable": str(beside),
        }


# Memory


def _runs_in_a_row(workload: Workload, size: Size, series: str, seed: int) -> list[Row]:
    cluster, rows, plans = this_machine(), list[Row](), list[Plan]()
    with tempfile.TemporaryDirectory(prefix="dejavu-memory-") as folder:
        for number in range(RUNS):
            _say(f"run {number + 1} of {RUNS} in a row, competitor: {series}")
            is_beside = series == "unpredictable" or (series == "every second" and number % 2 == 1)
            with an_unpredictable_one(seed + number) if is_beside else nullcontext():
                prices = Prices.measured(workload, cluster, Path(folder))
                plan = prices.fastest()
                with_memory, without = prices.predicted(plan)[0], _simulated(prices.fresh, plan)
                times = prices.train(plan, size.num_steps, keep=True)
            plans.append(plan)
            rows.append(
                {
                    "what": f"run {number + 1}, {plan.schedule}, cuts {list(plan.cuts)}",
                    "series": series,
                    "competitors": "unpredictable" if is_beside else "without",
                    "predicted_ms": 1e3 * with_memory,
                    "without_memory_ms": 1e3 * without,
                    "measured_ms": 1e3 * times.seconds,
                    "measured_disturbed_share": times.disturbed_share,
                }
            )
    for row, plan in zip(rows, plans, strict=True):
        row |= _judged(row, [other for other, its in zip(rows, plans, strict=True) if its == plan])
    return rows


def _judged(row: Row, same_plan: list[Row]) -> Row:
    """Errors against the run's own undisturbed steps; where it had none, against those of the plan's other runs."""
    undisturbed = [one for one in same_plan if (one["measured_disturbed_share"] or 0.0) <= MOST_DISTURBED_SHARE]
    if row in undisturbed or not undisturbed:
        truth = row["measured_ms"]
    else:
        truth = median(one["measured_ms"] for one in undisturbed)
    with_memory, without = (100 * (row[name] / truth - 1) for name in ("predicted_ms", "without_memory_ms"))
    return {
        "error_percent": with_memory,
        "error_without_memory_percent": without,
        "helps": abs(with_memory) <= abs(without),
    }


def _say(text: str) -> None:
    typer.echo(text, err=True)


if __name__ == "__main__":
    typer.run(main)
