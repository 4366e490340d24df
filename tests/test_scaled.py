"""Predictions at other microbatch sizes are held to what was measured at one."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dejavu.cluster import Cluster, load_cluster
from dejavu.cost import is_prediction
from dejavu.cost.sources.measured import subject_of
from dejavu.cost.sources.scaled import SCALED
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.planning import PlanRequest, Prices
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.workload import Workload

CLUSTER = Path(__file__).parents[1] / "examples" / "clusters" / "h100-and-l4.yaml"
SIZES = (1, 2, 4, 8, 16)
OWN = 4  # the workload's own number of microbatches


@cache
def workload() -> Workload:
    model = {"num_blocks": 3, "width": 256, "num_heads": 4}
    return Workload.model_validate(
        {
            "model_options": model,
            "data": "synthetic",
            "synthetic": {"num_classes": 512},
            "batch_size": 16,
            "num_microbatches": OWN,
        }
    )


@cache
def cluster() -> Cluster:
    return load_cluster(CLUSTER)


def prices(folder: Path) -> Prices:
    return Prices(PlanRequest(workload(), cluster(), folder))


def remember(graph: Graph, fresh: Prices, factors: dict[str, float], database: ProfileDatabase) -> None:
    """Measure, at the workload's own size, that many times what is predicted."""
    table, rows = fresh.table_of(OWN), []
    for name, factor in factors.items():
        column = table.device_types.index(name)
        for row, layer in {layer.signature: (k, layer) for k, layer in enumerate(graph.layers)}.values():
            for direction, grid in table.grids.items():
                rows.append(
                    Measurement(
                        kind="layer",
                        subject=subject_of(layer.signature, direction, workload().optimizer),
                        name=layer.name,
                        device_type=name,
                        direction=direction,
                        dtype="float32",
                        microbatch_size=graph.microbatch_size,
                        seconds=factor * float(grid.seconds_LD[row, column]),
                        source="test",
                        how="test",
                        repeats=5,
                        host_fingerprint="test",
                        torch_version="test",
                        measured_at=datetime(2026, 1, 1, tzinfo=UTC),
                    )
                )
    database.append(rows)


@pytest.mark.parametrize("factor", [0.8, 1.0, 3.0])
def test_what_a_prediction_is_off_by_at_one_size_it_is_at_another(tmp_path: Path, factor: float) -> None:
    database = ProfileDatabase(tmp_path / "profiles_db")
    fresh = prices(database.path)
    graph = capture(workload(), cluster().kind)
    remember(graph, fresh, {"L4": factor}, database)
    held = prices(database.path)
    for count in SIZES:
        before, after, own = fresh.table_of(count), held.table_of(count), held.table_of(OWN)
        k = OWN / count  # this microbatch over the measured one
        for name, column in ((name, after.device_types.index(name)) for name in after.device_types):
            for direction in ("forward", "backward"):
                seconds, base = (t.grids[direction].seconds_LD[:, column] for t in (after, own))
                predicted = before.grids[direction].seconds_LD[:, column]
                sources = set(after.grids[direction].source_LD[:, column])
                if name != "L4":
                    assert np.array_equal(seconds, predicted)
                    continue
                assert sources == ({SCALED} if count != OWN else {"measured"})
                assert (seconds >= min(1.0, k) * base * (1 - 1e-12)).all()
                assert (seconds <= max(1.0, k) * base * (1 + 1e-12)).all()
                inside = (seconds > min(1.0, k) * base * 1.001) & (seconds < max(1.0, k) * base * 0.999)
                assert seconds[inside] == pytest.approx(factor * predicted[inside], rel=1e-9)
                low, high = (getattr(after.grids[direction], f"{end}_seconds_LD")[:, column] for end in ("low", "high"))
                assert (low <= seconds).all() and (seconds <= high).all()


def test_what_is_scaled_still_counts_as_predicted() -> None:
    assert is_prediction(SCALED)
