"""The two forms of Alpa's profile of a cluster, as frames of one form: a row for each point.

The pickle is a dict `(cluster, (nodes, devices on each))` -> `MeshProfilingResult` with, for each collective, a dict
`(replica groups, dtype)` -> [(size, seconds)], and for matrix products `((), dtype)` -> [(flop, seconds)] with
flop = 2n³. The Parquet form has the same columns, and which points are no measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError
from dejavu.importers._base import BATCH_ROWS
from dejavu.importers.cells import cells_of, texts_of
from dejavu.importers.restricted_pickle import MOST_BYTES, Record, read_plain
from dejavu.importers.sources import check_columns, parquet_columns, parquet_frames

RECORD = "alpa.mesh_profiling.MeshProfilingResult"
WANTED = "Alpa's prof_database.pkl or its Parquet form"
CLUSTER = "cluster"  # the column with its name; older files have none
NO_NAME = "no name"  # of points that say nothing of their cluster
COLUMNS = ("mesh_nodes", "mesh_gpus_per_node", "op", "replica_groups", "dtype", "size_elements", "seconds", "flop")
_NUMBERS = ("size_elements", "flop")
FLAGS = ("is_noop", "is_monotone_clamped", "failed")

_CLAMPED_SLACK = 1e-9  # relative; a multiple that Alpa computed differs from ours by rounding


@dataclass(frozen=True)
class MeshProfile:
    """What Alpa measured on one mesh; the attributes that its class of the same job has."""

    all_gather_cost_dict: dict[Any, Any] = field(default_factory=dict)
    all_reduce_cost_dict: dict[Any, Any] = field(default_factory=dict)
    all_to_all_cost_dict: dict[Any, Any] = field(default_factory=dict)
    reduce_scatter_cost_dict: dict[Any, Any] = field(default_factory=dict)
    dot_cost_dict: dict[Any, Any] = field(default_factory=dict)
    conv_cost_dict: Any = None
    op_cost_dict: Any = None
    available_memory_per_device: float | None = None


def clusters_of(path: Path) -> list[str]:
    """Return the names of the clusters whose points a file has. Raises InputError where it has none of Alpa's forms."""
    if path.suffix != ".parquet":
        return sorted({_cluster(key, str(path)) for key in _content(path)})
    if CLUSTER not in parquet_columns(path, WANTED):
        return [NO_NAME]
    return sorted({str(name) for _, frame in parquet_frames(path, (CLUSTER,)) for name in _names(frame[CLUSTER])})


def parquet_pieces(path: Path) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield pieces with `COLUMNS`, `FLAGS` and `CLUSTER`, and each one's first point.

    Raises InputError for other columns.

    Where a number or a flag is wanted and none was found, a cell is its text, or missing.
    """
    found = parquet_columns(path, WANTED)
    check_columns(path, found, (*COLUMNS, *FLAGS))
    named = (CLUSTER,) if CLUSTER in found else ()
    for start, frame in parquet_frames(path, (*COLUMNS, *FLAGS, *named)):
        clusters = _names(frame[CLUSTER]) if named else NO_NAME
        texts = {column: texts_of(frame[column]) for column in ("op", "dtype", "replica_groups")}
        numbers = {column: cells_of(frame[column]) for column in ("mesh_nodes", "mesh_gpus_per_node", *_NUMBERS)}
        yield (
            start,
            frame.assign(**texts, **numbers, **{flag: cells_of(frame[flag]) for flag in FLAGS}, cluster=clusters),
        )


def pickle_pieces(path: Path) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield what `parquet_pieces` does. Raises InputError for anything but such a profile; runs nothing in it."""
    start, waiting = 0, 0
    pieces: list[pd.DataFrame] = []
    for frame in _series(_content(path), str(path)):
        pieces.append(frame)
        waiting += len(frame)
        if waiting >= BATCH_ROWS:
            yield start, pd.concat(pieces, ignore_index=True)
            start, waiting, pieces = start + waiting, 0, []
    if pieces:
        yield start, pd.concat(pieces, ignore_index=True)


