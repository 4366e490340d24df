"""What is wrong with the rows of a database: each finding says which row, why, and what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dejavu.profiles.files import Finding
from dejavu.profiles.measurement import SAME_MEASUREMENT
from dejavu.profiles.neighbours import distinct_values
from dejavu.profiles.plausible import implausible_rows
from dejavu.profiles.query import numbered

OUTLIER_RATIO = 1000.0  # between repeated measurements of one thing; past it, a unit or a clock was wrong (fault 20)

_PROFILED = {  # what `dejavu profile --measure` calls the kinds
    "layer": "layers",
    "transfer": "transfers",
    "pass": "passes",
    "launch": "passes",
    "operator": "operators",
    "collective": "collectives",
}


def findings_of(table: pa.Table, path: Path) -> list[Finding]:
    """Find the implausible rows and the outliers of the database in that folder."""
    wrong, newest = implausible_rows(table), _newest(table)
    findings = [
        Finding(path, f"{described(table, row)}: {why}", remedy_of(table, row))
        for row, why in sorted(wrong.items())
        if row in newest  # an older one was measured again since
    ]
    return findings + _outliers(table.filter(pa.array(~np.isin(np.arange(table.num_rows), list(wrong)))), path)


def described(table: pa.Table, row: int) -> str:
    """Describe a row by what it measures: in a filtered table its number is meaningless."""
    known = {
        column: table[column][row].as_py()
        for column in (
            "kind",
            "name",
            "device_type",
            "dtype",
            "direction",
            "microbatch_size",
            "num_ranks",
            "size_bytes",
        )
    }
    more = (
        f"{known['direction']} pass" if known["direction"] else "",
        f"microbatches of {known['microbatch_size']}" if known["microbatch_size"] else "",
        f"{known['num_ranks']} ranks" if known["num_ranks"] else "",
        f"{known['size_bytes']} bytes" if known["size_bytes"] is not None else "",
        f"measured {table['measured_at'][row].as_py():%Y-%m-%d %H:%M}",
    )
    return f"{known['kind']} {known['name']!r} on {known['device_type']} ({', '.join(filter(None, more))})"


def remedy_of(table: pa.Table, row: int) -> str:
    """Say how to get a sound row in its place."""
    kind, source, device_type = (table[column][row].as_py() for column in ("kind", "source", "device_type"))
    if source.startswith("import:"):
        return f"import it again from a sound file: `dejavu import {source.removeprefix('import:')} FILE`"
    if kind in _PROFILED:
        return f"measure it again on {device_type}: `dejavu profile --measure {_PROFILED[kind]} --again`"
    return "train such a plan again: `dejavu run`"


def _outliers(table: pa.Table, path: Path) -> list[Finding]:
    """Find things measured a thousandfold apart, until a newer measurement agrees with the majority."""
    groups = table.group_by([*SAME_MEASUREMENT]).aggregate([("seconds", "min"), ("seconds", "max")])
    if not pc.any(pc.greater(groups["seconds_max"], pc.multiply(groups["seconds_min"], OUTLIER_RATIO))).as_py():
        return []
    _, codes = distinct_values(table, SAME_MEASUREMENT)
    seconds, newest, findings = table["seconds"].to_numpy(), _newest(table), []
    for members in np.split(order := np.argsort(codes, kind="stable"), np.flatnonzero(np.diff(codes[order])) + 1):
        least, most = seconds[members].min(), seconds[members].max()
        if most <= OUTLIER_RATIO * least:
            continue
        last = next(int(row) for row in members if int(row) in newest)
        middle = float(np.median(seconds[members]))
        if len(members) > 2 and middle / OUTLIER_RATIO < seconds[last] < middle * OUTLIER_RATIO:
            continue
        kind, name, device_type = (table[column][last].as_py() for column in ("kind", "name", "device_type"))
        what = f"{kind} {name!r} on {device_type} was measured as both {least:g} s and {most:g} s"
        findings.append(Finding(path, what, remedy_of(table, last)))
    return findings


def _newest(table: pa.Table) -> set[int]:
    """Return the index of the newest row of each thing measured; of equal times, of the fastest."""
    order = numbered(table).sort_by([("measured_at", "ascending"), ("seconds", "descending")])
    positions = order["row"].to_numpy()
    last = numbered(order.drop_columns(["row"])).group_by([*SAME_MEASUREMENT]).aggregate([("row", "max")])["row_max"]
    return {int(positions[k]) for k in last.to_numpy()}
