"""Collectives: sizes and meshes that were left out of a profile, predicted, with baselines on the same points.

The profile is Alpa's (Parquet or pickle), or vidur's (Parquet or its own CSV), whose networks have no such groups as
share a card.

Left out are (a) one size at a time, in all dtypes of one group, among sizes that lie inside the group's curve; the row
`everywhere` leaves the size out of every group of the file instead; (b) one mesh at a time, groups that cross nodes
scored, where two meshes or more have some: else what crossing takes would come from the shipped coefficients, which
were fitted to Alpa's profile (`only_mesh_that_crosses_nodes`). What is no measurement (nothing to send, failed, raised
by Alpa to a smaller size's bandwidth) is neither used nor scored, and counted. Coefficients are fitted on what is left;
where one size is left out they see all of it, eight numbers to a thousand points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import nnls
from sklearn.isotonic import IsotonicRegression

from dejavu.cost.collectives.alpha_beta import FITTED_LINKS, shipped
from dejavu.cost.collectives.curves import CollectiveModel
from dejavu.cost.collectives.points import Points, screened
from dejavu.foundation.errors import InputError
from dejavu.importers.alpa import OF_ANOTHER, Alpa
from dejavu.importers.alpa.files import clusters_of
from dejavu.importers.devices import DeviceNames
from dejavu.importers.vidur import Vidur
from dejavu.importers.vidur.files import columns_of, holds_collectives
from dejavu.profiles.collective import Collective

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LEAST_CURVE = 3  # points that must be left of a curve to interpolate it


@dataclass(frozen=True)
class _OwnNames(DeviceNames):
    """Devices that the catalogue does not have keep the file's names: a network is predicted from its own points."""

    def resolve(self, found: str) -> str:
        return self.found(found) or found or super().resolve(found)


@dataclass(frozen=True, eq=False)
class Profile:
    """The points of one collective, with what only the benchmark asks of a mesh."""

    name: str
    points: Points
    mesh_P: Integers  # numbers of (nodes, devices per node)
    meshes: tuple[tuple[int, int], ...]

    @property
    def crosses_P(self) -> NDArray[np.bool_]:
        return np.array([layout.num_nodes > 1 for layout in self.points.layouts])

    @property
    def crossing_meshes(self) -> list[tuple[int, int]]:
        """The meshes with points of groups that cross nodes."""
        return [self.meshes[mesh] for mesh in np.unique(self.mesh_P[self.crosses_P])]


def run(path: Path) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    profiles, dropped = read(path)
    rows: list[dict[str, Any]] = []
    sizes_summary, mesh_summary, coverage = {}, {}, {}
    for name, profile in profiles.items():
        found = leave_size_out(profile)
        rows += [{"left out": "one size", "collective": name} | row for row in found]
        sizes_summary[name] = errors_of(found[0])
        coverage[f"{name}, one size"] = found[0]["in_interval_percent"]
    for name, profile in profiles.items():
        found = leave_mesh_out(profile)
        rows += [{"left out": "one mesh", "collective": name} | row for row in found]
        if found:
            mesh_summary[name] = errors_of(found[0])
            coverage[f"{name}, one mesh"] = found[0]["in_interval_percent"]
    summary = {
        "leave_size_out": sizes_summary,
        "leave_mesh_out_crossing_nodes": mesh_summary,
        "in_90_percent_interval_percent": coverage,
        "only_mesh_that_crosses_nodes": {
            name: " × ".join(map(str, profile.crossing_meshes[0]))
            for name, profile in profiles.items()
            if len(profile.crossing_meshes) == 1
        },
        "points": {name: len(profile.points) for name, profile in profiles.items()},
        "dropped_points": dict(dropped),
    }
    return "Collectives left out of a profile", rows, summary


