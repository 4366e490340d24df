"""Plans with splits that are found, as if no layer declared any, beside plans with the declared ones.

Both are priced by the same kernels and collectives, as they run: declared splits by rules of what is in parts and what
is whole, found ones by following torch.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dejavu.cluster import load_cluster
from dejavu.foundation.cores import num_cores
from dejavu.graphs.graph import Graph
from dejavu.planning import Planner, PlanRequest, Prices
from dejavu.workload.loader import load_workload

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
MODELS = {
    "t5-11b": "4x8-v100.yaml",
    "bert48": "4x8-v100.yaml",
    "llama3-8b": "8x8-h200.yaml",
}
WANTED_SECONDS = 30.0  # cold


class Undeclared(Prices):
    """The prices of a model whose layers declare no split."""

    def _captured(self, microbatch_size: int) -> Graph:
        graph = super()._captured(microbatch_size)
        return replace(graph, layers=tuple(replace(layer, tensor_parallel=None) for layer in graph.layers))


def measure(models: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Plan each model twice; wall seconds are from its captured layers to the plan."""
    rows, summary = list[dict[str, Any]](), dict[str, Any]()
    for name in models:
        found = {kind.__name__: _planned(name, kind) for kind in (Prices, Undeclared)}
        declared, own = found["Prices"], found["Undeclared"]
        summary[name] = {
            "declared_step_seconds": declared["step_seconds"],
            "found_step_seconds": own["step_seconds"],
            "dearer_percent": 100 * (own["step_seconds"] / declared["step_seconds"] - 1),
            "wall_seconds": own["wall_seconds"],
            "declared_wall_seconds": declared["wall_seconds"],
        }
        for kind, row in (("declared", declared), ("found", own)):
            rows.append({"model": name, "cluster": MODELS[name].removesuffix(".yaml"), "splits": kind, **row})
    return rows, {"plans": summary}


def _planned(name: str, kind: type[Prices]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dejavu-plans-") as folder:
        request = PlanRequest(load_workload(name), load_cluster(CLUSTERS / MODELS[name]), Path(folder))
        for count in request.counts:
            Prices(request).graph_of(count)  # captured, and kept in the user's cache
        began = time.perf_counter()
        prices = kind(request, num_forks=num_cores())
        choice = Planner(forks=True).plan(request, prices)
        seconds = time.perf_counter() - began
    degrees = Counter(
        stage.configuration.tensor_parallel for stage in choice.plan.stages for _ in range(stage.start, stage.stop)
    )
    return {
        "step_seconds": choice.simulated_seconds,
        "lower_bound_seconds": choice.simulated_lower_bound_seconds,
        "microbatches": choice.plan.num_microbatches,
        "stages": len(choice.plan.stages),
        "layers_by_tp": ", ".join(f"{count} × {degree}" for degree, count in sorted(degrees.items())),
        "wall_seconds": seconds,
    }
