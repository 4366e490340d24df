"""`dejavu price`: a plan of one's own, priced as the planner prices its own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dejavu.cluster import load_cluster
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.planning import Choice, Planner, PlanRequest, choice_to_dict
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.what_if import price_own_plan, read_plan
from dejavu.what_if.own_plan import FEW
from dejavu.workload import Workload
from flows.__main__ import app
from tests.test_planning import NODES, WORKLOAD

LAYERS = 6  # an embedding, four blocks, a head


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> PlanRequest:
    folder = tmp_path_factory.mktemp("own")
    (folder / "cluster.yaml").write_text(NODES)
    return PlanRequest(Workload.model_validate(WORKLOAD), load_cluster(folder / "cluster.yaml"), folder / "rows")


def one_device(starts: list[int], num_microbatches: int, schedule: str = "1f1b") -> Plan:
    """A V100 for each stage."""
    stops = [*starts[1:], LAYERS]
    spans = zip(starts, stops, strict=True)
    on = StageConfiguration("V100-SXM2-16GB")
    return Plan(tuple(Stage(a, b, on) for a, b in spans), schedule, num_microbatches)


def written(plan: Plan, folder: Path, **changes: Any) -> Path:
    (folder / "plan.json").write_text(json.dumps({**plan.to_dict(), **changes}))
    return folder / "plan.json"


def test_the_planners_own_plan_has_the_planners_prices(request_: PlanRequest, tmp_path: Path) -> None:
    choice: Choice = Planner().plan(replace(request_, searches=("exact",), schedules=("1f1b",)))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(choice_to_dict(choice)))
    plan = read_plan(path)
    assert plan == choice.plan
    found = price_own_plan(request_, plan)
    assert found.simulated_seconds == pytest.approx(choice.simulated_seconds, rel=1e-9)
    assert tuple(found.range_seconds) == pytest.approx(tuple(choice.range_seconds), rel=1e-9)
    assert found.formula_seconds == pytest.approx(choice.chosen.price.step_seconds, rel=1e-9)
    assert found.peak_bytes_S == pytest.approx(choice.chosen.price.peak_bytes)
    assert choice.assumed_host is not None  # the model is small: its hosts' launches are most of the step
    assert found.fits and found.notes == (str(choice.assumed_host),)


def test_fewer_microbatches_than_stages(request_: PlanRequest, tmp_path: Path) -> None:
    for count in (1, 2, 4):
        plan = read_plan(written(one_device([0, 1, 2, 4], count), tmp_path))
        found = price_own_plan(request_, plan)
        low, high = found.range_seconds
        assert 0.0 < low <= found.simulated_seconds <= high
        assert found.is_blocking == (count < 4) and (FEW in found.notes) == (count < 4)
        blocked = price_own_plan(request_, plan, is_blocking=True)
        assert blocked.simulated_seconds >= found.simulated_seconds * (1 - 1e-9)
        json.dumps(found.to_dict(), allow_nan=False)


def test_a_plan_that_does_not_fit_is_priced(request_: PlanRequest) -> None:
    large = request_.workload.model_copy(
        update={"model_options": {"num_blocks": 4, "width": 8192, "num_heads": 8}, "sequence_length": 2048}
    )
    found = price_own_plan(replace(request_, workload=large), one_device([0, 5], 8))
    assert not found.fits and max(found.peak_bytes_S) > 16 * 2**30 and found.simulated_seconds > 0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(0, 2, {}), (3, 6, {})], "stage 1 starts at layer 3; wanted 2: layer 2 is in no stage"),
        ([(0, 3, {}), (2, 6, {})], "stage 1 starts at layer 2; wanted 3: layer 2 stands twice"),
        ([(0, 3, {}), (3, 5, {})], "the plan's stages end at layer 5; the problem has 6"),
        ([(0, 0, {})], "stage 0 is layers 0 to 0"),
        ([(0, 6, {"device_type": "V200"})], "device type 'V200'; the cluster has V100-SXM2-16GB, T4"),
        ([(0, 6, {"devices_per_node": 2, "tensor_parallel": 3})], "must equal its 2 devices"),
        ([(0, 6, {"device_type": "T4", "devices_per_node": 3, "tensor_parallel": 3})], "does not divide 4"),
        ([(0, 6, {"devices_per_node": 7, "data_parallel": 7})], "wanted nodes × devices of"),
        ([(0, 2, {}), (2, 3, {}), (3, 4, {}), (4, 5, {}), (5, 6, {})], "uses 5 × V100-SXM2-16GB; the cluster has 4"),
        ([(0, 6, {"colour": "red"})], "colour"),
    ],
)
def test_mistakes_are_named(
    request_: PlanRequest, tmp_path: Path, stages: list[tuple[int, int, dict[str, Any]]], message: str
) -> None:
    basic = asdict(StageConfiguration("V100-SXM2-16GB"))
    rows = [{"start": start, "stop": stop, "configuration": {**basic, **facts}} for start, stop, facts in stages]
    (tmp_path / "plan.json").write_text(json.dumps({"stages": rows, "schedule": "1f1b", "num_microbatches": 8}))
    with pytest.raises(DejavuError) as error:
        price_own_plan(request_, read_plan(tmp_path / "plan.json"))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_microbatches": 3}, "batch_size 16 does not divide"),
        ({"schedule": "zbv"}, "wanted 1f1b, gpipe or chimera"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"stages": []}, "a list of one stage or more"),
        ({"schedule": "gpipe", "num_microbatches": 1}, "1 microbatches on 2 stages under gpipe"),
    ],
)
def test_what_a_plan_cannot_be(request_: PlanRequest, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        price_own_plan(request_, read_plan(written(one_device([0, 3], 8), tmp_path, **changes)))
    assert message in str(error.value)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(NODES)
    (tmp_path / "work.yaml").write_text(json.dumps(WORKLOAD))
    plan = written(one_device([0, 2, 4], 2), tmp_path)
    words = ["price", str(plan), "--model", str(tmp_path / "work.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    words += ["--database", str(tmp_path), "--json", str(tmp_path / "priced.json")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "in nine of ten cases" in done.stdout and "it fits" in done.stdout
    assert "fewer microbatches than stages" in done.stdout
    content = json.loads((tmp_path / "priced.json").read_text())
    assert content["blocking"] is True and len(content["stages"]) == 3
    for wrong, said in (("--json", "is a folder"), ("--database", "there is no such folder")):
        where = tmp_path if wrong == "--json" else tmp_path / "none"
        with pytest.raises(InputError, match=said):
            CliRunner().invoke(app, [*words, wrong, str(where)], catch_exceptions=False)
