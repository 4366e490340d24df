"""Iteration times of Megatron on A100s: predicted from kernels, collectives and the pipeline, against a file of times.

Times of one setting that lie on a straight line in the number of microbatches to the last bit were computed, not
measured: the title then says so, and an error against them is no error against a machine. A few published, measured
iterations of Megatron-LM stand in the same table.

One number of the predictor was fitted on iteration times, and ships (`A100_HOST_EFFICIENCY`). vTrain's single-node file
decided three more things by their kind, not by a number: that activations which fit are not recomputed, that the queue
of kernels is empty when a layer's pass begins, and that the vocabulary is padded only where tensor parallelism needs
it, so that the logits of the rest miss the tensor cores (`padding`; Megatron's own rule stands in the same table).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.megatron.formulas import IterationError, MegatronIteration
from benchmarks.megatron.iteration import IterationPrice, IterationPricer
from dejavu.foundation.errors import InputError
from dejavu.importers.cells import cells_of, numbers_of

Floats = NDArray[np.float64]
COLUMNS = {
    "global batch": "global_batch_size",
    "micro batch": "microbatch_size",
    "hidden size": "hidden_size",
    "attention heads": "num_heads",
    "# layers": "num_layers",
    "sequence length": "sequence_length",
    "tensor parallelism": "tensor_parallel",
    "data parallelism": "data_parallel",
    "pipeline parallelism": "pipeline_parallel",
}
DEVICES, MILLISECONDS = "# GPUs", "iteration time (ms)"
# Bang et al., MICRO 2024, abstract: their own error on one node, and on clusters of up to 512 A100.
VTRAIN_MAPE_PERCENT = {"one node": 8.37, "several nodes": 14.73}
TUNED = "host efficiency, and when vocabularies are padded and activations recomputed, to vTrain's single-node file"
EFFICIENCIES = np.arange(0.59, 0.76, 0.01)  # what a calibration tries
SEEDS = range(5)
LEAST_OF_PEAK = 0.1  # of the seconds at the peak of an A100: no peak in the catalogue is ten times as high
LONGEST_MILLISECONDS = 86_400_000.0  # a day: no iteration, but a mistake of the unit
# Points of one line differ from it by rounding alone when they were computed, by 1e-3 or more when they were measured.
COMPUTED_SPREAD = 1e-9


@dataclass(frozen=True)
class Published:
    """An iteration of Megatron-LM outside the file, recalled from Korthikanti et al., 2022, not checked with the paper.

    Full recomputation, no sequence parallelism, sequences of 2,048 tokens, vocabulary 51,200, A100-SXM4-80GB.
    """

    name: str
    iteration: MegatronIteration
    seconds: float


def _published(name: str, seconds: float, **settings: Any) -> Published:
    common: dict[str, Any] = {"sequence_length": 2048, "tensor_parallel": 8, "data_parallel": 1}
    return Published(name, MegatronIteration(recompute=True, **common, **settings), seconds)


PUBLISHED = (
    _published(
        "22B", 1.42, num_heads=64, hidden_size=6144, num_layers=48, pipeline_parallel=1,
        microbatch_size=4, global_batch_size=4,
    ),
    _published(
        "175B", 18.13, num_heads=96, hidden_size=12288, num_layers=96, pipeline_parallel=8, model_chunks=3,
        microbatch_size=1, global_batch_size=64,
    ),
    _published(
        "530B", 49.05, num_heads=128, hidden_size=20480, num_layers=105, pipeline_parallel=35, model_chunks=3,
        microbatch_size=1, global_batch_size=280,
    ),
    _published(
        "1T", 94.42, num_heads=160, hidden_size=25600, num_layers=128, pipeline_parallel=64,
        microbatch_size=1, global_batch_size=512,
    ),
)  # fmt: skip


def read(path: Path) -> tuple[list[MegatronIteration], Floats]:
    """The iterations of a file and their seconds; further columns are ignored.

    Raises:
        InputError: no row, a missing column, or a value that no iteration has; the message names row and column.
    """
    table, lines = _table(path)
    wanted = [DEVICES, *COLUMNS, MILLISECONDS]
    missing = [column for column in wanted if column not in table]
    if missing:
        raise InputError(f"{path}: no column {missing[0]!r}; wanted {', '.join(wanted)}")
    if table.empty:
        raise InputError(f"{path}: no row; wanted one or more iterations")
    numbers = pd.DataFrame({column: numbers_of(table[column]) for column in wanted})
    for column, values in numbers.items():
        whole = column == MILLISECONDS or values % 1 == 0
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0) & (values < LONGEST_MILLISECONDS) & whole))
        if len(bad):
            kind = "a time" if column == MILLISECONDS else "a whole number"
            (cell,) = cells_of(table[column].iloc[bad[:1]])
            found = "missing" if cell is None else repr(cell) if isinstance(cell, str) else f"{cell:g}"
            raise InputError(
                f"{path}: row {lines[bad[0]]}, {column!r} is {found}; "
                f"wanted {kind} above 0 and below {LONGEST_MILLISECONDS:,.0f}"
            )
    iterations = [_iteration(path, line, row) for line, (_, row) in zip(lines, numbers.iterrows(), strict=True)]
    return iterations, numbers[MILLISECONDS].to_numpy(dtype=float) / 1e3


def _table(path: Path) -> tuple[pd.DataFrame, list[int]]:
    """The cells of a CSV file, and each row's line in it; blank lines are no rows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = pd.read_csv(io.StringIO(text), index_col=False, skipinitialspace=True)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{path} is no CSV file ({' '.join(str(error).split())}); wanted one iteration a line"
        ) from error
    table.columns = [str(column).strip() for column in table.columns]
    twice = table.columns[table.columns.duplicated()]
    if len(twice):
        raise InputError(f"{path}: column {twice[0]!r} stands twice; wanted it once")
    lines = [number for number, line in enumerate(text.splitlines(), start=1) if line.strip()][1:]
    return table, lines if len(lines) == len(table) else list(range(2, len(table) + 2))