def _content(path: Path) -> dict[Any, Any]:
    """Read a pickle. Raises InputError for what is no dict; runs nothing in it."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise InputError(f"{path} has {size:,} bytes; wanted at most {MOST_BYTES:,}")
    content = read_plain(path.read_bytes(), RECORD, str(path))
    if type(content) is not dict:
        raise InputError(f"{path} holds a {type(content).__name__}; wanted a dict of meshes")
    return content


def _series(content: dict[Any, Any], where: str) -> Iterator[pd.DataFrame]:
    """Yield one collective over one grouping, or the products, of one dtype, size by size."""
    for key, value in content.items():
        (nodes, devices_per_node), cluster = _mesh(key, where), _cluster(key, where)
        mesh = f"{where}: mesh {nodes} × {devices_per_node}"
        if not isinstance(value, Record):
            raise InputError(f"{mesh}: found a {type(value).__name__}; wanted a {RECORD}")
        profile = _profile(value, mesh)
        for operation in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "dot"):
            place = f"{mesh}: {operation}_cost_dict"
            for (groups, dtype), points in _entries(getattr(profile, f"{operation}_cost_dict"), place):
                yield _frame(operation, groups, dtype, points, place).assign(
                    mesh_nodes=nodes, mesh_gpus_per_node=devices_per_node, cluster=cluster
                )


def _mesh(key: Any, where: str) -> tuple[int, int]:
    if type(key) is tuple and len(key) == 2 and type(key[1]) is tuple and len(key[1]) == 2:
        nodes, devices_per_node = key[1]
        if all(type(count) is int and 0 < count < 2**20 for count in key[1]):
            return nodes, devices_per_node
    raise InputError(f"{where}: found a key {_short(key)}; wanted (cluster, (nodes, devices on each))")


def _cluster(key: Any, where: str) -> str:
    _mesh(key, where)
    return key[0] if type(key[0]) is str and key[0] else NO_NAME if key[0] in (None, "") else _short(key[0])


def _names(clusters: pd.Series) -> NDArray[np.object_]:
    names = texts_of(clusters)
    names[names == ""] = NO_NAME
    return names


def _profile(record: Record, where: str) -> MeshProfile:
    names = [field.name for field in fields(MeshProfile)]
    unknown = sorted(set(record.attributes) - set(names))
    if unknown:
        raise InputError(f"{where} has attributes {', '.join(unknown)[:200]}; wanted {', '.join(names)}")
    return MeshProfile(**record.attributes)


def _entries(costs: Any, where: str) -> Iterator[tuple[tuple[tuple[Any, ...], str], list[Any]]]:
    if not isinstance(costs, Mapping):
        raise InputError(f"{where} is a {type(costs).__name__}; wanted a dict")
    for key, points in costs.items():
        if not (type(key) is tuple and len(key) == 2 and type(key[0]) is tuple and type(key[1]) is str):
            raise InputError(f"{where}: found a key {_short(key)}; wanted (replica groups, dtype)")
        if type(points) is not list:
            raise InputError(f"{where}: found a {type(points).__name__}; wanted a list of (size, seconds)")
        if not all(type(group) is tuple for group in key[0]):
            raise InputError(f"{where}: found a key {_short(key)}; wanted (replica groups, dtype)")
        yield key, points


def _frame(operation: str, groups: tuple[Any, ...], dtype: str, points: list[Any], where: str) -> pd.DataFrame:
    for point in points:
        good = type(point) is tuple and len(point) == 2 and all(type(part) in (int, float) for part in point)
        if not good or not abs(point[0]) < 2**62 or point[0] != int(point[0]) or not _fits(point[1]):
            raise InputError(f"{where}: found a point {_short(point)}; wanted (whole size, seconds)")
    sizes = np.array([int(point[0]) for point in points], dtype=np.int64)
    seconds = np.array([float(point[1]) for point in points], dtype=np.float64)
    ranks = len(groups[0]) if groups else 0
    least = {"all_reduce": 1, "all_to_all": ranks * ranks, "dot": 1}.get(operation, ranks)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = seconds / sizes
        clamped = np.abs(rate[1:] / rate[:-1] - 1) < _CLAMPED_SLACK
    return pd.DataFrame(
        {
            "op": operation,
            "replica_groups": str(groups),
            "dtype": dtype,
            "size_elements": sizes,
            "seconds": seconds,
            "flop": sizes.astype(np.float64),
            "is_noop": (sizes < least) | ((ranks == 1) & (operation != "dot")),
            "is_monotone_clamped": np.concatenate([[False], clamped])[: len(sizes)],
            "failed": np.isposinf(seconds),
        }
    )


def _fits(seconds: float) -> bool:
    """Whether a float can hold it."""
    return isinstance(seconds, float) or abs(seconds) < 2**62


def _short(value: Any) -> str:
    """Return a short description of whatever a file holds."""
    return type(value).__name__ if not isinstance(value, str | int | float) else repr(value)[:60]
