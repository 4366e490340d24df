"""Rows of valid Parquet that cannot be true (fault 30): found, named, not used; honest ones are left alone."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dejavu.cluster import DeviceType, load_cluster
from dejavu.cluster.this_machine import CORE_FLOPS_PER_CYCLE, CORE_MEMORY_BYTES_PER_SECOND
from dejavu.cost.collectives.transfer import fit
from dejavu.cost.pass_overhead import backward_parts, pass_cost
from dejavu.cost.sources.measured import Measured, subject_of
from dejavu.cost.sources.physics import FASTEST_RATIO, SLOWEST_RATIO, limits
from dejavu.cost.sources.predicted import _calibrating
from dejavu.graphs.capture import capture
from dejavu.planning import Choice, Planner, PlanRequest
from dejavu.plans.schedule import PARTS
from dejavu.profiles import Measurement, ProfileDatabase, ProfileError
from dejavu.profiles.measurement import FIGURES, measurements_of, table_of
from dejavu.profiles.plausible import implausible_rows
from dejavu.workload import TrialSettings, Workload
from tests.conftest import some
from tests.test_profiles import LAYER

SHIPPED = ProfileDatabase(Path(__file__).parents[1] / "profiles_db" / "shipped")
CORE = "cpu-core-amd-epyc-family26-model2"  # where what is shipped was measured
POISONS: dict[str, Callable[[float], float]] = {
    "÷ 1000": lambda seconds: seconds / 1000,
    "× 1000": lambda seconds: seconds * 1000,
    "0": lambda seconds: 0.0,
    "NaN": lambda seconds: math.nan,
    "infinite": lambda seconds: math.inf,
    "negative": lambda seconds: -seconds,
}
TWO_CORES = """
nodes: [{name: cores, devices: {type: core, count: 2}, link: {bandwidth: 1 GB/s, latency: 100 us}}]
devices: {core: {kind: cpu, memory: 4 GiB, bandwidth: 10 GB/s, float32: 100 GFLOP/s}}
"""
HARMLESS_SECONDS = 1e-2
every_poison = pytest.mark.parametrize("poison", POISONS)


def by_hand(folder: Path, rows: list[Measurement]) -> ProfileDatabase:
    """A database as somebody makes it who does not ask ours: a Parquet file and the manifest that lists it."""
    folder.mkdir(parents=True, exist_ok=True)
    sink = pa.BufferOutputStream()
    pq.write_table(table_of(rows), sink)
    payload = sink.getvalue().to_pybytes()
    name = hashlib.sha256(payload).hexdigest()
    line = {"name": f"{name[:16]}.parquet", "rows": len(rows), "bytes": len(payload), "sha256": name}
    (folder / line["name"]).write_bytes(payload)  # type: ignore[operator]
    lines = [{**line, "device_types": sorted({row.device_type for row in rows})}]
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": lines}))
    return ProfileDatabase(folder)


def poisoned(row: Measurement, poison: str) -> Measurement:
    return replace(row, seconds=POISONS[poison](row.seconds), seconds_low=None, seconds_high=None)


def shipped(kind: str) -> list[Measurement]:
    return SHIPPED.latest(kind=kind)


def passes() -> list[Measurement]:
    """What a core takes for a pass alone, and beside a message of four sizes; figures of a real measurement."""
    common = replace(LAYER, kind="pass", device_type=CORE, dtype="float32", direction=None, microbatch_size=None)
    common = replace(common, flops=None, seconds_low=None, seconds_high=None)
    times = {2**10: 7.1e-5, 2**15: 8.8e-5, 2**18: 1.6e-4, 2**20: 4.9e-4}
    alone = replace(common, subject="alone", name="alone", num_ranks=1, size_bytes=2**10, seconds=2.9e-5)
    exchanges = [
        replace(common, subject="exchange", name="exchange", num_ranks=2, size_bytes=size, seconds=seconds)
        for size, seconds in times.items()
    ]
    return [alone, *exchanges]


def layers_with_traffic() -> list[Measurement]:
    """Layers as they are measured now, with what they move: figures of a real measurement of small models."""
    figures = [  # name, direction, FLOP, bytes, kernels, seconds
        ("embedding", "forward", None, 5e4, 2, 2.0e-5),
        ("embedding", "optimizer", None, 1.0e6, 8, 2.1e-4),
        ("block", "forward", 8.5e5, 6e5, 14, 1.4e-4),
        ("block", "backward", 1.7e6, 1.4e6, 30, 2.9e-4),
        ("head", "backward", 1.0e6, 3e5, 8, 7.7e-5),
        ("flatten", "forward", 0.0, 0.0, 0, 3.4e-6),
        ("flatten", "optimizer", None, 0.0, 0, 8.9e-7),
        ("stem", "optimizer", None, 1.3e5, 8, 5.0e-4),
        ("large block", "backward_input", 2.6e9, 2.2e8, 60, 2.6e-2),  # of both parts together
        ("large block", "backward_weight", 2.6e9, 2.2e8, 60, 1.9e-2),
    ]
    common = replace(LAYER, device_type=CORE, dtype="float32", seconds_low=None, seconds_high=None)
    return [
        replace(
            common, subject=f"{name}{way}", name=name, direction=way, seconds=seconds,
            flops=None if way in PARTS else flops,
            extra=json.dumps({"family": name, "flops": flops or 0, "moved_bytes": moved, "num_kernels": kernels}),
        )
        for name, way, flops, moved, kernels, seconds in figures
    ]  # fmt: skip


def training(kind: str) -> list[Measurement]:
    """What a training of a GPT of 8 layers on two cores taught; figures of a real one."""
    figures = [  # name, kind, direction, FLOP, bytes, kernels, seconds
        ("layers 4–7", "stage", "backward", 1.064e9, 5.22e7, 65, 1.54e-2),
        ("layers 0–3", "stage", "backward", 1.022e9, 4.98e7, 63, 1.50e-2),
        ("layers 4–7", "stage", "forward", 5.24e8, 2.39e7, 34, 8.44e-3),
        ("layers 0–3", "stage", "forward", 5.03e8, 2.32e7, 34, 7.73e-3),
        ("layers 4–7", "stage", "optimizer", 0.0, 7.75e7, 32, 2.86e-3),
        ("2 stages, 1f1b × 8", "step", "both", 2.491e10, 1.35e9, 1632, 0.332),
    ]
    common = replace(LAYER, device_type=CORE, dtype="float32", seconds_low=None, seconds_high=None, num_ranks=2)
    common = replace(common, source="training")
    sent = {"num_messages": 16, "sent_bytes": 2_621_440}
    return [
        replace(
            common, kind=of, subject=f"{name}{way}", name=name, direction=way, flops=flops, seconds=seconds,
            extra=json.dumps({"moved_bytes": moved, "num_kernels": kernels, **(sent if of == "step" else {})}),
        )
        for name, of, way, flops, moved, kernels, seconds in figures if of == kind
    ]  # fmt: skip


HONEST: dict[str, Callable[[], list[Measurement]]] = {
    "transfer": lambda: shipped("transfer"),
    "collective": lambda: shipped("collective"),
    "operator": lambda: shipped("operator"),
    "layer": layers_with_traffic,
    "pass": passes,
    "stage": lambda: training("stage"),
    "step": lambda: training("step"),
}
REMEDY = {"stage": "dejavu run", "step": "dejavu run"}  # of what trainings teach


@pytest.mark.parametrize("kind", HONEST)
def test_honest_rows_are_sound(kind: str, tmp_path: Path) -> None:
    """As they are; all three times as slow, on a busy machine; and all three times as fast, on a better one."""
    rows = HONEST[kind]()
    for factor in (1.0, 3.0, 1 / 3):
        found = [
            replace(row, seconds=row.seconds * factor, seconds_low=None, seconds_high=None) for row in rows
        ]  # fmt: skip
        database = by_hand(tmp_path / str(factor), found)
        assert database.check() == []
        assert database.read().num_rows == len(rows)


def test_all_that_is_shipped_is_sound() -> None:
    assert implausible_rows(SHIPPED._load(SHIPPED._sound_files())) == {}
    assert SHIPPED.check() == []


@every_poison
@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("most", some([3, sys.maxsize], [3]), ids=["few rows", "every row"])
def test_a_poisoned_row_is_named_by_the_doctor_and_not_read(
    kind: str, poison: str, most: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of a real measurement in turn; where nothing is to be held against one, it must be harmless."""
    rows = HONEST[kind]()
    missed = []
    for k in random.Random(poison).sample(range(len(rows)), min(most, len(rows))):
        row = rows[k]
        bad = poisoned(row, poison)
        database = by_hand(tmp_path / str(k), [*rows[:k], bad, *rows[k + 1 :]])
        findings = [finding for finding in database.check() if repr(row.name) in finding.what]
        left = [one for one in measurements_of(database.read()) if one.seconds == bad.seconds]
        if row.name == "flatten" and 0 < bad.seconds < HARMLESS_SECONDS:
            continue  # it does nothing, and may take that long where others want the core
        if not findings or left:
            missed.append((row.name, row.direction, row.size_bytes, bad.seconds))
            continue
        assert f"{bad.seconds:.3g}" in findings[0].what or f"{bad.seconds!r}" in findings[0].what
        assert "expected" in findings[0].what and REMEDY.get(kind, "dejavu profile --measure") in findings[0].remedy
        assert findings[0].what in caplog.text
    # Of 45 honest collectives two took five times as long as larger ones: a thousandth of them looks possible.
    assert len(missed) <= 0.05 * len(rows) if kind == "collective" else missed == []


