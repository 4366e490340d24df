"""Detect implausible rows whose single values are valid, by comparison with device limits and with other sizes.

A wrong unit, a broken clock or a hand-made file is off by factors of a thousand. The bounds are as loose as that
allows, because honest rows vary: of small layers on a core the same work takes ten times as long in one as in another.
Where the layer itself is known, `dejavu.cost.sources.measured` checks its rows against its arithmetic and traffic.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dejavu.cluster import DeviceType, catalogue
from dejavu.cluster.this_machine import CORE_CYCLES_PER_SECOND, CORE_FLOPS_PER_CYCLE, CORE_MEMORY_BYTES_PER_SECOND
from dejavu.plans.schedule import PARTS
from dejavu.profiles.kernel import Kernel
from dejavu.profiles.measurement import broken_rows
from dejavu.profiles.neighbours import Floats, bounds_of_neighbours, distinct_values

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
# A message's time from other sizes': at most 5 × in 22,000 published ones (2026-11-21). A whole file is rejected for
# one that is further off than the first of these; a row that was measured here and is further off than the second is
# only left out, and measured again.
MESSAGE_RATIO = 100.0
MEASURED_MESSAGE_RATIO = 20.0

# The widest core's peak. Matrix units of cores (AMX: 2,048 multiplications and additions of 16-bit numbers per cycle)
# are 32 × its vector units; the nominal figures of a core leave them out.
CORE_FLOPS_PER_SECOND = max(CORE_FLOPS_PER_CYCLE.values()) * CORE_CYCLES_PER_SECOND
CORE_MATRIX_RATIO = 32.0
# Against the widest core's peak and the nominal memory: a core without vectors has an eighth of that peak, and what
# strides through memory a tenth of its bytes per second.
CORE_SLOWEST_RATIO = 50.0
CORE_STARTUP_SECONDS = 2.5e-6  # of an operator on a core that others want, too
LAUNCHES_SECONDS = 3e-5  # of the kernels of a layer's pass
LEAST_KERNEL_SECONDS = 2e-7  # each kernel of a pass takes at least as long, one after the other
CORE_CACHE_BYTES_PER_SECOND = 1e12  # of the first-level cache: two loads of 64 bytes per cycle, with some to spare
# No link, and no memory of one device, is as fast: B200's memory has 8e12.
MOST_BYTES_PER_SECOND = 1e14
# The runtime's overhead of a pass is the difference of two noisy times: below the first all are alike, and what is
# below the second was lost in the noise.
PASS_NOISE_SECONDS, LEAST_PASS_SECONDS = 1e-5, 1e-6
LEAST_LAUNCH_SECONDS, MOST_LAUNCH_SECONDS = 5e-7, 5e-4  # a host's, for one unit; 11 and 19 us were measured
LEAST_PART = 20.0  # each part of a backward pass of a layer with weights does a twentieth of the whole or more
# The slowest network plausible for pipeline training, and how long a message may wait on a busy host.
LEAST_LINK_BYTES_PER_SECOND, MOST_MESSAGE_SECONDS = 1e6, 0.02

SERIES = ("kind", "subject", "device_type", "peer_device_type", "dtype", "num_ranks", "tensor_parallel")
PASS_SERIES = ("kind", "device_type", "dtype")
MOST_PARSED = 50_000  # operators whose traffic is read from `extra`; of more only those that were measured here


def impossible_rows(table: pa.Table) -> dict[int, str]:
    """Return the physically impossible rows, by number: a sentence with the value found and the one wanted."""
    found = broken_rows(table)
    seconds = _seconds(table)
    kinds = table["kind"].to_numpy()
    least, why = np.zeros(len(seconds)), np.full(len(seconds), "", dtype=object)

    def at_least(bound: Floats, reason: str) -> None:
        higher = np.isfinite(bound) & (bound > least)
        least[higher], why[higher] = bound[higher], reason

    launched = np.isin(kinds, ("operator", "transfer", "collective"))
    at_least(np.where(launched, LEAST_SECONDS, 0.0), "nothing that is started ends sooner")
    sent = np.isin(kinds, ("transfer", "collective"))
    sizes = pc.fill_null(table["size_bytes"], 0).to_numpy().astype(float)
    at_least(np.where(sent, sizes / MOST_BYTES_PER_SECOND, 0.0), "no link is as fast")
    computed = np.isin(kinds, ("layer", "operator", "stage"))
    if computed.any():
        flops = pc.fill_null(table["flops"], 0.0).to_numpy()
        at_least(
            np.where(computed, flops / _most_flops_per_second(table), 0.0),
            f"its arithmetic takes {MOST_OF_PEAK_FLOPS:g} × the device's peak",
        )
    for row in np.flatnonzero(seconds < least):
        found.setdefault(int(row), f"seconds is {seconds[row]:.3g}, expected at least {least[row]:.3g}: {why[row]}")
    return found


def implausible_rows(table: pa.Table) -> dict[int, str]:
    """Return the impossible rows, and those that similar kernels, or other sizes of the same message, contradict."""
    found = impossible_rows(table)
    seconds = _seconds(table)
    seconds[list(found)] = np.nan  # never used as neighbours
    kinds = table["kind"].to_numpy()
    sources = table["source"].to_numpy()
    sent = np.isin(kinds, ("transfer", "collective")) & (sources != "training")  # those waited for others
    low, high = np.where(kinds == "layer", LEAST_SECONDS, 0.0), np.full(len(seconds), np.inf)
    for rows, columns, noise in ((sent, SERIES, 0.0), (kinds == "pass", PASS_SERIES, PASS_NOISE_SECONDS)):
        if rows.any():
            places = np.flatnonzero(rows)
            ratio = np.where(sources[places] == "measured", MEASURED_MESSAGE_RATIO, MESSAGE_RATIO)
            part, times = table.take(pa.array(places)), np.maximum(seconds[places], noise)
            least, most = bounds_of_neighbours(part, times, columns, 1.0)
            low[places], high[places] = least / ratio, most * ratio
    low[kinds == "pass"] = LEAST_PASS_SECONDS
    _flag(found, seconds, low, high, "of its neighbours, the other sizes")
    of_hosts = kinds == "launch"
    low, high = np.where(of_hosts, LEAST_LAUNCH_SECONDS, 0.0), np.where(of_hosts, MOST_LAUNCH_SECONDS, np.inf)
    _flag(found, seconds, low, high, "hosts launch work at such a pace")
    because, readable = "of its arithmetic and traffic on this device", np.ones(len(seconds), dtype=bool)
    readable[list(found)] = False  # of a broken row, what `extra` says of its work may be anything
    _flag(found, seconds, *_kernel_bounds(table, readable & (kinds == "operator")), because)
    for kind in ("layer", "stage", "step"):
        _flag(found, seconds, *_pass_bounds(table, readable & (kinds == kind)), because)
    return found


def _flag(found: dict[int, str], seconds: Floats, low: Floats, high: Floats, because: str) -> None:
    for word, wrong, bound in (("at least", seconds < low, low), ("at most", seconds > high, high)):
        for row in np.flatnonzero(wrong):
            found.setdefault(
                int(row), f"seconds is {seconds[row]:.3g}, expected {word} {bound[row]:.3g} because {because}"
            )


def _seconds(table: pa.Table) -> Floats:
    return np.array(pc.fill_null(table["seconds"], float("nan")).to_numpy(), dtype=float)


def _most_flops_per_second(table: pa.Table) -> Floats:
    """Return an upper bound on each row's device in its dtype."""
    known = catalogue()
    widest = max(max(device.peak_flops_per_second.values()) for device in known.values())
    pairs, codes = distinct_values(table, ("device_type", "dtype"))

    def most(name: str, dtype: str) -> float:
        if name in known:
            peaks = known[name].peak_flops_per_second
            return peaks.get(dtype, max(peaks.values()))
        if is_core(name):
            return CORE_FLOPS_PER_SECOND * (1.0 if dtype == "float32" else CORE_MATRIX_RATIO)
        return widest  # a device of somebody's cluster file

    return MOST_OF_PEAK_FLOPS * np.array([most(name, dtype) for name, dtype in pairs])[codes]


