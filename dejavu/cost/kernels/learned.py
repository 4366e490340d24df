"""Kernel times learned from measured devices, for devices that were never measured.

Devices of another kind run other libraries, and what is learned is what libraries make of a device: each kind of
devices (`cuda`, `rocm`) is learned from its own, and from another kind only where it has no measurements.

A kernel's expected time follows from peaks, tiles, waves and the board's power (`features.bounds`). What is learned is
the logarithm of measured over expected, from dimensionless ratios, so that it transfers to another device of similar
architecture. Intervals are of two parts, by how far off devices were that were left out: what a model's kernels share
on a device, and what is each kernel's own.

Shape suffixes: K = kernels, F = features, D = devices, B = bins of size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cluster.records import Kind
from dejavu.cost.estimates import CostError
from dejavu.cost.kernels.features import (
    BORROWED,
    FEATURES,
    MODELS,
    MONOTONE,
    KernelBounds,
    KernelWork,
    bounds,
    features,
)
from dejavu.cost.kernels.left_out import LEAST_ROWS, SIZE_BIN_EDGES, Errors, limits, next_draw
from dejavu.cost.kernels.trees import Curve, Trees
from dejavu.profiles.kernel import Kernel

Floats = NDArray[np.float64]
SHIPPED = Path(__file__).with_name("learned_kernels.npz")
FORMAT = 3

LAUNCH_SECONDS = 10e-6  # assumed where no kernel is small enough to show it
SMALL_SECONDS = 1e-6  # a kernel with less work than this at the peaks takes the launch alone
# Measured times outside are no kernel: nothing that is launched ends sooner, and an hour is another unit.
LEAST_SECONDS, MOST_SECONDS = 1e-7, 3600.0
MOST_SLOWDOWN = 100.0  # predictions end here, in multiples of the expected time
MOST_ROWS = 6000  # of one model and device, in each of two draws
# Ordinary values, not tuned; the depth is limited so that 10,000 kernels take well under a second.
BOOSTING = {
    "max_iter": 150,
    "learning_rate": 0.08,
    "max_leaf_nodes": 24,
    "max_depth": 8,
    "min_samples_leaf": 60,
    "l2_regularization": 1.0,
    "max_features": 0.5,
}


@dataclass(frozen=True, eq=False)
class Prediction:
    """Seconds of each kernel, measured alone: its launch included.

    Attributes:
        low_seconds_K, high_seconds_K: 90 % intervals; equal to `seconds_K` where the kernel is not known.
        known_K: whether a model knows the kernel; the others have the roofline's time, or NaN without a peak.
        shared_log_K: how much of the interval, as a logarithm, is an error that all kernels of the family share on this
            device; infinite: all of it.
        launch_seconds: part of each time; in a full queue of kernels it overlaps with the preceding kernel.
    """

    seconds_K: Floats
    low_seconds_K: Floats
    high_seconds_K: Floats
    known_K: NDArray[np.bool_]
    least_seconds_K: Floats
    shared_log_K: Floats
    launch_seconds: float

    @property
    def queued_seconds_K(self) -> Floats:
        """What each adds to a stream with queued work: without the launch, no less than the peaks allow."""
        return np.maximum(self.seconds_K - self.launch_seconds, np.maximum(self.least_seconds_K, SMALL_SECONDS))


@dataclass(frozen=True, eq=False)
class FamilyModel:
    """What is learned of one of `MODELS`.

    Attributes:
        low_B, high_B: 90 % limits of log(measured / predicted) on a device that was left out, by bins of size.
        shared_log: half the 90 % interval of a left-out device's mean error; infinite where that is not known.
        devices: names of those it learned from.
    """

    function: Trees | Curve
    low_B: Floats
    high_B: Floats
    shared_log: float
    devices: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Learned:
    """A predictor for each kind of devices and each model, and its source.

    Attributes:
        source: what it was fitted on, by whom it was measured, when it was fitted.
        notes: rejected rows, models without enough rows.
    """

    models: Mapping[tuple[Kind, str], FamilyModel]
    launch_seconds: float
    source: str
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def fit(
        cls,
        kernels: Sequence[Kernel],
        devices: Sequence[DeviceType],
        seconds: Sequence[float] | Floats,
        *,
        source: str = "",
        seed: int = 0,
        intervals: bool = True,
    ) -> Learned:
        """Learn from measurements: three sequences of one length; `source` says whose they are.

        The order of the rows does not matter. Where a device has more than `MOST_ROWS` of a model, what is learned is
        the mean of two draws: the first and the last rows in `drawn_order`; intervals are of the first. Impossible
        times are left out and counted in `notes`. With fewer than three devices, or without `intervals`, the interval
        is of the training residuals, doubled: too few to know better; a kind with so few takes the interval of the
        kind with most, wider by how much fewer they are.

        Raises:
            CostError: no row is left.
        """
        times = np.asarray(seconds, dtype=float)
        usable, notes = _screened(kernels, devices, times)
        order_K = drawn_order(kernels, times)
        kernels, devices = [kernels[row] for row in order_K], [devices[row] for row in order_K]
        times, usable = times[order_K], usable[order_K]
        if not usable.any():
            raise CostError(f"no usable measurement among {len(times)} rows ({'; '.join(notes) or 'none given'})")
        tables, launch = _tables(kernels, devices, times, usable)
        models: dict[tuple[Kind, str], FamilyModel] = {}
        for name in MODELS:
            of_kind: dict[Kind, list[_Table]] = {}
            for table in tables:
                if table.model == name:
                    of_kind.setdefault(table.kind, []).append(table)
            enough = {kind: found for kind, found in of_kind.items() if sum(map(len, found)) >= LEAST_ROWS}
            if not enough:
                notes.append(f"{name}: no model, fewer than {LEAST_ROWS} rows")
            alike: FamilyModel | None = None
            for kind in sorted(enough, key=lambda kind: -len(enough[kind])):
                models[kind, name] = _fitted(name, enough[kind], seed, intervals, alike)
                alike = alike or models[kind, name]
        text = source or f"fitted {date.today().isoformat()} on {', '.join(sorted({d.name for d in devices}))}"
        return cls(models, launch, text, tuple(notes))

    def averaged(self, other: Learned) -> Learned:
        """Return the mean of what both learned, logarithms, and of their launch times; all else is of this one."""
        models = {
            key: replace(model, function=_averaged(model.function, other.models[key].function))
            if key in other.models
            else model
            for key, model in self.models.items()
        }
        return replace(self, models=models, launch_seconds=(self.launch_seconds + other.launch_seconds) / 2)

    def predict(self, kernels: Sequence[Kernel], device: DeviceType) -> Prediction:
        """Predict each kernel on one such device; equal kernels are priced once."""
        distinct: dict[Kernel, int] = {}
        position_K = np.array([distinct.setdefault(kernel, len(distinct)) for kernel in kernels], dtype=np.intp)
        rows = np.full((5, len(distinct)), np.nan)  # seconds, low, high, least, shared
        rows[4] = np.inf
        known = np.zeros(len(distinct), dtype=bool)
        for (name, dtype), at, work in _groups(list(distinct)):
            found = bounds(name, work, device, dtype)
            if found is None:
                continue
            model = self.model_of(name, device.kind)
            rows[:3, at] = found.least_K + self.launch_seconds
            rows[3, at] = found.queued_K
            if model is not None:
                known[at], rows[4, at] = True, model.shared_log
                rows[:3, at] = self._priced(name, model, work, device, dtype, found)
        seconds, low, high, least, shared = rows[:, position_K]
        return Prediction(seconds, low, high, known[position_K], least, shared, self.launch_seconds)

    def model_of(self, name: str, kind: Kind) -> FamilyModel | None:
        """Return what was learned from devices of this kind, else from others; None: of no device."""
        others = (model for (_, known), model in self.models.items() if known == name)
        return self.models.get((kind, name)) or next(others, None)

    def _priced(
        self, name: str, model: FamilyModel, work: KernelWork, device: DeviceType, dtype: str, found: KernelBounds
    ) -> tuple[Floats, Floats, Floats]:
        features_KF = features(name, work, device, dtype, found, self.launch_seconds)
        seconds = _base(name, found, self.launch_seconds) * np.exp(model.function.predict(features_KF))
        bin_K = np.digitize(features_KF[:, FEATURES[name].index("size")], SIZE_BIN_EDGES)
        most = MOST_SLOWDOWN * (self.launch_seconds + found.expected_K)
        clipped = np.clip(seconds, found.least_K, most)
        low = np.clip(clipped * np.exp(model.low_B[bin_K]), found.least_K, clipped)
        return clipped, low, np.maximum(clipped * np.exp(model.high_B[bin_K]), clipped)

    def save(self, path: Path) -> None:
        """Save as .npz without pickles; `load` gives the same predictions."""
        header: dict[str, Any] = {
            "format": FORMAT,
            "source": self.source,
            "launch_seconds": self.launch_seconds,
            "notes": self.notes,
            "models": [
                {
                    "kind": kind,
                    "name": name,
                    "form": type(model.function).__name__,
                    "devices": model.devices,
                    "features": FEATURES[name],
                }
                for (kind, name), model in self.models.items()
            ],
        }
        arrays: dict[str, NDArray[Any]] = {"header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)}
        for (kind, name), model in self.models.items():
            own = f"{kind}.{name}"
            arrays |= {f"{own}.low_B": model.low_B, f"{own}.high_B": model.high_B}
            arrays[f"{own}.shared_log"] = np.array(model.shared_log)
            arrays |= {f"{own}.function.{key}": value for key, value in model.function.arrays().items()}
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> Learned:
        """Load a predictor.

        Raises:
            CostError: the file is no predictor of this version.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                header = json.loads(stored["header"].tobytes().decode())
                found = {key: stored[key] for key in stored.files}
        except (OSError, ValueError, KeyError) as error:
            raise CostError(f"{path} is no learned predictor: {error}") from None
        if header.get("format") != FORMAT:
            raise CostError(f"{path} has format {header.get('format')!r}; wanted {FORMAT}: fit it again")
        models = {}
        for entry in header["models"]:
            kind, name = entry["kind"], entry["name"]
            if tuple(entry["features"]) != FEATURES.get(name):
                raise CostError(f"{path}: {name!r} has features {entry['features']}; wanted {FEATURES.get(name)}")
            own = f"{kind}.{name}"
            start = f"{own}.function."
            arrays = {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}
            form: type[Trees] | type[Curve] = Curve if entry["form"] == "Curve" else Trees
            models[kind, name] = FamilyModel(
                form.from_arrays(arrays),
                found[f"{own}.low_B"],
                found[f"{own}.high_B"],
                float(found[f"{own}.shared_log"]),
                tuple(entry["devices"]),
            )
        return cls(models, float(header["launch_seconds"]), header["source"], tuple(header["notes"]))


