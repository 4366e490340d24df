import io
import itertools
import json
import math
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from plotly.graph_objects import Figure as Chart
from plotly.offline import get_plotlyjs
from rich.console import Console

from dejavu.binding import bind
from dejavu.cluster import Cluster, DeviceType, Link, NodeGroup
from dejavu.cost import CostTable, EstimateGrid
from dejavu.cost.ranges import Range
from dejavu.cost.trainings.steps import Basis, StepFactor
from dejavu.foundation.units import format_bound, format_bytes, format_gap, format_seconds, in_microbatches
from dejavu.init import Draw
from dejavu.launch.comparison import Comparison
from dejavu.planning import BASELINES, Choice, Planner, PlanRequest, Prices
from dejavu.planning.considered import considered_table, stages_table
from dejavu.planning.sentences import OTHER_WAYS, name_of
from dejavu.plans import Plan, Problem, Stage, StageConfiguration
from dejavu.plans.orders import both_ways_orders
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.schedule import SCHEDULES, Pass
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.profiles import ProfileDatabase
from dejavu.report import (
    ReportData,
    losses_figure,
    page,
    summary_markdown,
    summary_table,
    timeline_figure,
    where_to_look,
)
from dejavu.report.charts import timeline_chart
from dejavu.report.charts.outcome import MOST_POINTS, _curve
from dejavu.report.note import headline, note_markdown
from dejavu.report.page import _figures
from dejavu.report.summary import summary_rows
from dejavu.report.timeline import IDLE, Work
from dejavu.runtime.job import TrainingResult
from dejavu.runtime.job.progress import Evaluation
from dejavu.runtime.job.suspects import Suspect
from dejavu.simulation import Simulation, StageSeconds, simulate
from dejavu.timing.clock import Span, Timed
from dejavu.timing.training_times import StageTimes
from dejavu.trials import TrialResult, Trials
from dejavu.workload import Workload
from tasks.recording import _figures_of, record_training
from tests.conftest import some

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
NUM_TRIALS, TRIAL_STEPS, NUM_STEPS = 6, 8, 30


def make_cluster(num_devices: int, assumptions=("Between <devices>: 1 GB/s, nominal.",)) -> Cluster:
    peaks = {"float32": 1e12}
    core = DeviceType(
        name="core",
        kind="cpu",
        peak_flops_per_second=peaks,
        memory_bytes=8 * 2**30,
        memory_bytes_per_second=1e10,
        num_multiprocessors=None,
        cache_bytes=None,
        source="test",
    )
    link = Link(1e9, 1e-5)
    group = NodeGroup(name="desk", count=1, hosts=("localhost",), devices=(("core", num_devices),), link=link)
    return Cluster(name="desk", groups=(group,), device_types={"core": core}, links_between={}, assumptions=assumptions)


def make_table(num_layers: int, seed: int = 0, alike: bool = False) -> CostTable:
    random = np.random.default_rng(seed)
    forward = np.full((num_layers, 1), 2e-3) if alike else random.uniform(1e-3, 4e-3, (num_layers, 1))
    source = np.full((num_layers, 1), "measured", dtype=object)
    source[:2] = "roofline"

    def grid(seconds: np.ndarray) -> EstimateGrid:
        return EstimateGrid(seconds, 0.9 * seconds, 1.1 * seconds, source.astype(str))

    return CostTable(
        layers=("embedding", *(f"block{k}" for k in range(num_layers - 2)), "head"),
        device_types=("core",),
        forward=grid(forward),
        backward=grid(2.1 * forward),
        optimizer=grid(0.3 * forward),
    )


def make_problem(table: CostTable, cluster: Cluster, workload: Workload) -> Problem:
    L, count = len(table.layers), workload.num_microbatches
    costs = AdditiveCosts(
        seconds_CL=(table.forward.seconds_LD + table.backward.seconds_LD).T,
        per_step_seconds_CL=table.optimizer.seconds_LD.T,
        per_step_latency_seconds_C=np.zeros(1),
        fixed_bytes_CL=np.full((1, L), 4 * 3e6),
        activation_bytes_CL=np.full((1, L), 2e6),
        temporary_bytes_CL=np.full((1, L), 1e6),
        capacity_bytes_C=np.array([float(cluster.device_types["core"].memory_bytes)]),
        message_bytes_CL1=np.full((1, L + 1), 2 * count * 1e6),
        step_bytes_CL=np.zeros((1, L)),
    )
    return Problem(
        layers=table.layers,
        configurations=(StageConfiguration("core"),),
        device_counts=cluster.device_counts,
        costs=costs,
        cut_bytes_L1=np.full(L + 1, 1e6),
        link_latency_seconds_CC=np.full((1, 1), 1e-5),
        link_seconds_per_byte_CC=np.full((1, 1), 1e-9),
        schedule=workload.searched_schedule,
        num_microbatches=count,
        max_stages=count,
    )


def make_trials() -> tuple[TrialResult, ...]:
    steps = np.arange(TRIAL_STEPS)
    rows = []
    for n in range(NUM_TRIALS):
        losses = tuple(float(x) for x in 3 + 3 * np.exp(-steps / (2 + n)) + 0.05 * np.sin(steps * (n + 1)))
        rows.append(
            TrialResult(Draw("xavier", 1.0 + n / 10, seed=n), losses, losses[-1], f"{n}.safetensors", 1, 2.5 + n)
        )
    failed = TrialResult(
        Draw("normal", 9.0, seed=77), (5.0, 90.0), float("inf"), "", 1, 1.0, failure="the loss was nan"
    )
    return (*rows, failed)


class GivenErrors:
    """Ranges of a tenth, in place of those that follow from a model's prices."""

    def step_range(
        self,
        priced: PricedProblem,
        plan: Plan,
        factor: StepFactor,
        step_seconds: float,
        seed: int = 0,
        simulated: object = None,
        sum_seconds: object = None,
    ) -> Range:
        return Range(0.9 * step_seconds, 1.1 * step_seconds)


class Given(Prices):
    """Prices of a table that was made by hand, in place of a model's."""

    def __init__(self, request: PlanRequest, table: CostTable, priced: PricedProblem) -> None:
        self.request, self.corrections = request, []
        self.rows = ProfileDatabase(request.database).snapshot()
        self._table, self._given = table, priced
        self.errors = GivenErrors()

    def priced(self, num_microbatches: int) -> PricedProblem:
        return self._given

    def problems(self, num_microbatches: int) -> tuple[PricedProblem, ...]:
        return (self._given,)

    def table_of(self, num_microbatches: int) -> CostTable:
        return self._table

    def graph_of(self, num_microbatches: int) -> Any:
        return SimpleNamespace(microbatch_size=1, dtype="float32", fingerprint="by hand", layers=())


