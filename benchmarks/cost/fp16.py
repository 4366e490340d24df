"""fp16 matrix products of a device that was left out: predicted from all the others, beside two simpler rooflines.

Reads vidur's columns: device, M, N, K, median_ms, where N is the dimension that is summed over. Rows without N are no
products, and fewer than `LEAST_M` rows are a matrix times a few vectors: both are left out, and counted. So is what is
refused: a cell that is no number, no size or no time, a row without a device or of one that has no peak in fp16, a time
that cannot be true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.cost.device_table import candidates, meant
from dejavu.cluster import DeviceType, catalogue
from dejavu.cost.kernels.calibration import product
from dejavu.cost.kernels.roofline import MATRIX_UNITS, KernelRoofline, peak_flops_per_second
from dejavu.cost.kernels.roofline_fit import Sample, fit
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.importers.cells import MOST, numbers_of, texts_of
from dejavu.importers.devices import DeviceNames
from dejavu.importers.sources import check_columns, parquet_columns, parquet_frames
from dejavu.importers.vidur import USUAL_DEVICES

Floats = NDArray[np.float64]
Predictor = Callable[[Sample], Floats]

LEAST_M = 16
COLUMNS = ("device", "M", "N", "K", "median_ms")
WANTED = f"a Parquet file with {', '.join(COLUMNS)}"
OURS = "waves of tiles"
DTYPE = "float16"
TUNED = {  # by predictor: what of it was fitted, and to what
    "roofline": "nothing",
    "one constant": "one figure, to the devices in train",
    OURS: "six figures, to the devices in train; tiles and operand paths are as published; what a "
    "Hopper's board sustains is of an H100 and an H200 of ours, what others' do of a V100 (Alpa's products)",
}
ABSURD_FACTOR = 30.0  # a row that far from the shipped roofline is a fault of its measurement


def run(path: Path) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Leave each device out once.

    Raises:
        InputError: columns that are missing, a device that the catalogue does not have, or fewer than two devices.
    """
    file = read(path)
    rows: list[dict[str, Any]] = []
    for name, test in file.samples.items():
        train = [sample for other, sample in file.samples.items() if other != name]
        for method, predict in (
            ("roofline", at_the_peaks),
            ("one constant", one_constant(train)),
            (OURS, tiles(train)),
        ):
            ape_K = 100 * np.abs(predict(test) / test.seconds_K - 1)
            rows.append(
                {
                    "train": ", ".join(sorted(sample.device.name for sample in train)),
                    "test": name,
                    "predictor": method,
                    "mape_percent": float(np.mean(ape_K)),
                    "median_percent": float(np.median(ape_K)),
                    "p90_percent": float(np.percentile(ape_K, 90)),
                    "kernels": len(ape_K),
                    "tuned": TUNED[method],
                }
            )
    return (
        "fp16 matrix products of a device that was left out",
        rows,
        _summary(rows, file.refused) | {"no_products": dict(file.no_products), "taken_for": dict(file.taken_for)},
    )


def _summary(rows: Sequence[Mapping[str, Any]], refused: Mapping[str, int]) -> dict[str, Any]:
    """Mean and worst over the devices that were left out; `directions` has each, `baselines` the simpler rooflines'."""
    directions: dict[str, dict[str, float]] = {}
    for row in rows:
        directions.setdefault(row["predictor"], {})[f"{row['train']} -> {row['test']}"] = row["mape_percent"]
    ours = directions.pop(OURS)
    return {
        "mape_percent": float(np.mean(list(ours.values()))),
        "worst_percent": max(ours.values()),
        "directions": ours,
        "baselines": directions,
        "refused_rows": dict(refused),
    }


@dataclass(frozen=True, eq=False)
class Products:
    """What a file holds.

    Attributes:
        samples: the products of each device, by its name in the catalogue.
        refused: how many rows cannot be used, by reason.
        no_products: how many rows are none of these products, by reason.
        taken_for: by the file's own name of a device, its name in the catalogue.
    """

    samples: Mapping[str, Sample]
    refused: Mapping[str, int]
    no_products: Mapping[str, int]
    taken_for: Mapping[str, str]