def drawn_order(kernels: Sequence[Kernel], seconds: Floats) -> NDArray[np.intp]:
    """Return an order of the rows (K) that follows from what they are, however they come.

    Its first rows are a draw, and its last ones another: the same kernels on each device that measured them, so that
    what is learned from a draw is how devices differ, not which kernels each happened to be drawn with.
    """
    subject_K = np.array([kernel.subject for kernel in kernels], dtype=str)
    return np.lexsort((seconds, subject_K))


@cache
def shipped() -> Learned:
    """Load the predictor that ships with the package; `python -m benchmarks.cost.fit_kernels` refits it."""
    return Learned.load(SHIPPED)


@dataclass(frozen=True, eq=False)
class _Table:
    """The rows of one device for one model, and how to score them.

    Attributes:
        unseen_features_KF, unseen_target_K: as they are for who does not know the device's own launch time.
    """

    model: str
    device: str
    kind: Kind
    features_KF: Floats
    target_K: Floats
    unseen_features_KF: Floats
    unseen_target_K: Floats

    def __len__(self) -> int:
        return len(self.target_K)

    def drawn(self, rows: slice) -> _Table:
        names = ("features_KF", "target_K", "unseen_features_KF", "unseen_target_K")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def weight_K(self) -> Floats:
        return np.full(len(self), 1e3 / len(self))  # a device counts as one, however many rows