def read(path: Path) -> tuple[dict[str, Profile], Counter[str]]:
    """By collective (and device or cluster, where there are several), through the importer, as the database holds it.

    Raises:
        InputError: it is no such profile, or has no point of a collective.
    """
    profiles, dropped = dict[str, Profile](), Counter[str]()
    if path.suffix in (".parquet", ".csv") and holds_collectives(columns_of(path)):
        profiles, dropped = _read(Vidur(devices=_OwnNames()), path)
    else:
        clusters = clusters_of(path)
        for cluster in clusters:
            found, lost = _read(Alpa(cluster=cluster), path)
            profiles |= {f"{name} of {cluster}" if len(clusters) > 1 else name: one for name, one in found.items()}
            dropped += Counter({why: count for why, count in lost.items() if why != OF_ANOTHER})
    if not profiles:
        why = "; ".join(f"{count:,} points were dropped ({reason})" for reason, count in dropped.items())
        raise InputError(f"{path} has no point of a collective{why and '; ' + why}")
    return profiles, dropped


def _read(importer: Alpa | Vidur, path: Path) -> tuple[dict[str, Profile], Counter[str]]:
    frames: dict[tuple[str, str], list[tuple[Collective, str, float, float]]] = {}
    dropped: Counter[str] = Counter()
    bad: list[str] = []
    for batch in importer.batches(path):
        dropped.update(dict(batch.skipped))
        bad += map(str, batch.bad)
        columns = ("kind", "name", "device_type", "dtype", "size_bytes", "seconds", "extra")
        for kind, name, device, dtype, size, seconds, extra in zip(
            *(batch.table[column].to_pylist() for column in columns), strict=True
        ):
            if kind == "collective":
                entry = (Collective.from_json(name, extra), dtype, float(size), float(seconds))
                frames.setdefault((name, device), []).append(entry)
    if bad:
        dropped[f"not understood; the first: {bad[0]}"] = len(bad)
    profiles = {}
    several = len({device for _, device in frames}) > 1
    for (name, device), entries in sorted(frames.items()):
        entries.sort(key=_place)
        collectives, dtypes, sizes, seconds = (list(column) for column in zip(*entries, strict=True))
        points = screened(collectives, dtypes, np.array(sizes), np.array(seconds))
        dropped.update(points.dropped)
        mesh_of = {entry.subject: (entry.mesh_nodes, entry.devices_per_node) for entry in collectives}
        meshes = tuple(sorted(set(mesh_of.values())))
        mesh_P = np.array([meshes.index(mesh_of[subject]) for subject in points.subjects], dtype=np.int64)
        if len(points):
            profiles[f"{name} on {device}" if several else name] = Profile(name, points, mesh_P, meshes)
    dropped = Counter({reason: count for reason, count in dropped.items() if count})
    return profiles, dropped


def _place(entry: tuple[Collective, str, float, float]) -> tuple[Any, ...]:
    """Where Alpa's own file has the entry, so that halves of the groups are the same whatever the order of its rows."""
    collective, dtype, size, seconds = entry
    groups = collective.replica_groups
    is_of_neighbours = len(groups) > 1 and groups[0][-1] - groups[0][0] == collective.num_ranks - 1
    mesh = (-collective.mesh_nodes, -collective.devices_per_node)
    return (*mesh, is_of_neighbours, len(groups), groups, dtype, size, seconds)


# One size left out