@cache
def make_choice(
    num_layers: int, num_devices: int, schedule: str, named: bool = False, *, alike: bool = False
) -> Choice:
    """A real planner's, for tables by hand: layers that differ, or many that are alike."""
    workload = Workload().model_copy(update={"schedule": schedule if named else "auto"})
    if alike:
        workload = workload.model_copy(update={"batch_size": 1024, "num_microbatches": 512})
    cluster, table = make_cluster(num_devices), make_table(num_layers, alike=alike)
    problem = make_problem(table, cluster, workload)
    forward, backward = table.forward.seconds_LD.T, table.backward.seconds_LD.T
    priced = PricedProblem(problem, forward, backward, {"core": PassCost(pass_seconds=2e-4)})
    count = workload.num_microbatches
    request = PlanRequest(workload, cluster, Path("nowhere"), schedules=(schedule,), microbatches=(count,))
    return Planner().plan(request, Given(request, table, priced))


def make_data(
    num_layers: int = 12, num_devices: int = 3, trained: bool = True, schedule: str = "1f1b", named: bool = False
) -> ReportData:
    choice = make_choice(num_layers, num_devices, schedule, named)
    binding = bind(choice.priced.problem, choice.plan, choice.request.cluster)
    bound = choice.candidate(binding.plan)
    trials = make_trials()
    return ReportData(
        workload=choice.request.workload,
        cluster=choice.request.cluster,
        choice=choice,
        binding=binding,
        bound=bound,
        tried=Trials(trials, trials[0], (), 48, 9.0) if trained else None,
        training=replace(trained_like(bound.plan, bound.simulation), restarts=1, resumed_from_step=20)
        if trained
        else None,
        torchrun_line="torchrun --nproc-per-node=3 -m dejavu.runtime.worker '/run/job <1>.json'" if trained else "",
        reference_difference=5.4e-7 if trained else None,
    )


@pytest.fixture(scope="module")
def run() -> ReportData:
    return make_data()


@pytest.fixture(scope="module")
def html(run) -> str:
    return page(run)


class Page(HTMLParser):
    """The words of a page, all that it refers to, and whether its tags match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.marked: list[str] = []
        self._row: list[str] | None = None
        self.feed(html.replace(get_plotlyjs(), ""))

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        if tag == "tr":
            self._row = [] if ("class", "chosen") in attributes else None
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr" and self._row is not None:
            self.marked.append(re.sub(r"\s+", " ", " ".join(self._row)).strip())
            self._row = None

    def handle_data(self, data):
        if "style" not in self.open and "script" not in self.open:
            self.words.append(data)
        if self._row is not None:
            self._row.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def texts(figure: Figure) -> str:
    return " | ".join(
        text.get_text()
        for axes in figure.axes
        for text in [axes.title, axes._left_title, axes.xaxis.label, *axes.texts]
    )


def test_the_page_asks_nothing_of_the_network(html):
    parsed = Page(html)
    assert not parsed.open, "tags that are never closed"
    assert parsed.references == ["data:,"], "the icon, so that a browser asks for none"
    own = html.replace(get_plotlyjs(), "")
    assert not re.search(r"https?://|<script src|@import|url\(", own)
    assert len(html.encode()) < 6 * 10**6


def figures_of(html: str) -> dict[str, Any]:
    """What the page's script draws."""
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def test_every_figure_has_its_place_and_its_colors(html):
    figures, css = figures_of(html), html.split("<style>")[1].split("</style>")[0]
    assert {"timeline", "layers", "accuracy", "convergence", "counts", "memory", "losses"} <= set(figures)
    known = set(re.findall(r"(--[a-z-]+):", css))
    for name, figure in figures.items():
        assert f'<div id="{name}"' in html
        Chart(figure)  # plotly's own check of every property
        named = set(re.findall(r"var\((--[a-z-]+)\)", json.dumps(figure)))
        assert named and named <= known, name


def test_the_numbers_of_the_page_are_the_records(run, html):
    text = Page(html).text
    assert run.baseline is not None and run.gap is not None
    for wanted in (
        f"predicted {format_seconds(run.simulation.step_seconds)}, -20.0%",
        format_seconds(run.training.step_seconds),
        f"{run.baseline.step_seconds / run.bound.step_seconds:.2f} ×",
        f"the {run.baseline_name}: {format_seconds(run.baseline.step_seconds)}",
        f"{run.gap:.1%}",
        f"is simulated below {format_seconds(run.lower_bound_seconds)}; "
        f"this one at {format_seconds(run.simulation.step_seconds)}: a gap of {run.gap:.1%}",
        "30 of 36",
        "30 measured, 6 roofline",
        f"simulated: {format_seconds(run.simulation.step_seconds)}",
        "5.4e-07",
        "1 restart, resumed from step 20",
        run.torchrun_line,
        "Between <devices>: 1 GB/s, nominal.",
        run.cluster.fingerprint,
        f"in the order of the cluster file {format_seconds(run.binding.order_step_seconds)}",
        f"the mean of 1,000 random ones {format_seconds(run.binding.random_mean_step_seconds)}",
        "All bindings were compared: none takes less by this estimate.",
        *run.binding.reasons,
        "the loss was nan",
        f"{run.training.losses[-1]:.4f}",
    ):
        assert wanted in text, wanted
    for row in run.choice.considered:
        assert f"{name_of(row)} {row.num_microbatches} " in text
    for s, stage in enumerate(run.stages):
        measured = run.training.stages[s]
        assert stage.headroom_bytes == 8 * 2**30 - run.price.peak_bytes[s]
        for wanted in (
            format_bytes(stage.headroom_bytes),
            format_bytes(measured.peak_bytes),
            format_seconds(measured.forward_seconds),
            format_seconds(measured.backward_seconds),
            f"localhost:{s}",
        ):
            assert wanted in text, wanted
    for trial in run.trials:
        assert str(trial.draw) in text


def test_a_plan_without_a_training(html):
    run = make_data(trained=False)
    text = Page(page(run)).text
    assert "nothing was trained" in text
    assert format_seconds(run.bound.step_seconds) in text
    assert "Initializations" not in text and "Predicted against measured" not in text and "torchrun" not in text
    rows = printed(run)
    assert "measured, 6 roofline" in rows and "loss" not in rows


