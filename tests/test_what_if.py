"""What-if questions over several plans: clusters side by side, nodes added and removed, batches, the cheapest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from dejavu.cluster import catalogue, load_cluster
from dejavu.foundation.errors import InputError
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest
from dejavu.what_if import (
    Answered,
    Case,
    Cheapest,
    Goal,
    NodeFile,
    Trained,
    answer,
    changed,
    cheapest,
    cheapest_to_dict,
    difference,
    parse_changes,
    varied,
    what_changes,
    what_is_cheapest,
)
from dejavu.what_if.cheapest import _least_enough
from dejavu.what_if.table import days, goal_table
from dejavu.workload import Workload
from flows.__main__ import app
from flows.what_if import WhatIf, _duration, _tokens

FILE = """
name: table
nodes:
- {{name: a100, count: {a100}, devices: {{type: A100-SXM4-80GB, count: 2}}, price: 9 USD/hour}}
- {{name: l4, count: {l4}, devices: {{type: L4, count: 2}}, price: 2 {currency}/hour}}
links:
  default: {{bandwidth: 10 Gbit/s}}
  pairs:
  - {{between: [a100, l4], bandwidth: 25 Gbit/s}}
  {pairs}
"""
GPT = Workload(
    model="gpt", model_options={"num_blocks": 4, "width": 128, "num_heads": 4}, batch_size=16, num_microbatches=4
)


def write(folder: Path, a100: int = 2, l4: int = 3, currency: str = "USD", name: str = "table.yaml") -> NodeFile:
    path = folder / name
    pairs = "- {between: [a100, a100], bandwidth: 100 Gbit/s}" if a100 > 1 else ""
    path.write_text(FILE.format(a100=a100, l4=l4, currency=currency, pairs=pairs))
    return NodeFile(path)


def asked(file: NodeFile, folder: Path, workload: Workload = GPT) -> PlanRequest:
    alone = Parallelism(1, 1)
    return PlanRequest(workload, file.cluster, folder / "db", alone, ("proportional",), ("1f1b",), (4,))


@pytest.mark.parametrize(
    ("added", "removed", "wanted"),
    [
        ({"a100": 1}, {}, {"a100": 3, "l4": 3}),
        ({"A100": 1}, {"L4": 2}, {"a100": 3, "l4": 1}),
        ({"A100-SXM4": 5}, {"a100": 1}, {"a100": 6, "l4": 3}),
        ({}, {"a100": 2}, {"a100": 0, "l4": 3}),
    ],
)
def test_nodes_are_named_by_group_or_device(
    added: dict[str, int], removed: dict[str, int], wanted: dict[str, int], tmp_path: Path
) -> None:
    file = write(tmp_path)
    counts = changed(file, *([(number, name) for name, number in one.items()] for one in (added, removed)))
    assert counts == wanted
    cluster = file.with_counts(counts)
    assert {group.name: group.count for group in cluster.groups} == {k: n for k, n in wanted.items() if n}


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(3))
def test_fewer_nodes_are_the_first_of_the_hosts_that_are_named(first: int, second: int, tmp_path: Path) -> None:
    """Whatever another group's hosts are called: as a node of a group that is counted would be."""

    def file(name: str, *groups: tuple[str, list[str]]) -> NodeFile:
        nodes = [
            f"- {{name: {one}, hosts: [{', '.join(hosts)}], devices: {{type: L4}}}}\n" for one, hosts in groups if hosts
        ]
        path = tmp_path / name
        path.write_text("nodes:\n" + "".join(nodes) + "links: {default: {bandwidth: 25 Gbit/s}}\n")
        return NodeFile(path)

    groups = ("a", ["x", "y", "z"]), ("b", ["a-0", "a-1"])
    whole = file("whole.yaml", *groups)
    if first or second:
        wanted = file("fewer.yaml", ("a", groups[0][1][:first]), ("b", groups[1][1][:second])).cluster
        assert whole.with_counts({"a": first, "b": second}).fingerprint == wanted.fingerprint