def leave_size_out(profile: Profile) -> list[dict[str, Any]]:
    """Ours first."""
    name = profile.name
    model = CollectiveModel.of(name, profile.points, FITTED_LINKS)
    assert model.process is not None
    points = model.points  # thinned where they are many
    curve_P = numbered(list(zip(points.subjects, points.dtypes, strict=True)))
    base = np.log(model.coefficients.seconds(name, points.layouts, points.sizes_bytes, FITTED_LINKS))
    group_P = numbered(points.subjects)
    scored = inside_curves(points, curve_P)
    rows = []
    for method, blocks_P in (
        ("ours", numbered(list(zip(points.subjects, points.sizes_bytes, strict=True)))),
        ("ours, size left out everywhere", numbered(list(points.sizes_bytes))),
    ):
        mean, deviation = model.process.leave_out(blocks_P)
        log_seconds = bracketed(points, curve_P, base + mean)
        distance = np.abs(np.log(points.seconds) - log_seconds) / deviation
        factor = crossed_quantiles(distance, group_P)
        inside = (distance <= factor)[scored]
        errors = relative_errors(log_seconds, points)[scored]
        rows.append(row_of(method, errors, inside))
    baselines: dict[str, Callable[[Floats, Floats, float], float]] = {
        "log-log interpolation": lambda x, y, at: float(np.interp(at, x, y)),
        "monotone cubic interpolation": lambda x, y, at: float(PchipInterpolator(x, y)(at)),
        "linear regression (paper)": linear_regression,
    }
    for method, baseline in baselines.items():
        log_seconds = alone(points, curve_P, scored, baseline)
        rows.append(row_of(method, relative_errors(log_seconds, points)[scored], None))
    return rows


def inside_curves(points: Points, curve_P: Integers) -> NDArray[np.bool_]:
    """Points with a smaller and a larger size, and enough others, in their own curve."""
    scored = np.zeros(len(points), dtype=bool)
    for curve in np.unique(curve_P):
        rows = np.flatnonzero(curve_P == curve)
        if len(rows) > LEAST_CURVE:
            sizes = points.sizes_bytes[rows]
            scored[rows] = (sizes > sizes.min()) & (sizes < sizes.max())
    return scored


def bracketed(points: Points, curve_P: Integers, log_seconds: Floats) -> Floats:
    """Between the times of the next smaller and larger size of the own curve, rises only: as the model does it."""
    result = log_seconds.copy()
    for curve in np.unique(curve_P):
        rows = np.flatnonzero(curve_P == curve)
        rows = rows[np.argsort(points.sizes_bytes[rows])]
        x, y = np.log(points.sizes_bytes[rows]), np.log(points.seconds[rows])
        for index in range(1, len(rows) - 1):
            left = np.arange(len(rows)) != index
            knots = IsotonicRegression().fit(x[left], y[left]).predict(x[left])
            result[rows[index]] = np.clip(log_seconds[rows[index]], knots[index - 1], knots[index])
    return result


def alone(
    points: Points, curve_P: Integers, scored: NDArray[np.bool_], method: Callable[[Floats, Floats, float], float]
) -> Floats:
    """Log seconds of scored points from the other points of their own curve."""
    result = np.full(len(points), np.nan)
    for row in np.flatnonzero(scored):
        others = np.flatnonzero((curve_P == curve_P[row]) & (np.arange(len(points)) != row))
        others = others[np.argsort(points.sizes_bytes[others])]
        x, y = np.log(points.sizes_bytes[others]), np.log(points.seconds[others])
        result[row] = method(x, y, float(np.log(points.sizes_bytes[row])))
    return result


def linear_regression(log_sizes: Floats, log_seconds: Floats, at: float) -> float:
    slope, intercept = np.polyfit(np.exp(log_sizes), np.exp(log_seconds), 1)
    return float(np.log(max(intercept + slope * np.exp(at), 1e-9)))


# One mesh left out


