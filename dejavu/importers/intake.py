"""Import a source into the database: all rows are checked before the first is written."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dejavu.foundation.errors import InputError
from dejavu.importers._base import BATCH_ROWS, BadRow, Batch, Importer
from dejavu.importers.screening import bad_rows
from dejavu.importers.sources import num_rows
from dejavu.profiles import SCHEMA, ProfileDatabase

MOST_NAMED = 10  # bad rows that are reported one by one; the rest are counted

# The current activity, rows done, and the total where that is known.
Progress = Callable[[str, int, int | None], None]


@dataclass
class ImportReport:
    """Counts of the rows of a source.

    Attributes:
        num_read: rows of the source; the sum of the four below.
        num_new: rows that the database did not have.
        num_known: rows that it had, or that equal another row of the source in every column.
        skipped: rows without a measurement, by reason.
        num_bad: rows that cannot be measurements, left out with `skip_bad`; `bad` names the first.
    """

    num_read: int = 0
    num_new: int = 0
    num_known: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    num_bad: int = 0
    bad: list[BadRow] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.num_read:,} rows read: {self.num_new:,} new, {self.num_known:,} already known"]
        parts += [f"{count:,} skipped ({reason})" for reason, count in sorted(self.skipped.items())]
        if self.num_bad:
            parts.append(f"{self.num_bad:,} bad rows skipped")
        return ", ".join(parts)


def import_profile(
    importer: Importer,
    path: Path,
    database: ProfileDatabase,
    *,
    skip_bad: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> ImportReport:
    """Append what the source measured and the database lacks.

    A source with a bad row is rejected as a whole, before anything is written, unless `skip_bad` leaves such rows out.
    Interrupted, it has written some batches or none; run again, it writes the rest.

    Raises:
        InputError: the source is not of the importer's format, has a bad row, no measurement, or not the devices that
            the user named.
        ProfileError: the database cannot be written.
    """
    report = ImportReport()
    files = importer.files(path)
    importer.devices.asked.clear()
    total = num_rows(files)
    with tempfile.TemporaryDirectory(prefix="dejavu-import-") as folder:
        spool = Path(folder) / "rows.parquet"
        with pq.ParquetWriter(spool, SCHEMA, compression="zstd") as writer:
            for batch in itertools.chain.from_iterable(map(importer.batches, files)):
                table = _sound(batch, report, skip_bad)
                if table.num_rows:
                    writer.write_table(table)
                progress("reading", report.num_read, total)
        importer.devices.check_given()
        num_sound = report.num_read - report.skipped.total() - report.num_bad
        if not num_sound:
            raise InputError(f"{path} has no measurement: {report}")
        done = 0
        with pq.ParquetFile(spool) as rows:
            for piece in rows.iter_batches(batch_size=BATCH_ROWS):
                report.num_new += database.append_table(pa.Table.from_batches([piece]))
                done += piece.num_rows
                progress("writing", done, num_sound)
    report.num_known = num_sound - report.num_new
    return report


def _sound(batch: Batch, report: ImportReport, skip_bad: bool) -> pa.Table:
    """Return the batch's rows without the bad ones; the report counts them all."""
    wrong = bad_rows(batch) if batch.table.num_rows else {}
    bad = [*batch.bad, *wrong.values()]
    if bad and not skip_bad:
        more = f" (and {len(bad) - 1:,} more in the same {batch.num_read:,} rows)" if len(bad) > 1 else ""
        remedy = "nothing was imported: correct the file, or leave such rows out with --skip-bad"
        raise InputError(f"{bad[0]}{more}; {remedy}")
    report.num_read += batch.num_read
    report.skipped.update(batch.skipped)
    report.num_bad += len(bad)
    report.bad += bad[: MOST_NAMED - len(report.bad)]
    sound = np.ones(batch.table.num_rows, dtype=bool)
    sound[list(wrong)] = False
    return batch.table.filter(pa.array(sound)) if wrong else batch.table
