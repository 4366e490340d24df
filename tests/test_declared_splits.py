"""Splits that layers declare: what is priced is what torch sends, and the loss of split scores is the whole one's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.operators.losses import STEPS, WANTED, difference
from benchmarks.operators.losses import workload_of as small
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.cost.collectives.of_layers import layer_moves
from dejavu.cost.kernels.sharding import gathers_scores, has_split_loss, layer_kernels
from dejavu.cost.memory.shard import Shard
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Layer
from dejavu.graphs.kernels import kernel_of
from dejavu.graphs.split_loss import SplitLoss
from dejavu.init import Draw
from dejavu.plans import StageConfiguration
from dejavu.runtime.replicas import spread
from dejavu.runtime.splits import carry_out
from dejavu.runtime.splits.classes import loss_of_own_classes
from dejavu.sharding.capture import capture_operators
from dejavu.sharding.found import find
from dejavu.sharding.propagation import carried_out
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of, model_of, splits_loss
from tests.conftest import some
from tests.test_found_splits import prices_of
from tests.test_sharding import workload_of

NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
COPIES = ("to", "to_copy")  # torch also calls it where the type stays
VIEWS = ("detach", "view", "view_as", "unsqueeze", "squeeze", "flatten", "lift_fresh", "ones_like")  # and the beginning
HEADS = ("gpt", "bert", "t5", "llama")
SMOOTHED = "tests.own_losses:Smoothed"
every_head = pytest.mark.parametrize("name", HEADS)


@pytest.fixture
def two_devices() -> Iterator[DeviceMesh]:
    """The first of two devices, whose collectives bring nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("replica", "shard"))
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Notes collectives, with the bytes of the whole tensor, and operators that no distributed tensor is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.moves, self.calls = list[tuple[str, float]](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        tensors = [one for one in tree_leaves((args, made)) if isinstance(one, torch.Tensor)]
        if func.namespace == "_c10d_functional" and "wait" not in name and "wrap" not in name:
            self.moves.append((NAMES.get(name, name), float(max(one.nbytes for one in tensors))))
        elif func.namespace == "aten" and not any(type(one).__name__ == "FakeTensor" for one in tensors):
            self.calls.append(name.strip("_"))
        return made


def configured(degree: int, *, sequence_parallel: bool = False) -> StageConfiguration:
    return one_device(1, degree, sequence_parallel=sequence_parallel)


def split(workload: Workload, position: int, mesh: DeviceMesh, configuration: StageConfiguration) -> nn.Module:
    builder = layers_of(workload)[position]
    layer, plan = builder.build(), by_hand("1f1b", (0, 1), [configuration], 1).plan
    spread(nn.Sequential(layer), [builder], configuration, mesh, plan)
    return layer


def ends_of(workload: Workload, layers: tuple[Layer, ...], position: int, parts: int) -> tuple[torch.Tensor, Any]:
    """A device's input of a layer, and of the last one the loss's targets."""
    shape, size = dataset_of(workload).shape, workload.microbatch_size
    target = torch.randint(shape.num_classes, (size, *shape.target_shape)) if position == len(layers) - 1 else None
    if position == 0:
        return torch.randint(shape.num_classes, (size, *shape.input_shape)), target
    batch, length, *rest = layers[position - 1].output_shape
    return torch.randn(batch, length // parts, *rest, requires_grad=True), target


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("name", some([*HEADS, "gated t5", "hf:llama"], [*list(HEADS)[:2], "hf:llama"]))
def test_what_is_priced_is_what_is_sent(name: str, by_sequence: bool, two_devices: DeviceMesh, tmp_path: Path) -> None:
    workload = small(name, tmp_path) if name.startswith("hf:") else workload_of(name.split()[-1])
    if name.startswith("gated"):
        workload = workload.model_copy(update={"model_options": {**workload.model_options, "gated": True}})
    configuration = configured(2, sequence_parallel=by_sequence)
    layers = capture(workload).layers
    if by_sequence and not all(layer.tensor_parallel.sequence for layer in layers if layer.tensor_parallel):
        return
    for position, layer in enumerate(layers):
        module = split(workload, position, two_devices, configuration)
        x, target = ends_of(workload, layers, position, 2 if by_sequence else 1)
        with Sent() as forward:
            output = module(x)
            if target is not None:
                assert has_split_loss(layer, 2) and output.shape[-1] == layer.output_shape[-1] // 2
                loss = loss_of_own_classes(model_of(workload).loss, two_devices["shard"], layer.output_shape[-1])
                output = loss(output, target)
        with Sent() as backward:
            output.backward(torch.ones_like(output))
        for way, sent in (("forward", forward), ("backward", backward)):
            priced = Counter(layer_moves(layer, way, configuration))
            assert Counter(sent.moves) == priced, (layer.name, way)


def test_scores_are_gathered_where_the_loss_takes_all_and_that_is_priced(two_devices: DeviceMesh) -> None:
    workload = workload_of("gpt", model=SMOOTHED)
    layer, configuration = capture(workload).layers[-1], configured(2)
    assert gathers_scores(layer, 2) and not has_split_loss(layer, 2)
    module = split(workload, len(layers_of(workload)) - 1, two_devices, configuration)
    with Sent() as forward:
        output = module(torch.randn(*layer.output_shape[:2], 32, requires_grad=True))
    assert tuple(output.shape) == layer.output_shape
    with Sent() as backward:
        output.backward(torch.ones_like(output))
    for way, sent in (("forward", forward), ("backward", backward)):
        assert sent.moves == layer_moves(layer, way, configuration)


@every_head
def test_heads_whose_split_is_found_have_the_same_loss(name: str, two_devices: DeviceMesh) -> None:
    workload = workload_of(name)
    graph, last = capture_operators(workload, "cpu")[-1], len(layers_of(workload)) - 1
    found = find(graph, prices_of(2, 1.0), 1e3, loss_by_class=True)
    assert found.carried.split_loss and dict(found.weights)["logits.weight"] == 0
    module, mesh = layers_of(workload)[last].build(), two_devices["shard"]
    carry_out(module, dict(found.weights), mesh, whole_sums=found.whole_sums, split_output=True)
    layers = capture(workload).layers
    x, target = ends_of(workload, layers, last, 1)
    loss = loss_of_own_classes(model_of(workload).loss, mesh, layers[-1].output_shape[-1])
    with Sent() as forward:
        output = loss(module(x), target)
    with Sent() as backward:
        output.backward()
    for way, sent in (("forward", forward), ("backward", backward)):
        priced = Counter(
            (move.name.replace("all_to_all", "all_gather"), move.size_bytes) for move in found.carried.moves[way]
        )
        assert Counter(name for name, _ in sent.moves) == Counter(name for name, _ in priced.elements())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_s_kernels_are_those_that_torch_runs(dtype: torch.dtype, two_devices: DeviceMesh) -> None:
    own, target = torch.randn(6, 8, dtype=dtype, requires_grad=True), torch.randint(16, (6,))
    loss = loss_of_own_classes(nn.functional.cross_entropy, two_devices["shard"], 16)
    with Sent() as forward:
        found = loss(own, target)
    with Sent() as backward:
        found.backward()
    priced = SplitLoss(6, 8, str(dtype).removeprefix("torch."))
    assert forward.moves == list(priced.moves("forward")) and not backward.moves
    for way, sent in (("forward", forward), ("backward", backward)):
        kernels = Counter(kernel.name for kernel in priced.kernels(way) if kernel.name not in COPIES)
        assert Counter(name for name in sent.calls if name not in (*COPIES, *VIEWS)) == kernels


@every_head
def test_a_device_has_its_part_of_the_scores_and_the_loss(name: str) -> None:
    layer = capture(workload_of(name), "cuda").layers[-1]
    whole, parts = (list(layer_kernels(layer, "forward", degree)) for degree in (1, 2))
    product = max(kernel.flops for kernel in whole)
    assert max(kernel.flops for kernel in parts) == pytest.approx(product / 2)
    shard = Shard.of(layer, configured(2))
    assert shard.output_bytes(layer) == layer.footprint.output_bytes / 2
    smoothed = capture(workload_of("gpt", model=SMOOTHED), "cuda").layers[-1]
    assert Shard.of(smoothed, configured(2)).output_bytes(smoothed) == smoothed.footprint.output_bytes
    losses = {kernel for one in smoothed.operators if "softmax" in one.kind if (kernel := kernel_of(one))}
    held = {kernel for way in ("forward", "backward") for kernel in layer_kernels(smoothed, way, 2)}
    assert losses and losses <= held


@every_head
def test_what_is_priced_is_what_torch_computes(name: str) -> None:
    """Beside DTensor's own propagation of the same weights: what moves through memory, and what is multiplied."""
    workload = workload_of(name)
    for layer, graph in zip(capture(workload, "cuda").layers, capture_operators(workload, "cuda"), strict=True):
        declared, weights = dict(layer.tensor_parallel.weights or ()), dict[str, int]()  # type: ignore[union-attr]
        for weight in graph.weights:
            cut = declared.get(weight.rpartition(".")[0])
            if cut in ("columns", "scores"):
                weights[weight] = int("table" in weight)
            elif cut == "rows" and graph.nodes[graph.weights[weight]].outputs[0].shape[1:]:
                weights[weight] = 1
        if layer.name == "embedding":  # DTensor's numbers of words are not followed
            continue
        found = carried_out(graph, weights, 2, whole_sums=True, loss_by_class=True)
        for way in ("forward", "backward"):
            priced, run = list(layer_kernels(layer, way, 2)), list(found.kernels[way])
            assert sum(k.flops for k in priced) == pytest.approx(sum(k.flops for k in run), rel=1e-6), (layer.name, way)
            bytes_of = [sum(k.read_bytes + k.written_bytes for k in some) for some in (priced, run)]
            assert bytes_of[0] == pytest.approx(bytes_of[1], rel=0.02), (layer.name, way)


@pytest.mark.parametrize(("num_classes", "degree", "is_split"), [(50, 4, True), (9, 4, False), (8, 4, True)])
def test_every_device_needs_a_class(num_classes: int, degree: int, is_split: bool) -> None:
    head = layers_of(workload_of("gpt"))[-1].tensor_parallel
    assert head is not None and splits_loss(head, num_classes, degree) is is_split


@pytest.mark.integration
@pytest.mark.slow  # of some models: test_pipeline.py
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Vocabularies that no degree divides, in halves and in quarters; under schedules that split the backward pass."""
    by_sequence = one_device(1, 2, sequence_parallel=True)
    spreads: dict[str, tuple[str, list[StageConfiguration]]] = {
        "2": ("1f1b", [one_device(1, 2)]),
        "4": ("1f1b", [one_device(1, 4)]),
    }
    jobs = {}
    for name, (spread_as, (schedule, ranks)) in itertools.product(("gpt", "bert", "t5", "hf:llama"), spreads.items()):
        workload = small(name, tmp_path)
        if layers_of(workload)[-1].tensor_parallel.most % ranks[0].tensor_parallel:  # type: ignore[union-attr]
            continue
        whole = (0, len(layers_of(workload)))
        jobs[name, spread_as] = job_of(workload, by_hand(schedule, whole, ranks, 2), STEPS, Draw("xavier", seed=7))
    gpt = small("gpt", tmp_path)
    later = by_hand("zbv", (0, 1, 2, 3, 4), [by_sequence, one_device(1, 2)], 2)
    shared = by_hand("1f1b", (0, 4), [one_device(2, 2, context_parallel=2)], 2)
    jobs["gpt", "split backward"] = job_of(gpt, later, STEPS, Draw("xavier", seed=7))
    jobs["gpt", "parts of the sequence"] = job_of(gpt, shared, STEPS, Draw("xavier", seed=7))
    bert = small("bert", tmp_path)
    jobs["bert", "parts of the sequence"] = job_of(bert, shared, STEPS, Draw("xavier", seed=7))
    smoothed = gpt.model_copy(update={"model": SMOOTHED})
    jobs["gathered", "2"] = job_of(smoothed, by_hand("1f1b", (0, 4), [one_device(1, 2)], 2), STEPS)
    for (which, job), done in zip(jobs.items(), train_all(list(jobs.values())), strict=True):
        assert difference(job, done.losses) <= WANTED, which
