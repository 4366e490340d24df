"""Makes `dejavu/cost/collective_coefficients.json` from a profile of one cluster whose links are known.

python -m benchmarks.cost.fit_collectives PROFILE.parquet --source "Alpa's V100 profile, 2022" > coefficients.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.cost.collectives import Profile, read
from dejavu.cost.collectives.alpha_beta import FAMILY, FITTED_LINKS, TERMS, Coefficients, fit
from dejavu.cost.collectives.curves import CollectiveModel
from dejavu.cost.collectives.points import Points


def main(path: Path, source: Annotated[str, typer.Option()]) -> None:
    profiles, _ = read(path)
    entries = {}
    for name, profile in profiles.items():
        found = fitted(name, profile.points)
        entries[name] = replace(
            switched(name, found),
            log_error=held_out_log_error(name, profile),
            deviations=held_out_deviations(name, profile),
        )
    entries["send_recv"] = entries["all_gather"]  # of a pair: the same messages
    content = {
        "source": source,
        "fitted": date.today().isoformat(),
        "links": {place: asdict(link) for place, link in asdict_links().items()},
        "coefficients": {
            name: {
                "terms": {
                    term: float(f"{value:.4g}") for term, value in zip(TERMS[FAMILY[name]], entry.values, strict=True)
                },
                "tree_center_log2_bytes": entry.tree_center_log2_bytes,
                "tree_width_log2_bytes": entry.tree_width_log2_bytes,
                "log_error": round(entry.log_error, 3),
                "deviations": round(entry.deviations, 3),
            }
            for name, entry in entries.items()
        },
    }
    print(json.dumps(content, indent=1))


def asdict_links() -> dict:
    return {"inside": FITTED_LINKS.inside, "between": FITTED_LINKS.between}


def fitted(name: str, points: Points) -> Coefficients:
    nothing = Coefficients(values=(0.0,) * len(TERMS[FAMILY[name]]))
    return fit(name, points.layouts, points.sizes_bytes, points.seconds, FITTED_LINKS, nothing)


def switched(name: str, found: Coefficients) -> Coefficients:
    """Without what a pair pays where a direct link is one of several (V100's mesh): other nodes have a switch."""
    named = zip(TERMS[FAMILY[name]], found.values, strict=True)
    return replace(found, values=tuple(0.0 if term == "pair_bytes" else value for term, value in named))


def held_out_log_error(name: str, profile: Profile) -> float:
    """The 90 % quantile over meshes left out one at a time, groups inside a node and across nodes."""
    errors = []
    for mesh in np.unique(profile.mesh_P):
        train = profile.points.take(np.flatnonzero(profile.mesh_P != mesh))
        test = profile.points.take(np.flatnonzero(profile.mesh_P == mesh))
        predicted = fitted(name, train).seconds(name, test.layouts, test.sizes_bytes, FITTED_LINKS)
        errors.append(np.abs(np.log(predicted / test.seconds)))
    return float(np.quantile(np.concatenate(errors), 0.9))


def held_out_deviations(name: str, profile: Profile) -> float:
    """The same for groups across nodes, corrected by their neighbours, in standard deviations."""
    distances = []
    for mesh in np.unique(profile.mesh_P[profile.crosses_P]):
        train = profile.points.take(np.flatnonzero(profile.mesh_P != mesh))
        test = profile.points.take(np.flatnonzero((profile.mesh_P == mesh) & profile.crosses_P))
        model = CollectiveModel.of(name, train, FITTED_LINKS)
        mean, deviation = model.predict(test.layouts, test.subjects, test.dtypes, test.sizes_bytes)
        distances.append(np.abs(np.log(test.seconds) - mean) / deviation)
    return float(np.quantile(np.concatenate(distances), 0.9))


if __name__ == "__main__":
    typer.run(main)