def is_core(device_type: str) -> bool:
    """Return whether the name is one that `this_machine` gives to the cores of a CPU."""
    return device_type.startswith("cpu-core")


def _kernel_bounds(table: pa.Table, operators: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the least and the most seconds of operators on known devices; 0 and infinity for all other rows."""
    low, high = np.zeros(table.num_rows), np.full(table.num_rows, np.inf)
    if operators.sum() > MOST_PARSED:
        operators = operators & pc.equal(table["source"], "measured").to_numpy()
    known = catalogue()
    for row in np.flatnonzero(operators):
        name, extra = table["device_type"][int(row)].as_py(), table["extra"][int(row)].as_py()
        if not extra or not (is_core(name) or name in known):
            continue
        try:
            kernel = Kernel.from_json(extra)
        except (TypeError, ValueError):  # an importer keeps something else there
            continue
        low[row], high[row] = _of_kernel(kernel, known.get(name))
    return low, high


def _pass_bounds(table: pa.Table, passes: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the least and the most seconds of passes of layers, stages and whole steps whose traffic is recorded.

    0 and infinity for all other rows. Looser than where the layers themselves are known, whose kernels are priced one
    by one. A step's work may be spread over all its ranks, or done by one of them with all messages in between. A part
    of a backward pass is recorded with the work of the whole pass.
    """
    low, high = np.zeros(table.num_rows), np.full(table.num_rows, np.inf)
    passes = passes & pc.is_in(table["source"], pa.array(("measured", "training"))).to_numpy()
    known = catalogue()
    columns = ("device_type", "dtype", "kind", "direction", "num_ranks", "flops", "extra")
    for row in np.flatnonzero(passes):
        name, dtype, kind, direction, num_ranks, flops, extra = (table[column][int(row)].as_py() for column in columns)
        work, is_part = json.loads(extra or "{}"), direction in PARTS
        if is_part and not work.get("num_kernels"):
            continue  # earlier versions recorded no traffic
        if {"moved_bytes", "num_kernels"} <= work.keys() and (is_core(name) or name in known):
            flops = work.get("flops", flops or 0.0)
            least, most = _of_work(flops, float(work["moved_bytes"]), dtype, known.get(name))
            ranks = num_ranks or 1 if kind == "step" else 1
            low[row] = max(least, work["num_kernels"] * LEAST_KERNEL_SECONDS) / (LEAST_PART if is_part else ranks)
            high[row] = most + SLOWEST_RATIO * LAUNCHES_SECONDS
            high[row] += work.get("num_messages", 0) * MOST_MESSAGE_SECONDS
            high[row] += work.get("sent_bytes", 0) / LEAST_LINK_BYTES_PER_SECOND
    return low, high


def _of_kernel(kernel: Kernel, device: DeviceType | None) -> tuple[float, float]:
    return _of_work(kernel.flops, kernel.read_bytes + kernel.written_bytes, kernel.dtype, device)


def _of_work(flops: float, size_bytes: float, dtype: str, device: DeviceType | None) -> tuple[float, float]:
    """The least and the most that so much work takes on a device of the catalogue; None: on a core of any CPU."""
    if device is None:
        peak = CORE_FLOPS_PER_SECOND * (1.0 if dtype == "float32" else CORE_MATRIX_RATIO)
        least = max(flops / peak / MOST_OF_PEAK_FLOPS, size_bytes / CORE_CACHE_BYTES_PER_SECOND)
        usual = flops / CORE_FLOPS_PER_SECOND + size_bytes / CORE_MEMORY_BYTES_PER_SECOND
        return least, CORE_SLOWEST_RATIO * (CORE_STARTUP_SECONDS + usual)
    peaks = device.peak_flops_per_second
    compute = flops / peaks.get(dtype, max(peaks.values()))
    memory = size_bytes / device.memory_bytes_per_second
    least = max(compute / MOST_OF_PEAK_FLOPS, memory / MOST_OF_PEAK_MEMORY)
    return least, SLOWEST_RATIO * (STARTUP_SECONDS + compute + memory)