def _iteration(path: Path, line: int, row: Mapping[str, Any]) -> MegatronIteration:
    try:
        settings: dict[str, Any] = {name: int(row[column]) for column, name in COLUMNS.items()}
        iteration = MegatronIteration(**settings)
    except IterationError as error:
        raise InputError(f"{path}: row {line}: {error}") from None
    if iteration.num_devices != row[DEVICES]:
        raise InputError(
            f"{path}: row {line}, {DEVICES!r} is {row[DEVICES]:g}; wanted the product of the three degrees, "
            f"{iteration.num_devices}"
        )
    return iteration


def in_one_order(iterations: Sequence[MegatronIteration], seconds: Floats) -> tuple[list[MegatronIteration], Floats]:
    """Sort iterations by their settings, and equal ones by their seconds."""
    order = sorted(range(len(iterations)), key=lambda row: (astuple(iterations[row]), seconds[row]))
    return [iterations[row] for row in order], seconds[order]


def as_run(iteration: MegatronIteration, pricer: IterationPricer, padding: str = "where_needed") -> MegatronIteration:
    """With what the file does not say: recomputation where memory asks for it, and how the vocabulary is padded."""
    if padding == "where_needed" and iteration.tensor_parallel == 1:
        iteration = replace(iteration, vocabulary_multiple=1)
    return replace(iteration, recompute=iteration.fullest_stage_bytes > pricer.device.memory_bytes)


def errors(predicted: Floats, seconds: Floats) -> dict[str, Any]:
    """The columns that all ways to predict share."""
    ape = 100.0 * np.abs(predicted / seconds - 1.0)
    ranks = pd.DataFrame({"predicted": predicted, "measured": seconds}).rank().corr().iloc[0, 1]
    return {
        "rows": len(seconds),
        "mape_percent": float(ape.mean()),
        "median_ape_percent": float(np.median(ape)),
        "p90_ape_percent": float(np.percentile(ape, 90)),
        "bias_percent": float(100.0 * np.mean(predicted / seconds - 1.0)),
        "spearman": float(ranks) if np.isfinite(ranks) else None,
    }


def best_scale(work: Floats, seconds: Floats) -> float:
    """The factor of `work` with the least mean absolute percentage error: a weighted median."""
    ratio, order = seconds / work, np.argsort(seconds / work)
    weight = np.cumsum((1.0 / ratio)[order])
    return float(ratio[order][np.searchsorted(weight, weight[-1] / 2)])


def line_spread(iterations: Sequence[MegatronIteration], seconds: Floats) -> float | None:
    """How far times of one setting leave a straight line in microbatches, relative; None: no such rows.

    A line says something of three numbers of microbatches or more: it goes through any two, repeats of them included.
    """
    lines: dict[MegatronIteration, list[tuple[int, float]]] = {}
    for iteration, time in zip(iterations, seconds, strict=True):
        setting = replace(iteration, global_batch_size=iteration.microbatch_size * iteration.data_parallel)
        lines.setdefault(setting, []).append((iteration.num_microbatches, time))
    spreads = []
    for points in (np.array(sorted(set(points))) for points in lines.values()):
        if len(np.unique(points[:, 0])) < 3:
            continue
        fit = np.polyval(np.polyfit(points[:, 0], points[:, 1], 1), points[:, 0])
        spreads.append(np.abs(fit / points[:, 1] - 1.0).max())
    return float(max(spreads)) if spreads else None


