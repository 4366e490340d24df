"""The regressions of the paper's figures 6 and 24 to 53, and the predictors that its notes propose.

python -m benchmarks.paper.regressions PROFILE.parquet --figures FOLDER --json regressions.json

For each collective and group of devices one straight line of seconds over bytes is fitted, as there, and judged twice:
by R², as there, and by how far it is off a size that was left out. Beside it, on the same sizes left out: the other
predictors of the notes (support vectors, a random forest, two stages: which range of sizes, then a line in it), a line
on log axes, and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import typer
from sklearn.ensemble import RandomForestRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

from benchmarks._report import report, write
from benchmarks.cost.collectives import (
    Floats,
    Integers,
    Profile,
    alone,
    inside_curves,
    leave_size_out,
    numbered,
    read,
    relative_errors,
    row_of,
)
from dejavu.cost.collectives.points import Points

matplotlib.use("Agg")
SMALL_BYTES = 2**20  # below it a line fitted to seconds says little
SEED = 0
Predict = Callable[[Floats, Floats, float], float]  # log bytes, log seconds of the others, log bytes -> log seconds


def line_on_log_axes(x: Floats, y: Floats, at: float) -> float:
    """A power of the size."""
    slope, intercept = np.polyfit(x, y, 1)
    return float(intercept + slope * at)


def support_vectors(x: Floats, y: Floats, at: float) -> float:
    """Support vectors with a radial kernel, of standardized log bytes."""
    model = make_pipeline(StandardScaler(), SVR(C=10.0, epsilon=0.01))
    return float(model.fit(x[:, None], y).predict([[at]])[0])


def random_forest(x: Floats, y: Floats, at: float) -> float:
    """Trees of log bytes: between two sizes they know one or the other."""
    model = RandomForestRegressor(n_estimators=10, random_state=SEED)
    return float(model.fit(x[:, None], y).predict([[at]])[0])


def two_stages(x: Floats, y: Floats, at: float) -> float:
    """First whether latency or bandwidth decides, by the best split of the sizes; then a line in that part."""

    def fitted(part: Any) -> tuple[float, Floats]:
        line: Floats = np.polyfit(x[part], y[part], 1)
        return float(((np.polyval(line, x[part]) - y[part]) ** 2).sum()), line

    if len(x) < 4:
        return line_on_log_axes(x, y, at)
    splits = range(2, len(x) - 1)
    pairs = {k: (fitted(slice(None, k)), fitted(slice(k, None))) for k in splits}
    best = min(splits, key=lambda k: pairs[k][0][0] + pairs[k][1][0])
    low, high = pairs[best]
    return float(np.polyval((low if at < 0.5 * (x[best - 1] + x[best]) else high)[1], at))


PREDICTORS: Mapping[str, Predict] = {
    "line on log axes": line_on_log_axes,
    "support vectors": support_vectors,
    "random forest": random_forest,
    "two stages": two_stages,
}


def fits(name: str, profile: Profile) -> tuple[list[dict[str, Any]], dict[str, tuple[Floats, Floats, Floats]]]:
    """Return R² and errors of the line through each curve, and the curves: bytes, seconds, the line's seconds."""
    points, rows, curves = profile.points, list[dict[str, Any]](), dict[str, tuple[Floats, Floats, Floats]]()
    curve_P = numbered(list(zip(points.subjects, points.dtypes, strict=True)))
    for curve in np.unique(curve_P):
        at = np.flatnonzero(curve_P == curve)
        at = at[np.argsort(points.sizes_bytes[at])]
        x, y = points.sizes_bytes[at], points.seconds[at]
        if len(at) < 3:
            continue
        line: Floats = np.polyval(np.polyfit(x, y, 1), x).astype(float)
        small = x < SMALL_BYTES
        off = np.abs(line / y - 1.0)
        rows.append(
            {
                "collective": name,
                "group": points.subjects[at[0]],
                "dtype": points.dtypes[at[0]],
                "sizes": len(at),
                "r_squared": 1.0 - float(((line - y) ** 2).sum()) / max(float(((y - y.mean()) ** 2).sum()), 1e-300),
                "median_percent": 100.0 * float(np.median(off)),
                "small_p90_percent": 100.0 * float(np.quantile(off[small], 0.9)) if small.any() else None,
            }
        )
        curves[f"{points.subjects[at[0]]}, {points.dtypes[at[0]]}"] = (x, y, line)
    return rows, curves


