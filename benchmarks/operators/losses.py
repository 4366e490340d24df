"""Trainings whose layers are split as was found, whatever they declare: whose losses differ from one process's?

Devices have hardly any memory here, so a byte is dear and everything that can be split is.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.init import Draw
from dejavu.planning.candidates import splits_of
from dejavu.planning.request import PlanRequest
from dejavu.planning.shardings import FoundSplits
from dejavu.plans import StageConfiguration
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.models import layers_of

DEVICE, LEAST_BYTES = "V100-SXM2-16GB", 1_000
WANTED = 1e-5  # of a float32 loss
STEPS, DRAW = 3, Draw("xavier", seed=7)
LEARNING_RATES = {"vgg": 1e-4}  # with the others' its loss is 5e13 after a step, on one device, too

_TEXT = {"data": "synthetic", "synthetic": {"num_classes": 50}, "sequence_length": 16}
_SMALL = {"num_blocks": 2, "width": 32, "num_heads": 4}
_HF = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_HF |= {"intermediate_size": 48, "vocab_size": 320, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "own module": {"model": "tests.own_models:wide_stack", "data": "digits"},
    "gpt": {"model": "gpt", "model_options": _SMALL, **_TEXT},
    "bert": {"model": "bert", "model_options": _SMALL, **_TEXT},
    "t5": {"model": "t5", "model_options": {**_SMALL, "num_blocks": 1, "head_width": 8, "feedforward": 64}, **_TEXT},
    "mixtral": {"model": "mixtral", "model_options": {**_SMALL, "num_kv_heads": 4}, **_TEXT},
    "vgg": {"model": "vgg", "data": "synthetic", "synthetic": {"num_classes": 10, "image_shape": (3, 32, 32)}},
    "hf:llama": _HF,
    "hf:qwen3": _HF,
    "hf:gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 300},
}
SPREADS: dict[str, StageConfiguration] = {
    "2 devices": one_device(1, 2),
    "4 devices": one_device(1, 4),
    "2 replicas of 2": one_device(2, 2),
}


def workload_of(name: str, folder: Path) -> Workload:
    """Return a small training of one of the models."""
    fields = dict(MODELS[name])
    if name.startswith("hf:"):
        path = folder / f"{name.removeprefix('hf:')}.json"
        path.write_text(json.dumps({"model_type": name.removeprefix("hf:"), **fields}))
        fields = {"model": f"hf:{path}", "sequence_length": 16}
    return Workload.model_validate(
        {
            **fields,
            "batch_size": 8,
            "num_microbatches": 2,
            "num_steps": STEPS,
            "optimizer": OptimizerSettings(learning_rate=LEARNING_RATES.get(name, 1e-2), clip_norm=0.5),
            "trials": TrialSettings(count=0),
        }
    )


def found_job(workload: Workload, schedule: str, bounds: Sequence[int], ranks: Sequence[StageConfiguration]) -> Any:
    """Return a training under found splits, declarations left out of account."""
    group = NodeGroup("g", 1, (), ((DEVICE, max(one.num_devices for one in ranks)),), Link(150e9, 5e-6))
    kind = replace(catalogue()[DEVICE], memory_bytes=LEAST_BYTES)
    cluster = Cluster("losses", (group,), {DEVICE: kind}, {("g", "g"): Link(25e9 / 8, 25e-6)})

    @cache
    def undeclared(microbatch_size: int) -> Graph:
        graph = capture(workload.model_copy(update={"num_microbatches": workload.run_size // microbatch_size}))
        return replace(graph, layers=tuple(replace(layer, tensor_parallel=None) for layer in graph.layers))

    with tempfile.TemporaryDirectory() as folder:
        database = ProfileDatabase(Path(folder))
        found = FoundSplits(PlanRequest(workload, cluster, Path(folder)), database, undeclared)
        binding = by_hand(schedule, bounds, ranks, workload.num_microbatches)
        splits = splits_of(
            binding.plan, lambda size: found.added(undeclared(size)), workload.run_size // workload.num_microbatches
        )
    return job_of(workload, replace(binding, plan=replace(binding.plan, splits=splits)), STEPS, DRAW)


def difference(job: TrainingJob, losses: Sequence[float]) -> float:
    """Return the largest difference between these losses and those of one process."""
    expected = train_single(job.workload, job.draw, range(STEPS))
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def measure(models: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train each model in each way, all trainings of as many ranks in one launch."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        workloads = {name: workload_of(name, Path(folder)) for name in models}
        for spread, configuration in SPREADS.items():
            jobs = {
                name: found_job(one, "1f1b", (0, len(layers_of(one))), [configuration])
                for name, one in workloads.items()
            }
            for (name, job), done in zip(jobs.items(), train_all(list(jobs.values())), strict=True):
                split = sum(len(one.weights) for one in job.binding.plan.splits)
                apart = difference(job, done.losses)
                rows.append({"model": name, "spread": spread, "weights_split": split, "loss_difference": apart})
    return rows, {"worst_loss_difference": max(row["loss_difference"] for row in rows), "wanted": WANTED}
