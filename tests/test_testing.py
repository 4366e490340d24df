"""The published cases find what is wrong: members that break one promise each are told so."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dejavu.cluster import DeviceType
from dejavu.cost import Evidence
from dejavu.cost.estimates import CostSource, Estimate
from dejavu.foundation.errors import InputError
from dejavu.graphs.graph import Graph, Layer
from dejavu.importers import Batch
from dejavu.importers.nccl_tests import NcclTests
from dejavu.plans import Answer, Infeasible, Problem, SearchResult
from dejavu.plans.schedule import SCHEDULES, Schedule
from dejavu.profiles import SCHEMA
from dejavu.search import Exact, Search
from dejavu.testing import (
    check_cost_source,
    check_data_set,
    check_importer,
    check_model,
    check_schedule,
    check_search,
)
from dejavu.workload import Workload
from dejavu.workload.data import Digits, ExampleShape
from dejavu.workload.models import MODELS, LayerBuilder, Model
from tests.test_importers import write_nccl


@dataclass(frozen=True)
class Wrong(Search):
    """The exact search, with one lie."""

    name: ClassVar[str] = "exact"
    lie: Callable[[Answer, int], Answer] = lambda found, seed: found

    def run(self, problem: Problem, *, budget_seconds: float = 30.0, seed: int = 0) -> Answer:
        return self.lie(Exact().run(problem, budget_seconds=budget_seconds), seed)

    def _answer(self, *_: object) -> Answer:
        raise NotImplementedError


def of_results(change: Callable[[SearchResult], Answer]) -> Callable[[Answer, int], Answer]:
    return lambda found, seed: change(found) if isinstance(found, SearchResult) else found


LIES = {
    "s of a plan of": of_results(lambda found: replace(found, step_seconds=found.step_seconds * 1.01)),
    "its bound is": of_results(lambda found: replace(found, lower_bound_seconds=found.step_seconds * 2 + 1.0)),
    "it signs as": of_results(lambda found: replace(found, search="another")),
    "its history": of_results(lambda found: replace(found, history=((0.0, 0.0), *found.history))),
    "it has a plan for 0 of 80": of_results(lambda found: Infeasible("exact", "it is Monday", 0.0)),
}


@pytest.mark.parametrize("told", LIES)
def test_a_search_that_lies_is_found_out(told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_search(Wrong(lie=LIES[told]))


def test_the_search_beneath_the_lies_is_sound() -> None:
    check_search(Wrong())


@dataclass(frozen=True)
class Says(CostSource):
    estimates: Iterator[Estimate]

    def estimate(self, layer: Layer, direction: str, graph: Graph, device: DeviceType) -> Estimate | None:
        return next(self.estimates)


def always(*interval: float) -> Callable[[Evidence], CostSource]:
    return lambda known: Says(iter(lambda: Estimate(interval[1], interval[0], interval[2], "mine"), None))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (always(1.0, 0.5, 2.0), "wanted low ≤ seconds ≤ high"),
        (always(1.0, float("inf"), float("inf")), "wanted numbers ≥ 0"),
        (lambda known: Says(Estimate(0.5 + k, 0.0, 1e9, "mine") for k in range(10**6)), "asked again"),
    ],
)
def test_a_cost_source_without_a_sound_number_is_found_out(make: Callable, told: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=told):
        check_cost_source(make, tmp_path)
    check_cost_source(always(0.5, 1.0, 2.0), tmp_path / "sound")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"in_flight": lambda stage, num_stages, num_microbatches: 1}, "holds 2, in_flight says 1"),
        ({"torch_name": "GPipe"}, "in_flight says"),
        ({"searched_as": "zbv"}, "runs several stages a rank"),
        ({"name": "another"}, "is not the key"),
    ],
)
def test_a_schedule_that_is_not_torchs_is_found_out(change: dict, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Schedule = replace(SCHEDULES["1f1b"], **{"name": "mine", "searched_as": "mine", **change})
    monkeypatch.setitem(SCHEDULES, "mine", wrong)
    with pytest.raises(AssertionError, match=told):
        check_schedule("mine")


@dataclass(frozen=True, kw_only=True)
class DatedNow(NcclTests):
    def batches(self, file: Path) -> Iterator[Batch]:
        for batch in super().batches(file):
            place = batch.table.schema.get_field_index("source")
            elsewhere = pa.array(["elsewhere"] * batch.table.num_rows, pa.string())
            yield replace(batch, table=batch.table.set_column(place, SCHEMA.field("source"), elsewhere))


def test_an_importer_whose_rows_do_not_say_whose_they_are_is_found_out(tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    path, _ = write_nccl(theirs)
    with pytest.raises(AssertionError, match="its source is 'elsewhere'"):
        check_importer(DatedNow(), path, tmp_path)


@dataclass(frozen=True)
class Forgetful(Digits):
    def batch(self, step: int, batch_size: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().batch(int(torch.randint(10**6, ())), batch_size, seed=seed)


def test_a_data_set_that_deals_anew_is_found_out() -> None:
    with pytest.raises(AssertionError, match="step 3 again has another batch"):
        check_data_set(Forgetful())


class Linear(nn.Linear):
    """A layer of 64 that does as it was captured."""

    def __init__(self) -> None:
        super().__init__(64, 64)


class WiderThanCaptured(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if isinstance(x, FakeTensor) else nn.functional.pad(y, (0, 1))


class WorksMoreThanCaptured(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if isinstance(x, FakeTensor) else super().forward(x))


class WorksOnNoExample(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(torch.ones(64, 64, dtype=x.dtype))
        return x


class Numbered(Linear):
    """Each that is built has more weights than the one before it."""

    built: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(next(self.built)))


class DrawnByItself(Linear):
    """What it holds depends on how many were built before it."""

    built: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(float(next(self.built))))


@dataclass(frozen=True)
class OneLayerIsWrong(Model):
    middle: type[Linear] = Linear
    name: str = "middle"

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        return (
            LayerBuilder("flat", nn.Flatten),
            LayerBuilder(self.name, self.middle),
            LayerBuilder("head", partial(nn.Linear, 64, shape.num_classes)),
        )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"middle": WiderThanCaptured}, r"layer 'middle': captured \(4, 64\), returns \(4, 65\)"),
        ({"middle": WorksMoreThanCaptured}, r"layer 'middle': captured \d.* FLOP, does"),
        ({"middle": WorksOnNoExample}, "layer 'middle': twice the examples have the same signature"),
        ({"middle": Numbered}, r"captured with \d+ bytes, has"),
        ({"middle": DrawnByItself}, "layer 'middle': built alone, it has other weights"),
        ({"name": "head"}, r"its layers\(\) calls layer 2 'head'"),
    ],
)
def test_a_model_that_is_not_what_it_builds_is_found_out(
    change: dict, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = Workload(model="mine", data="digits", batch_size=8, num_microbatches=2, trials={"count": 0})
    monkeypatch.setitem(MODELS, "mine", OneLayerIsWrong)
    check_model(digits)
    monkeypatch.setitem(MODELS, "mine", partial(OneLayerIsWrong, **change))
    with pytest.raises((AssertionError, InputError), match=told):
        check_model(digits)


class Recurs(nn.Module):
    """An LSTM, of whose products torch has no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = self.cells(x.view(-1, 8, 8))[0]
        return read.flatten(1)


def test_a_model_with_an_lstm_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "mine", partial(OneLayerIsWrong, middle=Recurs))
    check_model(Workload(model="mine", data="digits", batch_size=8, num_microbatches=2, trials={"count": 0}))


def test_the_cases_need_no_pytest() -> None:
    code = "import dejavu.testing, sys; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