@pytest.mark.parametrize("a100", [1, 2, 3, 7])
@pytest.mark.parametrize("l4", [0, 1, 4])
def test_a_changed_cluster_is_the_one_whose_file_says_so(a100: int, l4: int, tmp_path: Path) -> None:
    """With the links that its file says, also where the group had one node before, or has now."""
    base = write(tmp_path, a100=2, l4=1)
    made = base.with_counts({"a100": a100, "l4": l4})
    if l4:
        assert made.fingerprint == write(tmp_path, a100=a100, l4=l4, name="other.yaml").cluster.fingerprint
    assert base.with_counts(base.counts).fingerprint == base.cluster.fingerprint


@pytest.mark.parametrize(
    ("added", "removed", "said"),
    [
        (["2xh100"], [], r"has no nodes called 'h100' or with such devices; it has a100 \(2 × A100"),
        (["a100"], [], "found no number of nodes and name; wanted such as --add 2xa100"),
        (["0xa100"], [], "found no number of nodes"),
        ([], ["3xa100"], r"--remove 3xa100: a100 has 2 in \S+; wanted at most that"),
        (["1xa100"], ["4xa100"], r"--remove 4xa100: a100 has 3 in \S+, after the other changes; wanted at most that"),
        ([], ["1xl4", "3xL4"], r"--remove 3xL4: l4 has 2 in \S+, after the other changes; wanted at most that"),
        ([], ["2xa100", "3xl4"], "leaves no node"),
    ],
)
def test_what_cannot_be_added_or_removed_is_said(
    added: list[str], removed: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        changed(write(tmp_path), parse_changes("--add", added), parse_changes("--remove", removed))


@pytest.mark.parametrize("device", catalogue())
def test_a_group_is_not_meant_by_another_device(device: str, tmp_path: Path) -> None:
    """`2xa10` of a file with A100s is a mistake: no more of these are meant."""
    path = tmp_path / "one.yaml"
    nodes = f"- {{name: mine, count: 2, devices: {{type: {device}, count: 2}}}}\n"
    path.write_text(f"nodes:\n{nodes}links: {{default: {{bandwidth: 25 Gbit/s}}}}\n")
    file = NodeFile(path)
    for other in catalogue():
        if other != device:
            with pytest.raises(InputError, match="has no nodes called"):
                file.group_named(other)
    parts = device.split("-")
    short = {"-".join(parts[:number]) for number in range(1, len(parts) + 1)}
    assert {file.group_named(name.lower()) for name in short if name == device or name not in catalogue()} == {"mine"}


def test_a_type_in_several_groups_has_to_be_named_by_its_group(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    nodes = "".join(f"- {{name: {name}, count: 2, devices: {{type: T4, count: 2}}}}\n" for name in ("old", "new"))
    path.write_text(f"nodes:\n{nodes}links: {{default: {{bandwidth: 10 Gbit/s}}}}\n")
    with pytest.raises(InputError, match="'T4' is in the nodes of old, new"):
        NodeFile(path).group_named("T4")
    with pytest.raises(InputError, match="this machine; wanted groups of nodes"):
        auto = tmp_path / "auto.yaml"
        auto.write_text("nodes: auto\n")
        load_cluster(auto, {"a": 1})


def test_every_length_goes_with_every_batch() -> None:
    found = varied(GPT, (64, 128), (16, 30))
    assert [name for name, _ in found] == [
        f"sequence {length}, batch {size}" for length in (64, 128) for size in (16, 30)
    ]
    assert [(one.sequence_length, one.batch_size, one.num_microbatches) for _, one in found] == [
        *((64, 16, 4), (64, 30, 2)),
        *((128, 16, 4), (128, 30, 2)),
    ]
    assert varied(GPT, (), ()) == [("", GPT)]
    with pytest.raises(InputError, match="sequence_length: "):
        varied(GPT, (1,), ())
    with pytest.raises(InputError, match=r"^num_microbatches: batch_size 7 does not divide into 4 runs"):
        varied(GPT.model_copy(update={"accumulate": 4}), (), (7,))


@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_a_length_is_refused_where_examples_have_none(data: str) -> None:
    """Of images each row was the same, and called by its own length."""
    sizes: dict[str, Any] = {"synthetic": {"image_shape": [1, 8, 8], "num_classes": 10}} if data == "synthetic" else {}
    images = Workload(model="mlp", data=data, batch_size=16, num_microbatches=4, **sizes)
    assert varied(images, (), (8,))[0][1].batch_size == 8
    with pytest.raises(InputError, match=rf"sequence_length 64: an example of data {data} is .* × .* wanted tokens"):
        varied(images, (64,), ())


@pytest.mark.parametrize("batches", ["14", "14,21", "7,14,28"])
def test_microbatches_are_those_of_the_batch_that_is_asked_for(batches: str, tmp_path: Path) -> None:
    """And not of the workload's own, which does not divide into 7."""
    words = ["--cluster", str(write(tmp_path).path), "--batch-size", batches, "--microbatches", "7"]
    found = ask(*words, folder=tmp_path)
    rows = [row["plan"] for row in found["rows"]] if "rows" in found else [found]
    assert [row["microbatches"] for row in rows] == [7] * len(batches.split(","))


def test_of_clusters_that_are_as_fast_the_cheapest_is_the_fastest(tmp_path: Path) -> None:
    file = write(tmp_path, a100=1, l4=1)
    goal = Goal(1e9, 1.0)
    found = cheapest(goal, [file], asked(file, tmp_path), Planner().plan)
    rows = tuple(sorted(found.rows, key=lambda row: -row.cost))
    same = [SimpleNamespace(answered=row.answered, seconds=7.0, cost=row.cost, is_in_time=False) for row in rows]
    tied: Any = replace(found, rows=tuple(same))
    assert tied.fastest is same[-1] and tied.best is None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answered, Answered]:
    folder = tmp_path_factory.mktemp("pair")
    file = write(folder, a100=1, l4=1)
    request = asked(file, folder)
    cases = [
        Case(name, replace(request, cluster=cluster))
        for name, cluster in (
            ("before", file.with_counts({"l4": 1})),
            ("after", file.with_counts({"a100": 1, "l4": 1})),
        )
    ]
    before, after = answer(cases, Planner().plan)
    return before, after


def test_a_difference_is_the_quotient_of_steps_and_turns_round(pair: tuple[Answered, Answered]) -> None:
    there, back = difference(*pair), difference(*pair[::-1])
    assert there is not None and back is not None
    assert pair[0].choice is not None and pair[1].choice is not None
    assert there.speedup == pytest.approx(pair[0].choice.step_seconds / pair[1].choice.step_seconds)
    assert there.speedup == pytest.approx(1 / back.speedup) and there.speedup > 1
    assert there.cost_per_hour == pytest.approx(-(back.cost_per_hour or 0.0)) and there.currency == "USD"
    assert "as fast" in what_changes(*pair) and "as slow" in what_changes(*pair[::-1])
    assert "has no use for the change" in what_changes(pair[0], pair[0])


def test_a_step_costs_its_hours(pair: tuple[Answered, Answered]) -> None:
    for row in pair:
        assert row.choice is not None and row.cost_of_a_step is not None and row.choice.rates.cost is not None
        assert row.cost_of_a_step[0] * 3600 == pytest.approx(row.choice.rates.cost[0] * row.choice.step_seconds)
        tokens = 16 * GPT.sequence_length
        assert row.choice.rates.cost_of_1e9_tokens == pytest.approx(row.cost_of_a_step[0] * 1e9 / tokens)


def test_a_case_without_a_plan_is_an_answer(tmp_path: Path) -> None:
    file = write(tmp_path, a100=1, l4=1)
    big = GPT.model_copy(update={"model_options": {"num_blocks": 2, "width": 32768, "num_heads": 4}})
    (row,) = answer(
        [Case("big", replace(asked(file, tmp_path, big), cluster=file.with_counts({"l4": 1})))], Planner().plan
    )
    assert row.choice is None and "memory" in row.failure
    assert "big has no plan" in what_changes(row, row)


def planned(folder: Path, file: NodeFile) -> tuple[PlanRequest, Callable[[PlanRequest], Choice], list[str]]:
    """The request, the planner, and the names of what it was asked."""
    names: list[str] = []

    def plan(request: PlanRequest) -> Choice:
        names.append(request.cluster.name)
        return Planner().plan(request)

    return asked(file, folder), plan, names


def test_the_cheapest_of_those_in_time_is_found(tmp_path: Path) -> None:
    file = write(tmp_path)
    request, plan, names = planned(tmp_path, file)
    every = cheapest(Goal(1e8, math.inf), [file], request, plan)
    assert (
        names
        == ["1 × a100", "2 × a100", "1 × l4", "2 × l4", "3 × l4"]
        == [row.answered.case.name for row in every.rows]
    )
    assert every.best is min(every.rows, key=lambda row: row.cost)
    for row in every.rows:
        goal = Goal(1e8, row.seconds)
        found = cheapest(goal, [file], request, plan)
        assert found.best is not None and found.best.seconds <= row.seconds and found.best.cost <= row.cost
        assert found.best.answered.case.name in what_is_cheapest(found)
    assert every.fastest is not None
    none = cheapest(Goal(1e8, every.fastest.seconds / 2), [file], request, plan)
    assert none.best is None and none.fastest is not None
    assert none.fastest.answered.case.name == every.fastest.answered.case.name
    assert "None of the 5 clusters that were planned is predicted" in what_is_cheapest(none)
    assert f"needs {days(none.fastest.seconds)}" in what_is_cheapest(none)


def test_what_is_proved_late_is_late(tmp_path: Path) -> None:
    file = write(tmp_path)
    request, plan, _ = planned(tmp_path, file)
    late = cheapest(Goal(1e12, 60.0), [file], request, plan)
    assert all(row.is_proved_late and not row.is_in_time for row in late.rows)
    said = "it is proved that no plan, of one device for each stage, is simulated in time"
    assert f"are too slow, and of all of these {said}" in what_is_cheapest(late)
    alone = what_is_cheapest(replace(late, rows=late.rows[:1]))
    assert alone.startswith("1 × a100, which alone was planned, is not predicted to train 1,000,000,000,000 tokens")
    assert f"; 1 is too slow, and of it {said}" in alone
    in_time = replace(late.rows[0], goal=Goal(1.0, math.inf))
    assert "of the one cluster that was planned." in what_is_cheapest(replace(late, rows=(in_time,)))
    free = replace(request, schedules=(), workload=GPT.model_copy(update={"schedule": "auto"}))
    late = cheapest(Goal(1e12, 60.0), [file], free, plan, nodes=(1, 1))
    assert all(row.is_proved_late for row in late.rows)
    said = said.replace("no plan", "no plan of whole sequences through one copy of the model")
    assert said in what_is_cheapest(late)
    nothing = Trained(Answered(Case("none", request), None, "no plan"), Goal(1.0, math.inf), 1)
    assert not nothing.is_in_time and Cheapest(nothing.goal, (nothing,), "USD").best is None
    in_time = cheapest(Goal(1.0, math.inf), [file], request, plan)
    assert all(row.is_in_time and not row.is_proved_late for row in in_time.rows)


def devices_of(row: Trained) -> int:
    assert row.answered.choice is not None
    return sum(stage.configuration.num_devices for stage in row.answered.choice.plan.stages)


@pytest.mark.parametrize("nodes", [(1, 5), (6, 6), (12, 40)])
def test_how_many_nodes_are_paid_is_said_where_the_plan_leaves_some_without_work(
    nodes: tuple[int, int], tmp_path: Path
) -> None:
    """A training of six layers has no use for more than six devices, on three nodes."""
    file = write(tmp_path)
    request, plan, _ = planned(tmp_path, file)
    found = cheapest(Goal(1e8, math.inf), [file], request, plan, nodes)
    prices = {group.name: group.price[0] for group in file.cluster.groups if group.price}
    written = cheapest_to_dict(found)["rows"]
    cells = [str(cell) for cell in goal_table(found, "").columns[0].cells]
    for row, as_json, cell in zip(found.rows, written, cells, strict=True):
        paid = row.num_used_nodes
        price = prices[next(name for name in prices if f"× {name}" in cell)]
        assert row.cost == pytest.approx(paid * price * row.seconds / 3600)
        assert as_json["num_used_nodes"] == paid >= math.ceil(devices_of(row) / 2)
        assert cell.endswith(f", {paid} used") == (paid < row.num_nodes)
    assert found.best is not None
    said = f", {found.best.num_used_nodes} used, predicted"
    assert (said in what_is_cheapest(found)) == (found.best.num_used_nodes < found.best.num_nodes) == (nodes[0] > 3)


@pytest.mark.parametrize("same", [True, False])
def test_nodes_of_one_name_in_two_files_are_told_apart(same: bool, tmp_path: Path) -> None:
    files = [write(tmp_path, 1, 1, name=name) for name in ("one.yaml", "other.yaml")]
    if not same:
        files[1].path.write_text(files[1].path.read_text().replace("a100", "gpu").replace("l4", "small"))
    request, plan, names = planned(tmp_path, files[0])
    found = cheapest(Goal(1e8, math.inf), files, request, plan)
    assert len(set(names)) == len(names) == len(found.rows) == 4
    assert all((str(file.path) in " ".join(names)) == same for file in files)
    assert found.best is not None and f"{found.best.answered.case.name}, predicted" in what_is_cheapest(found)


def test_of_many_nodes_those_that_decide_are_planned(tmp_path: Path) -> None:
    """With two thousand nodes some thirty plans; the least number in time is among them, as if all had been planned."""
    file = write(tmp_path, a100=1, l4=2000)
    request, plan, names = planned(tmp_path, file)
    whole = cheapest(Goal(1e8, math.inf), [file], request, plan, nodes=(1, 6))
    enough = next(row for row in whole.rows if row.answered.case.name == "3 × l4")
    names.clear()
    found = cheapest(Goal(1e8, enough.seconds), [file], request, plan)
    assert len(names) <= 30
    least = min(row.num_nodes for row in found.rows if row.is_in_time and "l4" in row.answered.case.name)
    first = min(row.num_nodes for row in whole.rows if row.seconds <= enough.seconds and "l4" in row.answered.case.name)
    assert least == first


@pytest.mark.parametrize("helps_until", [1, 3, 8, 100, 4096, 20_000])
@pytest.mark.parametrize("needed", [1, 2, 7, 64, 90, 5000, 50_000])
def test_no_more_nodes_are_planned_than_decide(needed: int, helps_until: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of up to twenty thousand: planning one with thousands takes minutes."""
    monkeypatch.setattr(Trained, "seconds", property(lambda row: 1.0 / min(row.num_nodes, helps_until)))
    monkeypatch.setattr(Trained, "cost", property(lambda row: row.seconds * row.num_nodes))
    choice = cast(Choice, object())
    asked_for: list[int] = []

    def trained(number: int) -> Trained:
        asked_for.append(number)
        return Trained(Answered(cast(Case, None), choice, ""), Goal(1.0, 1.0 / needed), number)

    rows = _least_enough(trained, 1, 20_000)
    assert [row.num_nodes for row in rows] == sorted(asked_for)
    in_time = [row.num_nodes for row in rows if row.is_in_time]
    assert bool(in_time) == (needed <= helps_until)
    if in_time:
        assert min(in_time) == needed and max(asked_for) <= max(4 * needed, 20_000 if needed > 10_000 else 1)
    else:
        assert max(asked_for) <= 8 * helps_until


def test_a_goal_wants_prices_in_one_currency_and_tokens(tmp_path: Path) -> None:
    file = write(tmp_path)
    goal, request = Goal(1e8, 1e6), asked(file, tmp_path)
    unpriced = tmp_path / "unpriced.yaml"
    unpriced.write_text("nodes: [{name: a, devices: {type: T4}}]\n")
    with pytest.raises(InputError, match=r"found no price of a in .*unpriced.yaml"):
        cheapest(goal, [NodeFile(unpriced)], request, Planner().plan)
    euro = tmp_path / "euro.yaml"
    euro.write_text("nodes: [{name: a, devices: {type: T4}, price: 1 EUR/hour}]\n")
    with pytest.raises(InputError, match="prices in EUR and USD"):
        cheapest(goal, [file, NodeFile(euro)], request, Planner().plan)
    images = replace(request, workload=Workload(model="mlp", data="digits", batch_size=16, num_microbatches=4))
    with pytest.raises(InputError, match="are no tokens"):
        cheapest(goal, [file], images, Planner().plan)


@pytest.mark.parametrize(
    ("text", "seconds"), [("14days", 14 * 86400), ("36h", 36 * 3600), ("2 weeks", 14 * 86400), ("1.5d", 1.5 * 86400)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert _duration(text) == seconds


@pytest.mark.parametrize(("text", "tokens"), [("300e9", 3e11), ("300B", 3e11), ("1.5T", 1.5e12), ("2048", 2048)])
def test_tokens_are_read(text: str, tokens: float) -> None:
    assert _tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "3q", "-3d", "0d", "d", "1e", "nan"])
def test_what_is_no_time_or_number_is_said(text: str) -> None:
    with pytest.raises(InputError, match="wanted such as"):
        _duration(text)
    with pytest.raises(InputError, match="wanted such as"):
        _tokens(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"goal": "fast"}, "no such goal"),
        ({"goal": "cheapest"}, "by when and how much"),
        ({"within": "3d"}, "--within is for --goal"),
        ({"nodes": "1-3"}, "--nodes is for --goal"),
        ({"goal": "cheapest", "within": "3d", "tokens": "1", "added": ("1xa",)}, "leave out the other options"),
        ({"clusters": (Path("a"), Path("b")), "added": ("1xa",)}, "change one cluster"),
    ],
)
def test_options_that_do_not_go_together_are_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        WhatIf(**{"clusters": (Path("a"),), **options})


COMMON = ["plan", "--model", "gpt", "--schedule", "1f1b", "--microbatches", "8", "--search", "proportional"]
COMMON += ["--budget-seconds", "0.5"]  # how near the best a plan is proved to be is no matter here


def ask(*words: str, folder: Path) -> dict[str, Any]:
    (new := folder / "new").mkdir(exist_ok=True)
    done = CliRunner().invoke(app, [*COMMON, *words, "--database", str(new), "--json", "-"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_command_answers_each_question(tmp_path: Path) -> None:
    one, other = write(tmp_path), write(tmp_path, a100=1, l4=1, name="other.yaml")
    one_words, both = ("--cluster", str(one.path)), ("--cluster", str(one.path), "--cluster", str(other.path))
    rows = ask(*both, folder=tmp_path)["rows"]
    assert [row["nodes"] for row in rows] == [{"a100": 2, "l4": 3}, {"a100": 1, "l4": 1}]
    assert all(row["plan"]["predicted_step_seconds"] > 0 and row["cost_per_step"] > 0 for row in rows)
    found = ask(*one_words, "--add", "1xa100", "--remove", "1xl4", folder=tmp_path)
    assert found["rows"][1]["nodes"] == {"a100": 3, "l4": 2} and found["difference"]["speedup"] > 0
    found = ask(*one_words, "--batch-size", "16,32", folder=tmp_path)
    assert [row["batch_size"] for row in found["rows"]] == [16, 32]
    assert ask(*one_words, "--batch-size", "16", folder=tmp_path)["microbatches"] == 8  # one plan, as without
    found = ask(
        *one_words, *("--goal", "cheapest", "--within", "9days", "--tokens", "1e9", "--nodes", "1-2"), folder=tmp_path
    )
    assert len(found["rows"]) == 4 and found["rows"][found["cheapest"]]["in_time"]


def test_the_command_prints_tables(tmp_path: Path) -> None:
    file = write(tmp_path)
    (new := tmp_path / "new").mkdir()
    common = [*COMMON, "--cluster", str(file.path), "--database", str(new)]
    for words, said in (
        (["--add", "1xa100"], ("1 more a100", "before", "after", "a step", "10⁹ tokens", "USD")),
        (["--goal", "cheapest", "--within", "9d", "--tokens", "1e9", "--nodes", "1"], ("✔ 1 × ", "Cheapest for")),
        (["--sequence-length", "64,128"], ("sequence 64", "sequence 128")),
    ):
        done = CliRunner().invoke(app, [*common, *words])
        assert done.exit_code == 0, done.output
        assert all(word in done.output for word in said), done.output
