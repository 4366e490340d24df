"""Pipeline cuts on operators: exact plans beside cuts between layers, the planner's own plan, and Auto-MAP's tables.

One price for all but the planner's: `dejavu.operator_cuts.pricing`. Batch 64, microbatch 16, float32, Adam.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from benchmarks._report import report, write
from benchmarks.operators.agents import Trainings
from benchmarks.published import PUBLISHED
from dejavu.cluster import Cluster
from dejavu.cluster.loader import load_cluster
from dejavu.operator_cuts import (
    CONFIGURATIONS,
    Answer,
    CutPlan,
    CutProblem,
    Found,
    LabelProgram,
    NoneFits,
    OperatorArrays,
    Servers,
    coarsen,
    fits,
    joined,
    price,
)
from dejavu.operator_cuts.captured import CapturedOperators, captured_operators
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest
from dejavu.plans import NoPlanError
from dejavu.workload import Workload

MODELS = ("bert-48", "t5-base", "t5-3b", "t5-11b", "vgg-19")
MICROBATCH_SIZE, NUM_MICROBATCHES, REPLICAS = 16, 4, 8
T5_TOKENS = (512, 114)  # that the encoder reads and the decoder writes, as T5 was trained
CLUSTER, DEVICE, DATABASE = Path("examples/clusters/4x8-v100.yaml"), "V100-SXM2-16GB", Path("profiles_db")
REPEATS, PLANNER_SECONDS, PROCESSES = 5, 10.0, 3
# Auto-MAP's device and operator cuts: table 7 (online; operator cuts are said in layers) and table 8 (inference, C).
THEIR_DEVICES = {"A": (8,), "B": (8, 16), "C": (8, 16, 24)}
THEIR_OTHER_DEVICES = {("t5-base", "C"): (8, 16, 22)}
THEIR_CUTS = {
    ("bert-48", "B"): "layers 17, 32",
    ("bert-48", "C"): "layers 14, 27, 40; points 34, 66, 98",
    ("t5-base", "C"): "points 34, 66, 98",
    ("t5-3b", "B"): "enc19, dec11",
    ("t5-11b", "A"): "out of memory",
    ("t5-11b", "B"): "out of memory",
    ("t5-11b", "C"): "enc13, dec3, dec15; points 34, 66, 98",
}
THEIR_POINTS = (34, 66, 98)
DATA_PARALLEL = Parallelism(max_tensor_parallel=1, recompute=(False,), zero_levels=(0,))


def show(models: str, seeds: int, steps: int, figures: Path | None, json_path: Path | None) -> None:
    """Measure, print two tables, and write everything."""
    chosen = models.split(",") if models else list(MODELS)
    if unknown := [name for name in chosen if name not in MODELS]:
        raise typer.BadParameter(f"unknown model {unknown[0]!r}; wanted some of {', '.join(MODELS)}")
    rows, summary = measure(chosen, seeds, steps, figures)
    exact = [row for row in rows if "agent" not in row]
    report("Pipeline cuts on operators", shown(exact), summary["pipeline"]["exact"], None)
    if seeds:
        learned = [row for row in rows if "agent" in row]
        report("Agents that learn to cut", learned, summary["pipeline"]["agents"], None)
    if json_path is not None:
        write(rows, summary, json_path)


def measure(
    models: Sequence[str], seeds: int, steps: int, figures: Path | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Cut each model on each configuration; train agents beside that."""
    cluster = load_cluster(CLUSTER)
    LabelProgram().run(CutProblem(OperatorArrays([1, 1], [1, 1], [1, 1]), Servers(2)))  # compile, or load what was
    rows, capture_seconds = list[dict[str, Any]](), dict[str, float]()
    captured: dict[str, CapturedOperators] = {}
    for name in models:
        began = time.process_time()
        captured[name] = captured_operators(workload(name), cluster.device_types[DEVICE], DATABASE, REPLICAS)
        capture_seconds[name] = time.process_time() - began
    points = {name: coarsen(one.arrays) for name, one in captured.items()}
    trainings = Trainings(points, seeds, steps, PROCESSES) if seeds else None
    for name in models:
        for configuration in CONFIGURATIONS:
            rows += compared(name, captured[name], configuration, cluster)
    found = {"exact": _summary(rows), "capture_cpu_seconds": capture_seconds}
    agent_rows, summary = trainings.finished(figures) if trainings is not None else ([], {})
    return [*rows, *agent_rows], {"pipeline": found | summary}


def workload(name: str) -> Workload:
    """Return the published model as a workload of Auto-MAP's batch and microbatch."""
    asked = PUBLISHED[name].workload(MICROBATCH_SIZE, NUM_MICROBATCHES, schedule="1f1b")
    if not name.startswith("t5"):
        return asked
    options = {**asked.model_options, "encoder_length": T5_TOKENS[0]}
    return asked.model_copy(update={"sequence_length": sum(T5_TOKENS), "model_options": options})


