"""Predicted steps on mixed clusters: one pipeline, and virtual workers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.operators.shardings import MODELS
from dejavu.cluster import Cluster, load_cluster
from dejavu.planning import Planner, PlanRequest
from dejavu.virtual_workers import NoTeam, Teams
from dejavu.workload import Workload

EXAMPLES = Path("examples/clusters")
BATCH = 256
# HetPipe's own (Park et al., USENIX ATC 2020, table 1): four nodes of four GPUs of one kind, 56 Gbit/s between them.
# Rates are of the makers' data sheets.
HETPIPE = """
name: hetpipe
devices:
  TITAN-V: {kind: cuda, memory: 12 GiB, bandwidth: 653 GB/s, float32: 14.9 TFLOP/s, multiprocessors: 80}
  RTX-2060: {kind: cuda, memory: 6 GiB, bandwidth: 336 GB/s, float32: 6.5 TFLOP/s, multiprocessors: 30}
  P4000: {kind: cuda, memory: 8 GiB, bandwidth: 243 GB/s, float32: 5.3 TFLOP/s, multiprocessors: 14}
nodes:
  - {name: v, count: 1, devices: {type: TITAN-V, count: 4}, link: {bandwidth: 12 GB/s, latency: 8 us}}
  - {name: r, count: 1, devices: {type: TITAN-RTX, count: 4}, link: {bandwidth: 12 GB/s, latency: 8 us}}
  - {name: g, count: 1, devices: {type: RTX-2060, count: 4}, link: {bandwidth: 12 GB/s, latency: 8 us}}
  - {name: q, count: 1, devices: {type: P4000, count: 4}, link: {bandwidth: 12 GB/s, latency: 8 us}}
links:
  default: {bandwidth: 56 Gbit/s, latency: 10 us}
"""
CNN = {
    "model": "wide_resnet",
    "data": "synthetic",
    "synthetic": {"num_classes": 1000, "image_shape": (3, 224, 224)},
}
CASES = (
    *(("vgg19", name) for name in ("hetpipe", "a100-and-t4", "two-generations")),
    *(("wide_resnet", name) for name in ("hetpipe", "a100-and-t4", "two-generations")),
    *(("bert48", name) for name in ("a100-and-t4", "two-generations")),
)


def cluster_of(name: str) -> Cluster:
    """Read one of the examples' clusters, or HetPipe's."""
    if name != "hetpipe":
        return load_cluster(EXAMPLES / f"{name}.yaml")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hetpipe.yaml"
        path.write_text(HETPIPE)
        return load_cluster(path)


def workload_of(name: str) -> Workload:
    given = CNN if name == "wide_resnet" else MODELS[name][0]
    return Workload.model_validate({**given, "batch_size": BATCH, "num_microbatches": 16, "dtype": "float32"})


def rows(budget_seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each model on each cluster. All steps are predicted."""
    for model, name in CASES:
        workload, cluster = workload_of(model), cluster_of(name)
        began = time.perf_counter()
        planner = Planner(forks=True)
        choice = planner.plan(PlanRequest(workload, cluster, budget_seconds=budget_seconds, seed=seed))
        between = time.perf_counter()
        found = Teams(choice, planner).best()
        ended = time.perf_counter()
        row: dict[str, Any] = {
            "model": model,
            "cluster": name,
            "one_pipeline_ms": 1e3 * choice.simulated_seconds,
            "one_pipeline_seconds_to_plan": between - began,
            "seconds_to_plan": ended - between,
        }
        if not isinstance(found, NoTeam):
            row |= {
                "division": found.division.name,
                "workers": len(found.workers),
                "examples": ", ".join(str(one.num_examples) for one in found.workers),
                "virtual_workers_ms": 1e3 * found.step_seconds,
                "of_which_sums_ms": 1e3 * found.sum_seconds,
                "gain": found.speedup,
            }
        yield row
