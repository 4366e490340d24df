"""One row of the cost database: its columns, its units, and its validation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dejavu.foundation.errors import DejavuError

SCHEMA_VERSION = 2
ADDED_COLUMNS = {"disturbed_share": 2}  # column -> the version that added it; older rows have a null there
KINDS = ("layer", "operator", "transfer", "pass", "launch", "collective", "stage", "step", "probe")
DIRECTIONS = ("forward", "backward", "backward_input", "backward_weight", "optimizer", "both")
SAME_MEASUREMENT = (
    *("kind", "subject", "device_type", "peer_device_type", "dtype", "direction"),
    *("microbatch_size", "tensor_parallel", "num_ranks", "size_bytes"),
)

MOST_DISTURBED_SHARE = 0.5  # with more, the median itself is of a disturbed repeat

# What a row's `extra` may say of its work: `profiles.plausible` and the cost sources compute with these.
FIGURES = (
    *("flops", "moved_bytes", "num_kernels", "num_messages", "sent_bytes"),  # of passes, stages and steps
    *("batch", "m", "n", "k", "read_bytes", "written_bytes"),  # of a kernel
)
MOST_SHOWN = 200  # characters of a value that is rejected
_SPREAD_SLACK = 1e-9  # relative; interpolated percentiles may pass the median by rounding


def _field(name: str, type_: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, type_, nullable=nullable)


SCHEMA = pa.schema(
    [
        _field("kind", pa.string()),
        _field("subject", pa.string()),
        _field("name", pa.string()),
        _field("device_type", pa.string()),
        _field("peer_device_type", pa.string(), nullable=True),
        _field("dtype", pa.string()),
        _field("direction", pa.string(), nullable=True),
        _field("microbatch_size", pa.int64(), nullable=True),
        _field("tensor_parallel", pa.int64()),
        _field("num_ranks", pa.int64(), nullable=True),
        _field("size_bytes", pa.int64(), nullable=True),
        _field("flops", pa.float64(), nullable=True),
        _field("seconds", pa.float64()),
        _field("seconds_low", pa.float64(), nullable=True),
        _field("seconds_high", pa.float64(), nullable=True),
        _field("repeats", pa.int64()),
        _field("peak_bytes", pa.int64(), nullable=True),
        _field("host_fingerprint", pa.string()),
        _field("torch_version", pa.string()),
        _field("source", pa.string()),
        _field("how", pa.string()),
        _field("measured_at", pa.timestamp("us", tz="UTC")),
        _field("extra", pa.string(), nullable=True),
        _field("disturbed_share", pa.float64(), nullable=True),
    ],
    metadata={"dejavu_schema_version": str(SCHEMA_VERSION)},
)


class ProfileError(DejavuError):
    """The cost database rejects a row or a file, or cannot write its folder."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of the database: how long one thing took, on what, and how that is known.

    Attributes:
        kind: one of `KINDS`.
        subject: `stable_hash` of what was measured; two layers that cost the same share it. `name` is for people.
        peer_device_type: the other end of a link.
        direction: forward, backward, its input and its weight part where they run apart, both; None where there is
            none, as in a transfer.
        size_bytes: what was sent, for transfers and collectives.
        seconds: the median of `repeats`; `seconds_low` and `seconds_high` are its 10th and 90th percentile.
        peak_bytes: the most memory that was allocated.
        source: "measured", "training", "import:alpa" …; `how` says the method in words.
        measured_at: with a time zone; kept to the microsecond.
        extra: a JSON object for what has no column.
        disturbed_share: the share of the repeats that had other work beside them (0: none, 1: all); None: not known,
            as on GPUs, of what others measured, and of rows that are older than the column.
    """

    kind: str
    subject: str
    name: str
    device_type: str
    peer_device_type: str | None = None
    dtype: str
    direction: str | None = None
    microbatch_size: int | None = None
    tensor_parallel: int = 1
    num_ranks: int | None = None
    size_bytes: int | None = None
    flops: float | None = None
    seconds: float
    seconds_low: float | None = None
    seconds_high: float | None = None
    repeats: int
    peak_bytes: int | None = None
    host_fingerprint: str
    torch_version: str
    source: str
    how: str
    measured_at: datetime
    extra: str | None = None
    disturbed_share: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether other work affected its median. Such a row never overrules an undisturbed one."""
        return self.disturbed_share is not None and self.disturbed_share > MOST_DISTURBED_SHARE

    def check(self) -> None:
        """Check the row.

        Raises:
            ProfileError: the database would reject it.
        """
        check_rows(table_of([self]))


