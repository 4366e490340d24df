"""Columns of numbers, written once as arrays that are mapped from then on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.workload.data._base import Batch, ExampleShape, Part, Stored, split_rows
from dejavu.workload.data.prepared.kept import Kept, Said, files_of, hash_of_files, kept
from dejavu.workload.data.prepared.reading import PARQUET, batches

FORM = 1
FIELD = ("parquet",)


@dataclass(frozen=True)
class Columns(Stored):
    """Rows of numbers, float32, and each row's class.

    Attributes:
        path: a Parquet file, or a folder of them.
        features: columns of numbers, or one column with lists of as many.
        target: the column of classes, whole numbers from 0.
    """

    path: Path
    features: tuple[str, ...]
    target: str

    @property
    def shape(self) -> ExampleShape:
        about = self._kept.about
        return ExampleShape((int(about["width"]),), torch.float32, (), int(about["num_classes"]))

    @property
    def content_hash(self) -> str:
        return self._kept.folder.name

    def parts(self) -> tuple[Part, Part]:
        if not self._kept.about["count"]:
            raise InputError(f"{self.path} has no rows; wanted at least one", FIELD)
        train, test = split_rows(int(self._kept.about["count"]), self.held_out, self.split_seed)
        return Part.of_rows(train, self._take), Part.of_rows(test, self._take)

    def _take(self, rows: np.ndarray) -> Batch:
        inputs, targets = self._mapped
        return torch.from_numpy(np.array(inputs[rows])), torch.from_numpy(np.array(targets[rows]))

    @cached_property
    def _mapped(self) -> tuple[np.ndarray, np.ndarray]:
        folder, about = self._kept
        inputs = np.memmap(folder / "inputs.bin", np.float32, mode="r")
        return inputs.reshape(-1, about["width"]), np.memmap(folder / "targets.bin", np.int64, mode="r")

    @cached_property
    def _kept(self) -> Kept:
        files = files_of(self.path, PARQUET, FIELD)
        key = [FORM, hash_of_files(files), self.features, self.target]
        return kept(key, FIELD, lambda folder: self._write(folder, files))

    def _write(self, folder: Path, files: list[Path]) -> dict[str, Any]:
        said, done = Said(f"columns of {self.path}", sum(file.stat().st_size for file in files)), 0
        width, most, count = None, 0, 0
        with (folder / "inputs.bin").open("wb") as inputs, (folder / "targets.bin").open("wb") as targets:
            for path in files:
                begin = 0
                for batch, _ in batches(path, [*self.features, self.target], FIELD):
                    where = f"{path}, rows {begin:,} to {begin + batch.num_rows:,}"
                    rows = np.concatenate([_numbers(batch.column(name), name, where) for name in self.features], axis=1)
                    classes = _classes(batch.column(self.target), self.target, where)
                    if width not in (None, rows.shape[1]):
                        raise InputError(f"{where} have {rows.shape[1]} numbers; wanted {width}, as before", FIELD)
                    width, most = rows.shape[1], max(most, int(classes.max(initial=0)))
                    inputs.write(rows.tobytes())
                    targets.write(classes.tobytes())
                    begin += batch.num_rows
                count, done = count + begin, done + path.stat().st_size
                said(done, f"{count:,} rows")
        return {"width": width or 0, "num_classes": most + 1, "count": count}


def _numbers(values: Any, name: str, where: str) -> np.ndarray:
    """Return a column as (rows, numbers in a row), float32."""
    import pyarrow as pa

    kind, width = values.type, 1
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = set(values.value_lengths().to_pylist()) if not pa.types.is_fixed_size_list(kind) else {kind.list_size}
        if len(lengths) != 1 or None in lengths:
            raise InputError(f"{where}: the lists of column {name!r} are not all as long; wanted one length", FIELD)
        (width,), count = lengths, len(values)
        values = values.flatten()
        kind = values.type
    else:
        count = len(values)
    _check(values, name, where, pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
    found = np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(count, width)
    if not np.isfinite(found).all():
        raise InputError(f"{where}: column {name!r} has a number that is not finite; wanted finite ones", FIELD)
    return found


def _classes(values: Any, name: str, where: str) -> np.ndarray:
    import pyarrow as pa

    _check(values, name, where, pa.types.is_integer(values.type) or pa.types.is_boolean(values.type))
    found = np.asarray(values.to_numpy(zero_copy_only=False), np.int64)
    if found.size and found.min() < 0:
        raise InputError(f"{where}: column {name!r} has the class {found.min()}; wanted whole numbers from 0", FIELD)
    return found


def _check(values: Any, name: str, where: str, is_right: bool) -> None:
    if not is_right:
        raise InputError(f"{where}: column {name!r} is of {values.type}; wanted numbers", FIELD)
    if values.null_count:
        raise InputError(f"{where}: column {name!r} is empty in {values.null_count:,}; wanted a value in each", FIELD)
