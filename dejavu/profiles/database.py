"""The folder of immutable Parquet files, and the manifest that says which of them count.

A write makes its file under a temporary name, syncs it, renames it to the hash of its content, and only then swaps
`manifest.json`, all under one lock; so a writer killed at any point leaves the old state or the new one. Readers open
what the manifest lists and take no lock, unless they find damage to set aside.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from dejavu.foundation.units import plural
from dejavu.profiles.files import (
    DATA_NAME,
    LOCK,
    SHIPPED,
    Finding,
    damage_of,
    file_at,
    measure_again,
    set_aside,
)
from dejavu.profiles.findings import described, findings_of, remedy_of
from dejavu.profiles.manifest import (
    MANIFEST,
    TEMPORARY_PREFIX,
    DamagedManifest,
    DataFile,
    read_manifest,
    write_atomically,
    write_manifest,
)
from dejavu.profiles.measurement import (
    MOST_DISTURBED_SHARE,
    SAME_MEASUREMENT,
    SCHEMA,
    Measurement,
    ProfileError,
    conformed,
    measurements_of,
    row_name,
    table_of,
)
from dejavu.profiles.plausible import implausible_rows, impossible_rows
from dejavu.profiles.query import could_equal, distinct, expression_of, numbered, without_known

log = logging.getLogger("dejavu.profiles")
T = TypeVar("T")

_TOLD: set[tuple[Path, str]] = set()  # warnings this process has given; rows are read many times in a run
_ROW_GROUP_ROWS = 32_768  # small enough that a (device_type, kind) query skips most of a million rows
_FILE_ROWS = 1_000_000  # what compaction puts into one file
_MOST_SMALL_FILES = 64  # each costs a read about a millisecond; past these, an append puts them together
_READ_ATTEMPTS = 20  # each retry needs a manifest swapped, and its old files swept, during a read of milliseconds


@dataclass(frozen=True)
class ProfileDatabase:
    """The measurements in one folder; a missing folder is an empty database, made by the first `append`.

    Any number of processes may read and write at once.

    Attributes:
        path: the folder.
        grace_seconds: how long files that the manifest no longer lists are kept for readers that opened it before.
        lock_timeout_seconds: how long a writer waits for the others.
        with_shipped: read what was shipped, too: a database of its own in the folder `shipped`, never written.
    """

    path: Path
    grace_seconds: float = 3600.0
    lock_timeout_seconds: float = 60.0
    with_shipped: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def append(self, measurements: Iterable[Measurement]) -> int:
        """Write the rows that are not there yet, all or none of them; return how many.

        One call for many rows is better than many calls: each writes and syncs two files, 6 to 20 ms.

        Raises:
            ProfileError: a row is wrong or impossible (it is named), or the folder cannot be written.
        """
        return self.append_table(table_of(list(measurements)))

    def append_table(self, table: pa.Table) -> int:
        """Append rows that are already a table of this schema; see `append`."""
        table = conformed(table, where="the table")
        _check_plausible(table)
        if not table.num_rows:
            return 0
        with self._locked():
            files = self._sound_files()
            new = without_known(table, self._load(files, could_equal(table)))
            if new.num_rows:
                files = [*files, *self._write_data(new)]
                write_manifest(self._manifest_path, files)
                self._tidy(files)
            return int(new.num_rows)

    def read(self, **filters: Any) -> pa.Table:
        """Return the rows that match the filters: `read(kind="layer", device_type=["T4", "V100"], direction=None)`.

        Damaged files are set aside with a warning, and the rest is used; impossible rows are left out with a warning,
        once each.

        Raises:
            ProfileError: no such column, or a file of another schema or a newer version.
        """
        shipped = self.path / SHIPPED
        own = self._read_own(expression_of(filters))
        if not self.with_shipped or not shipped.is_dir():
            return own
        return pa.concat_tables([own, ProfileDatabase(shipped).read(**filters)])

    def _read_own(self, expression: ds.Expression | None) -> pa.Table:
        cause: Exception | None = None
        for _ in range(_READ_ATTEMPTS):
            files = self._listed_or_rebuilt()
            damage = self._damage(files)
            if damage and self._listed_or_rebuilt() != files:
                continue  # the manifest was swapped since, and the old files were swept
            if damage:
                self._set_aside(damage)
            try:
                return self._plausible(self._load([file for file in files if file not in damage], expression))
            except (FileNotFoundError, pa.ArrowInvalid) as error:
                cause = error
        raise ProfileError(
            f"{self.path}: files changed during each of {_READ_ATTEMPTS} reads; last: {cause}"
        ) from cause

    def _plausible(self, table: pa.Table) -> pa.Table:
        """Return the plausible rows; warn of each other one, once per process."""
        wrong = implausible_rows(table)
        for row, why in wrong.items():
            said = f"{described(table, row)}: {why}"
            if (self.path, said) not in _TOLD:
                _TOLD.add((self.path, said))
                log.warning("%s: %s; it is not used; %s", self.path, said, remedy_of(table, row))
        sound = np.ones(table.num_rows, dtype=bool)
        sound[list(wrong)] = False
        return table.filter(pa.array(sound)) if wrong else table

    def snapshot(self) -> ProfileDatabase:
        """Return a database that answers the same question the same way every time, and reads for it once.

        What is asked together is priced by one state of the measurements, whoever appends meanwhile.
        """
        return _Snapshot(**{one.name: getattr(self, one.name) for one in fields(self)})

    def latest(self, **filters: Any) -> list[Measurement]:
        """Return the newest row of each thing measured (equal `SAME_MEASUREMENT` columns); of equal times, the fastest.

        A disturbed row counts only where there is no other.
        """
        table = self.read(**filters)
        # Other work can only slow a measurement down, by an unknown amount: a newer disturbed time is not a better one.
        quiet = pc.less_equal(pc.fill_null(table["disturbed_share"], 0.0), MOST_DISTURBED_SHARE)
        order = [("quiet", "ascending"), ("measured_at", "ascending"), ("seconds", "descending")]
        table = table.append_column("quiet", pc.cast(quiet, pa.int8())).sort_by(order).drop_columns(["quiet"])
        newest = numbered(table).group_by([*SAME_MEASUREMENT]).aggregate([("row", "max")])["row_max"]
        return measurements_of(table.take(newest.combine_chunks().sort()))

    def history(self, **filters: Any) -> list[list[Measurement]]:
        """Return all rows of each thing measured, the oldest first; disturbed ones only where it has no others."""
        things: dict[tuple[Any, ...], list[Measurement]] = {}
        for row in measurements_of(self.read(**filters).sort_by("measured_at")):
            things.setdefault(tuple(getattr(row, column) for column in SAME_MEASUREMENT), []).append(row)
        return [[row for row in rows if not row.is_disturbed] or rows for rows in things.values()]

    def compact(self) -> None:
        """Merge many small files into few, sorted by device type and kind; `sweep` removes the old ones later.

        Loads the whole database into memory: some 0.3 GiB for a million rows.
        """
        if not self.path.is_dir():
            return
        with self._locked():
            self._rewrite(self._sound_files())

    def sweep(self) -> list[Path]:
        """Remove temporaries and unlisted data files older than the grace period; return them.

        Without a manifest nothing says which data files count, and only temporaries go.
        """
        if not self.path.is_dir():
            return []
        with self._locked():
            return self._sweep(self._listed_or_rebuilt(locked=True))

    def check(self) -> list[Finding]:
        """Find what is damaged, foreign, left over or implausible, with a remedy for each; changes nothing."""
        try:
            files = read_manifest(self._manifest_path)
        except DamagedManifest as error:
            remedy = "nothing: the next read or append makes it again from the data files"
            return [Finding(self._manifest_path, str(error), remedy)]
        except ProfileError as error:
            newer, wanted = "use the newer version of Pipe-Déjàvu", "move it away: a database is a folder of its own"
            return [Finding(self._manifest_path, str(error), newer if self._manifest_path.is_file() else wanted)]
        findings, sound = [], []
        for file in files:
            try:
                reason = damage_of(self.path, file)
            except ProfileError as error:
                remedy = "use the version that wrote it, or move the file out of the folder and measure again"
                findings.append(Finding(self.path / file.name, str(error), remedy))
                continue
            if reason:
                findings.append(Finding(self.path / file.name, reason, measure_again(file)))
            else:
                sound.append(file)
        listed = {file.name for file in files}
        for path in (*self._data_paths(), *self._temporaries()):
            if path.name not in listed and time.time() - path.stat().st_mtime > self.grace_seconds:
                findings.append(Finding(path, "it is left over: the manifest does not list it", "delete it"))
        for path in sorted(self.path.glob("*.parquet")):
            if not DATA_NAME.fullmatch(path.name):
                remedy = "add its rows with ProfileDatabase.append_table, or move it elsewhere"
                findings.append(Finding(path, "it is not part of the database and is not read", remedy))
        for path in sorted((self.path / "set_aside").glob("*")):
            findings.append(Finding(path, "it was set aside as damaged", "measure again, then delete it"))
        return findings + findings_of(self._load(sound), self.path)

    # The manifest

    @property
    def _manifest_path(self) -> Path:
        return self.path / MANIFEST

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / LOCK, timeout=self.lock_timeout_seconds)
            lock.acquire()
        except Timeout as error:
            raise ProfileError(
                f"{self.path / LOCK}: another process has held it for {self.lock_timeout_seconds:g} s; try again"
            ) from error
        except OSError as error:
            raise ProfileError(f"{self.path}: the cost database cannot be written: {error}") from error
        try:
            yield
        finally:
            lock.release()

    def _listed_or_rebuilt(self, locked: bool = False) -> list[DataFile]:
        try:
            return read_manifest(self._manifest_path)
        except DamagedManifest:
            if locked:
                return self._rebuild()
            with self._locked():
                return self._listed_or_rebuilt(locked=True)

    def _rebuild(self) -> list[DataFile]:
        """List every intact data file again. Compacted rows may be in two files: `_rewrite` keeps one of each."""
        whole = [file for path in self._data_paths() if (file := file_at(path)).name == path.name]
        log.warning("%s is damaged; it is made again from %d data files", self._manifest_path, len(whole))
        set_aside(self._manifest_path)
        return self._rewrite([file for file in whole if damage_of(self.path, file) is None])

    def _rewrite(self, old: list[DataFile], beside: Sequence[DataFile] = ()) -> list[DataFile]:
        """Rewrite the rows of the old files into new ones, and list the other files as they are."""
        table = self._load(old)
        new = [*beside, *(self._write_data(distinct(table)) if table.num_rows else [])]
        kept = {file.name for file in new}
        for file in old:
            if file.name not in kept:
                os.utime(self.path / file.name)  # the grace period starts now, not when the file was written
        write_manifest(self._manifest_path, new)
        return new

    def _tidy(self, files: list[DataFile]) -> None:
        small = [file for file in files if file.rows < _ROW_GROUP_ROWS]
        if len(small) > _MOST_SMALL_FILES:
            self._sweep(self._rewrite(small, beside=[file for file in files if file not in small]))

    def _sweep(self, files: list[DataFile]) -> list[Path]:
        listed = {file.name for file in files}
        removable = self._temporaries()
        if self._manifest_path.exists():
            removable += [path for path in self._data_paths() if path.name not in listed]
        oldest = time.time() - self.grace_seconds
        swept = [path for path in removable if path.stat().st_mtime <= oldest]
        for path in swept:
            path.unlink()
        return swept

    # The data files

    def _data_paths(self) -> list[Path]:
        return sorted(path for path in self.path.glob("*.parquet") if DATA_NAME.fullmatch(path.name))

    def _temporaries(self) -> list[Path]:
        return sorted(self.path.glob(f"{TEMPORARY_PREFIX}*"))

    def _dataset(self, files: Sequence[DataFile]) -> ds.Dataset:
        return ds.dataset([str(self.path / file.name) for file in files], schema=SCHEMA, format="parquet")

    def _load(self, files: Sequence[DataFile], expression: ds.Expression | None = None) -> pa.Table:
        return self._dataset(files).to_table(filter=expression) if files else SCHEMA.empty_table()

    def _write_data(self, table: pa.Table) -> list[DataFile]:
        order = ("device_type", "kind", "subject", "measured_at")
        table = table.sort_by([(name, "ascending") for name in order])
        files = []
        for start in range(0, table.num_rows, _FILE_ROWS):
            part = table.slice(start, _FILE_ROWS)
            sink = pa.BufferOutputStream()
            pq.write_table(part, sink, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
            payload = sink.getvalue()
            device_types = tuple(sorted(pc.unique(part["device_type"]).to_pylist()))
            file = DataFile(hashlib.sha256(payload).hexdigest(), part.num_rows, payload.size, device_types)
            write_atomically(self.path / file.name, payload, "data")
            files.append(file)
        return files

    def _damage(self, files: Iterable[DataFile]) -> dict[DataFile, str]:
        return {file: reason for file in files if (reason := damage_of(self.path, file))}

    def _sound_files(self) -> list[DataFile]:
        """Return the listed files without damaged ones, which are set aside. Requires the lock."""
        files = self._listed_or_rebuilt(locked=True)
        damage = self._damage(files)
        for file, reason in damage.items():
            path = self.path / file.name
            if path.exists():
                set_aside(path)
            rows = plural(file.rows, "row")
            log.warning("%s: %s; set aside with its %s; %s", path, reason, rows, measure_again(file))
        sound = [file for file in files if file not in damage]
        if damage:
            write_manifest(self._manifest_path, sound)
        return sound

    def _set_aside(self, damage: dict[DataFile, str]) -> None:
        try:
            with self._locked():
                self._sound_files()
        except (ProfileError, OSError) as error:  # a reader may lack write permission; it can still use the rest
            for file, reason in damage.items():
                path = self.path / file.name
                log.warning("%s: %s; not used (not set aside: %s); %s", path, reason, error, measure_again(file))


@dataclass(frozen=True)
class _Snapshot(ProfileDatabase):
    """A database as it was at each first question; copies for other processes ask again."""

    _answers: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_answers": {}}

    def _once(self, ask: Callable[..., T], filters: Mapping[str, Any]) -> T:
        key = (ask.__name__, *_question(filters))
        if key not in self._answers:
            self._answers[key] = ask(**filters)
        answer: T = self._answers[key]
        return answer

    def snapshot(self) -> ProfileDatabase:
        return self

    def read(self, **filters: Any) -> pa.Table:
        return self._once(super().read, filters)

    def latest(self, **filters: Any) -> list[Measurement]:
        return list(self._once(super().latest, filters))

    def history(self, **filters: Any) -> list[list[Measurement]]:
        return [list(rows) for rows in self._once(super().history, filters)]


def _question(filters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for equal filters."""
    many = (list, tuple, set, frozenset)
    return tuple((name, tuple(one) if isinstance(one, many) else one) for name, one in sorted(filters.items()))


def _check_plausible(table: pa.Table) -> None:
    wrong = impossible_rows(table)
    if wrong:
        row = min(wrong)
        raise ProfileError(f"{row_name(table, row)}: {wrong[row]}")