def _screened(
    kernels: Sequence[Kernel], devices: Sequence[DeviceType], seconds: Floats
) -> tuple[NDArray[np.bool_], list[str]]:
    if not len(kernels) == len(devices) == len(seconds):
        raise CostError(
            f"{len(kernels)} kernels, {len(devices)} devices, {len(seconds)} times; wanted one of each a row"
        )
    with np.errstate(invalid="ignore"):
        true = np.isfinite(seconds) & (seconds >= LEAST_SECONDS) & (seconds <= MOST_SECONDS)
        not_positive = np.isfinite(seconds) & (seconds <= 0)
    counts = {
        "not finite": int((~np.isfinite(seconds)).sum()),
        "zero or negative": int(not_positive.sum()),
        f"positive and outside {LEAST_SECONDS:g} to {MOST_SECONDS:g} s": int(
            (np.isfinite(seconds) & ~true & ~not_positive).sum()
        ),
    }
    return true, [f"{count} times {why} were left out" for why, count in counts.items() if count]


def _groups(kernels: Sequence[Kernel]) -> Iterator[tuple[tuple[str, str], NDArray[np.intp], KernelWork]]:
    """Group by model and dtype: the indices of the kernels, and their numbers."""
    places: dict[tuple[str, str], list[int]] = {}
    for index, kernel in enumerate(kernels):
        places.setdefault((BORROWED.get(kernel.family, kernel.family), kernel.dtype), []).append(index)
    for key, found in places.items():
        yield key, np.array(found, dtype=np.intp), KernelWork.of([kernels[index] for index in found])


