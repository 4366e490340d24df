"""Layers that change buffers in their forward pass: each pass goes backward by its own, however many are under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dejavu.graphs.compiling import ChangedBufferError, compile_layers
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.runtime.training import Layers, build_layers
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from tests.conftest import TINY
from tests.launching import job_of, largest_difference

NUM_MICROBATCHES, MICROBATCH_SIZE, CPU = 5, 4, torch.device("cpu")
ORDERS = {"gpipe": "FFFFFBBBBB", "1f1b": "FFFBFBFBBB", "one by one": "FBFBFBFBFB"}
WAYS = ("in place", "data", "count")
LATER = ("later", "later, data")  # which are not compiled
MODEL = {"model": "tests.own_models:Scaling", "data": "digits", "batch_size": NUM_MICROBATCHES * MICROBATCH_SIZE}


def scaling(way: str, **settings: object) -> Workload:
    options = {"model_options": {"way": way}, "num_microbatches": NUM_MICROBATCHES}
    return Workload.model_validate(TINY.model_dump() | MODEL | options | settings)


def gradients(layers: Layers, workload: Workload, order: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Run two steps; return each weight's gradient, and the buffers after them."""
    data = dataset_of(workload)
    for step in range(2):
        layers.step, outputs, number = step, list[torch.Tensor](), 0
        for what in ORDERS[order]:
            if what == "F":
                layers.microbatch = number
                outputs.append(layers(data.batch(step * NUM_MICROBATCHES + number, MICROBATCH_SIZE, seed=0)[0]))
                number += 1
            else:
                outputs.pop(0).square().sum().backward()
    yield from ((name, weight.grad) for name, weight in layers.named_parameters() if weight.grad is not None)
    yield from layers.named_buffers()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("way", "compiles"),
    [*((way, False) for way in (*WAYS, *LATER)), *(pytest.param(way, True, marks=pytest.mark.slow) for way in WAYS)],
)
def test_gradients_are_those_of_one_microbatch_after_the_other(way: str, recompute: bool, compiles: bool) -> None:
    workload = scaling(way)
    expected = dict(gradients(build_layers(workload, Draw(), CPU), workload, "one by one"))
    for order in ORDERS:
        layers = build_layers(workload, Draw(), CPU, recompute=recompute)
        if compiles:
            compile_layers(layers)
        found = dict(gradients(layers, workload, order))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-4, msg=f"{order}: {name}")


def test_views_of_a_buffer_stay_views_of_it() -> None:
    """A mean kept in one tensor, or written to by views of its halves, is the same; it stayed as it began."""
    ways = ("in place", "views")
    found = [dict(gradients(build_layers(scaling(way), Draw(), CPU), scaling(way), "1f1b")) for way in ways]
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.slow
def test_a_compiled_layer_that_changes_views_of_a_buffer_is_refused() -> None:
    layers = build_layers(workload := scaling("views"), Draw(), CPU)
    compile_layers(layers)
    with pytest.raises(ChangedBufferError, match=r"layer '1' changes buffers that are views of one another, .* false"):
        layers(dataset_of(workload).batch(0, MICROBATCH_SIZE, seed=0)[0])


@pytest.mark.slow
def test_a_compiled_layer_that_changes_a_buffer_now_and_then_is_refused() -> None:
    workload = scaling("in place")
    layers = build_layers(workload, Draw(), CPU)
    scaled = next(part for part in layers.modules() if hasattr(part, "way"))
    scaled.way = "neither"
    scaled.register_buffer("count", None)
    scaled.forward = lambda x: scaled.linear(torch.tanh(x) * (scaled.mean.add_(1) if scaled.way == "now" else 1))
    compile_layers(layers)
    x = dataset_of(workload).batch(0, MICROBATCH_SIZE, seed=0)[0]
    layers(x)
    scaled.way = "now"
    said = r"layer '.*' changes its buffer '.*mean' in this forward pass, and did not in its first, .* compile: false"
    with pytest.raises(ChangedBufferError, match=said):
        layers(x)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_losses_of_two_stages_are_one_process_s(compiles: bool, tmp_path: Path) -> None:
    workload = scaling("in place", compile=compiles, num_steps=4)
    result = launch(job_of(workload, tmp_path / "run", (2,)))
    assert largest_difference(workload.model_copy(update={"compile": False}), result.losses) < 1e-5
