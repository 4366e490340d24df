"""The parts of the campaign. Each asks the product: its profiler, its cost sources, its simulation, its ranks."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.gpu.questions import NUM_RANKS, Question
from benchmarks.gpu.results import Predictions, Results, Row, compared
from benchmarks.gpu.schedule import Part, Timetable, Unit
from benchmarks.gpu.site import Site
from dejavu.binding import bind
from dejavu.cost.estimates import MEASURED, PASSES
from dejavu.cost.kernels.calibration import calibration_kernels
from dejavu.cost.priced_problem import as_planned
from dejavu.cost.sources.predicted import Predicted
from dejavu.graphs.graph import Graph
from dejavu.init import Draw
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.plans import Plan
from dejavu.profiles import Measurement
from dejavu.profiles.kernel import Kernel
from dejavu.profiling.kernels import can_measure, measure_kernels
from dejavu.profiling.launches import measure_launches
from dejavu.profiling.layers import Asked, Conditions, measure_layers_of
from dejavu.profiling.links import measure_link
from dejavu.profiling.profiler import kernels_of
from dejavu.runtime.job import TrainingJob
from dejavu.simulation import simulate_plan
from dejavu.workload import OptimizerSettings

STEPS = 6  # of each schedule's training; the first two do not count
LONG_STEPS, LONG_STEP_SECONDS = 4, 0.2  # so many where a step is expected to take so long: two of them count
ALONE, TOGETHER = "steps", "pipelines"  # parts: the whole model on one rank, and on `NUM_RANKS`
MEASURED_PARTS = ("layers", ALONE, "trainings", "searches", TOGETHER, "kernels")  # after what predicts them
TRAINED_STEPS = 12  # of the training through the launcher
PLANNING_SECONDS = 5.0
SEARCH_SECONDS = 3.0  # for each number of restarts
MOST_SEARCH_SECONDS = 60.0  # for all of them, on GPU and CPU


@dataclass(frozen=True)
class Campaign:
    """What all parts share.

    Attributes:
        blind: predictions of each question from the micro-benchmarks alone, by question and what of it.
    """

    site: Site
    asked: tuple[Question, ...]
    results: Results
    blind: dict[tuple[str, str], Predictions] = field(default_factory=dict)

    def parts(self, timetable: Timetable) -> list[Part]:
        """Return the parts in their order; a part's time is what is left when those before it have ended."""
        return [
            Part("calibration", 0.10, 15.0, self._calibrating),
            Part("messages", 0.13, 6.0, lambda: [Unit(f"{NUM_RANKS} ranks", self._measure_messages)]),
            Part("predictions", 0.18, 5.0, lambda: [Unit(str(one), partial(self._predict, one)) for one in self.asked]),
            Part("layers", 0.40, 20.0, lambda: self._by_precision(self._measure_layers)),
            Part(ALONE, 0.56, 18.0, lambda: self._by_precision(partial(self._train_steps, timetable, ALONE))),
            Part("trainings", 0.68, 25.0, lambda: [Unit(str(self.asked[0]), partial(self._train, self.asked[0]))]),
            Part("searches", 0.76, 15.0, lambda: [Unit("restarts at once", partial(self._search, timetable))]),
            Part(TOGETHER, 0.93, 35.0, lambda: self._by_precision(partial(self._train_steps, timetable, TOGETHER))),
            Part("kernels", 1.0, 12.0, lambda: [Unit("of all models", self._measure_kernels)]),
        ]

    def _by_precision(self, work: Callable[[Sequence[Question]], None]) -> list[Unit]:
        """Return units of one launch each: processes take seconds to start, and a GPU's first kernels to load."""
        precisions = dict.fromkeys(one.precision for one in self.asked)
        return [Unit(name, partial(work, [one for one in self.asked if one.precision == name])) for name in precisions]

    def _calibrating(self) -> list[Unit]:
        kernels = [one for one in calibration_kernels(self.site.device) if can_measure(one)]
        return [
            Unit(f"{len(kernels)} kernels", partial(self._compare_kernels, "calibration", kernels)),
            Unit("the host's launches", lambda: self._keep(measure_launches(self.site.device.name))),
        ]

    def _compare_kernels(self, part: str, kernels: Sequence[Kernel]) -> None:
        """Predict kernels, write that down, and measure them."""
        name, database = self.site.device.name, self.results.database
        prices = Predicted(database, OptimizerSettings()).prices(kernels, self.site.device)
        columns = (prices.seconds_K, prices.low_seconds_K, prices.high_seconds_K, prices.source_K)
        foretold = self.results.predict(
            f"{part}: {len(kernels)} kernels",
            (
                {
                    "part": part,
                    "model": None,
                    "precision": kernel.dtype,
                    "what": f"{kernel.family} {kernel.name} {kernel.batch}×{kernel.m}×{kernel.n}×{kernel.k}",
                    "seconds": float(seconds),
                    "low_seconds": float(low),
                    "high_seconds": float(high),
                    "source": str(source),
                }
                for kernel, seconds, low, high, source in zip(kernels, *columns, strict=True)
            ),
        )
        for row, measured in zip(foretold.rows, self._kept(measure_kernels(kernels, name)), strict=True):
            self.results.rows.append(compared(row, measured.seconds))

    def _kept(self, rows: Iterable[Measurement]) -> Iterator[Measurement]:
        """Yield measurements as they come, and keep them, also if their process fails before the last."""
        kept: list[Measurement] = []
        try:
            for row in rows:
                kept.append(row)
                yield row
        finally:
            self.results.database.append(kept)

    def _keep(self, rows: Iterable[Measurement]) -> None:
        for _ in self._kept(rows):
            pass

    def _prices(self, question: Question) -> Prices:
        request = PlanRequest(
            question.workload, self.site.cluster, self.results.database.path, Parallelism.one_device(),
            budget_seconds=PLANNING_SECONDS,
        )  # fmt: skip
        return Prices(request, remembers=False)

    def _predict(self, question: Question) -> None:
        """Predict every layer and every schedule from the micro-benchmarks, and write that down."""
        prices = self._prices(question)
        self.blind[str(question), "layers"] = self.results.predict(
            f"{question}: layers, from micro-benchmarks", self._layer_rows(question, prices)
        )
        for part in (ALONE, TOGETHER):
            self.blind[str(question), part] = self.results.predict(
                f"{question}: {part}, from micro-benchmarks", self._step_rows(question, prices, part)
            )

    def _layer_rows(self, question: Question, prices: Prices) -> list[Row]:
        count = question.workload.num_microbatches
        table, graph = prices.table_of(count), prices.graph_of(count)
        alike = Counter(layer.signature for layer in graph.layers)
        first = {layer.signature: k for k, layer in reversed(list(enumerate(graph.layers)))}
        rows: list[Row] = []
        for signature, k in sorted(first.items(), key=lambda entry: entry[1]):
            for name in PASSES:
                price = table.grids[name].at(k, 0)
                if price.seconds > 0:
                    rows.append(
                        {
                            "part": "layers",
                            "model": question.model,
                            "precision": question.precision,
                            "what": f"{graph.layers[k].name} × {alike[signature]}, {name}",
                            "signature": signature,
                            "direction": name,
                            "seconds": price.seconds,
                            "low_seconds": price.low_seconds,
                            "high_seconds": price.high_seconds,
                            "source": price.source,
                        }
                    )
        return rows

    def _step_rows(self, question: Question, prices: Prices, part: str) -> list[Row]:
        count = question.workload.num_microbatches
        priced = prices.priced(count)
        rows: list[Row] = []
        for plan in self._plans(question, prices.graph_of(count), part):
            places = self.site.places[: len(plan.ranks)]
            simulated = simulate_plan(priced, plan, places)
            rows.append(
                {
                    "part": part,
                    "model": question.model,
                    "precision": question.precision,
                    "what": plan.schedule if part == TOGETHER else "one rank",
                    "seconds": simulated.step_seconds,
                    "low_seconds": None,
                    "high_seconds": None,
                    "predicted_peak_gib": max(simulated.peak_bytes) / 2**30,
                    "source": Counter(prices.table_of(count).sources.tolist()).most_common(1)[0][0],
                }
            )
        return rows

    def _plans(self, question: Question, graph: Graph, part: str) -> list[Plan]:
        name, num_layers = self.site.device.name, len(graph.layers)
        return [question.whole(num_layers, name)] if part == ALONE else list(question.plans(num_layers, name))

    def _measure_layers(self, asked: Sequence[Question]) -> None:
        """Measure every layer as `dejavu profile` does, and compare with what was predicted."""
        ready = [question for question in asked if (str(question), "layers") in self.blind]
        graphs = [self._prices(one).graph_of(one.workload.num_microbatches) for one in ready]
        layers = [
            Asked(question.workload, graph, list(dict.fromkeys(layer.signature for layer in graph.layers)))
            for question, graph in zip(ready, graphs, strict=True)
        ]
        try:
            if layers:
                self._keep(measure_layers_of(layers, self.site.device.name, self._conditions))
        finally:
            without = [what for question in ready for what in self._compare_layers(question)]
        if without:
            raise LookupError(f"measured, but found implausible and not used (the log says why): {'; '.join(without)}")
        _check_predicted(asked, ready)

    @property
    def _conditions(self) -> Conditions:
        """In a rehearsal one core computes: on the others companions would push other work to it, and it would wait."""
        return Conditions(1 if self.site.is_rehearsal else min(NUM_RANKS, self.site.num_devices))

    def _compare_layers(self, question: Question) -> list[str]:
        """Compare its layers that are measured with what was predicted; return which are not."""
        measured, count = self._prices(question), question.workload.num_microbatches
        table, graph = measured.table_of(count), measured.graph_of(count)
        place = {layer.signature: k for k, layer in enumerate(graph.layers)}
        without: list[str] = []
        for row in self.blind[str(question), "layers"].rows:
            price = table.grids[row["direction"]].at(place[row["signature"]], 0)
            shown = {name: value for name, value in row.items() if name not in ("signature", "direction")}
            if price.source == MEASURED:
                self.results.rows.append(compared(shown, price.seconds))
            else:
                without.append(f"{question}, {row['what']}")
        return without

    def _measure_messages(self) -> None:
        self._keep(measure_link(self.site.device.name))

    def _train_steps(self, timetable: Timetable, part: str, asked: Sequence[Question]) -> None:
        """Train on ranks that start once; every step is predicted twice before: blind, and from the layers."""
        from benchmarks.pipeline.ranks import train_in_turn

        ready = [question for question in asked if (str(question), part) in self.blind]
        foretold: list[tuple[Row, Row]] = []
        jobs: list[TrainingJob] = []
        for question in ready:
            prices, count = self._prices(question), question.workload.num_microbatches
            informed = self.results.predict(
                f"{question}: {part}, with what is measured by now", self._step_rows(question, prices, part)
            )
            foretold += zip(self.blind[str(question), part].rows, informed.rows, strict=True)
            problem = prices.priced(count).problem
            plans = self._plans(question, prices.graph_of(count), part)
            jobs += [
                TrainingJob(
                    question.workload.model_copy(update={"schedule": plan.schedule}),
                    bind(problem, plan, self.site.cluster), Draw(), None, 0, num_steps(row["seconds"]), "",
                )
                for plan, row in zip(plans, informed.rows, strict=True)
            ]  # fmt: skip
        trained = train_in_turn(jobs, timeout_seconds=timetable.left_seconds) if jobs else []
        first_losses: dict[str, tuple[float, ...]] = {}
        for (blind, informed_row), run in zip(foretold, trained, strict=True):
            others = first_losses.setdefault(blind["model"], run.losses)
            finite = all(map(math.isfinite, run.losses))
            more = {
                "from_layers_ms": 1e3 * informed_row["seconds"],
                "from_layers_difference_percent": 100 * (informed_row["seconds"] / run.median_step_seconds - 1),
                "steps_counted": len(run.step_seconds),
                "backend": self.site.backend,
                "last_loss": run.losses[-1] if finite else None,
                "losses_apart": max(abs(a - b) for a, b in zip(run.losses, others, strict=False)) if finite else None,
                "peak_gib": max(stage.peak_bytes for stage in run.stages) / 2**30,
            }
            self.results.rows.append(compared(blind, run.median_step_seconds, **more))
        _check_predicted(asked, ready)

    def _train(self, question: Question) -> None:
        """Plan, bind, launch and checkpoint as `dejavu run` does, and compare the losses with one process."""
        from dejavu.launch.launcher import launch
        from dejavu.planning import Planner
        from dejavu.runtime.single import compared_steps, train_single

        prices = self._prices(question)
        choice = Planner().plan(prices.request, prices)
        low, high = choice.range_seconds
        foretold = self.results.predict(
            f"{question}: the planner's plan",
            [
                {
                    "part": "trainings",
                    "model": question.model,
                    "precision": question.precision,
                    "what": f"{choice.plan.schedule}, {len(choice.plan.stages)} stages, by the planner",
                    "seconds": choice.step_seconds,
                    "low_seconds": low,
                    "high_seconds": high,
                    "source": "the planner",
                }
            ],
        )
        workload = as_planned(question.workload, choice.plan).model_copy(update={"num_steps": TRAINED_STEPS})
        binding = bind(choice.priced.problem, choice.plan, self.site.cluster)
        with tempfile.TemporaryDirectory(prefix="dejavu-gpu-") as folder:
            job = TrainingJob(workload, binding, Draw(), None, 0, TRAINED_STEPS, str(Path(folder) / "run"))
            result = launch(job)
            alone = train_single(workload, Draw(), compared_steps(job))
        assert result.step_seconds is not None
        apart = max(abs(a - b) for a, b in zip(alone, result.losses, strict=False))
        more = {"backend": self.site.backend, "last_loss": result.losses[-1], "losses_apart": apart}
        self.results.rows.append(compared(foretold.rows[0], result.step_seconds, **more))

    def _search(self, timetable: Timetable) -> None:
        """Descend with more and more restarts at once, which is what the search on a GPU is for."""
        from benchmarks.search.restarts import table

        most_seconds = min(MOST_SEARCH_SECONDS, timetable.part_left_seconds)
        _, rows, _ = table(num_problems=1, budget_seconds=SEARCH_SECONDS, most_seconds=most_seconds)
        self.results.searches.extend(rows)

    def _measure_kernels(self) -> None:
        """Measure the kernels of all questions that were not measured yet: rows to ship."""
        rows = self.results.database.read(kind="operator", device_type=self.site.device.name)
        known = set(rows["subject"].to_pylist())
        graphs = [self._prices(one).graph_of(one.workload.num_microbatches) for one in self.asked]
        found = {one.subject: one for graph in graphs for one in kernels_of(graph)}
        kernels = [one for subject, one in found.items() if subject not in known and can_measure(one)]
        if kernels:
            self._compare_kernels("kernels", kernels)


def num_steps(seconds: float) -> int:
    """Return how many steps are trained, of a plan whose step is expected to take so long."""
    return STEPS if seconds < LONG_STEP_SECONDS else LONG_STEPS


def _check_predicted(asked: Sequence[Question], ready: Sequence[Question]) -> None:
    """Check that everything was predicted.

    Raises:
        LookupError: something was not.
    """
    if without := [str(question) for question in asked if question not in ready]:
        raise LookupError(f"not measured, because predictions come first and failed: {', '.join(without)}")
