"""What the campaign asks: three kinds of models in three precisions, sized for a GPU or for a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dejavu.foundation.registry import named
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, allowed_microbatches, default_schedules
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload

NUM_RANKS = 2
NUM_MICROBATCHES = 4
LARGE_MEMORY_BYTES = 40 * 2**30  # from here on microbatches are of full size, otherwise of a quarter
PRECISIONS: dict[str, dict[str, Any]] = {  # the first: weights too; the second: weights and gradients in float32
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"mixed_precision": "float16"},
    "float32": {},  # the last, because it takes longest
}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "gpt": {
        "model_options": {"num_blocks": 6, "width": 1024, "num_heads": 16},
        "synthetic": SyntheticSettings(num_classes=16_384),
        "sequence_length": 1024,
        "batch_size": 32,
    },
    "llama": {
        "model_options": {"num_blocks": 6, "width": 1024, "num_heads": 16, "num_kv_heads": 4, "feedforward": 2816},
        "synthetic": SyntheticSettings(num_classes=16_384),
        "sequence_length": 1024,
        "batch_size": 32,
    },
    "cnn": {
        "model_options": {"num_blocks": 8, "width": 256},
        "synthetic": SyntheticSettings(num_classes=1000, image_shape=(3, 64, 64)),
        "batch_size": 64,  # messages of 34 to 67 MB go between two ranks
    },
}
IN_REHEARSAL: dict[str, dict[str, Any]] = {
    "gpt": {
        "model_options": {"num_blocks": 6, "width": 64, "num_heads": 4},
        "synthetic": SyntheticSettings(num_classes=256),
        "sequence_length": 64,
        "batch_size": 8,
    },
    "llama": {
        "model_options": {"num_blocks": 6, "width": 64, "num_heads": 4, "num_kv_heads": 2, "feedforward": 176},
        "synthetic": SyntheticSettings(num_classes=256),
        "sequence_length": 64,
        "batch_size": 8,
    },
    "cnn": {
        "model_options": {"num_blocks": 8, "width": 16},
        "synthetic": SyntheticSettings(num_classes=10, image_shape=(3, 16, 16)),
        "batch_size": 8,
    },
}


@dataclass(frozen=True)
class Question:
    """A model in a precision."""

    model: str
    precision: str
    workload: Workload

    def __str__(self) -> str:
        return f"{self.model} in {self.precision}"

    def whole(self, num_layers: int, device_type: str) -> Plan:
        """Return the plan of one rank with all layers."""
        stage = Stage(0, num_layers, StageConfiguration(device_type))
        return Plan((stage,), "1f1b", self.workload.num_microbatches)

    def plans(self, num_layers: int, device_type: str) -> Iterator[Plan]:
        """Yield a plan of `NUM_RANKS` ranks under each schedule that the planner considers, with even cuts."""
        how, count = StageConfiguration(device_type), self.workload.num_microbatches
        for name in default_schedules():
            stages = NUM_RANKS * named(SCHEDULES, name).stages_per_rank
            if stages > num_layers or not allowed_microbatches(name, stages, count):
                continue
            ends = [num_layers * k // stages for k in range(stages + 1)]
            yield Plan(tuple(Stage(a, b, how) for a, b in pairwise(ends)), name, count)


def questions(memory_bytes: int, *, rehearsal: bool) -> tuple[Question, ...]:
    """Return every question, precision by precision."""
    sizes = IN_REHEARSAL if rehearsal else ON_A_GPU
    quarter = not rehearsal and memory_bytes < LARGE_MEMORY_BYTES
    return tuple(
        Question(model, precision, _workload(model, sizes[model], PRECISIONS[precision], quarter=quarter))
        for precision in PRECISIONS
        for model in sizes
    )


def _workload(model: str, size: dict[str, Any], precision: dict[str, Any], *, quarter: bool) -> Workload:
    return Workload(
        model=model,
        data="synthetic",
        num_microbatches=NUM_MICROBATCHES,
        optimizer=OptimizerSettings(learning_rate=1e-4),
        trials=TrialSettings(count=0),
        **{**size, "batch_size": size["batch_size"] // (4 if quarter else 1)},
        **precision,
    )