@every_poison
def test_a_link_and_a_pass_are_priced_from_what_is_left(poison: str, tmp_path: Path) -> None:
    """Never an error of linear algebra, and never far from the price of the sound rows."""
    rows = shipped("transfer")
    whole = fit(rows)
    for k, row in enumerate(rows):
        database = by_hand(tmp_path / f"link{k}", [*rows[:k], poisoned(row, poison), *rows[k + 1 :]])
        found = fit(database.latest(kind="transfer"))
        for size in (2**12, 2**20):
            expected = whole.latency_seconds + size * whole.seconds_per_byte
            assert found.latency_seconds + size * found.seconds_per_byte == pytest.approx(expected, rel=0.7)
    rows, honest = passes(), pass_cost(by_hand(tmp_path / "passes", passes()), CORE)
    for k, row in enumerate(rows):
        database = by_hand(tmp_path / f"pass{k}", [*rows[:k], poisoned(row, poison), *rows[k + 1 :]])
        left = pass_cost(database, CORE)
        assert 0 <= left.pass_seconds <= 2 * honest.pass_seconds
        assert 0 <= left.of_message(2**16) <= 3 * honest.of_message(2**16)


@every_poison
def test_a_layer_is_held_against_its_arithmetic_and_traffic(
    poison: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever in the honest range a measurement lies, a thousandth and a thousand times of it are not used."""
    workload = Workload(model_options={"num_blocks": 2, "width": 64, "num_heads": 4}, sequence_length=32)
    graph, core = capture(workload), core_device()
    for layer in {layer.signature: layer for layer in graph.layers}.values():
        for way in ("forward", "backward", "optimizer"):
            allowed = limits(layer, way, graph, core, workload.optimizer)
            assert allowed is not None
            for ratio in (0.7, 5.0, 30.0):  # of what the roofline expects: what was found on a busy core, and faster
                honest = replace(
                    LAYER, subject=subject_of(layer.signature, way, workload.optimizer), name=layer.name,
                    device_type=CORE, dtype="float32", direction=way, microbatch_size=workload.microbatch_size,
                    flops=None, seconds=ratio * allowed.expected_seconds, seconds_low=None, seconds_high=None,
                )  # fmt: skip
                folder = tmp_path / f"{layer.name}{way}{ratio}"
                known = Measured(by_hand(folder / "honest", [honest]), workload.optimizer)
                assert known.estimate(layer, way, graph, core) is not None
                bad = poisoned(honest, poison)
                if bad.seconds > 0 and allowed.hold(bad.seconds):
                    # A layer that does next to nothing: its launches may take that long, and decide no plan.
                    assert bad.seconds < SLOWEST_RATIO * 1e-4
                    continue
                known = Measured(by_hand(folder / "bad", [bad]), workload.optimizer)
                assert known.estimate(layer, way, graph, core) is None
                assert repr(layer.name) in caplog.text and "expected" in caplog.text
    assert 30 * FASTEST_RATIO < 1000


def core_device() -> DeviceType:
    peaks = {"float32": CORE_FLOPS_PER_CYCLE["avx512f"] * 2.5e9}
    return DeviceType(CORE, "cpu", peaks, 2**33, CORE_MEMORY_BYTES_PER_SECOND, None, None, "test")


@pytest.mark.parametrize("poison", ["÷ 1000", "0", "NaN", "infinite", "negative"])
def test_what_nothing_can_have_measured_is_refused_when_it_is_written(poison: str, tmp_path: Path) -> None:
    database = ProfileDatabase(tmp_path / "db")
    slow = replace(LAYER, name="block", device_type=CORE, dtype="float32", flops=1e9, seconds=2e-2)
    with pytest.raises(ProfileError, match=rf"row 1 \(layer 'block' on {CORE}\): seconds is .*, expected "):
        database.append([LAYER, poisoned(slow, poison)])
    assert database.read().num_rows == 0


def spoilt(rng: random.Random, content: dict[str, object]) -> str:
    """Return an `extra` with one value that cannot be what it stands for, or something else in its place."""
    if not content or rng.random() < 0.2:
        return rng.choice(["[1, 2]", "3", "{", "[" * 100_000, '{"a":' * 100_000])
    name = rng.choice([one for one in FIGURES if one in content] or ["flops"])
    return json.dumps({**content, name: rng.choice([None, "many", -1, math.nan, math.inf, 10**400, [1], {"a": 1}])})


@pytest.mark.parametrize("kind", HONEST)
def test_a_row_whose_extra_cannot_be_true_is_named_and_not_read(kind: str, tmp_path: Path) -> None:
    """Whatever stands in it; and it is refused when it is written. Most ended each read in a traceback."""
    rng, honest = random.Random(8), HONEST[kind]()
    for number in range(24):
        victim = rng.randrange(len(honest))
        row = honest[victim]
        bad = replace(row, extra=spoilt(rng, json.loads(row.extra or "{}")))
        database = by_hand(tmp_path / str(number), [*rng.sample(honest, min(20, len(honest))), bad])
        told = [one.what for one in database.check()]
        assert any(bad.name in one and "extra is" in one and "JSON object" in one for one in told), (bad.extra, told)
        assert bad.extra not in {one.extra for one in database.latest()}
        with pytest.raises(ProfileError, match="extra is"):
            ProfileDatabase(tmp_path / "new").append([bad])


def test_an_operator_that_is_no_kernel_and_a_layer_without_a_family_leave_prices_as_they_are(tmp_path: Path) -> None:
    """Rows of somebody's own may have something else in `extra`: they ended a plan in a TypeError."""
    core = replace(LAYER, device_type=CORE, dtype="float32", seconds=1e-3, seconds_low=None, seconds_high=None)
    notes = ['{"note": "by hand"}', '{"family": "nothing"}', '{"family": ["matmul"]}', None]
    odd = [replace(core, kind="operator", subject=f"own {k}", direction=None, extra=e) for k, e in enumerate(notes)]
    odd += [replace(core, subject=f"layer {k}", extra=text) for k, text in enumerate(notes)]
    database = ProfileDatabase(tmp_path / "db")
    assert database.append([*odd, *shipped("operator")[:60]]) == len(odd) + 60
    kernels, seconds = _calibrating(database, core_device())
    assert len(kernels) == len(seconds) == 60
    graph = capture(Workload(model_options={"num_blocks": 1, "width": 16, "num_heads": 2}, sequence_length=8))
    assert backward_parts(database, graph, CORE).shape == (len(graph.layers), 2)


def test_measuring_again_ends_the_finding(tmp_path: Path) -> None:
    """The remedy that the doctor names works: the newest row of each thing is what counts."""
    rows = layers_with_traffic()
    database = by_hand(tmp_path, [*rows[1:], poisoned(rows[0], "÷ 1000")])
    assert len(database.check()) == 1
    again = replace(rows[0], measured_at=rows[0].measured_at + timedelta(days=1))
    database.append([again])
    assert database.check() == []
    assert np.isclose(database.latest(subject=rows[0].subject)[0].seconds, rows[0].seconds)


@every_poison
def test_a_plan_and_its_proof_are_those_without_the_poisoned_row(poison: str, tmp_path: Path) -> None:
    """Rows of every layer, one of them poisoned: what is planned is what would be if that one had not been measured."""
    (tmp_path / "cluster.yaml").write_text(TWO_CORES)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    workload = Workload(
        model_options={"num_blocks": 2, "width": 64, "num_heads": 4}, sequence_length=32, batch_size=16,
        num_microbatches=4, schedule="1f1b", trials=TrialSettings(count=0),
    )  # fmt: skip
    graph, core = capture(workload), cluster.device_types["core"]
    layers = {layer.signature: layer for layer in graph.layers}.values()
    rows = [
        replace(
            LAYER, subject=subject_of(layer.signature, way, workload.optimizer), name=layer.name, device_type="core",
            dtype="float32", direction=way, microbatch_size=workload.microbatch_size, flops=None,
            seconds=5 * limits(layer, way, graph, core, workload.optimizer).expected_seconds,
            seconds_low=None, seconds_high=None,
        )
        for layer in layers for way in ("forward", "backward", "optimizer")
    ]  # fmt: skip
    k = max(range(len(rows)), key=lambda k: rows[k].seconds)

    def planned(name: str, kept: list[Measurement]) -> Choice:
        database = by_hand(tmp_path / name, kept)
        return Planner().plan(PlanRequest(workload, cluster, database.path, microbatches=(4,), budget_seconds=2.0))

    bad = planned("bad", [*rows[:k], poisoned(rows[k], poison), *rows[k + 1 :]])
    without = planned("without", [*rows[:k], *rows[k + 1 :]])
    assert bad.plan == without.plan
    assert bad.simulated_lower_bound_seconds == pytest.approx(without.simulated_lower_bound_seconds, rel=0.01)