def check_schema(schema: pa.Schema, where: str, require_version: bool) -> None:
    """Check that columns, types and version are ours or an older version's.

    Raises:
        ProfileError: they are not; the message has expected and found.
    """
    version = (schema.metadata or {}).get(b"dejavu_schema_version", b"none").decode()
    wrong_version = f"{where}: expected dejavu_schema_version {SCHEMA_VERSION} or older, found {version}"
    if version not in ("none", *map(str, range(1, SCHEMA_VERSION + 1))):
        raise ProfileError(wrong_version)
    later = {name for name, added in ADDED_COLUMNS.items() if version == "none" or int(version) < added}
    expected = {
        field.name: str(field.type) for field in SCHEMA if field.name in schema.names or field.name not in later
    }
    found = {field.name: str(field.type) for field in schema}
    if expected != found or len(found) != len(schema):
        missing = [f"{name}: {type_}" for name, type_ in expected.items() if found.get(name) != type_]
        other = [f"{name}: {type_}" for name, type_ in found.items() if expected.get(name) != type_]
        raise ProfileError(
            f"{where}: expected columns {', '.join(missing) or 'once each'}; found {', '.join(other) or '-'}"
        )
    if require_version and version == "none":
        raise ProfileError(wrong_version)


def conformed(table: pa.Table, where: str) -> pa.Table:
    """Return the same rows under `SCHEMA`: its order of columns, its metadata, no nulls where it allows none."""
    check_schema(table.schema, where, require_version=False)
    for name in ADDED_COLUMNS:
        if name not in table.column_names:
            table = table.append_column(SCHEMA.field(name), pa.nulls(table.num_rows, SCHEMA.field(name).type))
    table = table.select(SCHEMA.names)
    for field in SCHEMA:
        if not field.nullable and table[field.name].null_count:
            row = pc.index(pc.is_null(table[field.name]), True).as_py()
            raise ProfileError(f"{row_name(table, row)}: {field.name} is missing")
    return table.cast(SCHEMA)