def test_what_is_unknown_is_not_made_up():
    run = make_data(trained=False)
    choice = run.choice
    unbounded = {place: replace(bound, seconds=0.0) for place, bound in choice.simulated_bounds.items()}
    rows = tuple(row for row in choice.considered if row.search not in BASELINES)
    run = replace(
        run,
        choice=replace(choice, considered=rows, origin=rows[0], simulated_bounds=unbounded),
        binding=replace(run.binding, random_best_step_seconds=None, random_refused=1000),
    )
    text = Page(page(run)).text
    assert "nan" not in text
    assert "the best of 1,000 random ones – –" in text and "1000 of 1000 random bindings do not fit" in text
    assert "nothing was proved about other plans" in text and "no baseline fits its memory" in text
    assert "best baseline" not in printed(run)
    assert run.gap is None


@pytest.mark.parametrize("gap", [0.0, 1e-7, 3e-4, 0.0011, 0.02341, 0.16047, 1.0])
def test_a_page_says_one_bound_and_one_gap(gap: float) -> None:
    """Those of the sentence, of the tile and of the tables; rounded, a bound is never above what was proved."""
    run = make_data(trained=False)
    seconds = (1.0 - gap) * run.simulation.step_seconds
    choice, result = run.choice, run.source_row.result
    loose = replace(result, lower_bound_seconds=(1.0 - gap) * result.step_seconds)
    rows = tuple(replace(row, answer=loose) if row is choice.origin else row for row in choice.considered)
    origin = rows[choice.considered.index(choice.origin)]
    bounds = {place: replace(bound, seconds=seconds) for place, bound in choice.simulated_bounds.items()}
    choice = replace(choice, considered=rows, origin=origin, simulated_bounds=bounds)
    bound = (1.0 - gap) * run.binding.step_seconds
    run = replace(run, choice=choice, binding=replace(run.binding, lower_bound_seconds=bound))
    parsed = Page(page(run))
    found, text = f"{parsed.marked[1]} ", parsed.text
    names, none_below = (considered_table(choice).columns[k].cells for k in (0, 4))
    for name, said in zip(names, none_below, strict=True):
        assert "✔" not in name or f" {said} " in found, "as `dejavu plan` has it"
    if gap == 1.0:
        assert "Proved gap –" in text and "nothing was proved" in text and found.count(" – ") == 2
        return
    assert f"Proved gap {format_gap(gap)} " in text
    if gap > 0:
        assert f"a gap of {format_gap(gap)}" in text
        assert f"No binding takes less than {format_bound(bound, run.binding.step_seconds)} by" in text
    assert format_bound(seconds, run.simulation.step_seconds) in found
    assert format_bound(loose.lower_bound_seconds, loose.step_seconds) in found


def test_a_single_stage_and_many_layers():
    for data in (make_data(num_layers=5, num_devices=1, trained=False), make_data(num_layers=120, num_devices=8)):
        assert not Page(page(data)).open


def trained_like(plan: Plan, simulated: Simulation, slower: float = 1.25) -> TrainingResult:
    """Return what a training reports whose every pass took so much longer than simulated."""
    letters = {"F": Pass.FORWARD, "B": Pass.BACKWARD, "I": Pass.BACKWARD_INPUT, "W": Pass.BACKWARD_WEIGHT}
    events = [event for event in simulated.events if event.name != "optimizer"]

    def seconds(stage: int, name: str) -> float:
        return slower * max((e.seconds for e in events if (e.stage, e.name[0]) == (stage, name)), default=0.0)

    times = tuple(
        StageTimes(s, seconds(s, "F"), seconds(s, "B"), 1e-3, 5 * 10**8, seconds(s, "I"), seconds(s, "W"))
        for s in range(len(plan.stages))
    )
    passes = tuple(
        tuple(
            Timed(e.stage, letters[e.name[0]], int(e.name[1:]), e.start_seconds, e.stop_seconds)
            for e in events
            if e.rank == rank
        )
        for rank in range(len(plan.ranks))
    )
    once = tuple(
        tuple(
            Span(e.start_seconds, e.stop_seconds) for e in simulated.events if (e.rank, e.name) == (rank, "optimizer")
        )
        for rank in range(len(plan.ranks))
    )
    losses = tuple(3.05 - 0.02 * step for step in range(TRIAL_STEPS, NUM_STEPS))
    return TrainingResult(
        TRIAL_STEPS, losses, slower * simulated.step_seconds, times, 0, None, "/run/checkpoints/30", (), passes, once
    )


@pytest.mark.parametrize("named", [True, False], ids=["named", "auto"])
@EVERY_SCHEDULE
def test_every_schedule_ends_in_a_page_and_a_table(schedule: str, named: bool) -> None:
    run = make_data(schedule=schedule, named=named)
    if named:
        run = replace(run, tried=None)
    assert len(run.plan.stages) % SCHEDULES[schedule].stages_per_rank == 0
    said_of(run, schedule)


@EVERY_SCHEDULE
def test_the_fullest_device_holds_what_the_tables_say(schedule: str) -> None:
    """A pass's own needs included, as in the range that `dejavu plan` prints."""
    run = make_data(trained=False, schedule=schedule)
    held, capacity = run.choice.fullest_of(run.bound)
    wanted = rf"rank (\d+)'s, with at most {format_bytes(held)}, {held / capacity:.1%} of its {format_bytes(capacity)};"
    found = re.search(wanted, Page(page(run)).text)
    assert found is not None
    headroom = [stage.headroom_bytes for stage in run.stages if stage.rank == int(found[1])]
    assert headroom == pytest.approx([capacity - held] * len(headroom))
    assert headroom[0] == min(stage.headroom_bytes for stage in run.stages)


@pytest.mark.parametrize("tried", [True, False], ids=["trials", "no trials"])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe_v"])
def test_a_training_without_a_measured_step_ends_in_a_page_and_a_table(schedule: str, tried: bool) -> None:
    """Resumed when all its steps were done; with its progress lost, too; or not trained at all."""
    run = make_data(schedule=schedule, named=True)
    run = run if tried else replace(run, tried=None)
    done = TrainingResult(TRIAL_STEPS, run.training.losses, None, (), 0, NUM_STEPS, "/run/checkpoints/30")
    held_out = (Evaluation(TRIAL_STEPS + 1, 3.2), Evaluation(NUM_STEPS - 1, float("inf")))
    for training in (done, replace(done, losses=()), replace(done, evaluations=held_out), None):
        said_of(replace(run, training=training), schedule)


