"""Costs of collectives on a cluster: measured, interpolated between measurements, or predicted from the links.

A group whose curve over sizes was measured is interpolated, monotonically; any other is priced by the α–β model, which
its measured neighbours correct; without measurements the shipped coefficients and the cluster's links do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import Cluster, Device, Link
from dejavu.cost.collectives.alpha_beta import FITTED_LINKS, Coefficients, GroupLayout, Links, fit, shipped
from dejavu.cost.collectives.interpolation import CurvePoints, CurveProcess
from dejavu.cost.estimates import INTERPOLATED, MEASURED, CostError, Estimate
from dejavu.profiles import OUTLIER_RATIO, Measurement, ProfileDatabase
from dejavu.profiles.collective import COLLECTIVES, Collective

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NO_COMMUNICATION, ALPHA_BETA, CORRECTED = "no communication", "alpha-beta", "alpha-beta, corrected"

_INTERVAL = 0.90
_GAUSSIAN_90 = 1.645  # standard deviations on either side that hold 90 % of a Gaussian
# The shipped coefficients on hardware that they were not fitted on: nine of ten all_reduces inside an A100 node (vidur,
# 2026-11-21) were within this log ratio, the median within 0.37; small messages are the worst.
_OTHER_HARDWARE_LOG_ERROR = 1.11
_LEAST_POINTS_TO_CALIBRATE = 20
_MOST_POINTS = 3000  # conditioning takes time as their cube; more are thinned evenly
_SAME_RATE = 1e-9  # relative; two times at exactly one bandwidth are one measurement and a multiple of it
_GRID_POINTS = 8  # between two measured sizes, where the running maximum is taken


@dataclass(frozen=True, eq=False)
class Points:
    """Measured points of one collective, cleaned.

    Attributes:
        layouts, subjects, dtypes, sizes_bytes, seconds: point by point.
        dropped: how many were left out, by reason.
    """

    layouts: tuple[GroupLayout, ...]
    subjects: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes_bytes: Floats
    seconds: Floats
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.subjects)

    def take(self, rows: Integers) -> Points:
        return Points(
            tuple(self.layouts[row] for row in rows),
            tuple(self.subjects[row] for row in rows),
            tuple(self.dtypes[row] for row in rows),
            self.sizes_bytes[rows],
            self.seconds[rows],
            self.dropped,
        )


def screened(collectives: Sequence[Collective], dtypes: Sequence[str], sizes_bytes: Floats, seconds: Floats) -> Points:
    """Keep the rows that are measurements; drop the rest, counted by reason."""
    dropped: Counter[str] = Counter()
    curves: dict[tuple[str, str], dict[float, list[float]]] = {}
    layouts: dict[str, GroupLayout] = {}
    for collective, dtype, size, took in zip(collectives, dtypes, sizes_bytes, seconds, strict=True):
        if not (math.isfinite(took) and took > 0):
            dropped["failed: no finite time above 0"] += 1
        elif not (math.isfinite(size) and size > 0) or collective.num_ranks == 1:
            dropped["nothing to send"] += 1
        else:
            subject = collective.subject
            layouts.setdefault(subject, GroupLayout.of(collective))
            curves.setdefault((subject, dtype), {}).setdefault(float(size), []).append(float(took))
    kept: list[tuple[GroupLayout, str, str, float, float]] = []
    for (subject, dtype), curve in curves.items():
        sizes = np.array(sorted(curve))
        times = np.array([float(np.median(curve[size])) for size in sizes])
        raised, outlier = _raised(sizes, times), _outliers(times)
        dropped["not measured: raised to the smaller size's bandwidth"] += int(raised.sum())
        dropped["outlier among its neighbours"] += int((outlier & ~raised).sum())
        good = ~(raised | outlier)
        kept += [(layouts[subject], subject, dtype, *pair) for pair in zip(sizes[good], times[good], strict=True)]
    columns: list[tuple[Any, ...]] = list(zip(*kept, strict=True)) or [()] * 5
    return Points(
        columns[0],
        columns[1],
        columns[2],
        np.array(columns[3], dtype=np.float64),
        np.array(columns[4], dtype=np.float64),
        {reason: count for reason, count in dropped.items() if count},
    )


@dataclass(frozen=True, eq=False)
class CollectiveModel:
    """One collective on one kind of device with one kind of links.

    Attributes:
        points: what was measured; may be empty.
        size_factor: how many standard deviations hold 90 % of the points when their size is left out.
    """

    name: str
    links: Links
    points: Points
    coefficients: Coefficients
    process: CurveProcess | None = None
    size_factor: float = _GAUSSIAN_90

    @classmethod
    def of(cls, name: str, points: Points, links: Links) -> CollectiveModel:
        """Fit the model to the points; without any, use the shipped coefficients."""
        prior = shipped()[name]
        if not len(points):
            return cls(name, links, points, prior)
        if len(points) > _MOST_POINTS:
            points = points.take(np.linspace(0, len(points) - 1, _MOST_POINTS).astype(np.int64))
        coefficients = fit(name, points.layouts, points.sizes_bytes, points.seconds, links, prior)
        base = coefficients.seconds(name, points.layouts, points.sizes_bytes, links)
        groups, dtypes = _numbers(points.subjects), _numbers(points.dtypes)
        curve_points = CurvePoints.of(name, points.layouts, points.sizes_bytes, groups, dtypes)
        process = CurveProcess(curve_points, np.log(points.seconds / base))
        return cls(
            name,
            links,
            points,
            coefficients,
            process,
            _factor(process, _numbers(list(zip(points.subjects, points.sizes_bytes, strict=True)))),
        )

    def predict(
        self, layouts: Sequence[GroupLayout], subjects: Sequence[str], dtypes: Sequence[str], sizes_bytes: Floats
    ) -> tuple[Floats, Floats]:
        """Return log seconds and their standard deviation, point by point, as if none of them were measured."""
        base = np.log(self.coefficients.seconds(self.name, layouts, sizes_bytes, self.links))
        if self.process is None:
            return base, np.full(len(base), _unmeasured_log_error(self.coefficients) / _GAUSSIAN_90)
        asked = CurvePoints.of(
            self.name,
            layouts,
            sizes_bytes,
            _numbers(subjects, known=self.points.subjects),
            _numbers(dtypes, known=self.points.dtypes),
        )
        mean, deviation = self.process.predict(asked)
        return base + mean, deviation

    def estimate(self, collective: Collective, size_bytes: float, dtype: str) -> Estimate:
        """Estimate one call; 0 for one rank."""
        _check_size(size_bytes)
        if collective.num_ranks == 1:
            return Estimate(0.0, 0.0, 0.0, NO_COMMUNICATION)
        layout, subject = GroupLayout.of(collective), collective.subject
        sizes, knots, spread = self._curve(subject, dtype)
        if len(sizes) and sizes[0] <= size_bytes <= sizes[-1]:
            return self._between(layout, subject, dtype, size_bytes, sizes, knots, spread)
        mean, deviation = self.predict([layout], [subject], [dtype], np.array([float(size_bytes)]))
        log_seconds = float(mean[0])
        if len(sizes):  # more bytes take no less time than fewer that were measured
            log_seconds = min(log_seconds, knots[0]) if size_bytes < sizes[0] else max(log_seconds, knots[-1])
        if self.process is None:
            return _estimate(log_seconds, float(deviation[0]) * _GAUSSIAN_90, ALPHA_BETA)
        return _estimate(log_seconds, float(deviation[0]) * self.coefficients.deviations, CORRECTED)

    def _curve(self, subject: str, dtype: str) -> tuple[Floats, Floats, float]:
        """Return the measured sizes of a group, and their log seconds made nondecreasing."""
        if not len(self.points):
            return np.array([]), np.array([]), 0.0
        from sklearn.isotonic import IsotonicRegression  # half a second to import; without measurements not needed

        own = [row for row, found in enumerate(self.points.subjects) if found == subject]
        same = [row for row in own if self.points.dtypes[row] == dtype]
        rows = same or own  # another dtype's bytes take as long
        if same == [] and own:
            rows = [row for row in own if self.points.dtypes[row] == self.points.dtypes[own[0]]]
        sizes = self.points.sizes_bytes[rows]
        order = np.argsort(sizes)
        sizes, logs = sizes[order], np.log(self.points.seconds[rows])[order]
        if not len(sizes):
            return sizes, logs, 0.0
        knots = IsotonicRegression().fit(np.log(sizes), logs).predict(np.log(sizes))
        return sizes, knots, float(np.abs(knots - logs).mean())

    def _between(
        self,
        layout: GroupLayout,
        subject: str,
        dtype: str,
        size_bytes: float,
        sizes: Floats,
        knots: Floats,
        spread: float,
    ) -> Estimate:
        right = int(np.searchsorted(sizes, size_bytes))
        if sizes[right] == size_bytes:
            return _estimate(float(knots[right]), max(spread, _repeat_noise(layout)) * _GAUSSIAN_90, MEASURED)
        # The same grid for every size of an interval, so that the running maximum never falls from one to the next.
        grid = np.geomspace(sizes[right - 1], sizes[right], _GRID_POINTS + 2)[1:-1]
        asked = np.append(grid[grid < size_bytes], size_bytes)
        count = len(asked)
        mean, deviation = self.predict([layout] * count, [subject] * count, [dtype] * count, asked)
        log_seconds = float(np.clip(mean.max(), knots[right - 1], knots[right]))
        return _estimate(log_seconds, float(deviation[-1]) * self.size_factor, INTERPOLATED)


class CollectiveCosts:
    """All collectives of a cluster; models are fitted when first asked for, and kept."""

    def __init__(self, cluster: Cluster, database: ProfileDatabase | None) -> None:
        self.cluster = cluster
        self.database = database
        self._models: dict[tuple[str, str | None, Links], CollectiveModel] = {}
        self._points: dict[tuple[str, str], Points] = {}

    def estimate(
        self, name: str, size_bytes: float, groups: Sequence[Sequence[Device]], dtype: str = "float16"
    ) -> Estimate:
        """Estimate all groups running it concurrently, each on its own, as in `Collective`.

        Raises:
            CostError: no such collective, an invalid size, or invalid groups.
        """
        if name not in COLLECTIVES:
            raise CostError(f"unknown collective {name!r}; wanted one of {', '.join(COLLECTIVES)}")
        _check_size(size_bytes)
        try:
            collective = on_mesh(self.cluster, name, groups)
        except ValueError as error:
            raise CostError(f"{name} cannot be priced: {error}") from None
        if collective.num_ranks == 1:
            return Estimate(0.0, 0.0, 0.0, NO_COMMUNICATION)
        types = {device.type_name for group in groups for device in group}
        device_type = types.pop() if len(types) == 1 else None  # mixed groups are never measured
        return self.model(name, device_type, slowest_links(self.cluster, groups)).estimate(
            collective, size_bytes, dtype
        )

    def model(self, name: str, device_type: str | None, links: Links) -> CollectiveModel:
        """Fit to the database's rows of this device type, assuming that they were measured on these links."""
        key = (name, device_type, links)
        if key not in self._models:
            self._models[key] = CollectiveModel.of(name, self._measured(name, device_type), links)
        return self._models[key]

    def _measured(self, name: str, device_type: str | None) -> Points:
        if self.database is None or device_type is None:
            return screened([], [], np.array([]), np.array([]))
        key = (name, device_type)
        if key not in self._points:
            rows = self.database.latest(kind="collective", name=name, device_type=device_type)
            self._points[key] = points_of(rows)
        return self._points[key]


