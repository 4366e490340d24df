"""What every importer owes: rows that are whole, told where they come from, and the same however often they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from dejavu.cluster import catalogue
from dejavu.foundation.errors import InputError
from dejavu.importers import COMMON, Importer, import_profile
from dejavu.profiles import SCHEMA, ProfileDatabase
from dejavu.profiles.collective import Collective
from dejavu.profiles.kernel import Kernel
from dejavu.testing.expect import expect, expect_refusal


def check_importer(importer: Importer, path: Path, folder: Path) -> None:
    """Hold an importer to every case of this file.

        check_importer(Mine(), Path("profile.csv"), tmp_path)

    Args:
        path: a file or a folder of its format, of two measurements or more.
        folder: where databases and broken files can be written.

    Raises:
        AssertionError: it breaks one of them.
    """
    for case in CASES:
        (own := folder / case.__name__[:40]).mkdir()
        case(importer, path, own)


def the_same_file_twice_adds_nothing(importer: Importer, path: Path, folder: Path) -> None:
    """And every row of the source is accounted for."""
    database = ProfileDatabase(folder / "profiles_db")
    first = import_profile(importer, path, database)
    accounted = first.num_new + first.num_known + first.skipped.total() + first.num_bad
    expect(first.num_new > 0, f"{importer.name}: nothing of {path} is new to an empty database")
    expect(first.num_read == accounted, f"{importer.name}: {first.num_read} rows read, {accounted} accounted for")
    again, held = import_profile(importer, path, database), database.read().num_rows
    expect(again.num_new == 0, f"{importer.name}: the same file again has {again.num_new} new rows")
    expect(held == first.num_new, f"{importer.name}: {held} rows in the database; wanted {first.num_new}")


def rows_are_whole_and_say_where_they_come_from(importer: Importer, path: Path, folder: Path) -> None:
    """Under the schema, of known devices, as old as the source, and shapes that read back as what they stand for."""
    for file in importer.files(path):
        for batch in importer.batches(file):
            expect(batch.table.schema.equals(SCHEMA), f"{importer.name}: rows are not under the database's schema")
            rows = (len(batch.positions), batch.table.num_rows, batch.num_read)
            expect(rows[0] == rows[1] <= rows[2], f"{importer.name}: (positions, rows, read) are {rows}")
    database, started = ProfileDatabase(folder / "profiles_db"), datetime.now(UTC)
    import_profile(importer, path, database)
    for row in database.read().to_pylist():
        told = f"{importer.name}, row {row['name']!r} on {row['device_type']!r}"
        expect(row["source"] == f"import:{importer.name}", f"{told}: its source is {row['source']!r}")
        expect(row["device_type"] in catalogue(), f"{told}: {catalogue().unknown(row['device_type'])}")
        expect(row["measured_at"] < started, f"{told}: it is dated by the import, not by the source")
        if row["kind"] == "operator":
            kernel = Kernel.from_json(row["extra"])
            facts = (kernel.subject, kernel.dtype, kernel.flops)
            expect(facts == (row["subject"], row["dtype"], row["flops"]), f"{told}: its `extra` is of another kernel")
        if row["kind"] == "collective":
            collective = Collective.from_json(row["name"], row["extra"])
            ranks = (collective.subject, collective.num_ranks)
            expect(ranks == (row["subject"], row["num_ranks"]), f"{told}: its `extra` is of another collective")


def a_missing_or_empty_or_foreign_file_is_refused(importer: Importer, path: Path, folder: Path) -> None:
    """By an InputError that names it, before anything is written."""
    database = ProfileDatabase(folder / "profiles_db")

    def take(file: Path) -> None:
        import_profile(importer, file, database)

    expect_refusal(InputError, "there is no", lambda: take(folder / "absent"), f"{importer.name}, no file")
    file = folder / importer.files(path)[0].name
    file.touch()
    expect_refusal(InputError, "empty", lambda: take(file), f"{importer.name}, an empty file")
    file.write_bytes(b"PAR1\x00\x01 nothing of the kind \xff")
    expect_refusal(InputError, file.name, lambda: take(file), f"{importer.name}, a file of something else")
    expect(not database.path.exists(), f"{importer.name}: a refused file has left rows")


def an_interrupted_import_is_finished_by_the_next(importer: Importer, path: Path, folder: Path) -> None:
    """What was written stays, and the rest is added."""
    whole, database = ProfileDatabase(folder / "whole"), ProfileDatabase(folder / "profiles_db")
    expected = import_profile(importer, path, whole).num_new
    expect(expected > 1, f"{importer.name}: {path} has one measurement; wanted a file of two or more")

    def interrupt(what: str, done: int, total: int | None) -> None:
        if what == "writing":
            raise KeyboardInterrupt

    with patch("dejavu.importers.intake.BATCH_ROWS", 1):
        try:
            import_profile(importer, path, database, progress=interrupt)
        except KeyboardInterrupt:
            held = database.read().num_rows
            expect(
                0 < held < expected, f"{importer.name}: {held} rows after an interruption; wanted some of {expected}"
            )
        import_profile(importer, path, database)
    held = database.read().num_rows
    expect(held == expected, f"{importer.name}: {held} rows once it was finished; wanted {expected}")


def every_option_says_what_it_is_for(importer: Importer, path: Path, folder: Path) -> None:
    """The command takes the importer's fields as options, and shows these words."""
    for field in fields(importer):
        if field.name not in COMMON:
            told = f"{importer.name}: the field {field.name!r} has no help"
            expect(field.metadata.get("help"), f"{told}; make it by `dejavu.importers.option`")


CASES: tuple[Callable[[Importer, Path, Path], None], ...] = (
    the_same_file_twice_adds_nothing,
    rows_are_whole_and_say_where_they_come_from,
    a_missing_or_empty_or_foreign_file_is_refused,
    an_interrupted_import_is_finished_by_the_next,
    every_option_says_what_it_is_for,
)
