"""A folder of measured plans: plans.jsonl, layers.parquet and network.parquet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dejavu.foundation.errors import InputError
from dejavu.measured_plans.layers import LayerProfile, LayerRow
from dejavu.measured_plans.network import Bandwidth, Link, Network
from dejavu.measured_plans.plans import BadPlan, MeasuredPlan, read_plans

_LAYERS = ("device_type", "model", "layer", "tensor_parallel", "microbatch_size", "forward_s", "backward_s")
_ZONES = ("from_zone", "to_zone")
_NETWORK = ("scope", "from_device", "from_count", "to_device", "to_count", "c2", "c1", "c0")
_WITHIN, _EMBEDDING = "within a node", "embedding"


@dataclass(frozen=True, eq=False)
class MeasuredFolder:
    """Plans, and the profiles to price them.

    Attributes:
        left_out: how many rows of the profiles are none, by file and reason.
    """

    plans: tuple[MeasuredPlan | BadPlan, ...]
    layers: LayerProfile
    network: Network
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_folder(folder: Path) -> MeasuredFolder:
    """Read plans and profiles.

    Raises:
        InputError: a file or a column is missing, or holds what cannot be read; the message names it.
    """
    left_out: Counter[str] = Counter()
    layers = LayerProfile.of(_layer_rows(folder / "layers.parquet", left_out))
    if not layers.rows:
        why = "; ".join(f"{count:,} of {reason}" for reason, count in left_out.items())
        raise InputError(
            f"{folder / 'layers.parquet'} has no row with forward_s and backward_s above 0" + (why and f"; {why}")
        )
    network = _network(folder / "network.parquet", left_out)
    return MeasuredFolder(tuple(read_plans(folder / "plans.jsonl")), layers, network, dict(left_out))


def _rows(path: Path, wanted: tuple[str, ...], by: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The file's rows in one order, by these columns first: of rows that say the same thing twice the first counts."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; wanted Parquet with columns {', '.join(wanted)}")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no whole Parquet file ({error}); wanted columns {', '.join(wanted)}") from error
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise InputError(f"{path}: wanted columns {', '.join(missing)}; found {', '.join(table.column_names)}")
    rows: list[dict[str, Any]] = table.to_pylist()
    names = list(dict.fromkeys([*by, *wanted, *sorted(table.column_names)]))
    return sorted(rows, key=lambda row: [str(row.get(name)) for name in names])


def _layer_rows(path: Path, left_out: Counter[str]) -> list[tuple[str, str, int, int, int, LayerRow]]:
    """Rows whose passes are numbers above 0; an embedding's backward pass has hardly any work, and may take 0."""
    found = []
    for row in _rows(path, _LAYERS):
        forward, backward = (_first(row, f"{name}_s", f"planner_{name}_s") for name in ("forward", "backward"))
        may_idle = row.get("kind") in (None, "", _EMBEDDING)  # or may be one: where no kind is said
        layer, degree, size = (_whole(row, name) for name in ("layer", "tensor_parallel", "microbatch_size"))
        if not row["device_type"] or not row["model"]:
            left_out[f"{path.name}: no device_type or no model"] += 1
            continue
        if layer is None or degree is None or size is None or degree < 1 or size < 1:
            left_out[f"{path.name}: layer, tensor_parallel or microbatch_size is no whole number"] += 1
            continue
        if not forward or backward is None or min(forward, backward) < 0.0 or not (backward or may_idle):
            left_out[f"{path.name}: no forward_s and backward_s above 0"] += 1
            continue
        measured = LayerRow(
            str(row.get("kind") or "transformer"),
            forward,
            backward,
            _number(row, "update_s"),
            _number(row, "parameter_bytes"),
            _number(row, "output_bytes_mb1"),
        )
        found.append((str(row["device_type"]), str(row["model"]), layer, degree, size, measured))
    return found


def _network(path: Path, left_out: Counter[str]) -> Network:
    between: dict[Link, Bandwidth] = {}
    within: dict[tuple[str, int], Bandwidth] = {}
    zoned: set[Link] = set()  # known from one zone, which counts before two
    for row in _rows(path, _NETWORK, _ZONES):
        curve = [_number(row, name) for name in ("c2", "c1", "c0")]
        if not row["from_device"] or not row["to_device"]:
            left_out[f"{path.name}: no from_device or no to_device"] += 1
            continue
        peak = _number(row, "peak_bytes_per_s") or math.inf
        if None in curve or peak < 0.0:
            left_out[f"{path.name}: c2, c1 or c0 is no number, or peak_bytes_per_s below 0"] += 1
            continue
        counts = [1 if row[name] is None else _whole(row, name) or 0 for name in ("from_count", "to_count")]
        if min(counts) < 1:
            left_out[f"{path.name}: from_count or to_count is no whole number, 1 or more"] += 1
            continue
        c2, c1, c0 = (value or 0.0 for value in curve)
        bandwidth = Bandwidth(c2, c1, c0, peak)
        link = Link(str(row["from_device"]), counts[0], str(row["to_device"]), counts[1])
        if row["scope"] == _WITHIN:
            within.setdefault((link.from_device, link.from_count), bandwidth)
        elif row.get("from_zone") == row.get("to_zone") and link not in zoned:
            between[link] = bandwidth
            zoned.add(link)
        else:
            between.setdefault(link, bandwidth)
    try:
        return Network(between, within)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _first(row: dict[str, Any], *names: str) -> float | None:
    """The first of the columns with a number other than 0, else with one: the planner's is a copy of the same times."""
    values = [value for name in names if (value := _number(row, name)) is not None]
    return next((value for value in values if value), values[0] if values else None)


def _number(row: dict[str, Any], name: str) -> float | None:
    """A cell as a number, also where it is the text of one; None where it is missing or none."""
    try:
        value = float(row.get(name))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _whole(row: dict[str, Any], name: str) -> int | None:
    value = _number(row, name)
    return int(value) if value is not None and value == int(value) else None
