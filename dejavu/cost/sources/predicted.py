"""Predict a layer as the sum of its kernels, from physics and other devices' measurements.

Each kernel takes its number from the best source that knows it: a measurement of exactly that kernel on such a device,
then what was learned from measured devices, then the roofline. A few measured kernels calibrate the latter two.

Shape suffixes: K = kernels.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.estimates import CostSource, Estimate, Fallback
from dejavu.cost.kernels.calibration import Calibration, calibrate
from dejavu.cost.kernels.learned import Learned, shipped
from dejavu.cost.kernels.roofline import (
    PRODUCTS,
    KernelRoofline,
    has_matrix_units,
    peak_flops_per_second,
)
from dejavu.cost.memory.layers import ForEachByte
from dejavu.cost.sources.launches import Pace, launching_seconds, no_faster, pace_of
from dejavu.cost.sources.torch_kernels import as_torch_runs, at_least, at_most, convolved
from dejavu.graphs.graph import Graph, Layer
from dejavu.graphs.kernels import family_of, kernel_of
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.workload import OptimizerSettings

Floats = NDArray[np.float64]

MEASURED_KERNELS, LEARNED, ROOFLINE = "measured kernels", "learned", "roofline"
# Half of the roofline's 90 % interval, as a logarithm: products on matrix units are 7 % off in the mean on the device
# that was left out (A100 and A40, 2026-11-21), anything else 20 to 30 %; nine of ten published times of attention are
# nearer than 0.28 (`python -m benchmarks.cost --attention`, 2026-11-24); a CPU core is not in the catalogue.
ROOFLINE_LOG_INTERVAL_HALF_WIDTH = {
    "matrix units": math.log(1.2),
    "attention": 0.28,
    "other": math.log(1.6),
    "cpu": math.log(3.0),
}
LEAST_CALIBRATION = 8  # measured kernels, before the calibrated interval is taken from their residuals
FAMILY_PRIOR = 5.0  # weight of the prior on a family's correction, in kernels without error

# How torch's optimizers pass over memory, one kernel after another: (name, tensors read, tensors written); from
# torch/optim/adamw.py and sgd.py (`_single_tensor_*`, `_multi_tensor_*`), torch 2.13.
_OPTIMIZER_PASSES = {
    "adamw": (
        *(("mul", 1, 1), ("lerp", 2, 1), ("mul", 1, 1), ("addcmul", 2, 1)),
        *(("sqrt", 1, 1), ("div", 1, 1), ("add", 1, 1), ("addcdiv", 3, 1)),
    ),
    "sgd": (("add", 2, 1), ("add", 2, 1)),
}


@dataclass(frozen=True, eq=False)
class KernelPrices:
    """Times of K kernels: 90 % intervals, and their sources.

    Attributes:
        shared_log_K: how much of an interval, as a logarithm, is an error that all kernels of the family share on the
            device; infinite: all of it.
    """

    seconds_K: Floats
    low_seconds_K: Floats
    high_seconds_K: Floats
    source_K: NDArray[np.object_]
    shared_log_K: Floats

    def prices(self) -> list[KernelPrice]:
        """Return the price of each kernel with its two kinds of error."""
        below = _errors(self.seconds_K, self.low_seconds_K, self.shared_log_K)
        above = _errors(self.seconds_K, self.high_seconds_K, self.shared_log_K)
        columns = (one.tolist() for one in (self.seconds_K, *below, *above, self.source_K))
        return [KernelPrice(*row) for row in zip(*columns, strict=True)]


class KernelPrice(NamedTuple):
    """What a kernel takes, and by how much less or more: an error shared in its family, and its own; in seconds."""

    seconds: float
    below_shared: float
    below_own: float
    above_shared: float
    above_own: float
    source: str


@dataclass(frozen=True)
class Predicted(CostSource):
    """Layers as sums of kernels, on any device whose peaks are known."""

    database: ProfileDatabase
    optimizer: OptimizerSettings
    roofline: KernelRoofline = field(default_factory=KernelRoofline)
    _prices: dict[tuple[str, str, int], dict[Kernel, KernelPrice]] = field(default_factory=dict, repr=False)
    _paces: dict[str, Pace | None] = field(default_factory=dict, repr=False)

    def estimate(self, layer: Layer, direction: str, graph: Graph, device: DeviceType) -> Estimate | None:
        if peak_flops_per_second(device, graph.dtype) is None:
            return None
        prices, kernels = self._of(graph, device), self._kernels(layer, direction, graph)
        estimate, pace = summed((kernel, 1.0, prices[kernel]) for kernel in kernels), self.pace(device)
        if pace is None:
            return estimate
        return no_faster(estimate, launching_seconds(layer, direction, kernels, pace), pace.spread)

    def pace(self, device: DeviceType) -> Pace | None:
        """Return how fast the hosts of such devices launch; None: no GPU's."""
        if device.name not in self._paces:
            self._paces[device.name] = pace_of(self.database, device)
        return self._paces[device.name]

    def host_seconds(self, layer: Layer, direction: str, kernels: Sequence[Kernel], device: DeviceType) -> float:
        """Return what the host takes to launch a pass's kernels; 0 where no GPU computes."""
        pace = self.pace(device)
        return launching_seconds(layer, direction, kernels, pace) if pace else 0.0

    def fallbacks(self, graph: Graph, device: DeviceType) -> tuple[Fallback, ...]:
        if peak_flops_per_second(device, graph.dtype) is None:
            return ()
        prices, counts, seconds, total = self._of(graph, device), Counter[str](), defaultdict[str, float](float), 0.0
        alike = Counter(layer.signature for layer in graph.layers)
        for layer in {layer.signature: layer for layer in graph.layers}.values():
            times = alike[layer.signature]
            for operator in layer.operators:
                kernel = kernel_of(operator)
                if kernel is None:
                    continue
                total += times * prices[kernel].seconds
                meant = device.kind == "cpu" or _on_matrix_units(kernel, device)
                if family_of(operator.kind) is None or (prices[kernel].source == ROOFLINE and not meant):
                    counts[operator.kind] += times
                    seconds[operator.kind] += times * prices[kernel].seconds
        return tuple(
            Fallback(kind, device.name, count, seconds[kind] / total if total else 0.0)
            for kind, count in counts.most_common()
        )

    def prices(self, kernels: Sequence[Kernel], device: DeviceType) -> KernelPrices:
        """Price each kernel from the best source that knows it."""
        subjects, kernels = [one.subject for one in kernels], [as_torch_runs(one, device) for one in kernels]
        own = _latest(self.database, device, subjects)
        calibration, spread = self._calibration(device)
        seconds_K = calibration.roofline(self.roofline).seconds(kernels, device)
        reach_K = np.array([min(spread, _reach(kernel, device)) for kernel in kernels])
        found = KernelPrices(
            seconds_K,
            seconds_K * np.exp(-reach_K),
            seconds_K * np.exp(reach_K),
            np.full(len(kernels), ROOFLINE, object),
            np.full(len(kernels), math.inf),
        )
        if device.kind != "cpu":
            self._take_learned(found, kernels, device)
        for seconds_K in (found.seconds_K, found.low_seconds_K, found.high_seconds_K):
            seconds_K[:] = convolved(seconds_K, kernels, device)
        bounded_K = np.clip(found.seconds_K, at_least(kernels, device), at_most(kernels, device))
        moved_K = bounded_K / found.seconds_K  # the bounds are as uncertain as what they replace
        for seconds_K in (found.seconds_K, found.low_seconds_K, found.high_seconds_K):
            seconds_K *= moved_K
        for k, subject in enumerate(subjects):
            row = own.get(subject)
            if row is not None:
                found.seconds_K[k], found.source_K[k] = row.seconds, MEASURED_KERNELS
                found.low_seconds_K[k] = row.seconds if row.seconds_low is None else row.seconds_low
                found.high_seconds_K[k] = row.seconds if row.seconds_high is None else row.seconds_high
                found.shared_log_K[k] = math.inf
        return found

    def _take_learned(self, found: KernelPrices, kernels: Sequence[Kernel], device: DeviceType) -> None:
        """Overwrite the roofline's numbers where the learned predictor is better: not for products on matrix units."""
        learned = shipped()
        prediction = learned.predict(kernels, device)
        take_K = prediction.known_K & np.array([not _on_matrix_units(kernel, device) for kernel in kernels])
        correction = self._family_corrections(learned, device)
        factor_K = np.array([correction.get(kernel.family, 1.0) for kernel in kernels])
        queued_K = prediction.queued_seconds_K * factor_K
        found.seconds_K[take_K] = queued_K[take_K]
        for name, bound_K in (
            ("low_seconds_K", prediction.low_seconds_K),
            ("high_seconds_K", prediction.high_seconds_K),
        ):
            getattr(found, name)[take_K] = (queued_K * bound_K / prediction.seconds_K)[take_K]
        found.source_K[take_K], found.shared_log_K[take_K] = LEARNED, prediction.shared_log_K[take_K]

    def _calibration(self, device: DeviceType) -> tuple[Calibration, float]:
        """Return this device's calibration, and the log error that remains after it."""
        kernels, seconds = _calibrating(self.database, device)
        usable = [k for k, kernel in enumerate(kernels) if _has_peak(kernel, device)]
        kernels, seconds_K = [kernels[k] for k in usable], np.array([seconds[k] for k in usable])
        calibration = calibrate(kernels, seconds_K, device, self.roofline)
        if len(kernels) < LEAST_CALIBRATION:
            return calibration, math.inf
        left = np.abs(np.log(seconds_K / calibration.roofline(self.roofline).seconds(kernels, device)))
        return calibration, float(np.quantile(left, 0.9))

    def _family_corrections(self, learned: Learned, device: DeviceType) -> dict[str, float]:
        """Return measured over learned seconds of each family on this device, shrunk where few kernels were measured.

        Kernels are measured here back to back, so that launches overlap, as in a training.
        """
        kernels, seconds = _calibrating(self.database, device)
        if not kernels:
            return {}
        prediction = learned.predict(kernels, device)
        queued_K = np.clip(prediction.queued_seconds_K, at_least(kernels, device), at_most(kernels, device))
        logs: dict[str, list[float]] = defaultdict(list)
        for k, kernel in enumerate(kernels):
            if prediction.known_K[k] and not _on_matrix_units(kernel, device):
                logs[kernel.family].append(math.log(seconds[k] / queued_K[k]))
        return {
            family: math.exp(float(np.median(found)) * len(found) / (len(found) + FAMILY_PRIOR))
            for family, found in logs.items()
        }

    def _of(self, graph: Graph, device: DeviceType) -> dict[Kernel, KernelPrice]:
        """Return the prices of all of a graph's kernels on one device, computed once."""
        key = (device.name, graph.fingerprint, graph.microbatch_size)
        if key not in self._prices:
            distinct = {layer.signature: layer for layer in graph.layers}.values()
            kernels = list(
                dict.fromkeys(
                    kernel
                    for layer in distinct
                    for direction in ("forward", "backward", "optimizer")
                    for kernel in self._kernels(layer, direction, graph)
                )
            )
            self._prices[key] = dict(zip(kernels, self.prices(kernels, device).prices(), strict=True))
        return self._prices[key]

    def _kernels(self, layer: Layer, direction: str, graph: Graph) -> list[Kernel]:
        return layer_kernels(layer, direction, graph.dtype, self.optimizer)


