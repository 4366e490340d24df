"""Déjà vu: what was measured at other microbatches, in stages and in steps, comes back in the next price."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejavu.cluster import Cluster, catalogue, load_cluster
from dejavu.cost import CostTable, cost_table, remember_stages, sources
from dejavu.cost.sources.measured import subject_of
from dejavu.cost.trainings.believed import LEAST_DEVIATION, NORMAL_90, believed
from dejavu.cost.trainings.stages import StageRecord
from dejavu.cost.trainings.steps import (
    NO_FACTOR,
    Basis,
    StepFactor,
    factor_from,
    is_surely_faster,
    remembered_plans,
    step_factor,
    step_subject,
)
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.workload import OptimizerSettings, Workload
from tests.rows import START, row

ADAM = OptimizerSettings()
T4 = StageConfiguration("T4")


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
    assert str(correction).startswith(f"{correction.num_prices} forward costs on T4 corrected by earlier trainings")
    assert correction.num_prices == (after.forward.source_LD == "training").sum()


def test_a_measured_layer_moves_half_way(graph: Graph, cluster: Cluster, database: ProfileDatabase) -> None:
    """Of what is believed: that the stage took a fifth more is far beyond chance, so that is nearly all."""
    database.append(layer_rows(graph, 1e-3))
    before = priced(graph, cluster, database)
    database.append(stage_rows(graph, Stage(0, 2, T4), 1.2 * 2e-3))
    after, _ = remember_stages(before, graph, database, ADAM)
    moved = after.forward.seconds_LD[:2, 0] / 1e-3
    assert (moved <= np.sqrt(1.2)).all() and moved == pytest.approx(np.sqrt(1.2), rel=0.01)


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


def test_an_absurd_stage_is_left_out_and_named(
    graph: Graph, cluster: Cluster, database: ProfileDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where an honest one of the same stage is beside it, older or newer."""
    before = priced(graph, cluster, database)
    honest = stage_rows(graph, Stage(0, 2, T4), 3e-3)
    database.append(honest)
    alone, _ = remember_stages(before, graph, database, ADAM)
    for days in (-1, 1):
        absurd = stage_rows(graph, Stage(0, 2, T4), 1e3)
        database.append([replace(row, measured_at=row.measured_at + timedelta(days=days)) for row in absurd])
    after, corrections = remember_stages(before, graph, database, ADAM)
    assert corrections
    for direction, grid in after.grids.items():
        assert (grid.seconds_LD == alone.grids[direction].seconds_LD).all()
    assert "stage 'gpt layers 0–1 on 1 × T4' (forward) on T4 was measured at 16.7 min" in caplog.text


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
        assert once is not None  # runs per step, whatever the microbatch


def test_layers_of_one_model_have_a_family_each(graph: Graph) -> None:
    by_family: dict[str, set[str]] = {}
    for layer in graph.layers:
        by_family.setdefault(layer.family, set()).add(layer.signature)
    assert all(len(signatures) == 1 for signatures in by_family.values())


def plan_of(cuts: tuple[int, ...], num_layers: int, schedule: str = "1f1b") -> Plan:
    ends = [0, *cuts, num_layers]
    return Plan(tuple(Stage(a, b, T4) for a, b in pairwise(ends)), schedule, 4)


SIMULATED = 0.2


def remember_steps(graph: Graph, database: ProfileDatabase, plan: Plan, *logs: float, **fields: Any) -> None:
    """Trainings of the plan whose steps took so much more than simulated, as logarithms."""
    database.append(
        [
            row(
                kind="step",
                subject=step_subject(graph, plan),
                direction="both",
                microbatch_size=graph.microbatch_size,
                seconds=SIMULATED * math.exp(log),
                extra=json.dumps({"graph": graph.fingerprint, "plan": plan.to_dict()}),
                measured_at=START + timedelta(seconds=number),
                **fields,
            )
            for number, log in enumerate(logs)
        ]
    )


