"""Placement of branching graphs: against exhaustive search, against the bound, and on modules captured from torch."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.operators.every_schedule import fastest_of_all
from benchmarks.operators.placement_graphs import SHAPES, generated
from benchmarks.operators.placement_modules import MODULES
from dejavu.cluster import Cluster, load_cluster
from dejavu.cost.placements import placement_problem
from dejavu.cost.sources.predicted import Predicted
from dejavu.graphs.dataflow import trace_dataflow
from dejavu.placement import PLACERS, PlacementAnswer, PlacementProblem, PlacementResult
from dejavu.profiles import ProfileDatabase
from dejavu.workload import OptimizerSettings

Row = dict[str, Any]

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"
RATIOS = (0.1, 1.0, 5.0)  # mean message over mean operation
SPEEDS = ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 0.5, 0.5))
WITHIN = 10.0  # percent above the bound
COMPARED = ("one_device", "random", "heft", "local_search", "policy_gradient")


def drawn(seed: int, most: int = 9) -> PlacementProblem:
    """Draw a graph of 5 to `most` operations on 2 or 3 devices, some unlike, some with groups or little memory."""
    draws = np.random.default_rng([seed, 7])
    num_devices = 2 + seed % 2
    problem = generated(
        list(SHAPES)[seed % len(SHAPES)],
        int(draws.integers(5, most - num_devices + 3)),
        num_devices,
        message_ratio=float(draws.choice([0.1, 0.5, 2.0])),
        seed=seed,
        speeds=(1.0, 0.5, 0.25)[:num_devices] if seed % 3 == 0 else (),
        memory_share=0.7 if seed % 4 == 0 else math.inf,
    )
    if seed % 5 != 2:
        return problem
    first, *middle, last = problem.operations  # share a weight
    operations = (replace(first, group="tied"), *middle, replace(last, group="tied"))
    return PlacementProblem(operations, problem.tensors, problem.devices)


def measure(seed: int, budget_seconds: float, num_operations: int) -> tuple[list[Row], Row]:
    """Return the table's rows and what they come to."""
    for placer in PLACERS.values():  # compile
        placer().run(drawn(0), budget_seconds=0.1)
    small, exhaustive = _small(seed, budget_seconds)
    large = list(_large(seed, budget_seconds, num_operations))
    modules = list(_modules(budget_seconds))
    searched = [row for row in large if row["placer"] == "local_search"]
    within = [row["above_bound_percent"] <= WITHIN for row in searched]
    return [*small, *large, *modules], {
        **exhaustive,
        "large_operations": num_operations,
        "large_graphs": len(searched),
        "large_within_10_percent": sum(within),
        "large_within_10_percent_by_ratio": {
            str(ratio): sum(r["above_bound_percent"] <= WITHIN for r in searched if r["message_ratio"] == ratio)
            for ratio in RATIOS
        },
        "large_worst_above_bound_percent": {
            str(ratio): max(r["above_bound_percent"] for r in searched if r["message_ratio"] == ratio)
            for ratio in RATIOS
        },
        "large_most_cpu_seconds": max(row["cpu_seconds"] for row in searched),
        "large_median_above_bound_percent": {
            name: statistics.median(r["above_bound_percent"] for r in large if r["placer"] == name) for name in COMPARED
        },
        "modules": {
            f"{row['graph']}, {row['devices']}": {
                "one_device_over_placed": row["one_device_over_this"],
                "above_bound_percent": row["above_bound_percent"],
            }
            for row in modules
            if row["placer"] == "local_search"
        },
    }


