"""The parts of the campaign. Each asks the product: its profiler, its cost sources, its simulation, its ranks."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from dejavu.cost.sources.predicted import Predicted
from dejavu.graphs.graph import Graph
from dejavu.init import Draw
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.plans import Plan
from dejavu.profiles import Measurement
from dejavu.profiles.kernel import Kernel
from dejavu.profiling.kernels import can_measure, measure_kernels
from dejavu.profiling.links import measure_link
from dejavu.profiling.profiler import Profiler, kernels_of
from dejavu.runtime.job import TrainingJob
from dejavu.simulation import simulate_plan
from dejavu.workload import OptimizerSettings

STEPS = 8  # of each schedule's training; the first ones do not count
TRAINED_STEPS = 12  # of the training through the launcher
PLANNING_SECONDS = 5.0


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
            Part("calibration", 0.15, 20.0, self._calibrating),
            Part("predictions", 0.35, 10.0, lambda: self._each(self._predict)),
            Part("layers", 0.55, 15.0, lambda: self._each(self._measure_layers)),
            Part("messages", 0.60, 10.0, lambda: [Unit(f"{NUM_RANKS} ranks", self._measure_messages)]),
            Part("pipelines", 0.88, 25.0, lambda: self._each(partial(self._train_pipelines, timetable))),
            Part("trainings", 0.96, 20.0, lambda: self._each(self._train, self.asked[:1])),
            Part("kernels", 1.0, 15.0, lambda: self._each(self._measure_kernels)),
        ]

    def _each(self, work: Callable[[Question], None], asked: Sequence[Question] | None = None) -> list[Unit]:
        return [Unit(str(one), partial(work, one)) for one in asked or self.asked]

    def _calibrating(self) -> list[Unit]:
        kernels = [one for one in calibration_kernels(self.site.device) if can_measure(one)]
        return [Unit(f"{len(kernels)} kernels", partial(self._compare_kernels, "calibration", kernels))]

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
        measured = self._keep(measure_kernels(kernels, name))
        self._compare(zip(foretold.rows, measured, strict=True))

    def _keep(self, rows: Iterable[Measurement]) -> list[Measurement]:
        """Keep measurements as they come, also if their process fails before the last."""
        kept: list[Measurement] = []
        try:
            kept.extend(rows)
        finally:
            self.results.database.append(kept)
        return kept

    def _compare(self, pairs: Iterable[tuple[Row, Measurement]]) -> None:
        self.results.rows += [compared(foretold, row.seconds) for foretold, row in pairs]

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
        self.blind[str(question), "pipelines"] = self.results.predict(
            f"{question}: steps, from micro-benchmarks", self._step_rows(question, prices)
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

    def _step_rows(self, question: Question, prices: Prices) -> list[Row]:
        count = question.workload.num_microbatches
        priced = prices.priced(count)
        return [
            {
                "part": "pipelines",
                "model": question.model,
                "precision": question.precision,
                "what": plan.schedule,
                "seconds": simulate_plan(priced, plan, self.site.places).step_seconds,
                "low_seconds": None,
                "high_seconds": None,
                "source": str(max(sources, key=sources.__getitem__)),
            }
            for plan in self._plans(question, prices.graph_of(count))
            if (sources := Counter(prices.table_of(count).sources.tolist()))
        ]

    def _plans(self, question: Question, graph: Graph) -> list[Plan]:
        return list(question.plans(len(graph.layers), self.site.device.name))

    def _measure_layers(self, question: Question) -> None:
        """Measure every layer as `dejavu profile` does, and compare with what was predicted."""
        foretold = self.blind.get((str(question), "layers"))
        if foretold is None:
            raise LookupError("its layers were not predicted, so they are not measured: predictions come first")
        prices, count = self._prices(question), question.workload.num_microbatches
        Profiler(prices.graph_of(count), question.workload, self.site.cluster, self.results.database).run(("layers",))
        measured = self._prices(question)
        table, graph = measured.table_of(count), measured.graph_of(count)
        place = {layer.signature: k for k, layer in enumerate(graph.layers)}
        without: list[str] = []
        for row in foretold.rows:
            price = table.grids[row["direction"]].at(place[row["signature"]], 0)
            shown = {name: value for name, value in row.items() if name not in ("signature", "direction")}
            if price.source == MEASURED:
                self.results.rows.append(compared(shown, price.seconds))
            else:
                without.append(str(row["what"]))
        if without:
            raise LookupError(f"measured, but found implausible and not used (the log says why): {'; '.join(without)}")

    def _measure_messages(self) -> None:
        self._keep(measure_link(self.site.device.name))

    def _train_pipelines(self, timetable: Timetable, question: Question) -> None:
        """Train under every schedule, on ranks that start once; predicted twice before: blind, and from the layers."""
        from benchmarks.pipeline.ranks import train_in_turn

        blind = self.blind.get((str(question), "pipelines"))
        if blind is None:
            raise LookupError("its steps were not predicted, so they are not measured: predictions come first")
        prices = self._prices(question)
        count = question.workload.num_microbatches
        informed = self.results.predict(
            f"{question}: steps, with what is measured by now", self._step_rows(question, prices)
        )
        plans, problem = self._plans(question, prices.graph_of(count)), prices.priced(count).problem
        jobs = [
            TrainingJob(
                question.workload.model_copy(update={"schedule": plan.schedule}),
                bind(problem, plan, self.site.cluster), Draw(), None, 0, STEPS, "",
            )
            for plan in plans
        ]  # fmt: skip
        trained = train_in_turn(jobs, timeout_seconds=timetable.left_seconds)
        for first, second, run in zip(blind.rows, informed.rows, trained, strict=True):
            finite = all(map(math.isfinite, run.losses))
            apart = max(abs(a - b) for a, b in zip(run.losses, trained[0].losses, strict=True))
            more = {
                "from_layers_ms": 1e3 * second["seconds"],
                "from_layers_difference_percent": 100 * (second["seconds"] / run.median_step_seconds - 1),
                "backend": self.site.backend,
                "last_loss": run.losses[-1] if finite else None,
                "losses_apart": apart if finite else None,
                "peak_gib": max(stage.peak_bytes for stage in run.stages) / 2**30,
            }
            self.results.rows.append(compared(first, run.median_step_seconds, **more))

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
        workload = question.workload.model_copy(
            update={"num_microbatches": choice.plan.num_microbatches, "num_steps": TRAINED_STEPS}
        )
        binding = bind(choice.priced.problem, choice.plan, self.site.cluster)
        with tempfile.TemporaryDirectory(prefix="dejavu-gpu-") as folder:
            job = TrainingJob(workload, binding, Draw(), None, 0, TRAINED_STEPS, str(Path(folder) / "run"))
            result = launch(job)
            alone = train_single(workload, Draw(), compared_steps(job))
        assert result.step_seconds is not None
        apart = max(abs(a - b) for a, b in zip(alone, result.losses, strict=False))
        more = {"backend": self.site.backend, "last_loss": result.losses[-1], "losses_apart": apart}
        self.results.rows.append(compared(foretold.rows[0], result.step_seconds, **more))

    def _measure_kernels(self, question: Question) -> None:
        """Measure the kernels of the question that were not measured yet: rows to ship."""
        graph = self._prices(question).graph_of(question.workload.num_microbatches)
        rows = self.results.database.read(kind="operator", device_type=self.site.device.name)
        known = set(rows["subject"].to_pylist())
        kernels = {one.subject: one for one in kernels_of(graph) if one.subject not in known and can_measure(one)}
        if kernels:
            self._compare_kernels("kernels", list(kernels.values()))
