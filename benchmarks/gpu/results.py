"""What the campaign has found so far, as files: predictions, figures, and rows of the database."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet as pq

from benchmarks._report import result_of
from benchmarks.gpu.schedule import Done
from dejavu.foundation.processes.files import write_json
from dejavu.profiles import ProfileDatabase

Row = dict[str, Any]


@dataclass(frozen=True)
class Predictions:
    """Numbers that were written before what they foretell was measured.

    Attributes:
        made_at: when they were on the disk.
        sha256: of `rows` as sorted JSON.
    """

    of: str
    made_at: datetime
    sha256: str
    rows: tuple[Row, ...]


@dataclass
class Results:
    """The campaign's files: `PATH`, and beside it `PATH` with `-rows.parquet`, the measurements as database rows.

    Attributes:
        database: of this campaign alone.
        provenance: of every figure.
        done: what became of each unit.
        searches: rows of `benchmarks.search.restarts`.
    """

    path: Path
    database: ProfileDatabase
    provenance: Mapping[str, Any]
    done: Sequence[Done] = ()
    rows: list[Row] = field(default_factory=list)
    predictions: list[Predictions] = field(default_factory=list)
    searches: list[Row] = field(default_factory=list)

    def predict(self, of: str, rows: Iterable[Row]) -> Predictions:
        """Keep predictions: they are on the disk when this returns."""
        found = tuple(rows)
        text = json.dumps(found, sort_keys=True)
        made = Predictions(of, datetime.now(UTC), hashlib.sha256(text.encode()).hexdigest(), found)
        self.predictions.append(made)
        self.save()
        return made

    def save(self) -> None:
        """Write all files; a campaign that is cut off keeps what it had."""
        kept = {"predictions": [asdict(one) | {"made_at": one.made_at.isoformat()} for one in self.predictions]}
        kept["searches"] = self.searches
        write_json(self.path, result_of(self.rows, self.summary()) | kept)
        table, aside = self.database.read(), self.rows_path.with_name(f".{self.rows_path.name}.{os.getpid()}")
        told = {b"provenance": json.dumps(dict(self.provenance)).encode()}
        pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **told}), aside)
        aside.replace(self.rows_path)

    @property
    def rows_path(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-rows.parquet")

    def summary(self) -> Row:
        """Return errors by part and precision, what was not done and why, and the provenance.

        Errors are of what the micro-benchmarks alone predict; `from_layers`: of what the measured layers do.
        """
        found: Row = {}
        for part in dict.fromkeys(row["part"] for row in self.rows):
            of_part = [row for row in self.rows if row["part"] == part]
            for precision in dict.fromkeys(row["precision"] for row in of_part):
                own = [row for row in of_part if row["precision"] == precision]
                for name in ("", "from_layers_"):
                    differences = [row.get(f"{name}difference_percent") for row in own]
                    errors = [abs(one) for one in differences if one is not None]
                    if errors:
                        found[f"{part}_{precision}_{name}mape_percent"] = mean(errors)
            inside = [row["in_range"] for row in of_part if row.get("in_range") is not None]
            if inside:
                found[f"{part}_in_90_percent_range"] = f"{sum(inside)} of {len(inside)}"
        outcomes = Counter(one.outcome for one in self.done)
        return {
            **found,
            **{f"units_{name.replace(' ', '_')}": outcomes[name] for name in ("done", "skipped", "cut off", "failed")},
            "not_done": [str(one) for one in self.done if one.outcome != "done"],
            "seconds_of_parts": {
                part: sum(one.seconds for one in self.done if one.part == part)
                for part in dict.fromkeys(one.part for one in self.done)
            },
            "provenance": dict(self.provenance),
        }


def compared(predicted: Row, measured_seconds: float, **more: Any) -> Row:
    """Return a row of the table: what was predicted, with its 90 % range, beside what was measured."""
    seconds, low, high = (predicted[name] for name in ("seconds", "low_seconds", "high_seconds"))
    names = {name: value for name, value in predicted.items() if not name.endswith("seconds") and name != "source"}
    return {
        **names,
        "predicted_ms": 1e3 * seconds,
        "measured_ms": 1e3 * measured_seconds,
        "difference_percent": 100 * (seconds / measured_seconds - 1),
        "in_range": None if low is None or high is None else low <= measured_seconds <= high,
        "predicted_by": predicted["source"],
        **more,
    }