def _base(name: str, found: KernelBounds, launch_seconds: float) -> Floats | float:
    """Return the time that the learned factor multiplies: element-wise kernels depend on their size alone."""
    return launch_seconds if name == "elementwise" else launch_seconds + found.expected_K


def _tables(
    kernels: Sequence[Kernel],
    devices: Sequence[DeviceType],
    seconds: Floats,
    usable: NDArray[np.bool_],
) -> tuple[list[_Table], float]:
    """Return each device's rows by model, relative to that device's own launch time; and the usual launch time."""
    by_name: dict[str, DeviceType] = {device.name: device for device in devices}
    names = np.array([device.name for device in devices])
    grouped: dict[str, list[tuple[str, str, NDArray[np.intp], KernelBounds, KernelWork]]] = {}
    launches: dict[str, float] = {}
    for name in sorted(by_name):
        rows = np.flatnonzero(usable & (names == name))
        grouped[name] = [
            (model, dtype, rows[at], found, work)
            for (model, dtype), at, work in _groups([kernels[row] for row in rows.tolist()])
            if model in MODELS and (found := bounds(model, work, by_name[name], dtype)) is not None
        ]
        launch = _launch_seconds([(found, seconds[at]) for _, _, at, found, _ in grouped[name]])
        launches |= {} if launch is None else {name: launch}
    tables = []
    for name, groups in grouped.items():
        own = launches.get(name, LAUNCH_SECONDS)
        others = [launch for other, launch in launches.items() if other != name]
        for model, dtype, at, found, work in groups:
            columns = [
                column
                for launch in (own, float(np.median(others or [own])))
                for column in (
                    features(model, work, by_name[name], dtype, found, launch),
                    np.log(seconds[at] / _base(model, found, launch)),
                )
            ]
            tables.append(_Table(model, name, by_name[name].kind, *columns))
    return tables, float(np.median(list(launches.values()))) if launches else LAUNCH_SECONDS