def _calibrated(
    by_efficiency: Sequence[Floats], groups: NDArray[np.int64], predicted: Floats, seconds: Floats
) -> list[dict[str, Any]]:
    """A random tenth calibrates, the other nine tenths test: the one efficiency, and then a factor a group too."""
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in SEEDS:
        order = np.random.default_rng(seed).permutation(len(seconds))
        tenth, rest = np.split(order, [max(1, len(order) // 10)])
        if not len(rest):
            return []
        error = [np.mean(np.abs(times[tenth] / seconds[tenth] - 1.0)) for times in by_efficiency]
        again = by_efficiency[int(np.argmin(error))]
        factors = np.ones(len(seconds))
        for group in np.unique(groups[tenth]):
            here = tenth[groups[tenth] == group]
            factors[groups == group] = best_scale(again[here], seconds[here])
        for name, times in (
            ("as shipped, same rows", predicted),
            ("one efficiency from a tenth", again),
            ("and a factor for each tensor degree and pace from a tenth", again * factors),
        ):
            found.setdefault(name, []).append(errors(times[rest], seconds[rest]))
    return [
        {"way": name, "rows": tests[0]["rows"], "seeds": len(tests)}
        | {key: float(np.mean([test[key] for test in tests])) for key in ("mape_percent", "median_ape_percent")}
        for name, tests in found.items()
    ]


def _best_efficiency(by_efficiency: Sequence[Floats], seconds: Floats) -> float:
    """Among those tried; told beside the shipped one, and used by no row that is called shipped."""
    return float(EFFICIENCIES[int(np.argmin([np.mean(np.abs(times / seconds - 1.0)) for times in by_efficiency]))])


def run(path: Path) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """The table of `--iterations`.

    Raises:
        InputError: as `read`; or the times are of another unit, as half of them are far below what a device can do.
    """
    iterations, seconds = in_one_order(*read(path))  # a tenth that is drawn is the same whatever the rows' order
    pricer = IterationPricer()
    peak = pricer.device.peak_flops_per_second["float16"]
    work = np.array([iteration.model_flops / iteration.num_devices / peak for iteration in iterations])
    if np.median(seconds / work) < LEAST_OF_PEAK:
        raise InputError(
            f"{path}: half of the times or more are below {LEAST_OF_PEAK:g} of what an iteration takes at the peak of "
            f"{pricer.device.name}; is {MILLISECONDS!r} in milliseconds?"
        )
    settings = [as_run(iteration, pricer) for iteration in iterations]
    prices = [pricer.price(iteration) for iteration in settings]
    predicted = _seconds(prices)
    padded = [as_run(iteration, pricer, "always") for iteration in iterations]
    ways = {
        "ours, shipped efficiency": predicted,
        "ours, vocabulary always padded": _seconds([pricer.price(iteration) for iteration in padded]),
        "ours, host efficiency 1 (nothing fitted)": _seconds(
            [replace(pricer, host_efficiency=1.0).price(iteration) for iteration in settings]
        ),
    }
    ways["FLOPs / peak, its one efficiency fitted on this file"] = work * best_scale(work, seconds)

    rows: list[dict[str, Any]] = [{"way": name} | errors(times, seconds) for name, times in ways.items()]
    nodes = "several nodes" if max(it.num_devices for it in iterations) > pricer.devices_per_node else "one node"
    rows.append(
        {"way": f"vTrain as published against measured times, {nodes}", "mape_percent": VTRAIN_MAPE_PERCENT[nodes]}
    )
    by_efficiency = [
        _seconds([replace(pricer, host_efficiency=float(e)).price(it) for it in settings]) for e in EFFICIENCIES
    ]
    pace = [2 * it.tensor_parallel + any(price.host_bound) for it, price in zip(settings, prices, strict=True)]
    calibrations = _calibrated(by_efficiency, np.array(pace), predicted, seconds)
    rows += calibrations
    classes = np.array([(it.tensor_parallel, it.data_parallel, it.pipeline_parallel) for it in iterations])
    for tp, dp, pp in sorted(set(map(tuple, classes.tolist()))):
        here = (classes == (tp, dp, pp)).all(axis=1)
        rows.append({"way": f"ours, tp {tp} dp {dp} pp {pp}"} | errors(predicted[here], seconds[here]))
    for case in PUBLISHED:
        found = pricer.price(case.iteration).seconds
        rows.append(
            {
                "way": f"ours, Korthikanti et al. (recalled) {case.name} on {case.iteration.num_devices} A100",
                "rows": 1,
                "mape_percent": 100.0 * abs(found / case.seconds - 1.0),
                "bias_percent": 100.0 * (found / case.seconds - 1.0),
            }
        )
    spread = line_spread(iterations, seconds)
    summary = {key: rows[0][key] for key in ("mape_percent", "median_ape_percent", "spearman", "rows")} | {
        "vtrain_mape_percent": VTRAIN_MAPE_PERCENT[nodes],
        "flops_over_peak_mape_percent": rows[3]["mape_percent"],
        "always_padded_mape_percent": rows[1]["mape_percent"],
        "nothing_fitted_mape_percent": rows[2]["mape_percent"],
        "calibrated_mape_percent": {row["way"]: row["mape_percent"] for row in calibrations},
        "host_efficiency": pricer.host_efficiency,
        "tuned": TUNED,
        "best_host_efficiency_on_this_file": _best_efficiency(by_efficiency, seconds),
        "recomputed_rows": sum(iteration.recompute for iteration in settings),
        "published_mape_percent": float(np.mean([row["mape_percent"] for row in rows[-len(PUBLISHED) :]])),
        "line_spread": spread,
        "times_look_computed": spread is not None and spread < COMPUTED_SPREAD,
    }
    title = "Iterations: predicted against the file's times"
    return title + (", which look computed, not measured" if summary["times_look_computed"] else ""), rows, summary


def _seconds(prices: Sequence[IterationPrice]) -> Floats:
    return np.array([price.seconds for price in prices])