def said_of(run: ReportData, schedule: str) -> None:
    text = Page(page(run)).text
    assert f"schedule {schedule}" in text
    assert not re.search(r"\bnan\b", text.replace("the loss was nan", ""))
    assert ("Predicted against measured" in text) == (run.training is not None)
    assert "step, predicted" in printed(run)


@EVERY_SCHEDULE
def test_a_backward_pass_is_compared_as_it_ran(schedule: str) -> None:
    """Every pass took a quarter longer than simulated: each stage says so, and no backward took no time."""
    run = make_data(schedule=schedule)
    for stage in run.stages:
        assert stage.forward_seconds == pytest.approx(1.25 * stage.predicted.forward_seconds)
        assert stage.backward_seconds == pytest.approx(1.25 * stage.predicted_backward_seconds)
        assert stage.backward_seconds > stage.forward_seconds
    assert run.median_error == pytest.approx(0.2)
    html = page(run)
    assert "those of the passes by 20.0% in the median" in Page(html).text
    assert " 0 s" not in Page(html).text.split("Predicted against measured")[1].split("process's peak")[0]
    points = [trace for trace in figures_of(html)["accuracy"]["data"] if trace["mode"] == "markers"]
    names = {point["name"] for point in points}
    split = {str(Work.INPUT_GRADIENT), str(Work.WEIGHT_GRADIENT)} & names
    assert bool(split) == SCHEDULES[schedule].splits_backward
    for point in points:
        if point["name"] != str(Work.ONCE):
            assert point["y"] == pytest.approx([1.25 * x for x in point["x"]])


@EVERY_SCHEDULE
def test_waiting_is_what_the_rows_show(schedule: str) -> None:
    """Simulated and measured, in the figure itself: a row for each rank, without gaps; its grey is what is written."""
    run = make_data(schedule=schedule, named=True)
    html = page(run)
    timeline = figures_of(html)["timeline"]
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6}[timeline["layout"]["xaxis2"]["title"]["text"].split(", ")[1]]
    idle, ranks = {}, len(run.plan.ranks)
    for name, axis in (("simulated", "y"), ("measured", "y2")):
        traces = [trace for trace in timeline["data"] if trace["yaxis"] == axis]
        bars = [
            (rank, a, a + x, t["name"]) for t in traces for rank, a, x in zip(t["y"], t["base"], t["x"], strict=True)
        ]
        for rank in range(ranks):
            row = sorted(bar[1:] for bar in bars if bar[0] == rank)
            assert [bar[1] for bar in row[:-1]] == pytest.approx([bar[0] for bar in row[1:]])
            assert row[0][0] == 0.0
            assert row[-1][1] == pytest.approx(run.timelines[name].step_seconds * scale)
        assert {rank for rank, *_ in bars} == set(range(ranks))
        idle[name] = sum(b - a for _, a, b, work in bars if work in IDLE) / (
            ranks * run.timelines[name].step_seconds * scale
        )
        assert run.timelines[name].share(*IDLE) == pytest.approx(idle[name])
    assert idle["simulated"] == pytest.approx(run.simulation.bubble_fraction)
    assert f"Waiting {idle['measured']:.1%}" in Page(html).text
    parts = {Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT}
    for one in run.timelines.values():
        assert parts.isdisjoint(one.works) != SCHEDULES[schedule].splits_backward
        assert Work.ONCE in one.works and Work.WAIT in one.works


def on_gpus(cluster: Cluster) -> dict[str, DeviceType]:
    return {name: replace(one, kind="cuda") for name, one in cluster.device_types.items()}


