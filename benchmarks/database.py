"""The cost database with many rows: append, query by device and kind, compaction.

    python -m benchmarks.database --rows 1000000 --json benchmarks/results/database.json

The rows are made up; their columns have as many different values as a database of that size would.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks._report import report, spread_ms, timed_seconds
from dejavu.profiles import DIRECTIONS, KINDS, SCHEMA, ProfileDatabase

NUM_DEVICE_TYPES = 10
NUM_KINDS = 4
ROWS_PER_SUBJECT = 12  # microbatch sizes and degrees of one layer
FIRST_MICROSECOND = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1e6)


def made_up_rows(num_rows: int, seed: int, first_row: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    number = np.arange(first_row, first_row + num_rows)
    seconds = random.lognormal(-7, 2, num_rows)
    words: dict[str, Any] = {
        "kind": np.array(KINDS[:NUM_KINDS])[random.integers(NUM_KINDS, size=num_rows)],
        "subject": np.char.mod("%016x", number // ROWS_PER_SUBJECT * 2_654_435_761),
        "name": np.char.mod("transformer.block.%d", number // ROWS_PER_SUBJECT % 96),
        "device_type": np.char.mod("device-%d", random.integers(NUM_DEVICE_TYPES, size=num_rows)),
        "dtype": np.array(["float16", "bfloat16", "float32"])[random.integers(3, size=num_rows)],
        "direction": np.array(DIRECTIONS)[random.integers(len(DIRECTIONS), size=num_rows)],
        "microbatch_size": 2 ** random.integers(6, size=num_rows),
        "tensor_parallel": 2 ** random.integers(4, size=num_rows),
        "flops": seconds * 1e13,
        "seconds": seconds,
        "seconds_low": 0.95 * seconds,
        "seconds_high": 1.1 * seconds,
        "repeats": np.full(num_rows, 10),
        "peak_bytes": random.integers(2**20, 2**34, size=num_rows),
        "measured_at": FIRST_MICROSECOND + number * 1000,
        **{name: np.full(num_rows, "made up") for name in ("host_fingerprint", "torch_version", "source", "how")},
    }
    columns = [
        pa.array(words[field.name]).cast(field.type) if field.name in words else pa.nulls(num_rows, field.type)
        for field in SCHEMA
    ]
    return pa.table(columns, names=SCHEMA.names)


def measure(folder: Path, num_rows: int, num_appends: int, repeats: int) -> list[dict[str, Any]]:
    database = ProfileDatabase(folder / "profiles_db")
    part_rows = num_rows // num_appends
    parts = iter([made_up_rows(part_rows, seed, seed * part_rows) for seed in range(num_appends)])
    rows: list[dict[str, Any]] = []

    def add(what: str, seconds: list[float]) -> None:
        rows.append({"what": what, **spread_ms(seconds), "files": len(list(database.path.glob("*.parquet")))})

    def query() -> pa.Table:
        return database.read(device_type="device-3", kind="layer")

    add(f"append {part_rows:,} rows", timed_seconds(lambda: database.append_table(next(parts)), num_appends, 0))
    add("query (device, kind), first in this process", timed_seconds(query, 1, warmups=0))
    add(f"query (device, kind), {num_appends} files, warm", timed_seconds(query, repeats))
    add("compact", timed_seconds(database.compact, 1, warmups=0))
    ProfileDatabase(database.path, grace_seconds=0).sweep()
    query_seconds = timed_seconds(query, repeats)
    add("query (device, kind), compacted, warm", query_seconds)
    add("latest (device, kind)", timed_seconds(lambda: database.latest(device_type="device-3", kind="layer"), 3))
    singles = iter([made_up_rows(1, 1000 + number, num_rows + number) for number in range(repeats)])
    add("append 1 row", timed_seconds(lambda: database.append_table(next(singles)), repeats, warmups=0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--appends", type=int, default=20, help="over how many appends the rows come in")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.rows, arguments.appends, arguments.repeats)
        data_files = (Path(folder) / "profiles_db").glob("*.parquet")
        summary = {
            "rows_stored": arguments.rows // arguments.appends * arguments.appends + arguments.repeats,
            "bytes_on_disk": sum(path.stat().st_size for path in data_files),
            "query_median_ms": next(row["median_ms"] for row in rows if "compacted" in row["what"]),
        }
    report(f"Cost database, {arguments.rows:,} rows", rows, summary, arguments.json)


if __name__ == "__main__":
    main()
