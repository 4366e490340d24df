"""Filters, and rows as a set: what is equal, what is new."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from dejavu.profiles.measurement import SCHEMA, ProfileError


def numbered(table: pa.Table) -> pa.Table:
    return table.append_column("row", pa.array(range(table.num_rows), pa.int64()))


def distinct(table: pa.Table) -> pa.Table:
    return without_known(table, SCHEMA.empty_table())


def without_known(table: pa.Table, known: pa.Table) -> pa.Table:
    """The rows that differ, in some column, from all known rows and from each other. Nulls are equal to nulls."""
    both = numbered(pa.concat_tables([known, table]))
    first = both.group_by(SCHEMA.names).aggregate([("row", "min")])["row_min"]
    rows = pc.subtract(first, known.num_rows).combine_chunks()
    return table.take(rows.filter(pc.greater_equal(rows, 0)).sort())


def could_equal(table: pa.Table) -> ds.Expression:
    """What known rows must satisfy to equal one of these; narrow enough that an append reads little."""
    times = pc.min_max(table["measured_at"])
    span = (ds.field("measured_at") >= times["min"]) & (ds.field("measured_at") <= times["max"])
    for column in ("device_type", "kind", "subject"):
        span &= ds.field(column).isin(pc.unique(table[column]))
    return span


def expression_of(filters: dict[str, Any]) -> ds.Expression | None:
    expression = None
    for column, wanted in filters.items():
        if column not in SCHEMA.names:
            raise ProfileError(f"no column {column!r} to filter by; there are {', '.join(SCHEMA.names)}")
        values = list(wanted) if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
        try:
            known = pa.array([value for value in values if value is not None], SCHEMA.field(column).type)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ProfileError(f"filter {column}={wanted!r}: expected {SCHEMA.field(column).type}: {error}") from error
        term = ds.field(column).isin(known)
        if None in values:
            term |= ds.field(column).is_null()
        expression = term if expression is None else expression & term
    return expression
