"""The interface of importers: batches of rows of the cost database, and what was left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dejavu.importers.devices import DeviceNames
from dejavu.profiles import SCHEMA

BATCH_ROWS = 50_000  # rows held at once: some 50 MB while they are converted

# Older than any measurement, so that your own wins over a file without a date.
UNKNOWN_DATE = datetime(2000, 1, 1, tzinfo=UTC)
UNKNOWN = "unknown"


@dataclass(frozen=True)
class BadRow:
    """A row of the source that is no measurement: its position, and what was found and wanted."""

    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of one file of a source.

    Attributes:
        file: where they come from.
        table: rows under the database's schema; their times as they were found, good or bad.
        positions: for each row of the table, where it stands in the file, counted in `place_word`s.
        time_name, time_seconds: the source's word for the time (`latency_ms`), and its unit.
        moved_bytes: what each row's kernel reads and writes at least; NaN where the row is no kernel, None if none is.
        num_read: rows of the source that this batch stands for.
        skipped: rows that are sound but hold no measurement, by reason.
        bad: rows of which not even a row of the table could be made.
    """

    file: Path
    table: pa.Table
    positions: NDArray[np.int64]
    num_read: int
    time_name: str
    time_seconds: float
    place_word: str = "row"
    moved_bytes: NDArray[np.float64] | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    bad: tuple[BadRow, ...] = ()

    def place(self, row: int) -> str:
        """Describe for people where a row of the table is in the source."""
        return f"{self.file}: {self.place_word} {self.positions[row]}"


def option(help: str, default: Any = None) -> Any:
    """A field of an importer that the command takes as `--the-field`; `help` is what `dejavu import --help` says."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Importer(ABC):
    """Converts one format of profiles to rows of the cost database; it writes nothing.

    An importer streams: it never holds more than about `BATCH_ROWS` rows. Its rows depend only on the file and its own
    fields (no clock, no host), so that the same file gives the same rows again. Its fields are made by `option`, and
    are the command's options.

    Attributes:
        name: the command's word for it; the rows' source is `import:<name>`.
        published: date of publication, for files that do not say when they were measured.
        devices: the meaning of the source's names for devices.
    """

    name: ClassVar[str]
    published: ClassVar[datetime] = UNKNOWN_DATE

    devices: DeviceNames = field(default_factory=DeviceNames)

    @abstractmethod
    def files(self, path: Path) -> list[Path]:
        """List the file, or the files of this format in a folder. Raises InputError where there is none."""

    @abstractmethod
    def batches(self, file: Path) -> Iterator[Batch]:
        """Yield the rows of one file, in its order.

        Raises:
            InputError: it is not of this format; the message says what was expected and what was found.
        """

    def table(self, num_rows: int, **columns: Any) -> pa.Table:
        """Make rows under the schema from columns or single values; fills in provenance, the rest is null."""
        columns = {
            "tensor_parallel": 1,
            "host_fingerprint": UNKNOWN,
            "torch_version": UNKNOWN,
            "source": f"import:{self.name}",
            "measured_at": self.published,
            **columns,
        }
        return pa.table([_column(columns.get(column.name), column.type, num_rows) for column in SCHEMA], schema=SCHEMA)


def _column(value: Any, type_: pa.DataType, num_rows: int) -> pa.Array:
    if isinstance(value, np.ndarray | list | pa.Array):
        return pa.array(value, type_)
    return pa.repeat(pa.scalar(value, type_), num_rows)


def counted(reasons: Sequence[tuple[str, Any]]) -> Counter[str]:
    """Count the rows that each reason's mask marks; reasons that mark none are left out."""
    return Counter({reason: int(np.count_nonzero(mask)) for reason, mask in reasons if np.any(mask)})
