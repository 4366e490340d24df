"""TeraPipe's slices of large decoders, predicted: one sequence through many stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejavu.cluster.catalogue import catalogue
from dejavu.graphs.capture import capture
from dejavu.schedules import best_slices, best_uniform_slices
from dejavu.schedules.slices import slice_seconds
from dejavu.workload.loader import load_workload

WORKLOADS = Path(__file__).parents[2] / "examples" / "workloads"
NUM_UNITS = 64
# model, stages, blocks of a stage
CASES = (("gpt3-175b", 48, 2), ("gpt3-175b", 8, 12), ("llama3-8b", 8, 4))
DEVICES = ("A100-SXM4-80GB", "H200-SXM-141GB")


def slice_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each model, number of stages, device and number of sequences."""
    for name, num_stages, num_blocks in CASES:
        workload = load_workload(WORKLOADS / f"{name}.yaml")
        one = workload.model_copy(update={"batch_size": 1, "num_microbatches": 1})
        layer = capture(one, "cuda").layers[1]
        num_tokens = layer.output_shape[1]
        for device in DEVICES:
            seconds_LL = slice_seconds([layer] * num_blocks, catalogue()[device], num_tokens, NUM_UNITS)
            for sequences in (1, 8):
                best = best_slices(seconds_LL, num_stages, sequences)
                uniform = best_uniform_slices(seconds_LL, num_stages, sequences)
                whole_seconds = (sequences + num_stages - 1) * seconds_LL[NUM_UNITS - 1, 0]
                unit = num_tokens // NUM_UNITS
                yield {
                    "what": "slices",
                    "model": name,
                    "device": device,
                    "stages": num_stages,
                    "sequences": sequences,
                    "tokens": num_tokens,
                    "slices": len(best.lengths),
                    "first_slice_tokens": best.lengths[0] * unit,
                    "last_slice_tokens": best.lengths[-1] * unit,
                    "step_ms": 1e3 * best.seconds,
                    "uniform_ms": 1e3 * uniform.seconds,
                    "whole_ms": 1e3 * whole_seconds,
                    "times_faster_than_whole": whole_seconds / best.seconds,
                    "times_faster_than_uniform": uniform.seconds / best.seconds,
                }