def leave_mesh_out(profile: Profile) -> list[dict[str, Any]]:
    """Ours first; nothing where no other mesh is left whose groups cross nodes."""
    if len(profile.crossing_meshes) < 2:
        return []
    name = profile.name
    found: dict[str, list[Floats]] = {}
    distances: list[Floats] = []
    for mesh in range(len(profile.meshes)):
        held = np.flatnonzero((profile.mesh_P == mesh) & profile.crosses_P)
        kept = np.flatnonzero(profile.mesh_P != mesh)
        if not len(held):
            continue
        train, test = profile.points.take(kept), profile.points.take(held)
        model = CollectiveModel.of(name, train, FITTED_LINKS)
        mean, deviation = model.predict(test.layouts, test.subjects, test.dtypes, test.sizes_bytes)
        alpha_beta = model.coefficients.seconds(name, test.layouts, test.sizes_bytes, FITTED_LINKS)
        for method, log_seconds in (
            ("ours", mean),
            ("ours, α–β alone", np.log(alpha_beta)),
            ("simple α–β", simple_alpha_beta(train, test)),
            ("nearest group (paper)", nearest_group(train, test)),
        ):
            found.setdefault(method, []).append(relative_errors(log_seconds, test))
        distances.append(np.abs(np.log(test.seconds) - mean) / deviation)
    # An interval is not judged by what made it: its width comes from the other meshes, or was shipped.
    widths = [
        float(np.quantile(np.concatenate(others), 0.9)) if others else shipped()[name].deviations
        for others in ([*distances[:index], *distances[index + 1 :]] for index in range(len(distances)))
    ]
    inside = [distance <= width for distance, width in zip(distances, widths, strict=True)]
    return [
        row_of(method, np.concatenate(errors), np.concatenate(inside) if method == "ours" else None)
        for method, errors in found.items()
    ]


def simple_alpha_beta(train: Points, test: Points) -> Floats:
    """Steps and ring bytes, inside nodes and through shared cards apart; least squares of relative errors."""

    def columns(points: Points) -> Floats:
        n = np.array([float(layout.num_ranks) for layout in points.layouts])
        h = np.array([float(layout.sharing) for layout in points.layouts])
        crosses = h > 0
        wire = points.sizes_bytes * (n - 1) / n
        return np.stack([np.ones_like(n), (n - 1) * ~crosses, (n - 1) * crosses, wire * ~crosses, wire * h], axis=1)

    values, _ = nnls(columns(train) / train.seconds[:, None], np.ones(len(train)))
    return np.log(np.maximum(columns(test) @ values, 1e-9))


def nearest_group(train: Points, test: Points) -> Floats:
    """A line through the measured group with the nearest number of ranks, wherever these sit."""
    curves = numbered(list(zip(train.subjects, train.dtypes, strict=True)))
    firsts = [int(np.flatnonzero(curves == curve)[0]) for curve in np.unique(curves)]
    result = np.empty(len(test))
    for row, (layout, dtype) in enumerate(zip(test.layouts, test.dtypes, strict=True)):
        nearest = min(
            firsts,
            key=lambda at: (
                abs(np.log2(train.layouts[at].num_ranks / layout.num_ranks)),
                train.dtypes[at] != dtype,
            ),
        )
        rows = curves == curves[nearest]
        slope, intercept = np.polyfit(train.sizes_bytes[rows], train.seconds[rows], 1) if rows.sum() > 1 else (0.0, 1.0)
        result[row] = np.log(max(intercept + slope * test.sizes_bytes[row], 1e-9))
    return result


# Scores


def relative_errors(log_seconds: Floats, points: Points) -> Floats:
    return np.abs(np.expm1(log_seconds - np.log(points.seconds)))


def crossed_quantiles(distance: Floats, group_P: Integers) -> Floats:
    """For each half of the groups, the 90 % quantile of the other half: an interval is not judged by what made it."""
    half = group_P % 2
    quantiles = [
        float(np.quantile(distance[half == other], 0.9)) if (half == other).any() else 1.645 for other in (1, 0)
    ]
    return np.array(quantiles)[half]


def row_of(method: str, errors: Floats, inside: NDArray[np.bool_] | None) -> dict[str, Any]:
    known = len(errors) > 0
    return {
        "method": method,
        "median_percent": 100 * float(np.median(errors)) if known else None,
        "p90_percent": 100 * float(np.quantile(errors, 0.9)) if known else None,
        "in_interval_percent": 100 * float(inside.mean()) if inside is not None and known else None,
        "points": len(errors),
    }


def errors_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("median_percent", "p90_percent")}


def numbered(values: Any) -> Integers:
    numbers: dict = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