def collective_cost(
    cluster: Cluster,
    database: ProfileDatabase | None,
    name: str,
    size_bytes: float,
    groups: Sequence[Device] | Sequence[Sequence[Device]],
    dtype: str = "float16",
) -> Estimate:
    """Estimate one collective; for many, keep a `CollectiveCosts`. `groups` may be one group of devices.

    Raises:
        CostError: no such collective, an invalid size, or invalid groups.
    """
    several = [[entry] if isinstance(entry, Device) else list(entry) for entry in groups]
    if groups and isinstance(groups[0], Device):
        several = [[device for (device,) in several]]
    return CollectiveCosts(cluster, database).estimate(name, size_bytes, several, dtype)


def mesh_cost(
    name: str,
    size_bytes: float,
    *,
    nodes: int,
    devices_per_node: int,
    inside: Link,
    between: Link,
    concurrent_groups: int = 1,
) -> Estimate:
    """Estimate groups that each span `nodes` nodes with `devices_per_node` ranks in each, from the links alone.

    Raises:
        CostError: no such collective, or an invalid size or count.
    """
    if name not in COLLECTIVES:
        raise CostError(f"unknown collective {name!r}; wanted one of {', '.join(COLLECTIVES)}")
    for what, count in (
        ("nodes", nodes),
        ("devices_per_node", devices_per_node),
        ("concurrent_groups", concurrent_groups),
    ):
        if count < 1:
            raise CostError(f"{name}: {what} is {count}; wanted 1 or more")
    _check_size(size_bytes)
    layout = GroupLayout(nodes * devices_per_node, nodes, concurrent_groups if nodes > 1 else 0)
    if layout.num_ranks == 1:
        return Estimate(0.0, 0.0, 0.0, NO_COMMUNICATION)
    coefficients = shipped()[name]
    seconds = coefficients.seconds(name, [layout], np.array([float(size_bytes)]), Links(inside, between))
    return _estimate(math.log(seconds[0]), _unmeasured_log_error(coefficients), ALPHA_BETA)


