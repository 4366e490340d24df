"""Times that cannot be true: named before they reach the database.

A wrong unit or a broken clock is off by factors of a thousand; bounds are as loose as that allows.
"""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dejavu.cluster import catalogue
from dejavu.cluster.records import DeviceType
from dejavu.importers._base import BadRow, Batch

# Nothing that is launched ends sooner: the fastest of 477,460 published GPU kernels took 1.0e-6 s (2026-11-21).
LEAST_SECONDS = 1e-7
# What no kernel does, against the catalogue's peaks. Winograd convolutions do fewer multiplications than are counted,
# matrix cores exceed the vector peak that the catalogue has for float32 on AMD, and caches are several times as fast as
# memory: the most of those kernels was 2.2 × peak FLOP/s and 1.9 × peak memory (NeuSight and vidur, 2026-11-21).
MOST_OF_PEAK_FLOPS = 8.0
MOST_OF_PEAK_MEMORY = 16.0
# And the slowest: a start, and the work at peak, this many times. The worst of those kernels took 40 ×.
STARTUP_SECONDS = 5e-6
SLOWEST_RATIO = 200.0
# From what its neighbours are: a message's time from other sizes' (at most 5 × in 22,000 published ones, 2026-11-21),
# and a layer's from other layers', which differ more (an embedding beside transformer blocks: 30 × in Metis' example).
MESSAGE_RATIO = 100.0
LAYER_RATIO = 500.0


def bad_rows(batch: Batch) -> dict[int, BadRow]:
    """The rows of the table that cannot be measurements, by their number in it."""
    seconds = pc.fill_null(batch.table["seconds"], float("nan")).to_numpy()
    found: dict[int, BadRow] = {}

    def flag(mask: NDArray[np.bool_], wanted: str, bound_seconds: NDArray[np.float64] | None = None) -> None:
        for row in np.flatnonzero(mask):
            if int(row) not in found:
                bound = "" if bound_seconds is None else f" {bound_seconds[row] / batch.time_seconds:g}"
                found[int(row)] = BadRow(
                    f"{batch.place(int(row))} ({_what(batch, int(row))})",
                    f"{batch.time_name} is {seconds[row] / batch.time_seconds:g}; wanted {wanted}{bound}",
                )

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
    if not kernels.all():
        low, high = _neighbours(batch, seconds)
        flag(~kernels & (seconds < low), "what its neighbours allow: at least", low)
        flag(~kernels & (seconds > high), "what its neighbours allow: at most", high)
    return found


def _what(batch: Batch, row: int) -> str:
    kind, name, device_type = (batch.table[column][row].as_py() for column in ("kind", "name", "device_type"))
    return f"{kind} {name!r} on {device_type}"


def _kernel_bounds(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each row that is a kernel the least and the most that its device's peaks leave; NaN for the others."""
    devices = catalogue()
    pairs, codes = _distinct(batch, ("device_type", "dtype"))
    flops_per_second = np.array([_peak(devices[device], dtype) for device, dtype in pairs])[codes]
    bytes_per_second = np.array([devices[device].memory_bytes_per_second for device, _ in pairs])[codes]
    compute = pc.fill_null(batch.table["flops"], 0.0).to_numpy() / flops_per_second
    memory = np.asarray(batch.moved_bytes) / bytes_per_second
    least = np.maximum(compute / MOST_OF_PEAK_FLOPS, memory / MOST_OF_PEAK_MEMORY)
    return least, SLOWEST_RATIO * (STARTUP_SECONDS + compute + memory)


def _peak(device: DeviceType, dtype: str) -> float:
    """FLOP/s at this dtype, or of the fastest where the catalogue has none for it."""
    return device.peak_flops_per_second.get(dtype, max(device.peak_flops_per_second.values()))


def _neighbours(batch: Batch, seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each row the bounds that the other sizes of the same thing leave, infinitely wide where there are none.

    A message twice as large takes no less time and, at equal bandwidth, twice the time; layers of one model count as
    of one size. The nearest two on each side are asked, and one outlier among them does not condemn its neighbours.
    """
    columns = ("kind", "device_type", "tensor_parallel", "microbatch_size", "direction", "num_ranks")
    layers = batch.table["kind"][0].as_py() == "layer"
    subject, most = ((), LAYER_RATIO) if layers else (("subject",), MESSAGE_RATIO)
    _, codes = _distinct(batch, (*columns, *subject))
    sizes = np.maximum(pc.fill_null(batch.table["size_bytes"], 1).to_numpy().astype(np.float64), 1.0)
    low, high = np.zeros(len(seconds)), np.full(len(seconds), np.inf)
    order = np.lexsort((sizes, codes))
    for series in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        around = np.arange(len(series)) + np.array([[-2], [-1], [1], [2]])
        inside = (around >= 0) & (around < len(series))
        neighbour = series[np.where(inside, around, 0)]
        ratio, there = sizes[series] / sizes[neighbour], seconds[neighbour]
        usable = inside & np.isfinite(there) & (there > 0)
        upper = np.sort(np.where(usable, there * np.maximum(ratio, 1.0), -np.inf), axis=0)
        lower = np.sort(np.where(usable, there * np.minimum(ratio, 1.0), np.inf), axis=0)
        # The second most lenient neighbour decides where there are three, else the most lenient.
        second = usable.sum(axis=0) >= 3
        bounds = np.where(second, upper[-2], upper[-1]), np.where(second, lower[1], lower[0])
        some = usable.any(axis=0)
        high[series[some]], low[series[some]] = bounds[0][some] * most, bounds[1][some] / most
    return low, high


def _distinct(batch: Batch, columns: tuple[str, ...]) -> tuple[list[tuple], NDArray[np.int64]]:
    """The different values of some columns together, and which of them each row has."""
    codes = np.zeros(batch.table.num_rows, dtype=np.int64)
    values: list[list] = []
    for column in columns:
        encoded = pc.dictionary_encode(pc.fill_null(pc.cast(batch.table[column], "string"), "")).combine_chunks()
        values.append(encoded.dictionary.to_pylist())
        codes = codes * len(values[-1]) + encoded.indices.to_numpy()
    _, first, dense = np.unique(codes, return_index=True, return_inverse=True)
    rows = batch.table.select(columns).take(first).to_pylist()
    return [tuple(row.values()) for row in rows], dense.ravel()
