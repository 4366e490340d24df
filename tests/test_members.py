"""Every family of parts: one registry, one answer to an unknown name, and a new member at once where it is wanted."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dejavu.cost
from dejavu.cluster import DeviceType, catalogue, load_cluster
from dejavu.cluster.catalogue import DEVICES_CSV, catalogue_rows
from dejavu.cost import SOURCES
from dejavu.cost.estimates import CostSource, Estimate
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import Family, named
from dejavu.graphs.graph import Graph, Layer
from dejavu.importers import IMPORTERS, Batch, Importer, importers_options, option
from dejavu.importers.sources import files_of
from dejavu.init import PROPOSERS, SCHEMES, Draw, Role, Scheme, draw_layer, space_of
from dejavu.init.proposers.samples import Single
from dejavu.planning import Planner, PlanRequest
from dejavu.plans import Answer, Plan, Problem, Stage
from dejavu.plans.schedule import SCHEDULES
from dejavu.profiles import ProfileDatabase
from dejavu.profiling.profiler import KINDS
from dejavu.search import SEARCHES, Search
from dejavu.search._base import Incumbent
from dejavu.testing import check_schedule
from dejavu.workload import Workload
from dejavu.workload.data import DATASETS, Digits, dataset_of
from dejavu.workload.models import MODELS, layers_of
from dejavu.workload.models.images.mlp import MLP
from flows.__main__ import app
from flows.inputs import TypedQuestion, read_inputs

FAMILIES: list[Family[Any]] = [
    *(SEARCHES, SCHEDULES, SCHEMES, PROPOSERS, IMPORTERS, MODELS, DATASETS, SOURCES, KINDS),
    catalogue(),
]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.what)


@every_family
def test_a_name_finds_its_member_and_a_misspelt_one_is_asked_about(family: Family[Any]) -> None:
    for name, member in family.items():
        assert named(family, name) is member
        for misspelt in (name.swapcase(), f"{name}{name[-1]}", name[:-1]):
            if misspelt in family:
                continue
            with pytest.raises(InputError, match=f"^unknown {family.what} {misspelt!r}; did you mean '") as caught:
                named(family, misspelt)
            assert caught.value.field == family.field
        assert repr(name) in family.unknown(name.swapcase())


@every_family
def test_of_a_name_like_none_all_that_are_known_are_told(family: Family[Any]) -> None:
    told = family.unknown("§" * 1000)
    assert told.startswith(f"unknown {family.what} '{'§' * 80}'; wanted one of ")
    assert family.wanted in told if family.wanted else all(name in told for name in (*family, *family.also))


def test_a_family_is_a_dict_that_survives_copies() -> None:
    for again in (copy.copy(SCHEDULES), copy.deepcopy(SCHEDULES), pickle.loads(pickle.dumps(SCHEDULES))):
        assert again == dict(SCHEDULES)
        assert again.unknown("2f2b") == SCHEDULES.unknown("2f2b")


# A member of each family that is nobody's but ours, and where it is at once.

CLUSTER = "nodes: [{name: a, count: 1, devices: {type: T4, count: 2}}]\n"
TINY = {"model": "mlp", "model_options": {"num_blocks": 3, "width": 8}, "data": "digits", "batch_size": 4}
QUICK = ("--microbatches", "2", "--schedule", "gpipe", "--search", "uniform")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a cluster and a small workload."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "tiny.yaml").write_text(json.dumps({**TINY, "num_microbatches": 2}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, words, env={"COLUMNS": "300"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def plan(*words: str) -> dict[str, Any]:
    """What `dejavu plan --json` finds."""
    return json.loads(run("plan", *words, "--json", "-"))


@dataclass(frozen=True)
class Whole(Search):
    """All layers on one device."""

    name: ClassVar[str] = "dummy"

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        best.offer(
            Plan((Stage(0, problem.num_layers, problem.configurations[0]),), problem.schedule, problem.num_microbatches)
        )
        return best.result(0.0)


def test_a_search(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEARCHES, "dummy", Whole)
    words = ("--workload", "tiny.yaml", "--microbatches", "2", "--schedule", "gpipe", "--search", "dummy")
    rows = {row["search"]: row for row in plan(*words)["considered"]}
    assert rows["dummy"]["stages"] == 1
    assert "dummy" in run("plan", *words)
    for command in ("plan", "run"):
        assert "exhaustive, dummy" in " ".join(run(command, "--help").split())
    machines, workload = read_inputs(Path("cluster.yaml"), Path("tiny.yaml"), train=False)
    typed = TypedQuestion("dummy", "gpipe", "2", None, None, 1.0)  # as `dejavu run` and `dejavu plan` ask
    flow = PlanRequest(workload, machines, searches=("dummy",), microbatches=(2,))  # as the flow asks
    for request in (typed.request(workload, machines), flow):
        assert "dummy" in {row.search for row in Planner().plan(request).considered}


def test_a_cost_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(CostSource):
        def estimate(self, layer: Layer, direction: str, graph: Graph, device: DeviceType) -> Estimate | None:
            return Estimate(1e-4, 5e-5, 2e-4, "dummy") if direction == "forward" else None

    before = plan("--workload", "tiny.yaml", *QUICK)
    monkeypatch.setattr(dejavu.cost, "SOURCES", Family("cost source", {"dummy": lambda known: Slow(), **SOURCES}))
    after = plan("--workload", "tiny.yaml", *QUICK)
    assert after["step_seconds"] != before["step_seconds"]
    assert all(stage["seconds"] > 1e-4 for stage in after["stages"])


def test_a_schedule(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = replace(SCHEDULES["gpipe"], name="dummy", searched_as="dummy")
    monkeypatch.setitem(SCHEDULES, "dummy", same)
    words = ("--workload", "tiny.yaml", "--microbatches", "2", "--search", "uniform", "--schedule")
    found, known = plan(*words, "dummy"), plan(*words, "gpipe")
    assert found["schedule"] == "dummy" and found["simulated_step_seconds"] == known["simulated_step_seconds"]
    assert "hanayo_2, dummy" in " ".join(run("plan", "--help").split())
    assert Workload(schedule="dummy").searched_schedule == "dummy"  # of a file, too
    check_schedule("dummy")


@dataclass(frozen=True, kw_only=True)
class Lines(Importer):
    """Seconds of one matrix product, a line each."""

    name: ClassVar[str] = "dummy"
    flavour: str = option("what it tastes of", "vanilla")
    width: int | None = option("of the matrices")

    def files(self, path: Path) -> list[Path]:
        return files_of(path, ("*.lines",), "seconds, a line each")

    def batches(self, file: Path) -> Iterator[Batch]:
        seconds = [float(line) for line in file.read_text().splitlines()]
        table = self.table(
            len(seconds),
            kind="layer",
            name=self.flavour,
            subject=f"{self.width}",
            device_type="T4",
            dtype="float32",
            seconds=seconds,
            repeats=1,
            how="made up",
        )
        yield Batch(file, table, np.arange(len(seconds)), len(seconds), "seconds", 1.0, "line")


def test_an_importer_and_its_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPORTERS, "dummy", Lines)
    (folder / "some.lines").write_text("0.001\n0.0012\n")
    assert "2 new" in run("import", "dummy", "some.lines", "--flavour", "salt", "--width", "64", "--database", "rows")
    found = ProfileDatabase(folder / "rows").read().to_pylist()
    assert {(row["name"], row["subject"], row["source"]) for row in found} == {("salt", "64", "import:dummy")}
    help = " ".join(run("import", "--help").split())
    assert "nccl-tests, dummy" in help
    for words in ("--flavour <str> dummy: what it tastes of", "--width <int> dummy: of the matrices"):
        assert words in help
    with pytest.raises(InputError, match="--flavour is not for alpa; it is for dummy"):
        run("import", "alpa", "some.lines", "--flavour", "salt")


def test_every_importer_s_options_have_their_words_in_the_help() -> None:
    help = " ".join(run("import", "--help").split())
    for one in importers_options():
        assert f"--{one.name.replace('_', '-')} <{one.type.__name__}> {one.help}" in help


@dataclass(frozen=True)
class Wide(MLP):
    width: int = 96
    num_blocks: int = 3


def test_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "dummy", Wide)
    found = plan("--model", "dummy", *QUICK)  # with the data that such a model is usually trained on
    names = [name for stage in found["stages"] for name in stage["layers"]["names"]]
    assert names == ["hidden0", "hidden1", "hidden2", "classifier"]
    assert "wide_resnet, dummy" in " ".join(run("plan", "--help").split())


@dataclass(frozen=True)
class Dark(Digits):
    """Nothing to be seen."""

    def batch(self, step: int, batch_size: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().batch(step, batch_size, seed=seed)
        return torch.zeros_like(inputs), targets


def test_a_data_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "dummy", lambda workload: Dark())
    (folder / "dark.yaml").write_text(json.dumps({**TINY, "data": "dummy", "num_microbatches": 2}))
    assert plan("--workload", "dark.yaml", *QUICK)["stages"]
    workload = read_inputs(Path("cluster.yaml"), Path("dark.yaml"), train=False)[1]
    assert not dataset_of(workload).batch(0, 2, seed=0)[0].any()


class Ones(Scheme):
    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        weight.fill_(1.0)


class Always(Single):
    pass


@pytest.mark.parametrize("entry", ["proposer", "schemes", "data", "model", "schedule"])
def test_an_initializer_and_the_place_of_a_name_that_is_none(
    entry: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, "dummy", Ones())
    monkeypatch.setitem(PROPOSERS, "dummy", Always())
    trials = {"count": 2, "proposer": "dummy", "schemes": ["dummy"]}
    content: dict[str, Any] = {**TINY, "num_microbatches": 2, "trials": trials}
    (folder / "ones.yaml").write_text(json.dumps(content))
    workload = read_inputs(Path("cluster.yaml"), Path("ones.yaml"), train=False)[1]
    assert space_of(workload).schemes == ("dummy",)
    layer = draw_layer(layers_of(workload)[0], Draw("dummy"), position=0, depth=4)
    assert all((p == 1.0).all() for p in layer.parameters() if p.dim() > 1)
    wrong = {"schemes": ["dumy"], "proposer": "dumy"}
    if entry in wrong:
        content["trials"] = {**trials, entry: wrong[entry]}
    else:
        content[entry] = "dumy"
    (folder / "wrong.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in content.items()))
    with pytest.raises(InputError, match=r"wrong\.yaml:\d+:\d+: .*unknown [a-z ]+ 'dumy'; ") as caught:
        read_inputs(Path("cluster.yaml"), Path("wrong.yaml"), train=False)
    line = 1 + list(content).index("trials" if entry in wrong else entry)
    assert f"wrong.yaml:{line}:" in str(caught.value)


def test_a_device_of_the_cluster_file(folder: Path) -> None:
    device = "{kind: cuda, memory: 15 GiB, bandwidth: 320 GB/s, float32: 8 TFLOP/s}"
    nodes = CLUSTER.replace("type: T4", "type: dummy").replace("count: 2}", "count: 2}, link: {bandwidth: 8 GB/s}")
    (folder / "cluster.yaml").write_text(f"{nodes}devices: {{dummy: {device}}}\n")
    assert {stage["device_type"] for stage in plan("--workload", "tiny.yaml", *QUICK)["stages"]} == {"dummy"}
    more = device.replace("}", ", board_watts: 70, process_nanometres: 12, architecture: Hopper}")
    (folder / "cluster.yaml").write_text(f"{nodes}devices: {{dummy: {more}}}\n")
    found = load_cluster(folder / "cluster.yaml").device_types["dummy"]
    assert (found.board_watts, found.process_nanometres, found.architecture) == (70.0, 12, "Hopper")


def test_a_device_of_the_catalogue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = DEVICES_CSV.read_text(encoding="utf-8")
    line = next(line for line in known.splitlines() if line.startswith("T4,"))
    (folder / "devices.csv").write_text(f"{known}{line.replace('T4', 'dummy')}\n")
    monkeypatch.setattr(sys.modules["dejavu.cluster.catalogue"], "DEVICES_CSV", folder / "devices.csv")
    catalogue_rows.cache_clear()
    try:
        (folder / "cluster.yaml").write_text(CLUSTER.replace("T4", "dummy"))
        found = plan("--workload", "tiny.yaml", *QUICK)
        assert {stage["device_type"] for stage in found["stages"]} == {"dummy"}
        assert "did you mean 'dummy'" in catalogue().unknown("dumy")
    finally:
        catalogue_rows.cache_clear()
