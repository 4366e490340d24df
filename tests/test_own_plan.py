"""`dejavu price`: a plan of one's own, priced as the planner prices its own."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dejavu.cluster import load_cluster
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.planning import Choice, Planner, PlanRequest, choice_to_dict
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.priced_problem import Away
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import HAIR, PlanError
from dejavu.what_if import price_own_plan, read_plan
from dejavu.what_if.own_plan import FEW, FOUND_HERE
from dejavu.workload import Workload
from flows.__main__ import app
from tests.conftest import spread
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
        ([(0, 3, {}), (3, 5, {})], "stage 1: stop is 5; the model has 6 layers"),
        ([(0, 0, {})], "stage 0: stop is 0"),
        ([(0, 6, {"device_type": "V200"})], "stage 0: device type 'V200'; the cluster has V100-SXM2-16GB, T4"),
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
        ({"schedule": "hanayo_2"}, "2 stages cannot be divided so"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"stages": []}, "a list of one stage or more"),
        ({"schedule": "gpipe", "num_microbatches": 1}, "1 microbatch on 2 pipeline ranks under gpipe"),
    ],
)
def test_what_a_plan_cannot_be(request_: PlanRequest, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DejavuError) as error:
        price_own_plan(request_, read_plan(written(one_device([0, 3], 8), tmp_path, **changes)))
    assert message in str(error.value)


NO_BOOLS = ["no", "true", 0, 1, 1.0, None, []]
NO_COUNTS = ["1", 1.0, 0, -1, True, None, [1]]
WRONG: dict[str, list[Any]] = {
    "recompute": NO_BOOLS,
    "sequence_parallel": NO_BOOLS,
    "expert_parallel": NO_BOOLS,
    "num_nodes": NO_COUNTS,
    "devices_per_node": NO_COUNTS,
    "data_parallel": NO_COUNTS,
    "tensor_parallel": NO_COUNTS,
    "context_parallel": NO_COUNTS,
    "zero_level": [-1, 4, 7, "1", 1.0, True, None],
    "device_type": [1, None, True, ["T4"]],
    "groups": ["a", 1, None, True, [1], ["a", None]],
    "offload": ["no", 1, None, {"weights": "host"}, {"optimizer": True}, {"activations": "nvme"}],
    "start": [-1, "0", 0.0, False, None],
    "stop": [0, "6", 6.0, True, None],
}
WRONG_OF_PLANS: dict[str, list[Any]] = {
    "num_microbatches": ["8", 8.0, 0, -1, True, None, [8]],
    "schedule": ["2f2b", 1, None, ["1f1b"], {}],
    "slices": [4, "4", [0], [1.0], ["4"], [True], None],
    "both_ways": ["no", 0, 1, None],
    "splits": [4, "ab", ["a"], [1], [["a", 2]], [["a", 2, 5]], [["a", 2, ["b"]]], None],
    "stages": [{}, None, "all", []],
}


def test_every_key_is_given_for_the_wrong_kinds() -> None:
    assert set(WRONG) == {*StageConfiguration.__dataclass_fields__, "start", "stop"}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_of_a_stage_is_named(tmp_path: Path, key: str) -> None:
    for number, value in itertools.product((0, 1), WRONG[key]):
        content = one_device([0, 3], 8).to_dict()
        row = content["stages"][number]
        (row if key in row else row["configuration"])[key] = value
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(content))
        with pytest.raises(InputError) as error:
            read_plan(path)
        said = str(error.value)
        assert said.startswith(f"{path}: stage {number}: {key}") and "; wanted" in said, value
        assert all(repr(one) in said for one in (value.values() if isinstance(value, dict) else [value])), said


@pytest.mark.parametrize("key", WRONG_OF_PLANS)
def test_a_wrong_value_of_a_plan_is_named(tmp_path: Path, key: str) -> None:
    for value in WRONG_OF_PLANS[key]:
        path = written(one_device([0, 3], 8), tmp_path, **{key: value})
        with pytest.raises(InputError) as error:
            read_plan(path)
        assert str(error.value).startswith(f"{path}: ") and key in str(error.value)
        assert "; wanted" in str(error.value) or "did you mean" in str(error.value)


def test_a_file_with_several_answers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"rows": [{"case": "batch 8", "plan": one_device([0, 3], 8).to_dict()}] * 2}))
    with pytest.raises(InputError, match=r"has answers to several questions; wanted .* `plan` in one of its `rows`"):
        read_plan(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": [1]},
        {"stages": [None]},
        {"stages": [{"layers": 3}]},
        {"stages": [{"start": 0, "stop": 6}]},
        {"stages": [{"start": 0, "stop": 6, "configuration": None}]},
        {"stages": [{"start": 0, "stop": 6, "configuration": [1]}]},
    ],
)
def test_a_stage_that_is_none_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"plan\.json: stage 0: .*wanted"):
        read_plan(written(one_device([0, 3], 8), tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"schedule": "gpipe", "both_ways": True}, "false"), ({"schedule": "chimera", "both_ways": False}, "true")],
)
def test_both_ways_and_another_schedule(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"both_ways is .* with schedule .*; wanted.*{message}"):
        read_plan(written(one_device([0, 3], 8), tmp_path, **changes))


@pytest.mark.parametrize("stop", [4, 5, 7, 60])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "chimera", "zbv"])
def test_other_layers_than_the_models(request_: PlanRequest, tmp_path: Path, schedule: str, stop: int) -> None:
    content = one_device([0, 3], 8).to_dict() | {"schedule": schedule}
    content["stages"][1]["stop"] = stop
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(DejavuError, match=f"stage 1: stop is {stop}; the model has 6 layers"):
        price_own_plan(request_, read_plan(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    "facts",
    [
        {"device_type": "V200"},
        {"devices_per_node": 7, "data_parallel": 7},
        {"num_nodes": 9, "data_parallel": 9},
        {"device_type": "T4", "devices_per_node": 3, "tensor_parallel": 3},
        {"devices_per_node": 4, "data_parallel": 4},
        {"offload": True},
        {"offload": {"optimizer": "nvme"}},
        {"devices_per_node": 2, "tensor_parallel": 2, "expert_parallel": True},
    ],
)
def test_a_stage_that_is_not_possible_is_named(request_: PlanRequest, tmp_path: Path, facts: dict[str, Any]) -> None:
    content = one_device([0, 3], 8).to_dict()
    content["stages"][1]["configuration"].update(facts)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(DejavuError, match=r"^stage 1: "):
        price_own_plan(request_, read_plan(tmp_path / "plan.json"))


@pytest.mark.parametrize("rule", ["median", "suspicion", "trimmed_mean"])
def test_a_stage_whose_gradients_the_rule_cannot_combine_is_named(request_: PlanRequest, rule: str) -> None:
    four = StageConfiguration("V100-SXM2-16GB", 2, 2, 4, 1)
    work = replace(request_, workload=Workload.model_validate({**WORKLOAD, "gradients": rule, "schedule": "1f1b"}))
    assert price_own_plan(work, Plan((Stage(0, LAYERS, four),), "1f1b", 4)).simulated_seconds > 0
    one = StageConfiguration("T4")
    for s, stages in enumerate([(one, four), (four, one)]):
        spans = [Stage(a, b, on) for (a, b), on in zip(((0, 3), (3, LAYERS)), stages, strict=True)]
        with pytest.raises(PlanError, match=f"^stage {s}: gradients: {rule} "):
            price_own_plan(work, Plan(tuple(spans), "1f1b", 4))


@pytest.mark.parametrize("schedule", spread(sorted(SCHEDULES), 4))
def test_a_planned_schedule_has_the_planners_prices(request_: PlanRequest, tmp_path: Path, schedule: str) -> None:
    choice: Choice = Planner().plan(replace(request_, searches=("exact",), schedules=(schedule,)))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(choice_to_dict(choice)))
    plan = read_plan(path)
    assert plan == choice.plan
    found = price_own_plan(request_, plan)
    assert found.simulated_seconds == pytest.approx(choice.simulated_seconds, rel=1e-9)
    assert tuple(found.range_seconds) == pytest.approx(tuple(choice.range_seconds), rel=1e-9)
    problem, price = choice.priced.problem, choice.chosen.price
    rank_of = {s: rank for rank, own in enumerate(plan.ranks) for s in own}
    assert found.peak_bytes_S == pytest.approx([price.peak_bytes[rank_of[s]] for s in range(len(plan.stages))])
    for rank, own in enumerate(plan.ranks):  # a rank runs one pass at a time
        spans = [(plan.stages[s].start, plan.stages[s].stop, problem.index(plan.stages[s].configuration)) for s in own]
        in_flight = [choice.chosen.simulation.in_flight[s] for s in own]
        alone = [problem.costs.peak_bytes(*span, count) for span, count in zip(spans, in_flight, strict=True)]
        assert max(alone) <= price.peak_bytes[rank] * (1 + 1e-9)
        assert SCHEDULES[schedule].splits_backward or price.peak_bytes[rank] <= sum(alone) * (1 + 1e-9)
        assert len(own) == 1 or price.peak_bytes[rank] != pytest.approx(sum(alone), rel=1e-3)
    assert (found.formula_seconds is None) == (SCHEDULES[schedule].stages_per_rank > 1)
    if found.formula_seconds is not None:
        assert found.formula_seconds == pytest.approx(choice.chosen.price.step_seconds, rel=1e-9)
    assert choice.assumed_host is not None  # the model is small: its hosts' launches are most of the step
    assert found.fits
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(("accumulate", "schedule"), [(1, "1f1b"), (2, "1f1b"), (4, "zbv")])
def test_a_microbatch_is_one_of_a_run_as_in_the_planners_answer(
    request_: PlanRequest, accumulate: int, schedule: str, tmp_path: Path
) -> None:
    workload = Workload.model_validate({**WORKLOAD, "accumulate": accumulate, "num_microbatches": 2})
    asked = replace(request_, workload=workload, searches=("uniform",), schedules=(schedule,), microbatches=(2,))
    answer = choice_to_dict(Planner().plan(asked))
    (tmp_path / "plan.json").write_text(json.dumps(answer))
    found = price_own_plan(asked, read_plan(tmp_path / "plan.json")).to_dict()
    ours, theirs = ([stage["seconds"] for stage in one["stages"]] for one in (found, answer))
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert found["accumulate"] == answer["accumulate"] == accumulate


def test_it_fits_with_the_tolerance_that_searches_have(request_: PlanRequest) -> None:
    """What exceeds a device's memory by the rounding of a sum does not, and what exceeds it by more does."""
    found = price_own_plan(request_, one_device([0, 2, 4], 8))
    for excess, fits in ((0.0, True), (HAIR / 4, True), (8 * HAIR, False), (0.1, False)):
        full = tuple(held / (1 + excess) for held in found.peak_bytes_S)
        assert replace(found, capacity_bytes_S=full).fits == fits
        assert Away(1 + excess, 1.0, 0.0, 0.0).fits == Away(0.0, 0.0, 1 + excess, 1.0).fits == fits


