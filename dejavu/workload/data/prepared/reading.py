"""Documents out of files: plain text, JSON lines, a column of Parquet files; what is wrong with one is said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dejavu.foundation.errors import InputError

PIECE_BYTES = 2**20  # of a plain text: tokens are made of so much at once, up to the end of a line
ROWS = 4096  # of a Parquet file, at once
TEXTS, PARQUET = (".txt", ".md", ".py", ".jsonl"), (".parquet",)


class Piece(NamedTuple):
    """A document, or a part of a long one.

    Attributes:
        content: a text, or a list of tokens.
        ends: whether the document ends here.
        where: the file, and the line or the row.
        done_bytes: how much of all files was read.
    """

    content: Any
    ends: bool
    where: str
    done_bytes: int


def texts(files: Sequence[Path], field: str, error_at: tuple[str, ...]) -> Iterator[Piece]:
    """Read texts: each line of a `.jsonl` is a document, and each other file.

    Raises:
        InputError: what cannot be read, with its file and line.
    """
    done = 0
    for path in files:
        lines = _of_json_lines if path.suffix == ".jsonl" else _of_text
        try:
            for content, ends, where in lines(path, field):
                done += len(content)
                yield Piece(content, ends, where, done)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}", error_at) from error
        except ValueError as error:
            raise InputError(str(error), error_at) from error


def _of_text(path: Path, field: str) -> Iterator[tuple[str, bool, str]]:
    with path.open("rb") as file:
        piece, number = file.readlines(PIECE_BYTES), 1
        while piece:
            after = file.readlines(PIECE_BYTES)
            try:
                content = b"".join(piece).decode()
            except UnicodeDecodeError as error:
                line = number + error.object[: error.start].count(b"\n")
                raise ValueError(f"{path}, line {line:,} is no text in UTF-8; wanted that, or a .jsonl") from None
            yield content, not after, f"{path}, from line {number:,}"
            number += len(piece)
            piece = after


def _of_json_lines(path: Path, field: str) -> Iterator[tuple[str, bool, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number:,}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is no JSON: {str(error)[:100]}") from None
            if not isinstance(row, dict) or field not in row:
                has = f"has {', '.join(map(repr, list(row)[:8]))}" if isinstance(row, dict) else "is no object"
                raise ValueError(f"{where} {has}; wanted an object with the field {field!r}")
            if not isinstance(row[field], str):
                raise ValueError(f"{where}: {field!r} is {json.dumps(row[field])[:40]}; wanted a text")
            yield row[field], True, where


def column(files: Sequence[Path], name: str, error_at: tuple[str, ...], *, of_tokens: bool) -> Iterator[Piece]:
    """Read a column of Parquet files, a document in each row: texts, or lists of tokens.

    Raises:
        InputError: there is no such column, it holds something else, or a row is empty; with the row.
    """
    done = 0
    for path in files:
        begin, size = 0, path.stat().st_size
        for batch, rows in batches(path, [name], error_at):
            values = batch.column(0)
            if not _is_right(values.type, of_tokens):
                wanted = "lists of whole numbers" if of_tokens else "texts"
                raise InputError(f"{path}: column {name!r} is of {values.type}; wanted {wanted}", error_at)
            for number, value in enumerate(values, begin):
                where = f"{path}, row {number:,}"
                content = value.values.to_numpy(zero_copy_only=False) if of_tokens and value.is_valid else value.as_py()
                if content is None or (of_tokens and value.values.null_count):
                    raise InputError(f"{where}: column {name!r} is empty; wanted a value in each row", error_at)
                yield Piece(content, True, where, done + int(size * (number - begin) / max(1, rows)))
            begin += len(values)
        done += size


def _is_right(kind: Any, of_tokens: bool) -> bool:
    import pyarrow as pa

    if of_tokens:
        return bool((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def batches(path: Path, names: Sequence[str], error_at: tuple[str, ...]) -> Iterator[tuple[Any, int]]:
    """Read some columns of a Parquet file, so many rows at once, each with the number of all rows.

    Raises:
        InputError: it is no Parquet file, or has no such column.
    """
    import pyarrow as pa  # it starts threads, and a process that has some cannot fork ranks: only to prepare data
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        for name in names:
            if name not in file.schema_arrow.names:
                has = ", ".join(map(repr, file.schema_arrow.names[:12]))
                raise InputError(f"{path} has no column {name!r}; wanted one of {has}", error_at)
        for batch in file.iter_batches(ROWS, columns=list(names)):
            yield batch.select(list(names)), file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())[:200]}", error_at) from error