def table_of(measurements: Sequence[Measurement]) -> pa.Table:
    columns = []
    for field in SCHEMA:
        values = [getattr(measurement, field.name) for measurement in measurements]
        if field.name == "measured_at":
            _check_time_zones(values, measurements)
        try:
            columns.append(pa.array(values, field.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            row = next(i for i, value in enumerate(values) if not _converts(value, field.type))
            found = f"{field.name} is {values[row]!r}, expected {field.type}"
            raise ProfileError(f"row {row} ({measurements[row].name!r}): {found}") from error
    return conformed(pa.table(columns, names=SCHEMA.names), where="the rows")


def _check_time_zones(values: Sequence[Any], measurements: Sequence[Measurement]) -> None:
    for row, value in enumerate(values):
        if not isinstance(value, datetime) or value.tzinfo is None:
            found = f"measured_at is {value!r}, expected a datetime with a time zone"
            raise ProfileError(f"row {row} ({measurements[row].name!r}): {found}")


def _converts(value: Any, type_: pa.DataType) -> bool:
    try:
        pa.array([value], type_)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def measurements_of(table: pa.Table) -> list[Measurement]:
    names = [field.name for field in fields(Measurement)]
    columns = [table[name].to_pylist() for name in names]
    columns[names.index("measured_at")] = [value.astimezone(UTC) for value in columns[names.index("measured_at")]]
    return [Measurement(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


def row_name(table: pa.Table, row: int) -> str:
    """Describe a row for people: its number in the table, and what it measures."""
    kind, name, device_type = (table[column][row].as_py() for column in ("kind", "name", "device_type"))
    return f"row {row} ({kind} {name!r} on {device_type})"


def check_rows(table: pa.Table) -> None:
    """Check all rows. A null breaks no rule; `conformed` has checked those.

    Raises:
        ProfileError: of the first row that breaks a rule.
    """
    found = broken_rows(table)
    if found:
        row = min(found)
        raise ProfileError(f"{row_name(table, row)}: {found[row]}")


def broken_rows(table: pa.Table) -> dict[int, str]:
    """Return the rows that break a rule, by number: the first such column, the value found and the one wanted."""
    found: dict[int, str] = {}

    def flag(column: str, good: Any, wanted: str) -> None:
        if pc.all(pc.fill_null(good, True)).as_py() is False:
            for row in np.flatnonzero(~np.array(pc.fill_null(good, True).to_pylist(), dtype=bool)):
                value = repr(table[column][int(row)].as_py())
                shown = value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}…"
                found.setdefault(int(row), f"{column} is {shown}, expected {wanted}")

    def finite(column: str, least: Any, wanted: str) -> None:
        flag(column, pc.and_(pc.is_finite(table[column]), least(table[column], 0.0)), wanted)

    flag("kind", pc.is_in(table["kind"], pa.array(KINDS)), f"one of {', '.join(KINDS)}")
    known_direction = pc.or_(pc.is_null(table["direction"]), pc.is_in(table["direction"], pa.array(DIRECTIONS)))
    flag("direction", known_direction, f"null or one of {', '.join(DIRECTIONS)}")
    for field in SCHEMA:
        if field.type == pa.string() and field.name != "extra":
            flag(field.name, pc.not_equal(table[field.name], ""), "text that is not empty")
    for column in ("seconds", "seconds_low", "seconds_high"):
        finite(column, pc.greater, "a finite number of seconds above 0")
    finite("flops", pc.greater_equal, "a finite number of FLOP, 0 or more")
    share = table["disturbed_share"]
    flag("disturbed_share", pc.and_(pc.greater_equal(share, 0.0), pc.less_equal(share, 1.0)), "a share from 0 to 1")
    for column in ("tensor_parallel", "repeats", "microbatch_size", "num_ranks"):
        flag(column, pc.greater_equal(table[column], 1), "1 or more")
    for column in ("size_bytes", "peak_bytes"):
        flag(column, pc.greater_equal(table[column], 0), "0 bytes or more")
    seconds = table["seconds"]
    low, high = (
        pc.multiply(table["seconds_low"], 1 - _SPREAD_SLACK),
        pc.multiply(table["seconds_high"], 1 + _SPREAD_SLACK),
    )
    flag("seconds_low", pc.less_equal(low, seconds), "no more than seconds")
    flag("seconds_high", pc.greater_equal(high, seconds), "no less than seconds")
    texts_of: dict[str, list[str]] = {}
    for text in pc.unique(table["extra"]).to_pylist():
        if text is not None and (wanted := _wanted_instead(text)):
            texts_of.setdefault(wanted, []).append(text)
    for wanted, texts in texts_of.items():
        flag("extra", pc.invert(pc.is_in(table["extra"], pa.array(texts, pa.string()))), wanted)
    return found


def _wanted_instead(text: str) -> str | None:
    """Say what is wanted of a row's `extra` that it is not; None: nothing."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return "a JSON object"
    if not isinstance(content, dict):
        return "a JSON object"
    for name in FIGURES:
        figure = content.get(name, 0)
        if not isinstance(figure, int | float) or not 0 <= figure <= sys.float_info.max:
            return f"a JSON object whose {name!r}, if it has one, is a finite number, 0 or more"
    return None
