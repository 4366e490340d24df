"""Find impossible times before they reach the database.

A wrong unit or a broken clock is off by factors of a thousand; bounds are as loose as that allows.
"""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dejavu.cluster import catalogue
from dejavu.cluster.records import DeviceType
from dejavu.importers._base import BadRow, Batch
from dejavu.profiles.neighbours import bounds_of_neighbours, distinct_values
from dejavu.profiles.plausible import (
    LEAST_SECONDS,
    MESSAGE_RATIO,
    MOST_OF_PEAK_FLOPS,
    MOST_OF_PEAK_MEMORY,
    SLOWEST_RATIO,
    STARTUP_SECONDS,
    impossible_rows,
)

# A layer's time from other layers', which differ more than other sizes of a message do (an embedding beside transformer
# blocks: 30 × in Metis' example).
LAYER_RATIO = 500.0


def bad_rows(batch: Batch) -> dict[int, BadRow]:
    """Return the rows of the table that cannot be measurements, by their number in it.

    All rows that `ProfileDatabase.append` rejects are among them.
    """
    seconds = pc.fill_null(batch.table["seconds"], float("nan")).to_numpy()
    found: dict[int, BadRow] = {}

    def flag(mask: NDArray[np.bool_], wanted: str, bound_seconds: NDArray[np.float64] | None = None) -> None:
        for row in np.flatnonzero(mask):
            if int(row) not in found:
                bound = "" if bound_seconds is None else f" {bound_seconds[row] / batch.time_seconds:g}"
                time = f"{batch.time_name} is {float(seconds[row]) / batch.time_seconds:g}"
                found[int(row)] = _bad(batch, int(row), f"{time}; wanted {wanted}{bound}")

    flag(~(np.isfinite(seconds) & (seconds > 0)), "a finite time above 0")
    floor = np.full(len(seconds), LEAST_SECONDS)
    flag(seconds < floor, "what a device can do: no less than", floor)
    kernels = np.zeros(len(seconds), dtype=bool)
    if batch.moved_bytes is not None:
        kernels = np.isfinite(batch.moved_bytes)
        least, slowest = _kernel_bounds(batch)
        flag(kernels & (seconds < least), "what the device's peaks allow: no less than", least)
        slow = f"at most {SLOWEST_RATIO:g} × what the device's peaks and a start take:"
        flag(kernels & (seconds > slowest), slow, slowest)
    for row, problem in impossible_rows(batch.table).items():
        found.setdefault(row, _bad(batch, row, problem))
    if not kernels.all():
        usable = np.where(np.isin(np.arange(len(seconds)), list(found)), np.nan, seconds)  # the others are neighbours
        low, high = _neighbours(batch, usable)
        flag(~kernels & (seconds < low), "what its neighbours allow: at least", low)
        flag(~kernels & (seconds > high), "what its neighbours allow: at most", high)
    return found


def _bad(batch: Batch, row: int, problem: str) -> BadRow:
    kind, name, device_type = (batch.table[column][row].as_py() for column in ("kind", "name", "device_type"))
    return BadRow(f"{batch.place(row)} ({kind} {name!r} on {device_type})", problem)


def _kernel_bounds(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least and the most that its device's peaks allow for each kernel; NaN for the other rows."""
    devices = catalogue()
    pairs, codes = distinct_values(batch.table, ("device_type", "dtype"))
    flops_per_second = np.array([_peak(devices[device], dtype) for device, dtype in pairs])[codes]
    bytes_per_second = np.array([devices[device].memory_bytes_per_second for device, _ in pairs])[codes]
    compute = pc.fill_null(batch.table["flops"], 0.0).to_numpy() / flops_per_second
    memory = np.asarray(batch.moved_bytes) / bytes_per_second
    least = np.maximum(compute / MOST_OF_PEAK_FLOPS, memory / MOST_OF_PEAK_MEMORY)
    return least, SLOWEST_RATIO * (STARTUP_SECONDS + compute + memory)


def _peak(device: DeviceType, dtype: str) -> float:
    """Return FLOP/s at this dtype, or of the fastest dtype where the catalogue has none for it."""
    return device.peak_flops_per_second.get(dtype, max(device.peak_flops_per_second.values()))


def _neighbours(batch: Batch, seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bounds from each row's neighbours: other sizes of a message; layers of one model count as of one
    size."""
    columns = ("kind", "device_type", "tensor_parallel", "microbatch_size", "direction", "num_ranks")
    if batch.table["kind"][0].as_py() == "layer":
        return bounds_of_neighbours(batch.table, seconds, columns, LAYER_RATIO)
    return bounds_of_neighbours(batch.table, seconds, (*columns, "subject"), MESSAGE_RATIO)