def factor_of(graph: Graph, database: ProfileDatabase, plan: Plan) -> StepFactor:
    return step_factor(graph, plan, database, lambda _: SIMULATED)


@pytest.mark.parametrize("absurd", [math.log(1000), -math.log(1000)])
def test_an_absurd_step_is_left_out_and_named(
    absurd: float, graph: Graph, database: ProfileDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone, and between honest ones of the same plan."""
    plan = plan_of((2,), len(graph.layers))
    name = f"absurd {absurd:.1f}"  # each is told once in a process
    remember_steps(graph, database, plan, absurd, name=name)
    assert factor_of(graph, database, plan) == NO_FACTOR
    assert f"step {name!r}" in caplog.text and "wanted a time within a factor of 100" in caplog.text
    honest = ProfileDatabase(database.path.with_name("honest"))
    remember_steps(graph, honest, plan, 0.3, 0.32)
    remember_steps(graph, database, plan, 0.3, 0.32)
    assert factor_of(graph, database, plan) == factor_of(graph, honest, plan) != NO_FACTOR


LOGS = st.floats(-1.0, 1.0)


@given(LOGS, st.floats(0.001, 0.5))
def test_what_is_believed_is_a_part_of_what_was_measured(log: float, deviation: float) -> None:
    found = believed(log, deviation)
    assert 0 <= found / log <= 1 if log else found == 0
    assert (found == 0) == (abs(log) <= NORMAL_90 * deviation)
    assert abs(found) <= abs(believed(1.1 * log, deviation)) and abs(found) <= abs(believed(log, deviation / 1.1))
    assert believed(-log, deviation) == -found
    if abs(log) > 10 * deviation:
        assert found == pytest.approx(log, rel=0.03)


@given(st.lists(LOGS, min_size=1, max_size=5), st.lists(LOGS, min_size=1, max_size=3))
def test_a_plan_that_was_trained_knows_its_own_factor(own: list[float], other: list[float]) -> None:
    """Between none and the mean of its own trainings, whatever other plans did, and its interval holds that mean."""
    plan = plan_of((1,), 5)
    found = factor_from({plan: own, plan_of((1, 2), 5): other}, LEAST_DEVIATION, plan)
    mean = fmean(own)
    assert (found.basis, found.num_trainings) == (Basis.OWN, len(own))
    assert min(mean, 0) - 1e-9 <= math.log(found.factor) <= max(mean, 0) + 1e-9
    low, high = found.interval(found.factor)
    assert low <= math.exp(mean) * (1 + 1e-9) and high >= math.exp(mean) * (1 - 1e-9)


@given(LOGS)
def test_one_plans_factor_says_nothing_of_other_schedules(log: float) -> None:
    """Of plans that differ in their cuts alone it does. What it leaves open is as wide as it was itself."""
    known = {plan_of((1,), 5): [log]}
    for other in (plan_of((1, 2), 5), plan_of((), 5), plan_of((1,), 5, "gpipe")):
        found = factor_from(known, LEAST_DEVIATION, other)
        assert (found.factor, found.basis) == (1.0, Basis.NOTHING) and found.deviation >= abs(log)
    kin, own = (factor_from(known, LEAST_DEVIATION, plan_of((cut,), 5)) for cut in (3, 1))
    assert kin.basis == Basis.ALIKE and abs(math.log(kin.factor)) <= abs(math.log(own.factor)) + 1e-12
    assert abs(math.log(own.factor)) <= abs(log) + 1e-12 and kin.deviation >= own.deviation


@pytest.mark.parametrize(("logs", "least", "most"), [
    ((0.3, 0.31, 0.29), 0.25, 0.31),  # what all have in common is believed of a plan that was never trained
    ((0.3, -0.3, 0.3), -0.01, 0.01),  # what they have not is no reason to move it
    ((0.01, -0.01, 0.0), 0.0, 0.0),
])  # fmt: skip
def test_plans_of_other_schedules_are_believed_as_far_as_they_agree(
    graph: Graph, database: ProfileDatabase, logs: tuple[float, ...], least: float, most: float
) -> None:
    L = len(graph.layers)
    for log, schedule in zip(logs, ("gpipe", "interleaved_1f1b", "looped_bfs"), strict=True):
        remember_steps(graph, database, plan_of((1,) if schedule == "gpipe" else (1, 2, 3), L, schedule), log)
    found = factor_of(graph, database, plan_of((1,), L))
    assert least <= math.log(found.factor) <= most
    other = replace(graph, dtype="bfloat16")
    assert factor_of(other, database, plan_of((1,), L)).basis == Basis.NOTHING


def test_disturbed_steps_say_nothing(graph: Graph, database: ProfileDatabase) -> None:
    plan = plan_of((1,), len(graph.layers))
    remember_steps(graph, database, plan, 0.9, 1.0, disturbed_share=0.8)
    assert factor_of(graph, database, plan) == StepFactor(1.0, math.inf, Basis.NOTHING, 0)
    assert remembered_plans(graph, database) == []
    remember_steps(graph, database, plan, 0.2, disturbed_share=0.1, repeats=7)
    assert factor_of(graph, database, plan).num_trainings == 1
    assert factor_of(graph, database, plan).num_steps == 7
    assert 1.1 < factor_of(graph, database, plan).factor <= math.exp(0.2)


def test_disturbed_stages_correct_predictions_only(graph: Graph, cluster: Cluster, database: ProfileDatabase) -> None:
    before, stage = priced(graph, cluster, database), Stage(0, 2, T4)
    predicted = float(before.forward.seconds_LD[:2, 0].sum())
    database.append([replace(one, disturbed_share=1.0) for one in stage_rows(graph, stage, 3 * predicted)])
    after, _ = remember_stages(before, graph, database, ADAM)
    assert after.forward.seconds_LD[:2, 0].sum() > 2 * predicted
    database.append(layer_rows(graph, 1e-3))
    measured = priced(graph, cluster, database)
    same, corrections = remember_stages(measured, graph, database, ADAM)
    assert corrections == () and (same.forward.seconds_LD == measured.forward.seconds_LD).all()


@pytest.mark.parametrize("bias", [-0.25, -0.08, 0.0, 0.08, 0.4])
@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_memory_seldom_makes_a_prediction_worse(bias: float, noise: float) -> None:
    """Ten trainings of one plan in a row, many times: with memory the error is larger in two of ten at most, and where
    predictions are off by much more than trainings differ it ends much smaller."""
    plan, draws, rounds = plan_of((1,), 5), np.random.default_rng(0), 200
    worse, last_errors = 0, []
    for _ in range(rounds):
        logs = bias + noise * draws.standard_normal(10)
        for number, log in enumerate(logs):
            known = {plan: logs[:number].tolist()} if number else {}
            remembered = math.log(factor_from(known, LEAST_DEVIATION, plan).factor)
            worse += abs(remembered - log) > abs(log)
        last_errors.append(abs(remembered - log))
    assert worse / rounds <= 2.0
    if abs(bias) >= 4 * noise:
        assert fmean(last_errors) < 0.5 * abs(bias)


def test_a_new_plan_has_to_gain_more_than_is_uncertain() -> None:
    own = StepFactor(1.0, 0.02, Basis.OWN, 3)
    for deviation in (0.02, 0.1, 0.3):
        new = StepFactor(1.0, deviation, Basis.OTHERS, 3)
        reach = NORMAL_90 * math.hypot(deviation, 0.02)
        assert is_surely_faster(math.exp(-reach - 0.001), new, 1.0, own)
        assert not is_surely_faster(math.exp(-reach + 0.001), new, 1.0, own)
    assert not is_surely_faster(1e-9, StepFactor(1.0, math.inf, Basis.NOTHING, 0), 1.0, own)
