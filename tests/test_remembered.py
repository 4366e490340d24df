"""Déjà vu: what was measured at other microbatches, in stages and in steps, comes back in the next price."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejavu.cluster import Cluster, catalogue, load_cluster
from dejavu.cost import CostTable, cost_table, remember_stages, sources
from dejavu.cost.measured import subject_of
from dejavu.cost.remembered import RememberedError, StageRecord
from dejavu.graph import Graph, capture
from dejavu.plan import Plan, Stage, StageConfiguration
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.runtime.feedback import step_factor, step_subject
from dejavu.workload import OptimizerSettings, Workload

ADAM = OptimizerSettings()
T4 = StageConfiguration("T4")
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def database(tmp_path: Path) -> ProfileDatabase:
    return ProfileDatabase(tmp_path / "profiles_db")


@pytest.fixture
def graph(tiny: Workload) -> Graph:
    return capture(tiny)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, count: 1, devices: {type: T4, count: 2}}]\n")
    return load_cluster(tmp_path / "cluster.yaml")


def row(**fields: Any) -> Measurement:
    common: dict[str, Any] = {
        "name": "x",
        "device_type": "T4",
        "dtype": "float32",
        "repeats": 9,
        "host_fingerprint": "h",
        "torch_version": "t",
        "source": "measured",
        "how": "test",
        "measured_at": START,
    }
    return Measurement(**{**common, **fields})


def stage_rows(
    graph: Graph, stage: Stage, seconds: float, direction: str = "forward", age: int = 0
) -> list[Measurement]:
    record = StageRecord.of(graph, stage, ADAM)
    return [
        row(
            kind="stage",
            name=f"gpt {stage}",
            subject=record.subject,
            extra=record.to_json(),
            direction="forward",
            microbatch_size=graph.microbatch_size,
            seconds=seconds,
            measured_at=START - timedelta(days=age),
        )
    ]


def layer_rows(graph: Graph, seconds: float, microbatch_size: int | None = None) -> list[Measurement]:
    return [
        row(
            kind="layer",
            subject=subject_of(layer.signature, direction, ADAM),
            extra=json.dumps({"family": layer.family}),
            direction=direction,
            microbatch_size=microbatch_size or graph.microbatch_size,
            seconds=seconds,
            seconds_low=0.99 * seconds,
            seconds_high=1.01 * seconds,
        )
        for layer in {layer.signature: layer for layer in graph.layers}.values()
        for direction in ("forward", "backward", "optimizer")
    ]


def priced(graph: Graph, cluster: Cluster, database: ProfileDatabase) -> CostTable:
    return cost_table(graph, cluster, sources(database, ADAM))


@pytest.mark.parametrize("factor", [0.5, 1.3, 4.0])
def test_a_measured_stage_moves_predictions_nearly_all_the_way(
    factor: float, graph: Graph, cluster: Cluster, database: ProfileDatabase
) -> None:
    before, stage = priced(graph, cluster, database), Stage(0, 3, T4)
    predicted = before.forward.seconds_LD[:3, 0].sum()
    database.append(stage_rows(graph, stage, factor * predicted))
    after, corrections = remember_stages(before, graph, database, ADAM)
    assert after.forward.seconds_LD[:3, 0].sum() == pytest.approx(factor * predicted, rel=0.05)
    inside = {layer.signature for layer in graph.layers[:3]}
    for position, layer in enumerate(graph.layers):
        expected = "training" if layer.signature in inside else before.forward.source_LD[position, 0]
        assert after.forward.source_LD[position, 0] == expected
    assert (after.backward.seconds_LD == before.backward.seconds_LD).all()
    (correction,) = corrections
    assert str(correction).startswith(f"{correction.num_prices} forward prices on T4 follow")
    assert correction.num_prices == (after.forward.source_LD == "training").sum()


def test_a_measured_layer_moves_half_way(graph: Graph, cluster: Cluster, database: ProfileDatabase) -> None:
    database.append(layer_rows(graph, 1e-3))
    before = priced(graph, cluster, database)
    database.append(stage_rows(graph, Stage(0, 2, T4), 1.2 * 2e-3))
    after, _ = remember_stages(before, graph, database, ADAM)
    assert after.forward.seconds_LD[:2, 0] == pytest.approx(1e-3 * np.sqrt(1.2))


def test_the_interval_narrows_and_holds_the_number(graph: Graph, cluster: Cluster, database: ProfileDatabase) -> None:
    before = priced(graph, cluster, database)
    database.append(stage_rows(graph, Stage(0, len(graph.layers), T4), float(before.forward.seconds_LD.sum())))
    after, _ = remember_stages(before, graph, database, ADAM)
    low, middle, high = (getattr(after.forward, name) for name in ("low_seconds_LD", "seconds_LD", "high_seconds_LD"))
    assert (low < middle).all() and (middle < high).all()
    assert (high / low < before.forward.high_seconds_LD / before.forward.low_seconds_LD).all()


def test_more_trainings_come_nearer_to_what_all_of_them_say(
    graph: Graph, cluster: Cluster, database: ProfileDatabase
) -> None:
    """Every split of a model that is 1.5 × slower than predicted: the whole ends within 3 %."""
    before = priced(graph, cluster, database)
    L = len(graph.layers)
    truth = 1.5 * before.forward.seconds_LD[:, 0]
    for cut in range(1, L):
        for stage in (Stage(0, cut, T4), Stage(cut, L, T4)):
            database.append(stage_rows(graph, stage, float(truth[stage.start : stage.stop].sum()), age=cut))
    after, _ = remember_stages(before, graph, database, ADAM)
    assert after.forward.seconds_LD[:, 0] == pytest.approx(truth, rel=0.03)


def test_other_models_devices_dtypes_and_optimizers_change_nothing(
    graph: Graph, cluster: Cluster, database: ProfileDatabase, tiny: Workload
) -> None:
    other = capture(tiny.model_copy(update={"model_options": {**tiny.model_options, "width": 64}}))
    before = priced(graph, cluster, database)
    database.append(stage_rows(other, Stage(0, 2, T4), 1.0))
    (known,) = stage_rows(graph, Stage(0, 2, T4), 1.0)
    database.append(
        [replace(known, device_type="L4"), replace(known, dtype="bfloat16"), replace(known, microbatch_size=99)]
    )
    record = StageRecord.of(graph, Stage(0, 2, T4), OptimizerSettings(name="sgd"))
    database.append([replace(known, direction="optimizer", extra=record.to_json(), subject=record.subject)])
    after, corrections = remember_stages(before, graph, database, ADAM)
    assert corrections == ()
    for direction, grid in after.grids.items():
        assert (grid.seconds_LD == before.grids[direction].seconds_LD).all()


def test_an_absurd_stage_is_refused_and_named(graph: Graph, cluster: Cluster, database: ProfileDatabase) -> None:
    database.append(stage_rows(graph, Stage(0, 2, T4), 1e3))
    with pytest.raises(RememberedError, match=r"stage 'gpt layers 0–1 on 1 × T4' \(forward\) .* measured at 1e\+03 s"):
        remember_stages(priced(graph, cluster, database), graph, database, ADAM)


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_a_microbatch_between_two_measured_ones_follows_the_power_law(
    power: float, tiny: Workload, database: ProfileDatabase
) -> None:
    sizes = [1, 2, 4, 8]
    graphs = {m: capture(tiny.model_copy(update={"batch_size": m * tiny.num_microbatches})) for m in sizes}
    families = {m: [layer.family for layer in graph.layers] for m, graph in graphs.items()}
    assert all(families[m] == families[1] for m in sizes)
    for m in (1, 8):
        database.append(layer_rows(graphs[m], 1e-3 * m**power))
    measured, interpolated = sources(database, ADAM)[:2]
    for m in (2, 4):
        for layer in graphs[m].layers:
            assert measured.estimate(layer, "forward", graphs[m], catalogue()["T4"]) is None
            found = interpolated.estimate(layer, "forward", graphs[m], catalogue()["T4"])
            assert found is not None and found.source == "interpolated"
            assert found.seconds == pytest.approx(1e-3 * m**power)
            assert found.low_seconds <= found.seconds <= found.high_seconds
    outside = capture(tiny.model_copy(update={"batch_size": 16 * tiny.num_microbatches}))
    for layer in outside.layers:
        assert interpolated.estimate(layer, "backward", outside, catalogue()["T4"]) is None
        once = interpolated.estimate(layer, "optimizer", outside, catalogue()["T4"])
        assert once is not None  # works once a step, whatever the microbatch


def test_layers_of_one_model_have_a_family_each(graph: Graph) -> None:
    by_family: dict[str, set[str]] = {}
    for layer in graph.layers:
        by_family.setdefault(layer.family, set()).add(layer.signature)
    assert all(len(signatures) == 1 for signatures in by_family.values())


def plan_of(cuts: tuple[int, ...], num_layers: int, schedule: str = "1f1b") -> Plan:
    ends = [0, *cuts, num_layers]
    return Plan(tuple(Stage(a, b, T4) for a, b in pairwise(ends)), schedule, 4)


def test_a_trained_plan_knows_its_step_and_its_kin_take_the_mean(graph: Graph, database: ProfileDatabase) -> None:
    L = len(graph.layers)
    trained = {plan_of((cut,), L): seconds for cut, seconds in ((1, 0.3), (2, 0.6))}
    for plan, seconds in trained.items():
        database.append(
            [
                row(
                    kind="step",
                    subject=step_subject(graph, plan),
                    direction="both",
                    microbatch_size=graph.microbatch_size,
                    seconds=seconds,
                    extra=json.dumps({"graph": graph.fingerprint, "plan": plan.to_dict()}),
                )
            ]
        )
    for plan, seconds in trained.items():
        assert 0.2 * step_factor(graph, plan, database, lambda _: 0.2) == pytest.approx(seconds)
    assert step_factor(graph, plan_of((3,), L), database, lambda _: 0.2) == pytest.approx(np.sqrt(1.5 * 3.0))
    for stranger in (plan_of((1, 2), L), plan_of((), L), plan_of((3,), L, "gpipe")):
        assert step_factor(graph, stranger, database, lambda _: 0.2) == pytest.approx(np.sqrt(1.5 * 3.0))
    other = replace(graph, dtype="bfloat16")
    assert step_factor(other, plan_of((3,), L), database, lambda _: 0.2) == 1.0
