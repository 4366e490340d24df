"""NeuSight's single kernels: kernels.parquet, one row for each measured kernel.

Latencies are in milliseconds: the mean of the 5 fastest of 25 runs of a forward kernel, float32 with TF32 off. The
operators are those of `neusight.kernels`. models.parquet holds whole models and layers that no single kernel stands
for; they are for comparing predictions (`python -m benchmarks.cost`), not for the database.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError
from dejavu.importers._base import BadRow, Batch, Importer
from dejavu.importers.cells import flag_texts, not_whole, numbers_of, texts_of
from dejavu.importers.kernel_rows import devices_of, kernel_columns, moved_bytes
from dejavu.importers.neusight.kernels import DTYPE, SIZE_COLUMNS, NeuSightError, kernels_of, outsize
from dejavu.importers.sources import check_columns, files_of, parquet_columns, parquet_frames

_WANTED = "NeuSight's kernels.parquet"
_NEEDED = ("op", "device", "latency_ms")
_SIZES = tuple(dict.fromkeys(column for columns in SIZE_COLUMNS.values() for column in columns))
_FASTEST_OF = 25
_DTYPES = ("fp32", "float32")


@dataclass(frozen=True, kw_only=True)
class NeuSight(Importer):
    """Single float32 kernels on nine GPUs, as NeuSight publishes them.

    See [Lee et al., ASPLOS 2025](https://doi.org/10.1145/3669940.3707265).
    """

    name: ClassVar[str] = "neusight"
    published: ClassVar[datetime] = datetime(2025, 3, 30, tzinfo=UTC)  # the first day of ASPLOS 2025

    def files(self, path: Path) -> list[Path]:
        return files_of(path, ("kernels.parquet",), _WANTED)

    def batches(self, file: Path) -> Iterator[Batch]:
        found = parquet_columns(file, _WANTED)
        if "kind" in found and "e2e_ms" in found:
            raise InputError(
                f"{file} holds whole models and their layers, which no plan looks up; wanted {_WANTED} (models are "
                "compared with predictions by `python -m benchmarks.cost --kernels … --models … --devices …`)"
            )
        check_columns(file, found, _NEEDED)
        columns = [column for column in (*_NEEDED, "dtype", "torch", *_SIZES) if column in found]
        for start, frame in parquet_frames(file, columns):
            yield self._batch(file, start, frame)

    def _batch(self, path: Path, start: int, frame: pd.DataFrame) -> Batch:
        problems = problems_of(frame)
        devices = devices_of(self.devices, texts_of(frame["device"]), problems)
        good = np.array([problem is None for problem in problems], dtype=bool)
        kernels = kernels_of(frame[good])
        seconds = numbers_of(frame.loc[good, "latency_ms"]) / 1e3
        columns = kernel_columns(kernels)
        table = self.table(
            len(kernels),
            **columns,
            device_type=devices[good],
            seconds=seconds,
            repeats=_FASTEST_OF,
            how="NeuSight: mean of the 5 fastest of 25 runs, TF32 off",
            torch_version=_torch_versions(frame[good]),
        )
        return Batch(
            file=path,
            table=table,
            positions=start + np.flatnonzero(good),
            num_read=len(frame),
            time_name="latency_ms",
            time_seconds=1e-3,
            moved_bytes=moved_bytes(kernels),
            bad=tuple(BadRow(f"{path}: row {start + row}", problem) for row, problem in enumerate(problems) if problem),
        )


def problems_of(frame: pd.DataFrame) -> NDArray[np.object_]:
    """Return for each row why it is no kernel; None where it is one."""
    problems = np.full(len(frame), None, dtype=object)
    operations = texts_of(frame["op"])
    for operation in np.unique(operations):
        rows = np.flatnonzero(operations == operation)
        if operation not in SIZE_COLUMNS:
            problems[rows] = f"unknown operator {operation!r}; wanted one of {', '.join(SIZE_COLUMNS)}"
            continue
        for column in SIZE_COLUMNS[operation]:
            least = 0 if column == "pad" else 1
            if column not in frame.columns:
                wanted = f"wanted a whole number, {least} or more"
                problems[rows] = f"no column {column!r}, which {operation!r} needs; {wanted}"
                continue
            wrong = not_whole(f"{column} of {operation!r}", frame[column].iloc[rows], least)
            problems[rows[list(wrong)]] = list(wrong.values())
        if operation == "conv":
            sound = rows[[problems[row] is None for row in rows]]
            if len(sound):
                problems[sound] = _problems_of_convolutions(frame.iloc[sound])
    if "dtype" in frame.columns:
        dtypes = texts_of(frame["dtype"])
        for row in np.flatnonzero(~pd.Series(dtypes).isin(_DTYPES)):
            problems[row] = f"dtype is {dtypes[row]!r}; wanted {_DTYPES[0]} ({DTYPE} with TF32 off)"
    flag_texts("latency_ms", frame["latency_ms"], problems)
    return problems


def _problems_of_convolutions(frame: pd.DataFrame) -> list[str | None]:
    sizes = zip(*(numbers_of(frame[column]) for column in ("insize", "ksize", "stride", "pad")), strict=True)
    problems: list[str | None] = []
    for size in sizes:
        try:
            outsize(*map(int, size))
            problems.append(None)
        except NeuSightError as error:
            problems.append(str(error))
    return problems


def _torch_versions(frame: pd.DataFrame) -> list[str] | str:
    """`p2.1.0` -> `2.1.0`."""
    if "torch" not in frame.columns:
        return "unknown"
    return [version.removeprefix("p") or "unknown" for version in texts_of(frame["torch"])]
