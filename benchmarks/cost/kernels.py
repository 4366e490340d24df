"""Kernels and whole models on devices that the predictor never saw, beside what NeuSight published for the same.

A device's kernels were measured alone; in a whole model they queue, so that launches hide: whole models are sums of
queued kernels, without the optimizer and without host stalls. NeuSight's own figures are those in the file; where it
has none of a model, `models_beside` compares on the others alone. Of the devices in `neusight_learned_from` they are of
what it was fitted to, while ours never saw the device; `neusight, unseen` in `models_beside` has the other devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.cost.device_table import chosen, device_of, device_types, one_spelling, words
from benchmarks.cost.neusight_models import CONFIG, Program, programs
from dejavu.cluster import DeviceType
from dejavu.cost.kernels.learned import LEAST_SECONDS, MOST_SECONDS, Learned, Prediction, drawn_order
from dejavu.cost.sources.predicted import LEARNED, KernelPrices, summed
from dejavu.foundation.errors import InputError
from dejavu.importers.cells import numbers_of, texts_of
from dejavu.importers.neusight import problems_of
from dejavu.importers.neusight.kernels import SIZE_COLUMNS, kernels_of
from dejavu.importers.sources import check_columns, parquet_columns

Floats = NDArray[np.float64]
MS = 1e-3
SOME_ROWS = 600  # of a device and operation, in each of two draws, to learn from where each device is left out
# Rows that a data sheet's owner warns of: (words of the device, split, operations). NeuSight's P4 ran hot.
THROTTLED = ((frozenset({"p4"}), "train", ("bmm", "linear", "conv")),)
KERNEL_COLUMNS = ("op", "device", "latency_ms")  # of kernels.parquet; and those of each operation's size
MODEL_COLUMNS = (  # of models.parquet
    *("kind", "device", *CONFIG, "num_layer", "e2e_ms", "fw_ms", "bwall_ms"),
    *("idx", "name", "in_shapes", "out_shape", "op", "fw_ops", "bw_ops", "acc_ops"),
)
# What NeuSight's own predictors learned from (Lee et al., ASPLOS 2025); of AMD's recalled, not checked with the paper.
NEUSIGHT_LEARNED_FROM = (
    *("P4", "P100-PCIE-16GB", "V100-PCIE-32GB", "T4", "A100-PCIE-40GB", "A100-SXM4-40GB"),
    *("MI100", "MI210"),
)
# What was fitted to more than the devices that a table learns from (dejavu/cost/kernels, power.py and features.py).
TUNED = (
    "kernels' times to the devices learned from; before, whatever is left out: what a float32 operation takes of a "
    "board's power at 12 nm to V100 and T4, set when L4's error had been seen, and by an H200 how often wide "
    "multiprocessors issue; usual and most shares of the memory's peak to kernels of ten devices, these among them"
)
PUBLISHED = {"neusight": "pred_neusight_ms", "habitat": "pred_habitat_ms", "published_roofline": "pred_roofline_ms"}


def run(
    kernels: Path, models: Path | None, devices: Path | None, train: str, test: str
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Fit on the kernels of `train`, predict those of `test` and the whole models measured on it.

    With neither, each device of the file is left out in turn and predicted from all others.

    Raises:
        InputError: an option is missing, or a name in `train` or `test` is unknown or unclear.
    """
    if models is None or devices is None:
        raise InputError("--kernels also wants --models F and --devices CSV")
    check_columns(kernels, parquet_columns(kernels, "NeuSight's kernels.parquet"), KERNEL_COLUMNS)
    frame = pd.read_parquet(kernels)
    rows, dropped = usable_rows(frame)
    totals, operators, dropped_models = _read_models(models)
    table = device_types(devices)
    listed = pd.Series([name for text in texts_of(frame["device"]) if (name := text.strip())], dtype=object)
    named = pd.concat([rows["device"], totals["device"], listed])  # those without a usable row too, to say so of them
    spelling = one_spelling(named.unique(), table, devices)
    measured, everywhere = _present(rows["device"], listed), _present(named)
    rows = rows.assign(device=rows["device"].map(spelling))
    totals = totals.assign(device=totals["device"].map(spelling))
    try:
        parts = programs(operators)
    except InputError as error:
        raise InputError(f"{models}: {error}") from error
    said = {"dropped_rows": dropped, "dropped_models": dropped_models, "tuned": TUNED}
    if not train and not test:
        types = {name: device_of(name, table, devices) for name in _present(rows["device"])}
        return _each_left_out(rows, totals, parts, types, said)
    training = list(dict.fromkeys(spelling[name] for name in chosen(train, measured, "--train")))
    unseen = list(dict.fromkeys(spelling[name] for name in chosen(test, everywhere, "--test")))
    for option, asked, usable in (("train", training, [rows]), ("test", unseen, [rows, totals])):
        if nothing := set(asked).difference(*(one["device"] for one in usable)):
            raise InputError(f"--{option} {', '.join(sorted(nothing))} has no row that can be used{_why(dropped)}")
    both = {words(name) for name in training} & {words(name) for name in unseen}
    if both:
        raise InputError(f"{', '.join(' '.join(sorted(name)) for name in both)} is in --train and in --test")
    learned = fit(rows, {name: device_of(name, table, devices) for name in training}, "benchmark")
    output: list[dict[str, Any]] = []
    inside: list[NDArray[np.bool_]] = []
    unpriced: list[str] = []
    for name in unseen:
        device = device_of(name, table, devices)
        operator_rows, covered = _operators(rows[_is(rows["device"], name)], learned, device)
        model_rows, without = _models(totals[_is(totals["device"], name)], parts, learned, device)
        output += operator_rows + model_rows
        inside += covered
        unpriced += without
    summary = _summary(output, inside) | {
        "trained_on": [device_of(name, table, devices).name for name in training],
        **said,
        "refused": list(learned.notes),
        "models_without_operators": unpriced,
        "priced_as_memory_traffic": sorted({name for part in parts.values() for name in part.as_traffic}),
    }
    return "Kernels and whole models on unseen devices, fp32", output, summary


