"""A module as a graph of operators, and its placement problem: branches stay branches, weights stay in one place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.operators.placement_modules import Mixture, TwoTowers
from dejavu.cluster import Cluster, load_cluster
from dejavu.cost.placements import placement_problem
from dejavu.cost.sources.predicted import Predicted
from dejavu.foundation.errors import InputError
from dejavu.graphs.dataflow import Dataflow, trace_dataflow
from dejavu.graphs.layer_trace import CaptureError
from dejavu.placement import PLACERS, PlacementProblem, PlacementResult
from dejavu.profiles import ProfileDatabase
from dejavu.workload import OptimizerSettings

TEXT, IMAGE = torch.empty(2, 8, dtype=torch.int64), torch.empty(2, 6, 64)
CLUSTER = load_cluster(Path(__file__).parents[1] / "examples" / "clusters" / "h100-and-l4.yaml")


def towers() -> nn.Module:
    return TwoTowers(width=64, depth=1, patch=64, tokens=100)


def mixture() -> nn.Module:
    return Mixture(width=64, experts=3, depth=1)


def priced(flow: Dataflow, folder: Path, cluster: Cluster = CLUSTER) -> PlacementProblem:
    return placement_problem(flow, cluster, Predicted(ProfileDatabase(folder), OptimizerSettings()))


def reached(flow: Dataflow, start: set[int]) -> set[int]:
    found = set(start)
    for value in flow.values:  # in the order of their producers
        if value.producer in found:
            found |= set(value.readers)
    return found


@pytest.mark.parametrize("trains", [False, True])
def test_towers_meet_at_the_end_alone(trains: bool) -> None:
    flow = trace_dataflow(towers, (TEXT, IMAGE), trains=trains)
    assert all(value.producer < min(value.readers) for value in flow.values)
    text, image = (
        {n for n, name in enumerate(flow.names) if name.split(" ")[1].startswith(part)} for part in ("text.", "image.")
    )
    assert text and image
    forward = {n for n, operator in enumerate(flow.operators) if operator.direction == "forward"}
    assert not reached(flow, text) & image and not reached(flow, image) & text
    assert reached(flow, text) & reached(flow, image) & forward  # the products of both
    assert (len(forward) < len(flow.operators)) == trains
    assert sum(weight.size_bytes for weight in flow.weights) == 4 * sum(w.numel() for w in towers().parameters())
    assert all(weight.operators for weight in flow.weights)


def test_what_backward_reads_is_saved_and_only_that() -> None:
    flow = trace_dataflow(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (torch.empty(4, 8),))
    saved = [flow.operators[value.producer].kind for value in flow.values if value.is_saved]
    assert saved == ["aten.relu"]
    assert not any(value.is_saved for value in trace_dataflow(towers, (TEXT, IMAGE), trains=False).values)


def test_writing_in_place_makes_a_new_value() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.view(-1).add_(1)
            return y.exp()

    flow = trace_dataflow(InPlace, (torch.empty(4, 8),), trains=False)
    assert [operator.kind for operator in flow.operators] == ["aten.mul", "aten.add_", "aten.exp"]
    assert [(value.producer, value.readers) for value in flow.values] == [(0, (1,)), (1, (2,))]


@pytest.mark.parametrize("build", [towers, mixture])
def test_weights_are_in_one_place_and_counted_once(build: object, tmp_path: Path) -> None:
    assert callable(build)
    inputs = (TEXT, IMAGE) if build is towers else (torch.empty(2, 8, 64),)
    weights = 4 * sum(weight.numel() for weight in build().parameters())
    flow = trace_dataflow(build, inputs)
    problem = priced(flow, tmp_path)
    for weight in flow.weights:
        assert len({int(problem.group_N[n]) for n in weight.operators}) == 1
    saved = sum(value.size_bytes for value in flow.values if value.is_saved)
    assert problem.arrays.memory_G.sum() == pytest.approx(4 * weights + saved)  # weight, gradient, AdamW's two moments
    forward = priced(trace_dataflow(build, inputs, trains=False), tmp_path)
    assert forward.arrays.memory_G.sum() == pytest.approx(weights)
    assert (problem.arrays.seconds_ND.sum(axis=0) > forward.arrays.seconds_ND.sum(axis=0)).all()
    assert problem.num_devices == CLUSTER.num_devices


@pytest.mark.parametrize("frozen", ["", "0", "2", "0.weight", "2.bias"])
def test_frozen_weights_have_no_gradient_and_no_optimizer(frozen: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        for name, weight in module.named_parameters():
            weight.requires_grad_(not frozen or not name.startswith(frozen))
        return module

    flow = trace_dataflow(build, (torch.empty(2, 64),))
    weights = {name: 4 * weight.numel() for name, weight in build().named_parameters()}
    still = sum(size for name, size in weights.items() if frozen and name.startswith(frozen))
    assert (still > 0) == bool(frozen)
    saved = sum(value.size_bytes for value in flow.values if value.is_saved)
    assert priced(flow, tmp_path).arrays.memory_G.sum() == pytest.approx(4 * sum(weights.values()) - 3 * still + saved)


@dataclass
class Returned:
    """What a module returns: any of it may be missing, or be in lists."""

    scores: object
    states: object = None


RETURNED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "tuple": lambda a, b: (a, b),
    "dictionary": lambda a, b: {"a": a, "b": [b, None]},
    "dataclass": Returned,
    "list in a dataclass": lambda a, b: Returned(None, [a, {"b": b}]),
    "dataclasses in a list": lambda a, b: [Returned(a), Returned(Returned(b), "text")],
}


@pytest.mark.parametrize("form", RETURNED)
def test_every_output_is_found_in_whatever_it_is_returned(form: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> object:
            return RETURNED[form](self.a(x), self.b(x))

    flow = trace_dataflow(Two, (torch.empty(3, 8),))
    backward = [n for n, operator in enumerate(flow.operators) if operator.direction == "backward"]
    assert all(set(weight.operators) & set(backward) for weight in flow.weights) and len(flow.weights) == 4


def test_branches_run_side_by_side_where_that_pays(tmp_path: Path) -> None:
    wide = trace_dataflow(lambda: Mixture(width=1024, experts=4, depth=1), (torch.empty(8, 256, 1024, device="meta"),))
    problem = priced(wide, tmp_path)
    alone, placed = (PLACERS[name]().run(problem, budget_seconds=0.5) for name in ("one_device", "local_search"))
    assert isinstance(alone, PlacementResult) and isinstance(placed, PlacementResult)
    assert placed.seconds < 0.6 * alone.seconds
    assert len(set(placed.placement.device_N)) > 1


def test_operators_that_no_table_has_are_listed() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x)

    flow = trace_dataflow(Odd, (torch.empty(4, 8),), trains=False)
    assert flow.unknown == ("aten.special_bessel_j0",)


def test_what_cannot_be_traced_or_priced_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"cannot be traced on \[\(4, 9\)\]"):
        trace_dataflow(lambda: nn.Linear(8, 8), (torch.empty(4, 9),))
    with pytest.raises(CaptureError, match="computes nothing"):
        trace_dataflow(nn.Identity, (torch.empty(4, 9),), trains=False)
    with pytest.raises(CaptureError, match="no output of the module depends on a weight"):
        trace_dataflow(nn.ReLU, (torch.empty(4, 9),))
    double = trace_dataflow(lambda: nn.Linear(8, 8), (torch.empty(4, 8, dtype=torch.float64),), dtype=torch.float64)
    with pytest.raises(InputError, match="found no peak for float64"):
        priced(double, tmp_path)
    huge = trace_dataflow(
        lambda: nn.Linear(2**20, 2**16, bias=False), (torch.empty(1, 2**20, device="meta"),), trains=False
    )
    with pytest.raises(InputError, match="the least that would do"):
        priced(huge, tmp_path)


def test_a_gpus_attention_is_one_kernel() -> None:
    flow = trace_dataflow(towers, (TEXT, IMAGE), kind="cuda", trains=False)
    assert sum("attention" in operator.kind for operator in flow.operators) == 2
    assert math.isfinite(sum(operator.flops for operator in flow.operators))
