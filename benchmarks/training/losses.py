"""Every model, under schedules with whole and with split backward passes, trained in many ways: whose losses differ?

Ranks are real processes. Beside each training the same steps in one process, from the same weights and data.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.foundation.registry import named
from dejavu.graphs.graph import content_hash
from dejavu.init import Draw
from dejavu.plans import StageConfiguration
from dejavu.plans.schedule import SCHEDULES as ALL_SCHEDULES
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.models import layers_of

SCHEDULES = ("1f1b", "zbv", "interleaved_1f1b")
MICROBATCHES, BATCH = 4, 16
WANTED = 1e-5  # of a float32 loss

_ZOO = {"num_blocks": 6, "width": 32, "num_heads": 4}
_DECODER = {**_ZOO, "num_kv_heads": 2, "feedforward": 64}
_HF = {"num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
_HF |= {"vocab_size": 320, "max_position_embeddings": 64}
_GROUPED = {**_HF, "num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True)
class Family:
    """A model to train.

    Attributes:
        options: of a zoo's model, or the config of one of transformers'.
        tied: options by which its embedding and head are one matrix; None: they cannot be.
    """

    model: str
    options: Mapping[str, Any]
    tied: Mapping[str, Any] | None = None

    def workload(self, folder: Path, options: Mapping[str, Any], **fields: Any) -> Workload:
        given = {**self.options, **options}
        if self.model.startswith("hf:"):
            path = folder / f"{self.model[3:]}-{content_hash(given)}.json"
            path.write_text(json.dumps({"model_type": self.model[3:], **given}))
            fields |= {"model": f"hf:{path}"}
        else:
            fields |= {"model": self.model, "model_options": given}
        return Workload(**fields)


_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
MODELS: dict[str, Family] = {
    "gpt": Family("gpt", _ZOO, {"tied": True}),
    "llama": Family("llama", _DECODER, {"tied": True}),
    "mixtral": Family("mixtral", {**_DECODER, "num_experts": 4}),
    "hf-llama": Family("hf:llama", {**_GROUPED, **_UNTIED}, _TIED),
    "hf-gpt2": Family(
        "hf:gpt2",
        {"n_layer": 6, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 320, **_UNTIED},
        _TIED,
    ),
    "hf-t5": Family(
        "hf:t5",
        {"num_layers": 3, "num_decoder_layers": 3, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
        | {"vocab_size": 320, **_UNTIED},
        _TIED,
    ),
    "hf-mixtral": Family(
        "hf:mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, **_UNTIED}, _TIED
    ),
}


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        first: how the first pipeline rank is spread; the other is one device.
        precision: of the products: what a difference may be follows from it.
    """

    first: StageConfiguration = field(default_factory=one_device)
    fields: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "float32"
    tied: bool = False
    shards: bool = False


WAYS: dict[str, Way] = {
    "uneven cuts": Way(),
    "2 replicas and 1": Way(one_device(data_parallel=2)),
    "2 shards and 1": Way(one_device(tensor_parallel=2), shards=True),
    "2 shards by sequence and 1": Way(one_device(tensor_parallel=2, sequence_parallel=True), shards=True),
    "2 replicas of 2 shards by sequence and 1": Way(one_device(2, 2, sequence_parallel=True), shards=True),
    "2 shards by expert and 1": Way(one_device(tensor_parallel=2, expert_parallel=True), shards=True),
    "2 shards by expert and sequence and 1": Way(
        one_device(tensor_parallel=2, sequence_parallel=True, expert_parallel=True), shards=True
    ),
    "2 replicas of 2 shards by expert with ZeRO 1 and 1": Way(
        one_device(2, 2, zero_level=1, expert_parallel=True), shards=True
    ),
    "2 shards by expert and 1 clipped": Way(
        one_device(tensor_parallel=2, expert_parallel=True),
        fields={"optimizer": OptimizerSettings(learning_rate=0.01, clip_norm=0.1)},
        shards=True,
    ),
    "2 that share a sequence and 1": Way(one_device(data_parallel=2, context_parallel=2)),
    "2 of 2 shards by sequence that share a sequence with ZeRO 1 and 1": Way(
        one_device(2, 2, zero_level=1, sequence_parallel=True, context_parallel=2), shards=True
    ),
    "tied ends on different stages": Way(tied=True),
    "recomputed": Way(one_device(recompute=True)),
    "2 runs of the schedule a step, 2 replicas and 1": Way(one_device(data_parallel=2), fields={"accumulate": 2}),
    "clipped": Way(fields={"optimizer": OptimizerSettings(learning_rate=0.01, clip_norm=0.1)}),
    "bfloat16 under autocast": Way(fields={"mixed_precision": "bfloat16"}, precision="bfloat16"),
    "float16 under autocast": Way(fields={"mixed_precision": "float16"}, precision="float16"),
    "bfloat16 weights, float32 masters": Way(
        fields={"dtype": "bfloat16", "optimizer": OptimizerSettings(learning_rate=0.01, master_weights=True)},
        precision="bfloat16",
    ),
}