def test_stages_of_a_rank_need_one_configuration(request_: PlanRequest) -> None:
    plan = one_device([0, 1, 2, 4], 8, "zbv")
    other = replace(plan.stages[3], configuration=StageConfiguration("T4"))
    with pytest.raises(DejavuError, match=r"stages \[0, 3\] share the devices of pipeline rank 0 under zbv"):
        price_own_plan(request_, replace(plan, stages=(*plan.stages[:3], other)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "stage 1: stop is 7"),
        ({"num_microbatches": 3}, "batch_size 16 does not divide into 3"),
        ({"slices": [3, 3]}, r"slices: \[3, 3\] are 6 positions"),
        ({"schedule": "chimera", "num_microbatches": 1}, "schedule: chimera: the plan has 2 stages and 1 microbatch"),
        ({"schedule": "hanayo_2"}, "schedule hanayo_2 runs 4 stages"),
    ],
)
def test_the_command_names_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "cluster.yaml").write_text(NODES)
    (tmp_path / "work.yaml").write_text(json.dumps(WORKLOAD))
    on = StageConfiguration("V100-SXM2-16GB")
    plan = written(Plan((Stage(0, 3, on), Stage(3, 7, on)), "1f1b", 8), tmp_path, **changes)
    words = ["price", str(plan), "--model", str(tmp_path / "work.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    with pytest.raises(InputError, match=f"^{re.escape(str(plan))}: {message}"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(NODES)
    (tmp_path / "work.yaml").write_text(json.dumps(WORKLOAD))
    plan = written(one_device([0, 2, 4], 2), tmp_path)
    words = ["price", str(plan), "--model", str(tmp_path / "work.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    (tmp_path / "new").mkdir()
    words += ["--database", str(tmp_path / "new"), "--json", str(tmp_path / "priced.json")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "in nine of ten cases" in done.stdout and "it fits" in done.stdout
    assert "fewer microbatches than stages" in done.stdout
    assert "by the searches' formula, which takes the fastest links between devices of its types: " in done.stdout
    content = json.loads((tmp_path / "priced.json").read_text())
    assert content["blocking"] is True and len(content["stages"]) == 3
    for wrong, said in (("--json", "is a folder"), ("--database", "there is no such folder")):
        where = tmp_path if wrong == "--json" else tmp_path / "none"
        with pytest.raises(InputError, match=said):
            CliRunner().invoke(app, [*words, wrong, str(where)], catch_exceptions=False)


@pytest.mark.parametrize("place", ["plan", "stage"])
@pytest.mark.parametrize("key", ["schedul", "num_microbatch", "Slices", "both-ways", "pipeline", "", "config"])
def test_a_key_that_would_be_ignored_is_told(place: str, key: str, tmp_path: Path) -> None:
    plan = one_device([0, 2], 4).to_dict()
    (plan if place == "plan" else plan["stages"][1])[key] = "zbv"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    where = r"plan\.json: " if place == "plan" else r"plan\.json: stage 1: "
    with pytest.raises(InputError, match=rf"{where}unknown key '{key}'"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("count", [1, 4, 8])
def test_two_names_of_the_number_of_microbatches_agree(count: int, tmp_path: Path) -> None:
    plan = one_device([0, 2], 4)
    path = written(plan, tmp_path, microbatches=count)
    if count == plan.num_microbatches:
        assert read_plan(path) == plan
        return
    with pytest.raises(InputError, match=f"num_microbatches is 4 and microbatches {count}; wanted one of the two"):
        read_plan(path)


def test_all_that_is_written_is_read(request_: PlanRequest, tmp_path: Path) -> None:
    """A plan of a training with its splits, and the whole answer of `dejavu plan`."""
    plan = one_device([0, 2], 4)
    assert read_plan(written(plan, tmp_path)) == plan
    for name in ("splits", "slices"):
        assert read_plan(written(plan, tmp_path, **{name: []})) == plan
    choice = Planner().plan(replace(request_, searches=("uniform",), schedules=("1f1b",), microbatches=(4,)))
    assert "considered" in choice_to_dict(choice)
    assert read_plan(written(plan, tmp_path, **choice_to_dict(choice))).stages == choice.plan.stages


@pytest.mark.parametrize("end", ["start", "stop"])
@pytest.mark.parametrize("value", [0, 1, 2, 3, 6, "3", None])
def test_a_stage_says_its_layers_once(end: str, value: object, tmp_path: Path) -> None:
    """In `layers`, as answers have them, or beside; in both they agree."""
    content = one_device([0, 3], 4).to_dict()
    row = content["stages"][0]
    row["layers"] = {"start": row.pop("start"), "stop": row.pop("stop")}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    assert read_plan(path) == one_device([0, 3], 4)
    row[end] = value
    path.write_text(json.dumps(content))
    if value == row["layers"][end]:
        assert read_plan(path) == one_device([0, 3], 4)
        return
    with pytest.raises(InputError, match=f"stage 0: {end} is {value!r}, and in layers {row['layers'][end]}; wanted"):
        read_plan(path)


SIZES = ["--sequence-length", "32", "--batch-size", "8", "--seed", "3"]
OTHERS: list[tuple[list[str], dict[str, Any], str, str]] = [
    ([], {}, "sequence_length 32, batch_size 8, seed 3", "sequence_length 64, batch_size 16, seed 0"),
    (SIZES[:4], {}, "seed 3", "seed 0"),
    (SIZES[2:], {}, "sequence_length 32", "sequence_length 64"),
    (SIZES, {}, "", ""),
    (SIZES, {"model_options": {"num_blocks": 4, "width": 128, "num_heads": 4}}, "'width': 256", "'width': 128"),
    (SIZES, {"synthetic": {"num_classes": 99}}, "'num_classes': 256", "'num_classes': 99"),
    (SIZES, {"optimizer": {"name": "sgd"}}, "optimizer adamw", "optimizer sgd"),
    (SIZES, {"mixed_precision": "float16"}, "mixed_precision False", "mixed_precision float16"),
    (SIZES, {"compile": True}, "compile False", "compile True"),
    (SIZES, {"accumulate": 2, "num_microbatches": 1}, "accumulate 1", "accumulate 2"),
    (SIZES, {"num_steps": 99, "num_microbatches": 2, "schedule": "gpipe"}, "", ""),  # of the training, or the plan's
]


def test_a_saved_plan_says_what_it_was_made_for(tmp_path: Path) -> None:
    """`dejavu price` has the options of `dejavu plan`: the same numbers with them, and without them a sentence."""
    (tmp_path / "cluster.yaml").write_text(NODES)
    (tmp_path / "work.yaml").write_text(json.dumps(WORKLOAD))
    of_both = ["--cluster", str(tmp_path / "cluster.yaml"), "--workload"]
    plan = [
        "plan",
        *of_both,
        str(tmp_path / "work.yaml"),
        *SIZES,
        "--search",
        "uniform",
        "--schedule",
        "1f1b",
        "--microbatches",
        "4",
    ]
    done = CliRunner().invoke(app, [*plan, "--json", str(tmp_path / "plan.json")], catch_exceptions=False)
    assert done.exit_code == 0
    planned = json.loads((tmp_path / "plan.json").read_text())
    assert planned["made_for"]["batch_size"] == 8 and planned["made_for"]["sequence_length"] == 32
    for options, changes, theirs, ours in OTHERS:
        (tmp_path / "other.yaml").write_text(json.dumps({**WORKLOAD, **changes}))
        words = ["price", str(tmp_path / "plan.json"), *of_both, str(tmp_path / "other.yaml"), *options]
        done = CliRunner().invoke(app, [*words, "--json", str(tmp_path / "priced.json")], catch_exceptions=False)
        assert done.exit_code == 0
        priced = json.loads((tmp_path / "priced.json").read_text())
        said = [note for note in priced["notes"] if note.startswith("the plan was made for")]
        assert len(said) == bool(theirs) and all(note in done.stdout for note in said), (changes, options)
        if said:
            before, after = said[0].split(", and is priced for ")
            assert theirs in before and ours in after
        else:
            for key in ("simulated_step_seconds", "predicted_step_seconds_range"):
                assert priced[key] == pytest.approx(planned[key], rel=1e-9)
    content = {**planned, "made_for": 3}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"plan\.json: made_for is 3; wanted an object"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("splits", [[], [["head", 2, [["weight", 0]], False, True]]])
def test_splits_that_are_not_priced_are_told(splits: list[Any], request_: PlanRequest, tmp_path: Path) -> None:
    found = price_own_plan(request_, read_plan(written(one_device([0, 3], 8), tmp_path, splits=splits)))
    assert (FOUND_HERE in found.notes) == bool(splits)
    assert found.simulated_seconds == price_own_plan(request_, one_device([0, 3], 8)).simulated_seconds