def _small(seed: int, budget_seconds: float) -> tuple[list[Row], Row]:
    """Return how far each member is from the fastest schedule of graphs of up to 12 operations."""
    problems = [drawn(seed + k) for k in range(30)]
    problems += [
        generated(shape, 9 if shape == "layered" else 12, 2, message_ratio=0.5, seed=seed + 3) for shape in SHAPES
    ]
    best = [fastest_of_all(problem) for problem in problems]
    rows, equal = [], 0
    for name in ("exact", *COMPARED):
        answers = [PLACERS[name]().run(problem, budget_seconds=budget_seconds, seed=seed) for problem in problems]
        above = [
            100.0 * (answer.seconds / b - 1.0) for answer, b in zip(answers, best, strict=True) if _is_placed(answer)
        ]
        if name == "exact":
            equal = sum(_agrees(answer, b) for answer, b in zip(answers, best, strict=True))
        rows.append(
            {
                "graph": f"{len(problems)} of 5 to 12 operations",
                "devices": "2 or 3",
                "placer": name,
                "above_best_percent": statistics.mean(above),
                "worst_above_best_percent": max(above),
                "placed": len(above),
                "cpu_seconds": max(_cpu_seconds(answer) for answer in answers),
            }
        )
    return rows, {
        "small_graphs": len(problems),
        "small_equal_to_exhaustive": equal,
        "small_infeasible": sum(map(math.isinf, best)),
    }


def _agrees(answer: PlacementAnswer, best: float) -> bool:
    """Whether `exact` has the exhaustive search's seconds, proved, or proves that there is nothing."""
    if isinstance(answer, PlacementResult):
        return abs(answer.seconds - best) <= 1e-9 * best and answer.gap <= 1e-9
    return math.isinf(best)


def _is_placed(answer: PlacementAnswer) -> bool:
    return isinstance(answer, PlacementResult)


def _cpu_seconds(answer: PlacementAnswer) -> float:
    return answer.cpu_seconds if isinstance(answer, PlacementResult) else answer.seconds


def _large(seed: int, budget_seconds: float, num: int) -> Iterator[Row]:
    for speeds in SPEEDS:
        for shape in SHAPES:
            for ratio in RATIOS:
                problem = generated(shape, num, len(speeds), message_ratio=ratio, seed=seed, speeds=speeds)
                described = f"{len(speeds)}, {'equal' if len(set(speeds)) == 1 else 'half of them at half speed'}"
                for row in _compared(problem, seed, budget_seconds):
                    yield {"graph": shape, "operations": num, "devices": described, "message_ratio": ratio, **row}


def _compared(problem: PlacementProblem, seed: int, budget_seconds: float) -> Iterator[Row]:
    """Yield each member's seconds; the bound is the same for all."""
    alone = math.inf
    for name in COMPARED:
        answer = PLACERS[name]().run(problem, budget_seconds=budget_seconds, seed=seed)
        if not isinstance(answer, PlacementResult):
            continue
        alone = answer.seconds if name == "one_device" else alone
        yield {
            "placer": name,
            "milliseconds": 1e3 * answer.seconds,
            "above_bound_percent": 100.0 * (answer.seconds / answer.lower_bound.seconds - 1.0),
            "bound_by": answer.lower_bound.because,
            "one_device_over_this": alone / answer.seconds if math.isfinite(alone) else None,
            "cpu_seconds": answer.cpu_seconds,
        }


def _one_node(cluster: Cluster, most: int) -> Cluster:
    """Return one node of the first group, and so many of its devices."""
    group = cluster.groups[0]
    kind, count = group.devices[0]
    return replace(
        cluster, groups=(replace(group, count=1, hosts=group.hosts[:1], devices=((kind, min(count, most)),)),)
    )


def _modules(budget_seconds: float) -> Iterator[Row]:
    for file in ("4x8-v100", "8x8-h200"):
        cluster = _one_node(load_cluster(CLUSTERS / f"{file}.yaml"), 4)
        (kind,) = cluster.device_counts
        with tempfile.TemporaryDirectory() as folder:
            predicted = Predicted(ProfileDatabase(Path(folder), with_shipped=False), OptimizerSettings())
            for name, (build, inputs) in MODULES.items():
                for trains in (True, False):
                    flow = trace_dataflow(build, inputs, trains=trains, kind="cuda")
                    problem = placement_problem(flow, cluster, predicted)
                    graph = f"{name}, {'training' if trains else 'forward'}"
                    for row in _compared(problem, 0, budget_seconds):
                        shown = {"graph": graph, "operations": len(flow.operators), "devices": f"4 {kind}"}
                        yield {**shown, "message_ratio": None, **row}