def _each_left_out(
    rows: pd.DataFrame,
    totals: pd.DataFrame,
    parts: Mapping[tuple[Any, ...], Program],
    types: Mapping[str, DeviceType],
    said: Mapping[str, Any],
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Predict each device from all others, some of whose rows are learned from; all rows of its own are counted."""
    if len(types) < 2:
        raise InputError(
            f"kernels of {', '.join(types) or 'no device'}; wanted two devices or more{_why(said['dropped_rows'])}"
        )
    drawn = rows.iloc[drawn_order(kernels_of(rows), rows["latency_ms"].to_numpy(dtype=float))]
    alike = drawn.groupby([drawn["device"].astype(str), drawn["op"].astype(str)])
    first, last = alike.head(SOME_ROWS), alike.tail(SOME_ROWS)
    output: list[dict[str, Any]] = []
    inside: list[NDArray[np.bool_]] = []
    by_device: dict[str, dict[str, Any]] = {}
    unpriced: list[str] = []
    for name, device in types.items():
        others = {other: one for other, one in types.items() if words(other) != words(name)}
        learned = fit(first, others, "benchmark").averaged(fit(last, others, "benchmark", intervals=False))
        operator_rows, covered = _operators(rows[_is(rows["device"], name)], learned, device)
        model_rows, without = _models(totals[_is(totals["device"], name)], parts, learned, device)
        output += operator_rows + model_rows
        inside += covered
        unpriced += without
        by_device[device.name] = _left_out(model_rows, covered) | {"refused": list(learned.notes)}
    kernels_percent = [
        one["kernels_inside_percent"] for one in by_device.values() if one["kernels_inside_percent"] is not None
    ]
    whole = [one for one in by_device.values() if one["models"]]
    elsewhere = totals["device"][~totals["device"].isin(list(types))]
    summary = _summary(output, inside)
    if kernels_percent:  # of devices, however many rows each has
        summary["coverage"]["kernels_percent"] = float(np.mean(kernels_percent))
    return (
        "Kernels and whole models, fp32, each device left out in turn",
        output,
        summary
        | {
            "left_out": by_device,
            "mean_bias_percent": float(np.mean([one["bias_percent"] for one in whole])) if whole else None,
            "learned_rows_of_a_device_and_operation": {"draws": 2, "of_each": SOME_ROWS},
            **said,
            "models_without_operators": unpriced,
            "models_of_devices_without_kernels": elsewhere.value_counts().to_dict(),
        },
    )


def _left_out(model_rows: Sequence[Mapping[str, Any]], covered: Sequence[NDArray[np.bool_]]) -> dict[str, Any]:
    errors = [row["ours_percent"] for row in model_rows if row["ours_percent"] is not None]
    ranges = [row["high_ms"] / row["low_ms"] for row in model_rows]
    return {
        "kernels_inside_percent": float(100 * np.concatenate(covered).mean()) if covered else None,
        "models": len(model_rows),
        "models_inside": sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in model_rows),
        "mape_percent": float(np.mean(np.abs(errors))) if errors else None,
        "bias_percent": float(np.mean(errors)) if errors else None,
        "range_width_log": float(np.mean(np.log(ranges))) if ranges else None,
    }


def usable_rows(rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, int]]:
    """Without rows that are no float32 kernel, that cannot be true or were throttled; and how many those were."""
    rows = rows.assign(device=[name.strip() for name in texts_of(rows["device"])], op=texts_of(rows["op"]))
    milliseconds = numbers_of(rows["latency_ms"])
    seconds = MS * milliseconds
    operations = rows["op"]
    split = rows["split"].astype(str) if "split" in rows.columns else pd.Series("", index=rows.index)
    throttled = np.zeros(len(rows), dtype=bool)
    for device, part, names in THROTTLED:
        throttled |= (_words_are(rows["device"], device) & (split == part) & operations.isin(names)).to_numpy()
    unknown = sorted(set(operations) - set(SIZE_COLUMNS))
    problems = problems_of(rows)
    no_kernel = (
        np.array([problem is not None for problem in problems], dtype=bool) & operations.isin(SIZE_COLUMNS).to_numpy()
    )
    no_kernel &= np.isfinite(seconds)
    with np.errstate(invalid="ignore"):
        why = {
            "latency not finite": ~np.isfinite(seconds),
            "latency zero or negative": seconds <= 0,
            f"latency outside {LEAST_SECONDS:g} to {MOST_SECONDS:g} s": (seconds > 0)
            & ((seconds < LEAST_SECONDS) | (seconds > MOST_SECONDS)),
            "throttled P4": throttled,
            "no device": ~rows["device"].astype(bool).to_numpy(),
        } | {f"unknown operation {name or '(none)'}": (operations == name).to_numpy() for name in unknown}
    if no_kernel.any():
        first = int(np.flatnonzero(no_kernel)[0])
        why[f"no float32 kernel; the first, row {first}: {problems[first]}"] = no_kernel
    bad, counts = np.zeros(len(rows), dtype=bool), {}
    for reason, mask in why.items():  # a row with several counts for the first
        if fresh := int((mask & ~bad).sum()):
            counts[reason] = fresh
        bad |= mask
    return rows.assign(latency_ms=milliseconds)[~bad], counts


def _why(dropped: Mapping[str, int]) -> str:
    return "".join(f"; {count:,} rows were dropped ({reason})" for reason, count in dropped.items())


def fit(rows: pd.DataFrame, devices: Mapping[str, DeviceType], source: str, *, intervals: bool = True) -> Learned:
    """On the rows of these devices, by the names that the rows use."""
    mine = rows[rows["device"].astype(str).isin(list(devices))]
    names = mine["device"].astype(str)
    seconds = MS * mine["latency_ms"].to_numpy(dtype=float)
    types = [devices[name] for name in names]
    return Learned.fit(kernels_of(mine), types, seconds, source=source, intervals=intervals)


def _read_models(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, int]]:
    """Totals, operators, and how many totals have no time that could be compared."""
    check_columns(path, parquet_columns(path, "NeuSight's models.parquet"), MODEL_COLUMNS)
    frame = pd.read_parquet(path)
    times = [name for name in ("num_layer", "idx", "e2e_ms", "fw_ms", "bwall_ms", *PUBLISHED.values()) if name in frame]
    frame = frame.assign(
        **{name: texts_of(frame[name]) for name in ("kind", "device", "model", "mode", "option")},
        **{name: numbers_of(frame[name]) for name in times},
    )
    totals = frame[frame["kind"] == "total"]
    timed = np.isfinite(totals["e2e_ms"]) & (totals["e2e_ms"] > 0)
    dropped = {"no time above 0": int((~timed).sum())} if not timed.all() else {}
    return totals[timed], frame[frame["kind"] == "op"], dropped


def _present(*columns: pd.Series) -> list[str]:
    """Each device once: by its spelling among the kernels where it has any."""
    found: dict[frozenset[str], str] = {}
    for column in columns:
        for name in dict.fromkeys(column.astype(str)):
            found.setdefault(words(name), name)
    return list(found.values())


def _words_are(column: pd.Series, wanted: frozenset[str]) -> pd.Series:
    names = column.astype(str)
    return names.isin([name for name in names.unique() if words(name) == wanted])


def _is(column: pd.Series, name: str) -> pd.Series:
    return _words_are(column, words(name))


def _operators(
    rows: pd.DataFrame, learned: Learned, device: DeviceType
) -> tuple[list[dict[str, Any]], list[NDArray[np.bool_]]]:
    found, covered = [], []
    for operation, group in rows.groupby(rows["op"].astype(str)):
        measured = MS * group["latency_ms"].to_numpy(dtype=float)
        prediction = learned.predict(kernels_of(group), device)
        inside = (prediction.low_seconds_K <= measured) & (measured <= prediction.high_seconds_K)
        known = prediction.known_K
        if known.any():
            covered.append(inside[known])
        found.append(
            {
                "table": "operator",
                "device": device.name,
                "what": operation,
                "rows": len(group),
                "ours_mape_percent": _mape(prediction.seconds_K, measured),
                "ours_median_percent": _median(prediction.seconds_K, measured),
                "roofline_mape_percent": _mape(prediction.least_seconds_K, measured),
                "coverage_percent": float(100 * inside[known].mean()) if known.any() else None,
                "roofline_only_rows": int((~known).sum()),
            }
        )
    return found, covered


def _models(
    totals: pd.DataFrame, parts: Mapping[tuple[Any, ...], Program], learned: Learned, device: DeviceType
) -> tuple[list[dict[str, Any]], list[str]]:
    found, without = [], []
    for row in totals.to_dict("records"):
        program = parts.get(tuple(row[name] for name in CONFIG))
        label = f"{row['model']} batch {row['batch']}" + (f" {row['option']}" if str(row["option"]) else "")
        if program is None:
            without.append(f"{label} {row['mode']} on {device.name}")
            continue
        prediction = learned.predict(program.kernels, device)
        ours = _passes(prediction.queued_seconds_K, program)
        roofline = sum(_passes(prediction.least_seconds_K, program))
        measured = (MS * row["fw_ms"], MS * row["bwall_ms"])
        found.append(
            {
                "table": "model",
                "device": device.name,
                "what": label,
                "mode": {"inf": "inference"}.get(str(row["mode"]), str(row["mode"])),
                "measured_ms": float(row["e2e_ms"]),
                "ours_ms": sum(ours) / MS,
                "ours_percent": _error(sum(ours), MS * row["e2e_ms"]),
                **_interval(prediction, program),
                "forward_percent": _error(ours[0], measured[0]),
                "backward_percent": _error(ours[1], measured[1]) if measured[1] > 0 else None,
                "roofline_percent": _error(roofline, MS * row["e2e_ms"]),
                **{
                    f"{peer}_percent": _error(row[column], row["e2e_ms"])
                    for peer, column in PUBLISHED.items()
                    if column in row
                },
            }
        )
    return found, without


def _passes(seconds_K: Floats, program: Program) -> tuple[float, float]:
    """Forward and backward seconds."""
    spent = seconds_K * program.count_K
    return float(spent[~program.backward_K].sum()), float(spent[program.backward_K].sum())


def _interval(prediction: Prediction, program: Program) -> dict[str, float]:
    """The 90 % interval of a whole model, as `cost.sources.predicted` sums kernels."""
    queued_K = prediction.queued_seconds_K
    prices = KernelPrices(
        queued_K,
        queued_K * prediction.low_seconds_K / prediction.seconds_K,
        queued_K * prediction.high_seconds_K / prediction.seconds_K,
        np.full(len(queued_K), LEARNED, object),
        prediction.shared_log_K,
    ).prices()
    found = summed(zip(program.kernels, program.count_K.tolist(), prices, strict=True))
    return {"low_ms": found.low_seconds / MS, "high_ms": found.high_seconds / MS}


def _summary(rows: Sequence[Mapping[str, Any]], inside: Sequence[NDArray[np.bool_]]) -> dict[str, Any]:
    whole = [row for row in rows if row["table"] == "model"]
    single = [row for row in rows if row["table"] == "operator"]
    names = list(dict.fromkeys(row["device"] for row in rows))

    def mean(column: str, chosen_rows: Sequence[Mapping[str, Any]]) -> float | None:
        errors = [abs(row[column]) for row in chosen_rows if row.get(column) is not None]
        return float(np.mean(errors)) if errors else None

    def by_mode(column: str) -> dict[str, dict[str, float | None]]:
        return {
            name: {
                mode: mean(column, [row for row in whole if (row["device"], row["mode"]) == (name, mode)])
                for mode in ("train", "inference")
            }
            for name in names
        }

    def beside(column: str, rows: Sequence[Mapping[str, Any]] = whole) -> dict[str, Any]:
        """Both on the models of which the peer says something."""
        both = [row for row in rows if row.get(column) is not None and row["ours_percent"] is not None]
        ours, theirs = mean("ours_percent", both), mean(column, both)
        return {"models": len(both), "ours_mape_percent": ours, "peer_mape_percent": theirs}

    errors = [abs(row["ours_percent"]) for row in whole if row["ours_percent"] is not None]
    peers = ("roofline", *PUBLISHED)
    coverage = float(100 * np.concatenate(inside).mean()) if inside else None
    inside_models = sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in whole)
    return {
        "models_mape_percent": mean("ours_percent", whole),
        "models_median_percent": float(np.median(errors)) if errors else None,
        "models": by_mode("ours_percent"),
        **{f"models_mape_percent_{peer}": mean(f"{peer}_percent", whole) for peer in peers},
        **{f"models_{peer}": by_mode(f"{peer}_percent") for peer in peers},
        "models_beside": {
            **{peer: beside(f"{peer}_percent") for peer in PUBLISHED},
            "neusight, unseen": beside(
                "neusight_percent", [row for row in whole if row["device"] not in NEUSIGHT_LEARNED_FROM]
            ),
        },
        "neusight_learned_from": [name for name in names if name in NEUSIGHT_LEARNED_FROM],
        "forward_mape_percent": mean("forward_percent", whole),
        "backward_mape_percent": mean("backward_percent", whole),
        "models_inside_interval": inside_models,
        "operators": {
            name: {row["what"]: row["ours_mape_percent"] for row in single if row["device"] == name} for name in names
        },
        "operators_median": {
            name: {row["what"]: row["ours_median_percent"] for row in single if row["device"] == name} for name in names
        },
        "interval_coverage_percent": coverage,
        "coverage": {
            "kernels_percent": coverage,
            "models_percent": 100 * inside_models / len(whole) if whole else None,
        },
    }


def _error(predicted: float, measured: float) -> float | None:
    """Signed, in percent; None where either is not known."""
    if not np.isfinite(predicted) or not np.isfinite(measured) or measured <= 0:
        return None
    return float(100 * (predicted / measured - 1))


def _mape(predicted: Floats, measured: Floats) -> float | None:
    known = np.isfinite(predicted)
    return float(100 * np.abs(predicted[known] / measured[known] - 1).mean()) if known.any() else None


def _median(predicted: Floats, measured: Floats) -> float | None:
    known = np.isfinite(predicted)
    return float(100 * np.median(np.abs(predicted[known] / measured[known] - 1))) if known.any() else None