def compared(name: str, captured: CapturedOperators, configuration: str, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the rows of one model on one configuration; without a memory limit as well where nothing fits."""
    servers = CONFIGURATIONS[configuration]
    asked = {"model": name, "configuration": configuration}
    rows = [asked | {"memory": "16 GiB"} | _cuts(name, captured, configuration, servers)]
    rows[0] |= _planned(name, cluster, servers.count)
    if rows[0]["step_ms"] is None:
        unlimited = replace(servers, memory_bytes=float("inf"))
        rows.append(asked | {"memory": "any"} | _cuts(name, captured, configuration, unlimited))
    return rows


def _cuts(name: str, captured: CapturedOperators, configuration: str, servers: Servers) -> dict[str, Any]:
    """Cut everywhere, in smaller spaces, between layers only, and without joining operators into points."""
    points = coarsen(captured.arrays)
    layers = joined(captured.arrays, list(captured.layer_ends))
    spaces = {"boundaries": servers.boundaries, "radius_3": servers.near_boundaries(), "all": servers.everywhere}
    answers = {space: _timed(CutProblem(points, servers, cuts)) for space, cuts in spaces.items()}
    best = answers["all"][0]
    by_layers, _ = _timed(CutProblem(layers, servers, servers.everywhere), 1)
    unjoined, _ = _timed(CutProblem(captured.arrays, servers, servers.boundaries), 1)
    row: dict[str, Any] = {"operators": len(captured.arrays), "points": len(points), "step_ms": _step_ms(best)}
    row |= {"gap_percent": best.gap_percent if isinstance(best, Found) else 0.0}
    if isinstance(best, NoneFits):
        row |= {"least_gib": best.least_bytes / 2**30}
    row |= {f"{space}_step_ms": _step_ms(answer) for space, (answer, _) in answers.items() if space != "all"}
    row |= {f"{space}_cpu_ms": spent for space, (_, spent) in answers.items()}
    row |= {"device_cuts": _shown(best, "device_cuts"), "operator_cuts": _shown(best, "operator_cuts")}
    row |= {"layers_step_ms": _step_ms(by_layers), "layers_device_cuts": _shown(by_layers, "device_cuts")}
    row |= {"layer_cuts": _layer_cuts(by_layers, captured.layer_names)}
    row |= {"unjoined_boundaries_step_ms": _step_ms(unjoined)}
    their_devices = THEIR_OTHER_DEVICES.get((name, configuration), THEIR_DEVICES[configuration])
    row |= {"their_device_cuts": str(their_devices), "their_cuts": THEIR_CUTS.get((name, configuration))}
    if configuration == "C" and len(points) == 128:
        row |= {"their_points_step_ms": _their_step_ms(points, servers)}
    return row


def _their_step_ms(points: OperatorArrays, servers: Servers) -> float | None:
    problem = CutProblem(points, servers)
    found = price(problem, CutPlan(THEIR_POINTS, servers.boundaries))
    return 1e3 * found.step_seconds if fits(problem, found) else None


def _timed(problem: CutProblem, repeats: int = REPEATS) -> tuple[Answer, float]:
    """Return the exact answer, and the median of its CPU milliseconds."""
    answers = [LabelProgram().run(problem) for _ in range(repeats)]
    return answers[0], 1e3 * statistics.median(answer.cpu_seconds for answer in answers)


def _planned(name: str, cluster: Cluster, servers: int) -> dict[str, Any]:
    """Return what the planner's layer-level plans are simulated to take: of replicas only, and of all it knows."""
    groups = tuple(replace(group, count=servers, hosts=group.hosts[:servers]) for group in cluster.groups)
    found: dict[str, Any] = {}
    for way, parallelism in (("planner", DATA_PARALLEL), ("planner_any", None)):
        request = PlanRequest(
            workload(name),
            replace(cluster, groups=groups),
            DATABASE,
            parallelism,
            schedules=("1f1b",),
            microbatches=(NUM_MICROBATCHES,),
            budget_seconds=PLANNER_SECONDS,
        )
        began = time.process_time()
        try:
            plan = Planner().plan(request)
            found[f"{way}_step_ms"] = 1e3 * plan.simulated_seconds
            found[f"{way}_stages"] = " | ".join(
                f"{stage.start}–{stage.stop - 1} on {stage.configuration.num_devices}" for stage in plan.plan.stages
            )
        except NoPlanError:
            found[f"{way}_step_ms"] = None
        found[f"{way}_cpu_s"] = time.process_time() - began
    return found


def _step_ms(answer: Answer) -> float | None:
    return 1e3 * answer.step_seconds if isinstance(answer, Found) else None


def _shown(answer: Answer, cuts: str) -> str | None:
    return str(getattr(answer.plan, cuts)) if isinstance(answer, Found) else None


def _layer_cuts(answer: Answer, names: Sequence[str]) -> str | None:
    """Name the layers before which is cut."""
    return ", ".join(names[cut] for cut in answer.plan.operator_cuts) if isinstance(answer, Found) else None


def shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what fits on a screen of each row; the JSON has everything."""
    hidden = (
        *("unjoined", "planner_stages", "planner_any_stages", "planner_cpu", "planner_any_cpu", "layers_device"),
        *("operators", "gap", "boundaries_step", "radius_3", "their_device"),
    )
    return [{name: value for name, value in row.items() if not name.startswith(hidden)} for row in rows]


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the longest times, and how much shorter a step is than with cuts between layers."""
    of_both = [row for row in rows if row["step_ms"] and row["layers_step_ms"]]
    gains = {
        f"{row['model']} {row['configuration']}": round(100 * (1 - row["step_ms"] / row["layers_step_ms"]), 6)
        for row in of_both
    }
    return {
        **{f"most_{space}_cpu_ms": max(row[f"{space}_cpu_ms"] for row in rows) for space in ("boundaries", "all")},
        "most_gap_percent": max(row["gap_percent"] for row in rows),
        "gain_over_layers_percent": gains,
        "median_gain_over_layers_percent": statistics.median(gains.values()),
    }