def read(path: Path) -> Products:
    """Return the file's products.

    Raises:
        InputError: columns that are missing, a device that the catalogue does not have, or fewer than two devices.
    """
    check_columns(path, parquet_columns(path, WANTED), COLUMNS)
    pieces = [frame for _, frame in parquet_frames(path, COLUMNS)]
    frame = pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame(columns=list(COLUMNS))
    products, refused, no_products = _products(frame)
    names = products["device"].drop_duplicates()
    found = {name: device_name(name, f"{path}: row {row}, device") for row, name in names.items()}
    products = products.sort_values(["M", "K", "N", "median_ms"])  # a law sees some of them: the same in any order
    samples = {}
    for name, rows in products.groupby(products["device"].map(found)):
        device = catalogue()[str(name)]
        if peak_flops_per_second(device, DTYPE) is None:
            refused[f"{name} has no peak FLOP/s in {DTYPE}"] = len(rows)
            continue
        try:
            samples[str(name)], absurd = sample_of(rows, device)
        except DejavuError as error:
            raise InputError(f"{path}: {error}") from error
        refused["absurd"] += absurd
    if len(samples) < 2:
        left_out = [f"{count:,} rows ({why})" for why, count in {**no_products, **refused}.items() if count]
        raise InputError(
            f"{path}: fp16 products of {', '.join(samples) or 'no device'}; wanted two devices or more"
            + (f"; left out were {', '.join(left_out)}" if left_out else "")
        )
    return Products(samples, refused, no_products, found)


def _products(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, int], dict[str, int]]:
    """The rows that can be used, as numbers; and those that cannot, each counted once."""
    no_product = frame["N"].isna()
    rows = pd.DataFrame({column: numbers_of(frame[column]) for column in COLUMNS[1:]})
    rows.insert(0, "device", [name.strip() for name in texts_of(frame["device"])])
    sizes = rows[["M", "N", "K"]]
    sound = ((sizes >= 1) & (sizes < MOST) & (sizes % 1 == 0)).all(axis=1)
    sound &= np.isfinite(rows["median_ms"]) & (rows["median_ms"] > 0)
    nameless = rows["device"] == ""
    thin = (rows["M"] >= 1) & (rows["M"] < LEAST_M)
    left_out = no_product | thin
    refused = {"no positive time or size": int((~sound & ~left_out).sum()), "absurd": 0}
    if (unnamed := sound & nameless & ~left_out).any():
        refused["no device"] = int(unnamed.sum())
    none = {"no N": int(no_product.sum()), f"M below {LEAST_M}": int((thin & ~no_product).sum())}
    return rows[sound & ~nameless & ~left_out], refused, none


def device_name(name: str, place: Path | str) -> str:
    """Its name in the catalogue, from vidur's, the catalogue's own, or one that means only its devices of one chip.

    Of several boards with the chip, as `v100` and `H100-80GB` name them, the first is taken.

    Raises:
        InputError: none, or several chips.
    """
    if found := DeviceNames().knowing(USUAL_DEVICES).found(name.casefold()) or meant(name):
        return found
    boards = candidates(name)
    if len({board.partition("-")[0] for board in boards}) != 1:
        raise InputError(f"{place}: {catalogue().unknown(name)}")
    return boards[0]


def sample_of(rows: pd.DataFrame, device: DeviceType) -> tuple[Sample, int]:
    """One device's products, and how many of its rows were absurd."""
    sizes = rows[["M", "K", "N"]].to_numpy(dtype=int)
    kernels = [product(m, n, k, DTYPE) for m, n, k in sizes.tolist()]
    seconds_K = rows["median_ms"].to_numpy() / 1e3
    factor_K = seconds_K / KernelRoofline().seconds(kernels, device)
    sound = np.flatnonzero((factor_K < ABSURD_FACTOR) & (factor_K > 1 / ABSURD_FACTOR))
    if not len(sound):
        raise InputError(f"all {len(kernels)} times on {device.name!r} are absurd: is the unit of median_ms right?")
    return Sample.of([kernels[position] for position in sound], seconds_K[sound], device), len(kernels) - len(sound)


def at_the_peaks(sample: Sample) -> Floats:
    """The plain roofline: peak FLOP/s and peak bytes per second, whichever takes longer."""
    arithmetic = sample.columns.flops_K / sample.peak_flops_per_second
    return np.maximum(arithmetic, sample.columns.bytes_K / sample.device.memory_bytes_per_second)


def one_constant(train: Sequence[Sample]) -> Predictor:
    """The plain roofline times one figure: the median over the other devices' kernels."""
    factor = float(np.mean([np.median(sample.seconds_K / at_the_peaks(sample)) for sample in train]))
    return lambda sample: factor * at_the_peaks(sample)


def tiles(train: Sequence[Sample]) -> Predictor:
    """Ours: waves of tiles, six figures fitted to the other devices."""
    law = fit(MATRIX_UNITS, train)
    return lambda sample: sample.predicted_K(law)
