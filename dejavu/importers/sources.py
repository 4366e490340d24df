"""Reading tables of a source in pieces, with the columns checked first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import nearest
from dejavu.importers._base import BATCH_ROWS

DAMAGED = (pa.ArrowException, OSError, ValueError)  # that pyarrow raises; the last for names that are no text


def files_of(path: Path, patterns: Sequence[str], wanted: str) -> list[Path]:
    """List the file, or those of a folder whose names match, in the order of their names.

    Raises:
        InputError: there is no such file or folder, no match, or an empty file.
    """
    if not path.exists():
        raise InputError(f"there is no {path}; wanted {wanted}")
    files = [path]
    if path.is_dir():
        files = sorted({file for pattern in patterns for file in path.rglob(pattern) if file.is_file()})
        if not files:
            raise InputError(f"{path} has no {' or '.join(patterns)}; wanted {wanted}")
    for file in files:
        if not file.stat().st_size:
            raise InputError(f"{file} is empty; wanted {wanted}")
    return files


def parquet_columns(path: Path, wanted: str) -> list[str]:
    """Return the names of its columns.

    Raises:
        InputError: it is not a whole Parquet file.
    """
    try:
        return list(pq.read_schema(path).names)
    except DAMAGED as error:
        raise InputError(f"{path} is no whole Parquet file ({error}); wanted {wanted}") from error


def check_columns(path: Path, found: Sequence[str], expected: Sequence[str]) -> None:
    """Check that all expected columns are there; the InputError names a similar column of another unit."""
    missing = [column for column in expected if column not in found]
    if not missing:
        return
    other = [column for column in found if column not in expected]
    near = {column: nearest(column, other) for column in missing}
    instead = ", ".join(f"{close[0]!r} instead of {column!r}" for column, close in near.items() if close)
    raise InputError(
        f"{path}: expected columns {', '.join(missing)}; found {instead or ', '.join(other[:12]) or 'no others'}"
    )


def parquet_frames(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield pieces of the file and the row that each starts with.

    Raises:
        InputError: the file breaks off or cannot be decoded.
    """
    start = 0
    try:
        with pq.ParquetFile(path) as file:
            for piece in file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns)):
                piece.validate(full=True)  # text may be damaged, which only who reads it would find
                yield start, piece.replace_schema_metadata(None).to_pandas()  # and what pandas noted of its columns
                start += piece.num_rows
    except DAMAGED as error:
        raise InputError(f"{path}: the rows from {start} on cannot be read: {error}") from error


def csv_columns(path: Path, wanted: str) -> list[str]:
    """Return the names in the first line of a CSV file. Raises InputError where there is none."""
    try:
        return list(pd.read_csv(path, nrows=0).columns)
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is no CSV file ({error}); wanted {wanted}") from error


def csv_frames(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield what `parquet_frames` does, for CSV; rows are counted without the header."""
    start = 0
    try:
        with pd.read_csv(path, usecols=list(columns), chunksize=BATCH_ROWS) as pieces:
            for piece in pieces:
                yield start, piece.reset_index(drop=True)
                start += len(piece)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: the rows from {start} on cannot be read: {error}") from error


def num_rows(files: Sequence[Path]) -> int | None:
    """Count the rows of Parquet files from their footers; None where one is no Parquet file."""
    try:
        return sum(int(pq.read_metadata(file).num_rows) for file in files)
    except DAMAGED:
        return None