def _launch_seconds(groups: Sequence[tuple[KernelBounds, Floats]]) -> float | None:
    """Return the lower quartile of kernels with next to no work; None where a device has none."""
    small = np.concatenate([times[found.least_K < SMALL_SECONDS] for found, times in groups] or [np.zeros(0)])
    return float(np.quantile(small, 0.25)) if len(small) >= 5 else None


def _fitted(
    name: str, tables: Sequence[_Table], seed: int, intervals: bool, alike: FamilyModel | None = None
) -> FamilyModel:
    names = sorted({table.device for table in tables})
    first, last = ([table.drawn(rows) for table in tables] for rows in (slice(MOST_ROWS), slice(-MOST_ROWS, None)))
    function = _function(name, first, seed)
    if any(len(table) > MOST_ROWS for table in tables):
        function = _averaged(function, _function(name, last, seed))
    if intervals and len(names) < 3 and alike is not None:
        # The next device's error adds to the mean error of those learned from: of n devices 1 + 1/n times the variance,
        # and of the other kind's, each left out, n is one less than their number.
        wider = math.sqrt((1 + 1 / len(names)) / (1 + 1 / max(len(alike.devices) - 1, 1)))
        low, high, shared = wider * alike.low_B, wider * alike.high_B, wider * alike.shared_log
        return FamilyModel(function, low, high, shared, tuple(names))
    if not intervals or len(names) < 3:
        low, high = limits([_errors(name, first, function)], scale=2.0)
        return FamilyModel(function, low, high, math.inf, tuple(names))
    held_out = [
        _errors(
            name,
            [table for table in first if table.device == left_out],
            _function(name, [table for table in first if table.device != left_out], seed),
        )
        for left_out in names
    ]
    shared = next_draw([errors.log_K.mean() for errors in held_out])
    low, high = limits([errors.without_mean for errors in held_out])
    return FamilyModel(function, -np.hypot(shared, low), np.hypot(shared, high), shared, tuple(names))


def _averaged(one: Trees | Curve, other: Trees | Curve) -> Trees | Curve:
    if isinstance(one, Trees) and isinstance(other, Trees):
        return one.averaged(other)
    if isinstance(one, Curve) and isinstance(other, Curve):
        return one.averaged(other)
    raise TypeError(f"no mean of {type(one).__name__} and {type(other).__name__}")


def _errors(name: str, tables: Sequence[_Table], function: Trees | Curve) -> Errors:
    """Return the errors of a function on these tables, as for who does not know the devices' launch times."""
    return Errors(
        np.concatenate([table.unseen_features_KF[:, FEATURES[name].index("size")] for table in tables]),
        np.concatenate([table.unseen_target_K - function.predict(table.unseen_features_KF) for table in tables]),
        np.concatenate([table.weight_K for table in tables]),
    )


def _function(name: str, tables: Sequence[_Table], seed: int) -> Trees | Curve:
    features_KF = np.concatenate([table.features_KF for table in tables])
    target_K = np.concatenate([table.target_K for table in tables])
    weight_K = np.concatenate([table.weight_K for table in tables])
    if name == "elementwise":
        return Curve.of(features_KF[:, 0], target_K, weight_K)
    from sklearn.ensemble import HistGradientBoostingRegressor  # a second to import, and predicting does without

    monotone = [MONOTONE.get(feature, 0) for feature in FEATURES[name]]
    model = HistGradientBoostingRegressor(**BOOSTING, monotonic_cst=monotone, random_state=seed)
    return Trees.of(model.fit(features_KF, target_K, sample_weight=weight_K))