@pytest.mark.parametrize(("P", "B"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 12)])
def test_both_directions_are_shown_by_the_plan_s_stages_and_the_ranks_microbatches(P: int, B: int) -> None:
    """Simulated as measured: no stage that the plan does not have, and a pass has one name in both."""
    choice = make_choice(12, P, "1f1b")
    bounds = np.linspace(0, 12, P + 1).astype(int).tolist()
    stages = tuple(Stage(a, b, StageConfiguration("core")) for a, b in itertools.pairwise(bounds))
    binding = bind(choice.priced.problem, Plan(stages, "1f1b", B, both_ways=True), choice.request.cluster)
    bound = choice.candidate(binding.plan)
    ways = (Pass.FORWARD, Pass.BACKWARD)
    passes = tuple(  # as `runtime.stage` numbers them, every pass a second
        tuple(
            Timed(one.stage, ways[one.direction], one.number + one.copy * B // 2, k, k + 1) for k, one in enumerate(row)
        )
        for row in both_ways_orders(P, B)
    )
    spans = [[e for e in bound.simulation.events if (e.rank, e.name) == (rank, "optimizer")] for rank in range(P)]
    times = tuple(  # as `runtime.worker` has them: of what a rank does once a step an equal part for each of its stages
        StageTimes(s, 1.0, 1.0, sum(e.seconds for e in own) / len(own), (rank + 1) * 10**6, pipeline_rank=rank)
        for rank, own in enumerate(spans)
        for s in {rank, P - 1 - rank}
    )
    training = TrainingResult(0, (3.0,), 1.0, times, 0, None, "/run/checkpoints/1", (), passes)
    run = ReportData(choice.request.workload, choice.request.cluster, choice, binding, bound, training=training)
    shown = {
        name: {(bar.rank, bar.stage, bar.name) for bar in one.bars if bar.work in (Work.FORWARD, Work.BACKWARD)}
        for name, one in run.timelines.items()
    }
    assert shown["simulated"] == shown["measured"] and len(shown["measured"]) == 2 * P * B
    gpus = replace(run, cluster=replace(run.cluster, device_types=on_gpus(run.cluster)))
    assert gpus.rank_measured_bytes == tuple((rank + 1) * 10**6 for rank in range(P))
    at = {placed.pipeline_rank: f"{placed.device.host}:{placed.device.index} (" for placed in binding.placements}
    for s, stage in enumerate(run.stages):
        assert {rank for rank, name in at.items() if name in stage.devices} == {s, P - 1 - s}
        assert stage.devices.startswith(at[s])
    once = [row for row in run.compared if row.work is Work.ONCE]
    assert len(once) == P and [row.error for row in once] == pytest.approx([0.0] * P)
    text = Page(page(run)).text
    for rank in range(P):
        assert f"rank {rank}: stages {', '.join(map(str, sorted({rank, P - 1 - rank})))}" in text
    rows = run.trace["traceEvents"]
    assert {row["args"]["stage"] for row in rows if row["ph"] == "X"} == set(range(P))
    lanes = [{row["args"]["name"] for row in rows if row["name"] == "thread_name" and row["pid"] == k} for k in (0, 1)]
    assert lanes[1] <= lanes[0]
    for row in rows:  # a message of a pass leaves the rank that ran it
        if row["ph"] == "X" and row["pid"] == 1:
            lane = next(
                o["args"]["name"] for o in rows if o["ph"] == "M" and o.get("tid") == row["tid"] and o["pid"] == 1
            )
            assert (int(lane.split()[1]), row["args"]["stage"], row["name"]) in shown["measured"]


@pytest.mark.parametrize("lengths", [(), (1,), (2, 2), (3, 2, 3)])
def test_the_numbers_of_passes_say_what_they_count(lengths: tuple[int, ...]) -> None:
    run = make_data(trained=False)
    plan = replace(run.plan, slices=lengths)
    simulation = simulate(plan, [StageSeconds(1.0, 2.0, 0.0)] * len(plan.stages))
    run = replace(
        run, bound=replace(run.bound, plan=plan, simulation=simulation), binding=replace(run.binding, plan=plan)
    )
    what = "slice" if len(lengths) > 1 else "microbatch"
    chart = timeline_chart(run.timelines, run.rank_devices)
    assert {t.hovertemplate.split(",")[0] for t in chart.data if t.name == "forward"} == {
        f"<b>forward of {what} %{{text}}"
    }
    assert f"the number is the {what}" in texts(timeline_figure(simulation))


def test_a_step_too_long_to_draw_is_drawn_from_its_beginning(monkeypatch):
    run = make_data()
    monkeypatch.setattr("dejavu.report.charts.steps.MOST_BARS", 40)
    html = page(run)
    assert "Drawn are the first" in Page(html).text
    assert sum(len(trace["x"]) for trace in timeline_chart(run.timelines, run.rank_devices).data) == 40


def test_mlflow_has_the_seconds_of_stages_that_the_page_has(run: ReportData) -> None:
    """Of replicas, or of two copies of the model, the slowest; whoever measured a stage is no figure of it."""
    first = [replace(one, forward_seconds=2 * one.forward_seconds, pipeline_rank=1) for one in run.training.stages]
    second = [replace(one, peak_bytes=one.peak_bytes + 1, replica=1) for one in run.training.stages]
    run = replace(run, training=replace(run.training, stages=(*first, *run.training.stages, *second)))
    record, told = MagicMock(), dict[str, float]()
    record.metrics.side_effect = lambda figures: told.update((one.name, one.value) for one in figures)
    record_training(record, MagicMock(), MagicMock(), run.training)
    assert told == {
        f"stage_{stage.stage}_{name}": getattr(stage, name)
        for stage in run.stages
        for name in ("forward_seconds", "backward_seconds", "optimizer_seconds", "peak_bytes")
    }


def test_the_plan_of_the_run_is_marked(run, html):
    marked = Page(html).marked
    assert marked[0].startswith(f"✔ this run {run.plan.schedule} {run.plan.num_microbatches} ")
    assert any(row.startswith(f"✔ {name_of(run.choice.origin)} ") for row in marked)
    assert any(row.startswith(f"✔ {run.winner.draw} ") for row in marked)
    assert any(row.startswith("✔ this one ") for row in marked)


@pytest.mark.parametrize("search", ["exact", *OTHER_WAYS])
def test_a_bound_stands_beside_plans_of_which_it_is_proved(run: ReportData, search: str) -> None:
    """As in the terminal's table and in JSON: of both directions and of slices nothing is proved."""
    row = run.choice.considered[-1]
    choice = replace(run.choice, considered=(*run.choice.considered, replace(row, search=search)))
    html = Page(page(replace(run, choice=choice))).text
    bound = format_seconds(choice.simulated_bound_seconds(row.num_microbatches))
    shown = (
        f"{search} {row.num_microbatches} {row.shown.plan.schedule_name} {format_seconds(row.shown.simulated_seconds)}"
    )
    assert f"{shown} {'–' if search in OTHER_WAYS else bound} " in html
    assert f"the bound below which no plan{run.within} is simulated." in html


@pytest.mark.parametrize("num_layers", [3, 4, 7])
def test_a_stage_of_one_layer_has_one_number(num_layers: int) -> None:
    choice = make_choice(num_layers, 3, "1f1b")
    for cuts in itertools.combinations(range(1, num_layers), 2):
        spans = [*itertools.pairwise((0, *cuts, num_layers))]
        plan = Plan(tuple(Stage(a, b, StageConfiguration("core")) for a, b in spans), "1f1b", 8)
        table = stages_table(replace(choice, chosen=choice.candidate(plan)))
        assert list(table.columns[0].cells) == [f"{a}" if b == a + 1 else f"{a}–{b - 1}" for a, b in spans]


@pytest.mark.parametrize("schedule", ["1f1b", "looped_bfs", "zbv"])
@pytest.mark.parametrize("num_layers", some([15, 16, 17, 18, 40, 257], often=[16, 17, 40]))
def test_a_plan_of_any_length_is_a_screen_and_says_each_stage_once(schedule: str, num_layers: int) -> None:
    """Of many stages those alike share a row, with all their layers, ranks and the most that one of them holds."""
    choice, ranks = (
        make_choice(num_layers, num_layers, "1f1b", alike=True),
        num_layers // SCHEDULES[schedule].stages_per_rank,
    )
    S = ranks * SCHEDULES[schedule].stages_per_rank
    spans = [*itertools.pairwise((*range(S), num_layers))]  # the last one may be longer
    plan = Plan(
        tuple(Stage(a, b, StageConfiguration("core")) for a, b in spans), schedule, choice.plan.num_microbatches
    )
    chosen = choice.candidate(plan)
    columns = [list(map(str, column.cells)) for column in stages_table(replace(choice, chosen=chosen)).columns]
    assert len(columns[0]) == S if S <= 16 else len(columns[0]) <= 9
    bounds = [row.split("–") for row in columns[0]]
    said = [layer for row in bounds for layer in range(int(row[0]), int(row[-1]) + 1)]
    assert said == list(range(num_layers))
    counted = [re.search(r", (\d+) stages? of", row) for row in columns[1]]
    assert sum(int(found[1]) if found else 1 for found in counted) == S
    most = max(max(0.0, held) for held, _ in choice.held(chosen))
    assert any(cell.endswith(format_bytes(most)) for cell in columns[4])
    if schedule != "1f1b":
        ends = [re.search(r"\(ranks? (\d+)(?: to (\d+))?\)", row) for row in columns[2]]
        found = [(int(row[1]), int(row[2] or row[1])) for row in ends if row]
        listed = [r for a, b in found for r in (range(a, b + 1) if a <= b else range(a, b - 1, -1))]
        assert listed == [SCHEDULES[schedule].rank_of(s, S) for s in range(S)]


def test_a_baseline_that_was_trained_in_the_plan_s_place_is_marked(run):
    measured = Comparison.of([0.2] * 10, [0.1] * 10, run.baseline_name)
    assert measured.is_slower
    replaced = replace(run, bound=run.baseline, comparison=measured)
    parsed = Page(page(replaced))
    assert parsed.marked[0].startswith(f"✔ this run: the {run.baseline_name} ")
    assert parsed.marked[0].endswith("1.00 × 100 ms")
    assert "the planner's, measured to be slower" in parsed.text and "200 ms" in parsed.text
    assert (
        f"0.50 × as fast as the {run.baseline_name}, measured in turn, was the planner's plan; so this" in parsed.text
    )
    best = run.choice.best_baseline
    assert any(row.startswith(f"✔ {name_of(best)} {best.num_microbatches} ") for row in parsed.marked)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_of_a_plan_that_is_no_slower_no_reason_is_given(run: ReportData, factor: float) -> None:
    """The baseline itself, though it was trained before, and a faster plan."""
    trained = replace(run.baseline, factor=StepFactor(factor * run.baseline.factor.factor, 1.0, Basis.OWN, 1))
    found = replace(run, bound=trained)
    assert found.speedup == pytest.approx(1 / factor) and found.why_slower == ""
    assert "kept because" not in dict(summary_rows(found))["best baseline"] + note_markdown(found, "dejavu run", "")


@pytest.mark.parametrize("steps", [0, 1, 38])
@pytest.mark.parametrize("basis", [Basis.OWN, Basis.OTHERS])
def test_of_a_plan_that_is_predicted_to_be_slower_it_is_said_why(run: ReportData, basis: Basis, steps: int) -> None:
    """Summary, note and verdict: a plan that was trained stays while no other's gain is certain, and of which steps."""
    slower = replace(run.bound, factor=StepFactor(2.5, 1.0, basis, 1, steps))
    measured = {0: "", 1: " (1 step measured)", 38: " (38 steps measured)"}[steps]
    found = replace(run, bound=slower)
    said = (dict(summary_rows(found))["best baseline"], headline(found), note_markdown(found, "dejavu run", ""))
    for text in said:
        assert "% slower than the" in text
        assert (f"kept because it was trained before{measured} and no" in text) == (basis is Basis.OWN)


def test_every_loss_says_what_it_is(run, html):
    text, winner = Page(html).text, run.winner
    assert f"The winner's is {winner.score:.4f} after {len(winner.losses)} steps" in text
    assert f"(its last batch alone: {winner.losses[-1]:.4f})" in text
    assert f"Training loss {run.training.losses[-1]:.4f} of the last batch, step {len(run.losses)}" in text


class Moved(NamedTuple):
    """A change of plan, as a training tells it."""

    step: int
    reason: str
    from_plan: Plan
    to_plan: Plan
    seconds: float
    steps_lost: int
    gain: str | None = None


def test_changes_of_plan_are_listed_and_only_then(run, html):
    assert "Changes of plan" not in Page(html).text
    plan = run.plan
    fewer = replace(plan, stages=(*plan.stages[:-2], replace(plan.stages[-2], stop=plan.stages[-1].stop)))
    lost = Moved(12, "desk:<2> was lost", plan, fewer, 4.5, 2)
    faster = Moved(30, "fewer cuts", plan, fewer, 2.0, 0, gain="a step took 9 ms")
    text = Page(page(replace(run, migrations=(lost, Moved(20, "a rank ended", fewer, fewer, 1.0, 0), faster)))).text
    assert "30 fewer cuts; a step took 9 ms 1f1b" in text
    assert "Changes of plan" in text
    cuts = ", ".join(map(str, fewer.cuts))
    assert f"1f1b, {plan.num_microbatches} microbatches, cut before layers {cuts} 4.5 s 2" in text
    assert "the same plan, on other ranks 1 s 0" in text
    assert "12 desk:<2> was lost 1f1b" in text


HOSTILE = '<script>alert("x")</script>"&<img src=x onerror=alert(1)>%{y}</svg>'


def test_names_are_shown_and_never_read_as_html(run):
    """Of the model, the cluster, a device, a host, a layer, a draw's failure: in the page, its drawing, its figures."""
    core, group = run.cluster.device_types["core"], run.cluster.groups[0]
    assert core.name == "core"
    rename = lambda placed: replace(placed, device=replace(placed.device, host=HOSTILE))  # noqa: E731
    failed = replace(run.trials[-1], failure=HOSTILE)
    table = replace(run.table, layers=(HOSTILE, *run.table.layers[1:]))
    prices = Given(run.choice.request, table, run.bound.priced)
    hostile = replace(
        run,
        workload=run.workload.model_copy(update={"model": HOSTILE}),
        cluster=replace(run.cluster, name=HOSTILE, groups=(replace(group, hosts=(HOSTILE,)),), assumptions=(HOSTILE,)),
        binding=replace(run.binding, placements=tuple(map(rename, run.binding.placements)), reasons=(HOSTILE,)),
        choice=replace(run.choice, prices=prices),
        tried=replace(run.tried, results=(*run.trials[:-1], failed)),
        torchrun_line=HOSTILE,
    )
    html = page(hostile)
    plain = html.replace(get_plotlyjs(), "")
    assert "<img" not in plain
    assert plain.count("<script") == plain.count("</script") == 3
    parsed = Page(html)
    assert not parsed.open and HOSTILE in parsed.text
    figures = figures_of(html)
    assert not [text for text in every_text(figures) if re.search(r"<(?!/?b>|br>|/?extra>)", text)]
    for name in ("layers", "timeline", "memory"):
        assert any("&lt;img src=x" in text for text in every_text(figures[name])), name


def every_text(value: Any) -> list[str]:
    """All texts inside a figure."""
    if isinstance(value, dict):
        return [text for one in value.values() for text in every_text(one)]
    if isinstance(value, list):
        return [text for one in value for text in every_text(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("tried", [True, False], ids=["trials", "no trials"])
def test_what_is_held_out_is_a_line_of_its_own(run: ReportData, tried: bool) -> None:
    rows = (Evaluation(TRIAL_STEPS + 1, 3.0417), Evaluation(NUM_STEPS - 1, 2.9123))
    run = replace(run, training=replace(run.training, evaluations=rows), tried=run.tried if tried else None)
    drawn = dict(_figures(run))["losses" if tried else "training"]
    (line,) = (trace for trace in drawn.data if trace.name == "on what is held out")
    assert (list(line.x), list(line.y)) == ([row.step + 1 for row in rows], [3.0417, 2.9123])
    said = f"3.0417 after step {rows[0].step + 1} and 2.9123 after step {NUM_STEPS}"
    assert said in Page(page(run)).text
    assert f"3.0417 after {rows[0].step + 1} steps, 2.9123 after {NUM_STEPS}" in printed(run)
    if tried:
        (axes,) = losses_figure(run.trials, run.winner, run.training).axes
        assert "on what is held out" in axes.get_legend_handles_labels()[1]


@pytest.mark.parametrize("seed", range(12))
def test_the_losses_of_winner_and_training_are_inside_the_picture(run: ReportData, seed: int) -> None:
    """Those on what is held out, too, which a training that learns its examples by heart lets rise above all others."""
    rng = np.random.default_rng(seed)
    rises = rng.uniform(0.0, 9.0, NUM_STEPS).tolist()
    rows = [Evaluation(step, rises[step]) for step in range(TRIAL_STEPS, NUM_STEPS, 1 + seed % 3)]
    rows += [Evaluation(NUM_STEPS, math.inf)] if seed % 2 else []
    (axes,) = losses_figure(run.trials, run.winner, replace(run.training, evaluations=tuple(rows))).axes
    low, high = axes.get_ylim()
    shown = [*run.losses, *(row.loss for row in rows if math.isfinite(row.loss))]
    assert low <= min(shown) and max(shown) <= high


@pytest.mark.parametrize("count", [1, 2, 7])
def test_picture_table_and_page_have_one_loss_of_the_winner_and_its_name(run: ReportData, count: int) -> None:
    score = 3.14159
    winner = replace(run.winner, score=score)
    tried = replace(run.tried, winner=winner, results=(winner, *run.trials)[:count])
    found = replace(run, tried=tried)
    assert f"the best of {count}: running loss 3.1416" in printed(found)
    assert "their running loss, the mean over their last steps. The winner's is 3.1416" in Page(page(found)).text
    what = "1 initialization" if count == 1 else f"{count} initializations"
    said = f"The best of {what}: running loss 3.142 after {len(winner.losses)} steps"
    figure = losses_figure(tried.results, winner, run.training)
    assert said in texts(figure)
    figure.canvas.draw()
    assert figure.axes[0]._left_title.get_window_extent().x1 <= figure.bbox.x1


def test_a_suspected_replica_is_a_line_of_the_summary(run: ReportData) -> None:
    suspect = Suspect(1, 2, 5, "alpha", 3, 9, 39, 28, 30, 4.04)
    run = replace(run, training=replace(run.training, suspects=(suspect,)))
    assert "replica 2 (rank 5 on alpha, device 3)" in printed(run)
    assert str(suspect) in Page(page(run)).text


def test_the_losses_go_on_from_the_winner(run):
    assert run.losses == run.winner.losses + run.training.losses
    figure = losses_figure(run.trials, run.winner, run.training)
    drawn = {line.get_label(): line for line in figure.axes[0].lines}
    training = drawn["pipelined training from there"]
    assert list(training.get_xdata()) == list(range(TRIAL_STEPS, NUM_STEPS + 1))
    assert list(training.get_ydata()) == [run.winner.losses[-1], *run.training.losses]
    assert tuple(drawn[f"the best: {run.winner.draw}"].get_ydata()) == run.winner.losses


LONG = Draw("depth_scaled", 1.34, slope=1.51, embedding=0.341, head=3.04, residual=0.191, bias=0.301, seed=4)


@pytest.mark.parametrize("kind", [Draw(), LONG], ids=["short", "long"])
def test_no_legend_covers_the_losses(run: ReportData, kind: Draw) -> None:
    """Whatever the winner is called."""
    winner = replace(run.winner, draw=kind)
    figure = losses_figure((winner, *run.trials), winner, run.training)
    figure.canvas.draw()
    (legend,), (axes,) = figure.legends, figure.axes
    covered, drawn = legend.get_window_extent(), axes.get_window_extent()
    assert axes.get_legend() is None and not covered.overlaps(drawn)
    assert covered.x0 >= 0 and covered.x1 <= figure.bbox.x1 and covered.y0 >= 0
    assert drawn.height > 0.4 * figure.bbox.height


@pytest.mark.parametrize("first_step", [0, 1, TRIAL_STEPS, TRIAL_STEPS + 5])
@pytest.mark.parametrize("tried", [True, False], ids=["trials", "resumed"])
def test_the_first_loss_says_of_which_step_it_is(run: ReportData, tried: bool, first_step: int) -> None:
    """A resumed training knows its losses from its own first step on, and no longer those of its trials.

    So does one whose first lines of progress are lost.
    """
    losses = tuple(7.0 - 0.125 * step for step in range(first_step, NUM_STEPS))
    training = replace(run.training, losses=losses, first_step=first_step)
    found = replace(run, training=training, tried=run.tried if tried else None)
    assert found.num_trained_steps == NUM_STEPS
    is_whole = tried and 0 < first_step <= TRIAL_STEPS
    first, step = (run.winner.losses[0], 1) if is_whole else (losses[0], first_step + 1)
    began = "at first" if step == 1 else f"in step {step}"
    for text in (printed(found), note_markdown(found, "dejavu run", "")):
        assert f"{first:.4f} {began}, {losses[-1]:.4f} after {NUM_STEPS} steps" in text
    said = f"Training loss {losses[-1]:.4f} of the last batch, step {NUM_STEPS}; {first:.4f} at step {step}"
    assert said in Page(page(found)).text
    if tried:
        lines = losses_figure(found.trials, found.winner, training).axes[0].lines
        (line,) = (one for one in lines if one.get_label() == "pipelined training from there")
        drawn = dict(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))
        known = dict(enumerate(losses, first_step + 1))
        assert drawn == ({first_step: run.winner.losses[first_step - 1]} if is_whole else {}) | known


@pytest.mark.parametrize(
    "name", ["lab [a100]", "[red]lab", "lab [/b]", "a | b", "[link=x]y[/link]", r"\[x]", ":smile:"]
)
def test_names_in_the_table_and_in_markdown_are_shown_as_they_are(run: ReportData, name: str) -> None:
    """Rich reads what is in brackets as a style, and Markdown a bar as a cell's end."""
    named = replace(
        run, cluster=replace(run.cluster, name=name), workload=run.workload.model_copy(update={"model": name})
    )
    assert f"{name} on {name}" in printed(named)
    stage = replace(run.binding.placements[0].device, host=name)
    placed = replace(run.binding.placements[0], device=stage)
    named = replace(named, binding=replace(run.binding, placements=(placed, *run.binding.placements[1:])))
    for text in (summary_markdown(named), note_markdown(named, "dejavu run", "")):
        rows = [line for line in text.splitlines() if line.startswith("|")]
        counts = {re.sub(r"\\.", "", row).count("|") for row in rows}
        assert counts <= {3} or counts <= {6}, "as many cells in each row as its table has"


@pytest.mark.parametrize("runs", [1, 3])
def test_the_page_says_how_often_the_schedule_runs_in_a_step(run: ReportData, runs: int) -> None:
    workload = run.workload.model_copy(update={"accumulate": runs})
    counts = in_microbatches(run.plan.num_microbatches, runs)
    assert f"batch {workload.batch_size} in {counts} · schedule" in Page(page(replace(run, workload=workload))).text


def own(factory: str, num_classes: int) -> dict[str, Any]:
    settings = {"factory": f"tests.own_data:{factory}", "options": {"count": 50}, "num_classes": num_classes}
    return {"data": "examples", "examples": settings}


@pytest.mark.parametrize(
    ("data", "tokens_of_an_example"),
    [
        ({}, 32),
        ({"data": "digits"}, None),
        (own("rows", 3), None),
        (own("masks", 3), None),
        (own("successors", 8), 1),
    ],
    ids=["text", "images", "rows", "a class for each number", "single tokens"],
)
def test_mlflow_is_told_tokens_a_second_where_the_page_is(
    run: ReportData, data: dict[str, Any], tokens_of_an_example: int | None
) -> None:
    workload = Workload.model_validate({"model": "gpt", "batch_size": 16, "sequence_length": 32, **data})
    found = replace(run, workload=workload)
    _, figures = _figures_of(found)
    each = 1 if tokens_of_an_example is None else tokens_of_an_example
    wanted = "examples_per_second" if tokens_of_an_example is None else "tokens_per_second"
    assert figures[wanted] == pytest.approx(16 * each / run.training.step_seconds)
    assert len({"examples_per_second", "tokens_per_second"} & figures.keys()) == 1
    assert found.rate_range[1] == ("samples" if tokens_of_an_example is None else "tokens")


def test_figures_say_what_they_show(run):
    figures = {
        "timeline": timeline_figure(run.simulation),
        "losses": losses_figure(run.trials, run.winner, run.training),
    }
    said = {name: texts(figure) for name, figure in figures.items()}
    assert f"{run.simulation.bubble_fraction:.1%}" in said["timeline"]
    rows = figures["timeline"].axes[0].get_yticklabels()
    assert [row.get_text() for row in rows] == [f"rank {rank}" for rank in range(len(run.plan.ranks))]
    assert "best of 7" in said["losses"]
    assert all(figure.dpi == 120 for figure in figures.values())
    assert pyplot.get_fignums() == []  # no global state


def printed(run: ReportData) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(run))
    text = console.export_text()
    assert all(len(line) <= 100 for line in text.splitlines())
    return re.sub(r"\s+", " ", text.replace("│", " "))


def test_the_table_at_the_end(run, tmp_path):
    text = printed(run)
    for wanted in (
        "stage 2 ",
        f"1f1b, {len(run.plan.stages)} stages, {run.plan.num_microbatches} microbatches",
        format_seconds(run.bound.step_seconds),
        f"{format_seconds(run.training.step_seconds)} (the prediction is off by -20.0%)",
        f"the {run.baseline_name}, predicted {format_seconds(run.baseline.step_seconds)}",
        f"a gap of {run.gap:.1%}",
        "30 measured, 6 roofline",
        str(run.winner.draw),
        f"{run.losses[0]:.4f} at first, {run.losses[-1]:.4f} after {NUM_STEPS} steps",
    ):
        assert wanted in text, wanted
    folder, shown = (
        tmp_path / ("long" * 30) / "artifacts",
        "MLflow: sqlite:////project/mlflow.db (`dejavu up` shows it)",
    )
    page = folder / "report" / "report.html"
    lost = "report: it could not be written, as a warning above says"  # on a full disk
    assert where_to_look(folder, "sqlite:////project/mlflow.db") == [lost, shown]
    page.parent.mkdir(parents=True)
    page.touch()
    assert where_to_look(folder, "sqlite:////project/mlflow.db") == [f"report: {page}", shown]
    for server in ("http://127.0.0.1:5000", "https://mlflow.example", "postgresql://db/mlflow"):
        assert where_to_look(None, server) == [f"MLflow: {server}"], "`dejavu up` shows a project's own database"


@pytest.mark.parametrize("length", [0, 1, 2, 1499, 1500, 1501, 1502, 2999, 3000, 3001, 4567, 100_000])
def test_a_long_curve_ends_where_its_losses_end(length: int) -> None:
    """However long: its first and last point, at most one more than fit, in order and at their steps."""
    losses = np.random.default_rng(length).uniform(1.0, 5.0, length).tolist()
    drawn = _curve(7, losses)
    assert len(drawn["x"]) == len(drawn["y"]) <= MOST_POINTS + 1 and drawn["x"] == sorted(set(drawn["x"]))
    assert [drawn["x"][k] for k in (0, -1) if length] == [7, 6 + length][: 2 * bool(length)]
    assert drawn["y"] == [float(f"{losses[step - 7]:.5g}") for step in drawn["x"]]
