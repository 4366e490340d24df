"""Layers that compute in a narrower type than their weights': captured, measured and trained alike."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dejavu.graphs.autocast import computing_in
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.init import Draw
from dejavu.profiling.layer_passes import _Layers
from dejavu.runtime.training import build_layers
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from tests.conftest import some, spread
from tests.test_models import ZOO

NARROW = ("bfloat16", "float16")
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.convolution", "aten.convolution_backward")


@cache
def in_full(name: str) -> Graph:
    return capture(ZOO[name])


def narrowed(name: str, narrow: str) -> tuple[Graph, Graph]:
    return in_full(name), capture(ZOO[name].model_copy(update={"mixed_precision": narrow}))


@pytest.mark.parametrize("narrow", some(NARROW, ["bfloat16"]))
@pytest.mark.parametrize("name", spread(ZOO, 6))
def test_products_are_captured_in_the_type_that_computes_them(name: str, narrow: str) -> None:
    """Weights, arithmetic and what crosses a cut stay as they are; what is kept for the backward pass gets smaller."""
    wide, captured = narrowed(name, narrow)
    products = [one for layer in captured.layers for one in layer.operators if one.kind in PRODUCTS]
    assert {one.dtype for one in products} == {narrow}
    for before, after in zip(wide.layers, captured.layers, strict=True):
        assert (after.parameter_bytes, after.output_bytes) == (before.parameter_bytes, before.output_bytes)
        for direction in ("forward", "backward"):
            assert after.flops(direction) == pytest.approx(before.flops(direction), rel=0.02)
    flops = [sum(one.flops for one in layer.operators) for layer in wide.layers]
    assert wide.fingerprint != captured.fingerprint or not any(flops)


@pytest.mark.parametrize("narrow", NARROW)
def test_the_cache_of_traced_layers_tells_them_apart(narrow: str) -> None:
    plain, captured = narrowed("gpt", narrow)
    again = capture(ZOO["gpt"])
    assert again.fingerprint == plain.fingerprint != captured.fingerprint


@pytest.mark.parametrize("narrow", NARROW)
def test_what_is_measured_computes_as_what_is_trained(narrow: str) -> None:
    """To the last bit, in every layer."""
    workload: Workload = ZOO["gpt"].model_copy(update={"mixed_precision": narrow})
    graph = capture(workload)
    trained = build_layers(workload, Draw(), torch.device("cpu"))
    x, _ = dataset_of(workload).batch(0, workload.microbatch_size, seed=0)
    whole = trained(x)
    for layer in trained:
        x = computing_in(layer, narrow)(x)
        assert x.dtype == torch.float32
    assert torch.equal(x, whole)
    for _, work in _Layers(workload, graph, torch.device("cpu")).of([layer.signature for layer in graph.layers]):
        (module,) = work.modules
        assert module(work.x).dtype == torch.float32
