"""Published trainings beside what this project predicts of them: tokens a second, MFU, memory.

    python -m benchmarks.published --json published.json
    python -m benchmarks.published --plans --json published-plans.json

Predicted: the source's model, devices and plan, by the costs that are shipped; no number was fitted on these rows.
Attention is priced as each source had it: of Megatron-LM's rows written out, two products with softmax and dropout
between; where tensor-parallel devices sent beside their products (`async`), as of NVIDIA's of 2024 and half of
torchtitan's of 2025, they do here. What differs, and is not corrected: other kernels that Megatron fused, and dropout
elsewhere; memory is that of this project's runtime, in which torch's pipeline keeps a step's messages, and whose tensor
parallelism keeps whole inputs on each device. `formulas_percent` is how far the formulas of
`benchmarks.megatron` are off, which know Megatron's kernels.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report_table
from benchmarks.megatron.formulas import MegatronIteration
from benchmarks.megatron.iteration import IterationPricer
from benchmarks.published import mpt
from benchmarks.published.best_plans import EVERYTHING, rows_of
from benchmarks.published.predicting import Prediction, predict
from benchmarks.published.trainings import KORTHIKANTI, MEGATRON, TRAININGS, Training
from dejavu.foundation.errors import InputError


def main(
    only: Annotated[str, typer.Option(help="rows whose name or source has this word")] = "",
    plans: Annotated[bool, typer.Option(help="the planner's best plans beside the sources' own")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Every published training, as it was."""
    report_table(lambda: run_plans(only) if plans else run(only), json_path)


def chosen(only: str) -> list[Training]:
    """Return the trainings whose name or source has this word."""
    return [training for training in TRAININGS if only.lower() in f"{training.name} {training.source}".lower()]


def run(only: str = "") -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """The table; `only`: of the rows whose name or source has this word."""
    found = [(training, predict(training)) for training in chosen(only)]
    rows = [
        row_of(training, one, alone=len(predictions) == 1) for training, predictions in found for one in predictions
    ]
    compared = [row for row in rows if row["difference_percent"] is not None]
    by_formulas = [abs(row["formulas_percent"]) for row in compared if row["formulas_percent"] is not None]
    if not compared:
        raise InputError(f"no row of a published training has {only!r} in its name or source and can be compared")
    worst = max(compared, key=lambda row: abs(row["difference_percent"]))
    return (
        "Published trainings, and what is predicted of them",
        rows,
        {
            "compared": len(compared),
            "median_error_percent": statistics.median(abs(row["difference_percent"]) for row in compared),
            "worst_error_percent": worst["difference_percent"],
            "worst": worst["training"],
            "by_source": _by_source(compared),
            "median_error_of_formulas_percent": statistics.median(by_formulas) if by_formulas else None,
            "partly_recomputed_outside_percent": {
                f"{training.name} on {training.num_devices}": outside_percent(training, predictions)
                for training, predictions in found
                if len(predictions) > 1
            },
        },
    )


def run_plans(only: str = "") -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """The table of best plans, MosaicML's trainings left out: all of FSDP alone, and a hundred of them.

    Raises:
        InputError: no other training has the word in its name or source.
    """
    trainings = [training for training in chosen(only) if training.source != mpt.SOURCE]
    if not trainings:
        raise InputError(f"no row of a published training but MosaicML's has {only!r} in its name or source")
    rows = [row for training in trainings for row in rows_of(training)]
    like = [row for row in rows if row["allowed"] != EVERYTHING]
    same = sum(row["same_shape"] for row in like)
    return "Best plans beside published ones", rows, {"trainings": len(like), "same_shape": same}


def _by_source(compared: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Errors of each source's trainings on each type of device, and which sign they have on the mean."""
    groups: dict[str, list[float]] = {}
    for row in compared:
        device = row["devices"].split()[1]
        groups.setdefault(f"{row['source']}, {device}", []).append(row["difference_percent"])
    return {
        name: {
            "compared": len(found),
            "median_error_percent": statistics.median(map(abs, found)),
            "worst_error_percent": max(found, key=abs),
            "mean_percent": statistics.mean(found),
        }
        for name, found in groups.items()
    }


def outside_percent(training: Training, predictions: list[Prediction]) -> float:
    """How far the nearer of two predictions is off where the source's figure is not between them, else 0."""
    tokens, said = [one.tokens_per_second for one in predictions], training.tokens_per_second
    return 100.0 * (min(max(said, min(tokens)), max(tokens)) / said - 1.0)


def row_of(training: Training, found: Prediction, *, alone: bool) -> dict[str, Any]:
    """A row; there is a difference only where the source's training is the one that was predicted.

    Args:
        alone: there is no other prediction of the same training.
    """
    beside = " async" if training.beside_products else ""
    degrees = (training.tensor_parallel, training.pipeline_parallel, training.data_parallel)
    zero = f" ZeRO-{training.zero_level}" if training.zero_level else ""
    shared = f", sequence in {training.context_parallel}" if training.context_parallel > 1 else ""
    chunks = f", {training.chunks} stages each" if training.chunks > 1 else ""
    said, predicted = training.tokens_per_second, found.tokens_per_second
    return {
        "training": training.name,
        "devices": f"{training.num_devices} {training.device.name}",
        "tp_pp_dp": "·".join(map(str, degrees)) + beside + shared + chunks + zero,
        "microbatch": found.microbatch_size,
        "attention": training.attention,
        "recomputed": ("all" if found.recompute else "none") + ("" if alone else " (source: some)"),
        "tokens_s_gpu": said,
        "predicted": predicted,
        "difference_percent": 100.0 * (predicted / said - 1.0) if training.comparable and alone else None,
        "step_s": training.step_seconds(said),
        "predicted_step_s": found.step_seconds,
        "mfu_percent": training.utilization_percent(said),
        "predicted_mfu_percent": training.utilization_percent(predicted),
        "gib": training.memory_gib,
        "predicted_gib": found.memory_gib,
        "fits": "yes" if found.fits else "no",
        "formulas_percent": _by_formulas(training, found),
        "source": training.source + ("" if training.comparable else ", products in 8 bits"),
    }


def _by_formulas(training: Training, found: Prediction) -> float | None:
    """How far Megatron's formulas are off in tokens a second; None: the training is not Megatron's."""
    if training.source not in (MEGATRON, KORTHIKANTI):
        return None
    options = training.model.options
    seconds = (
        IterationPricer()
        .price(
            MegatronIteration(
                num_heads=options["num_heads"],
                hidden_size=options["width"],
                num_layers=options["num_blocks"],
                sequence_length=training.model.sequence_length,
                tensor_parallel=training.tensor_parallel,
                data_parallel=training.data_parallel,
                pipeline_parallel=training.pipeline_parallel,
                model_chunks=training.chunks,
                microbatch_size=found.microbatch_size,
                global_batch_size=training.batch_size,
                recompute=found.recompute,
            )
        )
        .seconds
    )
    return 100.0 * (training.step_seconds(training.tokens_per_second) / seconds - 1.0)


if __name__ == "__main__":
    typer.run(main)