def on_mesh(cluster: Cluster, name: str, groups: Sequence[Sequence[Device]]) -> Collective:
    """Map the groups to ranks of the smallest mesh that contains their nodes, in the cluster's order.

    Raises:
        ValueError: the groups are not of one size, empty, or share a device.
    """
    order = [group.name for group in cluster.groups]
    nodes = sorted(
        {(device.group, device.node_index) for group in groups for device in group},
        key=lambda node: (order.index(node[0]), node[1]),
    )
    width = max((cluster.group(name).devices_per_node for name, _ in nodes), default=1)
    place = {node: index for index, node in enumerate(nodes)}
    ranks = tuple(
        tuple(place[device.group, device.node_index] * width + device.index for device in group) for group in groups
    )
    return Collective(name=name, replica_groups=ranks, mesh_nodes=max(len(nodes), 1), devices_per_node=width)


def slowest_links(cluster: Cluster, groups: Sequence[Sequence[Device]]) -> Links:
    """Return the slowest link of any pair in a group, inside a node and between nodes: every ring waits for it.

    Where the groups use no link of a kind it is the slowest of the cluster, which their neighbours were measured on.
    """
    inside: set[Link] = set()
    between: set[Link] = set()
    for group in groups:
        # One device of each node suffices for all links between nodes.
        nodes: dict[tuple[str, int], list[Device]] = {}
        for device in group:
            nodes.setdefault((device.group, device.node_index), []).append(device)
        inside |= {cluster.link(*devices[:2]) for devices in nodes.values() if len(devices) > 1}
        firsts = [devices[0] for devices in nodes.values()]
        between |= {cluster.link(a, b) for index, a in enumerate(firsts) for b in firsts[:index]}
    inside = inside or {group.link for group in cluster.groups if group.devices_per_node > 1}
    between = between or set(cluster.links_between.values())
    return Links(
        _slowest(inside) if inside else FITTED_LINKS.inside, _slowest(between) if between else FITTED_LINKS.between
    )