def left_out(profile: Profile, thinned: Points) -> list[dict[str, Any]]:
    """Return each predictor's errors on sizes that were left out of their own curve."""
    curve_P: Integers = numbered(list(zip(thinned.subjects, thinned.dtypes, strict=True)))
    scored = inside_curves(thinned, curve_P)
    found = []
    for name, predict in PREDICTORS.items():
        log_seconds = alone(thinned, curve_P, scored, predict)
        found.append(row_of(name, relative_errors(log_seconds, thinned)[scored], None))
    return found


def draw(name: str, curves: Mapping[str, tuple[Floats, Floats, Floats]], folder: Path) -> Path:
    """Draw all groups of one collective on log axes: points as measured, lines as fitted."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, at = plt.subplots(figsize=(5.2, 3.8))
    for number, (x, y, line) in enumerate(curves.values()):
        color = f"C{number % 10}"
        at.plot(x, 1e3 * y, ".", markersize=2.5, color=color, label="measured" if not number else None)
        up = line > 0
        at.plot(x[up], 1e3 * line[up], linewidth=0.5, color=color, label="line through seconds" if not number else None)
    at.set_xscale("log")
    at.set_yscale("log")
    at.set_xlabel("bytes")
    at.set_ylabel("ms")
    at.set_title(f"{name.replace('_', '-')}: {len(curves)} groups and types of number", fontsize=9)
    at.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path = folder / f"regressions-{name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def measure(path: Path, figures: Path | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Fit, judge and draw every collective of a profile."""
    rows, summary = list[dict[str, Any]](), dict[str, Any]()
    for name, profile in read(path)[0].items():
        own, curves = fits(name, profile)
        rows += own
        small = [row["small_p90_percent"] for row in own if row["small_p90_percent"] is not None]
        by_method = {row["method"]: row for row in leave_size_out(profile)}
        by_method |= {row["method"]: row for row in left_out(profile, profile.points)}
        summary[name] = {
            "curves": len(own),
            "median_r_squared": float(np.median([row["r_squared"] for row in own])),
            "most_r_squared": max(row["r_squared"] for row in own),
            "median_small_p90_percent": float(np.median(small)) if small else None,
            "size_left_out": {
                method: {key: row[key] for key in ("median_percent", "p90_percent")}
                for method, row in by_method.items()
            },
        }
        if figures is not None:
            draw(name, curves, figures)
    return rows, summary


def shown(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table for people: each collective's predictors on sizes that were left out."""
    return [
        {"collective": name, "predictor": method, **errors}
        for name, found in summary.items()
        for method, errors in found["size_left_out"].items()
    ]


def main(
    profile: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Alpa's profile, Parquet or pickle")],
    figures: Annotated[Path | None, typer.Option(file_okay=False, help="folder for one drawing a collective")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Fit the paper's lines, and say what R² does not."""
    rows, summary = measure(profile, figures)
    lines: Sequence[dict[str, Any]] = [
        {"collective": name, **{key: value for key, value in found.items() if key != "size_left_out"}}
        for name, found in summary.items()
    ]
    report("Sizes left out of their own curve", shown(summary), {}, None)
    report("A line through seconds over bytes, judged on what it was fitted to", lines, summary, None)
    if json_path is not None:
        write(rows, summary, json_path)


if __name__ == "__main__":
    typer.run(main)