def layer_kernels(layer: Layer, direction: str, dtype: str, optimizer: OptimizerSettings) -> list[Kernel]:
    """Return the kernels that one pass of a layer launches."""
    if direction == "optimizer":
        return optimizer_kernels(layer.trained_bytes, optimizer, dtype)
    operators = (operator for operator in layer.operators if operator.direction == direction)
    return [kernel for operator in operators if (kernel := kernel_of(operator)) is not None]


def optimizer_kernels(parameter_bytes: float, optimizer: OptimizerSettings, dtype: str) -> list[Kernel]:
    """Return the kernels of torch's optimizer step on so many bytes of weights: passes over memory.

    With master weights the passes are over float32 tensors, and one more copies the masters to the weights.
    """
    if not parameter_bytes:
        return []
    elements = max(int(parameter_bytes) // (4 if dtype == "float32" else 2), 1)
    update_bytes = parameter_bytes * ForEachByte.of(optimizer).update_bytes

    def over(name: str, read_bytes: float, written_bytes: float) -> Kernel:
        return Kernel(
            family="copy" if name == "copy" else "elementwise",
            name=name,
            dtype="float32" if optimizer.master_weights else dtype,
            m=elements,
            read_bytes=float(read_bytes),
            written_bytes=float(written_bytes),
        )

    passes = [over(name, r * update_bytes, w * update_bytes) for name, r, w in _OPTIMIZER_PASSES[optimizer.name]]
    return [*passes, over("copy", update_bytes, parameter_bytes)] if optimizer.master_weights else passes


def _errors(seconds_K: Floats, bound_K: Floats, shared_log_K: Floats) -> tuple[Floats, Floats]:
    """Return the seconds from each time to its bound in two parts: what its family shares, and its own.

    As logarithms their squares add up to that of the whole.
    """
    least = np.finfo(float).tiny
    log_K = np.log(np.maximum(bound_K, least)) - np.log(np.maximum(seconds_K, least))
    shared_K = np.minimum(np.abs(log_K), shared_log_K)
    own_K = np.sqrt(np.maximum(log_K**2 - shared_K**2, 0.0))
    shared, own = (np.abs(seconds_K * np.expm1(np.sign(log_K) * part_K)) for part_K in (shared_K, own_K))
    return shared, own


def summed(kernels: Iterable[tuple[Kernel, float, KernelPrice]]) -> Estimate:
    """Sum kernels that run in series, each so many times.

    What a family shares is fully correlated (the device is better or worse at it than predicted). Different families,
    and different kernels' own errors, are independent.
    """
    total = 0.0
    shares = defaultdict[str, float](float)
    shared = {way: defaultdict[str, float](float) for way in ("below", "above")}
    own = {way: defaultdict[Kernel, float](float) for way in ("below", "above")}
    for kernel, count, price in kernels:
        total += count * price.seconds
        shares[price.source] += count * price.seconds
        shared["below"][kernel.family] += count * price.below_shared
        shared["above"][kernel.family] += count * price.above_shared
        own["below"][kernel] += count * price.below_own
        own["above"][kernel] += count * price.above_own
    below, above = (math.hypot(*shared[way].values(), *own[way].values()) for way in ("below", "above"))
    source = max(shares, key=lambda name: shares[name]) if shares else ROOFLINE
    return Estimate(total, max(total - below, 0.0), total + above, source)


def _latest(database: ProfileDatabase, device: DeviceType, subjects: list[str]) -> dict[str, Measurement]:
    rows = database.latest(kind="operator", device_type=device.name, subject=subjects)
    return {row.subject: row for row in sorted(rows, key=lambda row: row.measured_at)}


def _calibrating(database: ProfileDatabase, device: DeviceType) -> tuple[list[Kernel], list[float]]:
    """Return the kernels measured here on such a device; the shipped predictor was fitted to imported ones already.

    A row whose `extra` names no kernel, as in somebody's own rows, can teach nothing.
    """
    kernels, seconds = [], []
    for row in database.latest(kind="operator", device_type=device.name, source="measured"):
        try:
            kernel = Kernel.from_json(row.extra or "{}")
        except (TypeError, ValueError):
            continue
        kernels.append(kernel)
        seconds.append(row.seconds)
    return kernels, seconds


def _on_matrix_units(kernel: Kernel, device: DeviceType) -> bool:
    return kernel.family in PRODUCTS and has_matrix_units(device, kernel.dtype)


def _has_peak(kernel: Kernel, device: DeviceType) -> bool:
    return kernel.family not in PRODUCTS or peak_flops_per_second(device, kernel.dtype) is not None


def _reach(kernel: Kernel, device: DeviceType) -> float:
    if device.kind == "cpu":
        return ROOFLINE_LOG_INTERVAL_HALF_WIDTH["cpu"]
    on_matrix_units = "attention" if kernel.family == "attention" else "matrix units"
    return ROOFLINE_LOG_INTERVAL_HALF_WIDTH[on_matrix_units if _on_matrix_units(kernel, device) else "other"]
