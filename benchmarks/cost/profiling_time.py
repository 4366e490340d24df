"""How long predicting the costs of T5-11B on 4 × 8 V100 takes, against profiling every stage on that very cluster.

The cluster is not here, so the profiling time is an estimate, and each of its assumptions favours the profiler: no
compilation, no loading of weights, no failed runs, every stage on n devices n times as fast as on one, all 32 devices
always busy, and as few runs as Alpa's profiler makes. Only stages whose weights, gradients, optimizer state and one
microbatch of activations fit into their devices are counted. Predicting is processor time on this machine; beside it
goes what profiling each distinct layer once would take, which is all that a plan by sums over layers needs.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost.stage_memory import fixed_bytes
from dejavu.cluster import load_cluster
from dejavu.cost import cost_table, sources
from dejavu.cost.memory.layers import layer_activation_bytes
from dejavu.graphs.capture import capture
from dejavu.profiles import ProfileDatabase
from dejavu.workload import Workload

CLUSTER = """
nodes: [{name: v100, count: 4, devices: {type: V100-SXM2-16GB, count: 8}}]
links: {default: {bandwidth: 25 Gbit/s, latency: 20 us}}
"""
WORKLOAD = {
    "model": "t5",
    "model_options": {"num_blocks": 24, "width": 1024, "num_heads": 128, "head_width": 128, "feedforward": 65536},
    "data": "synthetic",
    "synthetic": {"num_classes": 32128},
    "sequence_length": 1024,
    "batch_size": 64,
    "num_microbatches": 64,
    "trials": {"count": 0},
}
SUBMESHES = (1, 2, 4, 8, 16, 24, 32)  # devices: powers of two in a node, then whole nodes
WARMUPS, REPEATS = 1, 3


def run() -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """A row for each submesh, the two ways to profile, and the prediction."""
    workload = Workload.model_validate(WORKLOAD)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(CLUSTER)
        cluster, database = load_cluster(file), ProfileDatabase(Path(folder) / "profiles_db")
        started = time.process_time()
        graph = capture(workload, cluster.kind)
        captured_seconds = time.process_time() - started
        started = time.process_time()
        table = cost_table(graph, cluster, sources(database, workload.optimizer))
        priced_seconds = time.process_time() - started
    (name,), devices = table.device_types, cluster.num_devices
    ends = np.concatenate([[0.0], np.cumsum((table.forward.seconds_LD + table.backward.seconds_LD)[:, 0])])
    held_L = [
        fixed_bytes(layer.parameter_bytes, workload.optimizer) + layer_activation_bytes(layer) for layer in graph.layers
    ]
    held = np.concatenate([[0.0], np.cumsum(held_L)])
    capacity_bytes = cluster.device_types[name].memory_bytes
    first, last = np.triu_indices(len(ends), k=1)
    rows: list[dict[str, Any]] = []
    for submesh in SUBMESHES:
        fits = (held[last] - held[first]) <= submesh * capacity_bytes
        device_seconds = (WARMUPS + REPEATS) * float((ends[last] - ends[first])[fits].sum())
        rows.append(
            {
                "way": f"profile every stage on {submesh} devices",
                "stages": int(fits.sum()),
                "device_seconds": device_seconds,
                "seconds": device_seconds / devices,
            }
        )
    stages_seconds = sum(row["seconds"] for row in rows)
    distinct = {layer.signature: position for position, layer in enumerate(graph.layers)}
    layer_seconds = (WARMUPS + REPEATS) * sum(ends[k + 1] - ends[k] for k in distinct.values())
    predicted_seconds = captured_seconds + priced_seconds
    rows += [
        {"way": "profile every stage, in all", "stages": sum(row["stages"] for row in rows), "seconds": stages_seconds},
        {"way": "profile each distinct layer on one device", "stages": len(distinct), "seconds": layer_seconds},
        {"way": "predict: capture", "seconds": captured_seconds},
        {"way": "predict: price every layer", "stages": len(graph.layers), "seconds": priced_seconds},
    ]
    summary = {
        "predicted_in_cpu_seconds": predicted_seconds,
        "profiled_in_seconds_estimate": stages_seconds,
        "layers_profiled_in_seconds_estimate": layer_seconds,
        "distinct_layers": len(distinct),
        "times_faster": stages_seconds / predicted_seconds,
        "runs_of_each_stage": WARMUPS + REPEATS,
        "parameters": graph.num_parameters,
        "assumed_for_the_profiler": "no compilation, no weights to load, perfect scaling, all devices busy",
    }
    return f"T5-11B on 4 × 8 {name}: predicting against profiling", rows, summary
