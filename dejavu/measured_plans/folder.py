"""A folder of measured plans: plans.jsonl, layers.parquet and network.parquet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dejavu.foundation.errors import InputError
from dejavu.measured_plans.layers import LayerProfile, LayerRow
from dejavu.measured_plans.network import Bandwidth, Link, Network
from dejavu.measured_plans.plans import BadPlan, MeasuredPlan, read_plans

_LAYERS = ("device_type", "model", "layer", "tensor_parallel", "microbatch_size", "forward_s", "backward_s")
_NETWORK = ("scope", "from_device", "from_count", "to_device", "to_count", "c2", "c1", "c0")
_WITHIN = "within a node"


@dataclass(frozen=True, eq=False)
class MeasuredFolder:
    """Plans, and the profiles to price them."""

    plans: tuple[MeasuredPlan | BadPlan, ...]
    layers: LayerProfile
    network: Network


def read_folder(folder: Path) -> MeasuredFolder:
    """Read plans and profiles.

    Raises:
        InputError: a file or a column is missing, or holds what cannot be read; the message names it.
    """
    layers = LayerProfile.of(_layer_rows(folder / "layers.parquet"))
    if not layers.rows:
        raise InputError(f"{folder / 'layers.parquet'} has no row with forward_s and backward_s above 0")
    return MeasuredFolder(tuple(read_plans(folder / "plans.jsonl")), layers, _network(folder / "network.parquet"))


def _rows(path: Path, wanted: tuple[str, ...]) -> list[dict[str, Any]]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no whole Parquet file ({error}); wanted columns {', '.join(wanted)}") from error
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise InputError(f"{path}: wanted columns {', '.join(missing)}; found {', '.join(table.column_names)}")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _layer_rows(path: Path) -> Iterator[tuple[str, str, int, int, int, LayerRow]]:
    """Rows whose passes are numbers; a layer without work (an embedding's backward pass) may take 0."""
    for row in _rows(path, _LAYERS):
        forward, backward = (_first(row, f"{name}_s", f"planner_{name}_s") for name in ("forward", "backward"))
        places = [_number(row, name) for name in ("layer", "tensor_parallel", "microbatch_size")]
        if forward is None or backward is None or None in places:
            continue
        layer, degree, size = (int(place or 0) for place in places)
        if min(forward, backward) < 0.0 or forward + backward <= 0.0 or degree < 1 or size < 1:
            continue
        measured = LayerRow(
            str(row.get("kind") or "transformer"),
            forward,
            backward,
            _number(row, "update_s"),
            _number(row, "parameter_bytes"),
            _number(row, "output_bytes_mb1"),
        )
        yield str(row["device_type"]), str(row["model"]), layer, degree, size, measured


def _network(path: Path) -> Network:
    between: dict[Link, Bandwidth] = {}
    within: dict[tuple[str, int], Bandwidth] = {}
    zoned: set[Link] = set()  # known from one zone, which counts before two
    for row in _rows(path, _NETWORK):
        curve = [_number(row, name) for name in ("c2", "c1", "c0")]
        if None in curve or row["from_device"] is None or row["to_device"] is None:
            continue
        c2, c1, c0 = (value or 0.0 for value in curve)
        bandwidth = Bandwidth(c2, c1, c0, _number(row, "peak_bytes_per_s") or math.inf)
        counts = [int(_number(row, name) or 1) for name in ("from_count", "to_count")]
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
    """The first of the columns that has a number here: the planner's is another copy of the same measurements."""
    return next((value for name in names if (value := _number(row, name)) is not None), None)


def _number(row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    return None if value is None or not math.isfinite(value) else float(value)