@dataclass(frozen=True)
class Case:
    """A training, and where its row belongs."""

    model: str
    schedule: str
    way: str
    job: TrainingJob


def compare(
    models: Sequence[str], schedules: Sequence[str], steps: int, seed: int, ways: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train all; return a row for each and what is worst.

    Args:
        ways: some of `WAYS`; empty: all.

    Raises:
        InputError: a schedule of such a name is not known.
    """
    with tempfile.TemporaryDirectory(prefix="dejavu-losses-") as folder:
        cases = [
            case
            for model in models
            for schedule in schedules
            for way in ways or WAYS
            if (case := case_of(model, schedule, way, steps, seed, Path(folder)))
        ]
        # Torch keeps groups of devices that share layers beyond the end of a process group: launches of their own.
        trained: dict[int, tuple[float, ...]] = {}
        for shards in (False, True):
            places = [k for k, case in enumerate(cases) if WAYS[case.way].shards is shards]
            found = train_all([cases[k].job for k in places]) if places else []
            trained |= {k: one.losses for k, one in zip(places, found, strict=True)}
        singles: dict[str, list[float]] = {}
        rows = []
        for k, case in enumerate(cases):
            key = case.job.workload.model_copy(update={"schedule": "auto"}).model_dump_json()
            if key not in singles:
                singles[key] = train_single(case.job.workload, case.job.draw, range(steps))
            rows.append(_row(case, trained[k], singles[key]))
    worst: dict[str, float] = {}
    for row in rows:
        worst[row["precision"]] = max(worst.get(row["precision"], 0.0), row["loss_difference"])
    summary = {
        "worst_loss_difference": worst,
        "trainings": len(rows),
        "float32_within_1e-5": worst.get("float32", 0.0) <= WANTED,
        "left_out": "what a model does not declare as trained: shards, a split sequence, tied ends",
    }
    return rows, summary


def case_of(model: str, schedule: str, way: str, steps: int, seed: int, folder: Path) -> Case | None:
    """Make one training; None where the model cannot be trained in this way."""
    family, how = MODELS[model], WAYS[way]
    if how.tied and family.tied is None:
        return None
    given = {"optimizer": OptimizerSettings(learning_rate=0.01), **how.fields}
    workload = family.workload(
        folder,
        (family.tied or {}) if how.tied else {},
        sequence_length=24,
        batch_size=BATCH,
        num_microbatches=MICROBATCHES,
        num_steps=steps,
        seed=seed,
        trials=TrialSettings(count=0),
        **given,
    )
    builders = layers_of(workload)
    splits = [one.tensor_parallel for one in builders if one.tensor_parallel and one.tensor_parallel.weights]
    if how.shards and len(splits) < len(builders):
        return None
    if how.first.sequence_parallel and not all(split.sequence for split in splits):
        return None
    parts = [one.tensor_parallel for one in builders]
    if how.first.context_parallel > 1 and not all(one is not None and one.context for one in parts):
        return None
    if how.first.expert_parallel and not any(split.experts for split in splits):
        return None
    bounds = uneven_bounds(len(builders), 2 * named(ALL_SCHEDULES, schedule).stages_per_rank)
    binding = by_hand(schedule, bounds, [how.first, one_device()], MICROBATCHES)
    return Case(model, schedule, way, job_of(workload, binding, steps, Draw("depth_scaled", seed=seed)))


def uneven_bounds(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Cuts that leave one layer to the first stage, and most to the last."""
    return (*range(num_stages), num_layers)


def _row(case: Case, losses: Sequence[float], single: Sequence[float]) -> dict[str, Any]:
    return {
        "model": case.model,
        "schedule": case.schedule,
        "way": case.way,
        "precision": WAYS[case.way].precision,
        "ranks": len(case.job.binding.placements),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "loss_difference": max(abs(a - b) for a, b in zip(losses, single, strict=True)),
    }