def points_of(rows: Sequence[Measurement]) -> Points:
    """Convert rows of the database (kind `collective`, one name) to points; invalid ones are dropped and counted."""
    collectives, good, unreadable = [], [], 0
    for row in rows:
        try:
            collectives.append(Collective.from_json(row.name, row.extra or ""))
        except ValueError:
            unreadable += 1
        else:
            good.append(row)
    points = screened(
        collectives,
        [row.dtype for row in good],
        np.array([float(row.size_bytes or 0) for row in good]),
        np.array([row.seconds for row in good]),
    )
    if unreadable:
        points.dropped["extra that names no collective"] = unreadable
    return points


def _slowest(links: set[Link]) -> Link:
    return Link(min(link.bytes_per_second for link in links), max(link.latency_seconds for link in links))


def _check_size(size_bytes: float) -> None:
    if not (math.isfinite(size_bytes) and size_bytes >= 0):
        raise CostError(f"size of a collective is {size_bytes} bytes; wanted a finite number ≥ 0")


def _raised(sizes: Floats, times: Floats) -> NDArray[np.bool_]:
    """Find points at exactly the smaller size's bandwidth: Alpa wrote them over slower measurements."""
    raised = np.zeros(len(sizes), dtype=bool)
    rate = sizes / times
    raised[1:] = np.abs(rate[1:] / rate[:-1] - 1.0) < _SAME_RATE
    return raised


def _outliers(times: Floats) -> NDArray[np.bool_]:
    """Find points further than `OUTLIER_RATIO` from the median of the four around them: a unit or clock was wrong."""
    found = np.zeros(len(times), dtype=bool)
    for index in range(len(times) if len(times) >= 3 else 0):
        around = [there for there in range(index - 2, index + 3) if there != index and 0 <= there < len(times)]
        ratio = times[index] / float(np.median(times[around]))
        found[index] = not 1 / OUTLIER_RATIO < ratio < OUTLIER_RATIO
    return found


def _numbers(values: Sequence[Any], known: Sequence[Any] | None = None) -> Integers:
    """Number the values: equal ones alike, those of `known` as there, others with new numbers."""
    numbers: dict[Any, int] = {}
    for value in known or ():
        numbers.setdefault(value, len(numbers))
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _factor(process: CurveProcess, blocks_P: Integers) -> float:
    """Return how many standard deviations hold 90 % of the points when their blocks are left out."""
    if len(process.points) < _LEAST_POINTS_TO_CALIBRATE or len(np.unique(blocks_P)) < 2:
        return _GAUSSIAN_90
    mean, deviation = process.leave_out(blocks_P)
    return float(np.quantile(np.abs(process.residuals_P - mean) / deviation, _INTERVAL))


def _repeat_noise(layout: GroupLayout) -> float:
    asked = CurvePoints.of("all_gather", [layout], np.array([1.0]), np.array([0]), np.array([0]))
    return float(np.sqrt(asked.noise_variance[0]))


def _unmeasured_log_error(coefficients: Coefficients) -> float:
    return max(coefficients.log_error, _OTHER_HARDWARE_LOG_ERROR)


def _estimate(log_seconds: float, half_width: float, source: str) -> Estimate:
    return Estimate(
        math.exp(log_seconds), math.exp(log_seconds - half_width), math.exp(log_seconds + half_width), source
    )
