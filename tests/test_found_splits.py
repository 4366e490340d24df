"""Splits of layers that declare none: found, priced as torch carries them out, planned, and trained."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.operators.losses import WANTED, difference, found_job, workload_of
from benchmarks.pipeline.plans import by_hand, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.launch.launcher import launch
from dejavu.parallelism import Parallelism
from dejavu.planning.prices import Prices
from dejavu.planning.request import PlanRequest
from dejavu.plans import LayerSplit, Offload, Plan, Stage
from dejavu.profiles.kernel import Kernel
from dejavu.runtime.single import train_single
from dejavu.runtime.splits import carry_out
from dejavu.sharding.assembly import ShardingPrices
from dejavu.sharding.capture import capture_operators
from dejavu.sharding.found import find
from dejavu.sharding.operator_graph import OperatorGraph
from dejavu.sharding.problem import Floats, ShardingError
from dejavu.sharding.propagation import carried_out
from dejavu.workload import Workload
from dejavu.workload.models import layers_of as builders_of
from tests import own_models
from tests.conftest import some
from tests.test_pipeline import DROPOUT
from tests.test_sharding import BATCH, DEVICE, MODELS
from tests.test_sharding import workload_of as of_sharding

WIDE = Workload.model_validate(
    {
        "model": "tests.own_models:wide_stack",
        "model_options": {"width": 4096, "depth": 1},
        "data": "digits",
        "batch_size": 256,
        "num_microbatches": 8,
    }
)
BLOCK = {"qkv.weight": 0, "qkv.bias": 0, "projection.weight": 1, "expand.weight": 0, "expand.bias": 0}
MEGATRON = {**BLOCK, "contract.weight": 1}


@cache
def layers_of(name: str) -> tuple[OperatorGraph, ...]:
    return capture_operators(of_sharding(name), "cpu")


def by_flops(kernels: Sequence[Kernel]) -> Floats:
    return np.array([one.flops + one.read_bytes + one.written_bytes for one in kernels])


def prices_of(size: int, of_a_byte: float) -> ShardingPrices:
    return ShardingPrices((size,), by_flops, lambda name, dimension, size_bytes: of_a_byte * size_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_layer_moves_nothing(name: str) -> None:
    for layer in layers_of(name):
        assert not any(carried_out(layer, {}, 2).moves.values())


@pytest.mark.parametrize("size", [2, 4])
def test_megatron_s_split_is_carried_out_with_one_sum_for_each_pair(size: int) -> None:
    whole, split = (carried_out(layers_of("gpt")[1], weights, size) for weights in ({}, MEGATRON))
    assert [move.name for move in split.moves["forward"]] == ["all_reduce"] * 2
    assert split.held_bytes < whole.held_bytes and split.peak_bytes < whole.peak_bytes
    products = [
        sum(one.flops for way in carried.kernels.values() for one in way if one.family == "matmul")
        for carried in (whole, split)
    ]
    assert products[1] == pytest.approx(products[0] / size)


@pytest.fixture
def two_devices() -> Iterator[DeviceMesh]:
    """The first of two devices, whose collectives bring nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


@pytest.mark.parametrize("seconds_per_byte", [0.0, 1e3])
@pytest.mark.parametrize("whole_sums", [False, True])
@pytest.mark.parametrize("name", some(["gpt", "bert", "llama", "t5", "mlp"], ["gpt", "llama", "mlp"]))
def test_what_is_priced_is_what_is_sent(
    name: str, whole_sums: bool, seconds_per_byte: float, two_devices: DeviceMesh
) -> None:
    """Where a byte is dear everything is split that can be, norms too; there the way that was chosen alone is held.

    The other one's prices may have more gathers than torch sends, since gradients add up in another order.
    """
    workload, checked = of_sharding(name), 0
    builders = builders_of(workload)
    for position, (builder, graph) in enumerate(zip(builders, layers_of(name), strict=True)):
        found = find(graph, prices_of(2, 0.0), seconds_per_byte)
        weights = dict(found.weights)
        if seconds_per_byte and whole_sums != found.whole_sums:
            continue
        if not weights or position in (0, len(builders) - 1):  # numbers of tokens, and the loss
            continue
        carried, module = carried_out(graph, weights, 2, whole_sums=whole_sums), builder.build()
        carry_out(module, weights, two_devices, whole_sums=whole_sums)
        received = torch.randn(graph.nodes[0].outputs[0].shape, requires_grad=True)
        with CommDebugMode() as forward:
            output = module(received)
        with CommDebugMode() as backward:
            output.backward(torch.randn_like(output))
        for way, counted in (("forward", forward), ("backward", backward)):
            sent = {str(call).rpartition(".")[2]: count for call, count in counted.get_comm_counts().items()}
            # On CPUs torch gathers what it sends from each device to each on others.
            expected = Counter(move.name.replace("all_to_all", "all_gather") for move in carried.moves[way])
            assert {NAMES.get(call, call): count for call, count in sent.items()} == expected, (builder.name, way)
        checked += 1
    assert checked or seconds_per_byte


@pytest.mark.parametrize("kind", own_models.ODD)
def test_what_can_be_carried_out_is_run_by_torch(kind: str, two_devices: DeviceMesh) -> None:
    """Each single split of every weight, forward and backward; the others are refused."""
    workload = WIDE.model_copy(update={"model": "tests.own_models:odd", "model_options": {"kind": kind}})
    builder, graph, checked = builders_of(workload)[1], capture_operators(workload, "cpu")[1], 0
    for name, number in graph.weights.items():
        for dim, whole_sums in itertools.product(range(len(graph.nodes[number].outputs[0].shape)), (False, True)):
            try:
                carried_out(graph, {name: dim}, 2, whole_sums=whole_sums)
            except ShardingError:
                continue
            module = builder.build()
            carry_out(module, {name: dim}, two_devices, whole_sums=whole_sums)
            received = torch.randn(graph.nodes[0].outputs[0].shape, requires_grad=True)
            output = module(received)
            output.backward(torch.randn_like(output))
            assert output.shape == received.shape == received.grad.shape
            checked += 1
    assert bool(checked) == (kind not in own_models.NEVER_SPLIT), "of these torch has no rule for some operator"


def attention_of(*kinds: str) -> tuple[OperatorGraph, ...]:
    settings = {"model": "tests.own_models:attends", "model_options": {"kinds": kinds}, "sequence_length": 16}
    data = {"data": "synthetic", "synthetic": {"num_classes": 64}, "batch_size": 8}
    return capture_operators(Workload.model_validate(settings | data), "cuda")[1:-1]


def test_keys_are_appended_to_none() -> None:
    (layer,) = attention_of("cached")
    assert find(layer, prices_of(2, 0.0), 0.0).weights


@pytest.mark.parametrize("kinds", [("biased", "masked"), ("masked", "biased")])
def test_masks_with_a_gradient_and_without(kinds: tuple[str, str]) -> None:
    """Torch's kernel and its shapes are the same: what is kept of the one is not for the other."""
    for layer in attention_of(*kinds):
        assert not any(carried_out(layer, {}, 1).moves.values())


@pytest.mark.parametrize("size", [2, 4])
def test_whole_sums_of_t5_are_megatron_s(size: int) -> None:
    """Two sums each way in a block of the encoder, three and four in one of the decoder, whatever the microbatch."""
    for count in (1, 2, 8):
        workload = of_sharding("t5", num_microbatches=BATCH["batch_size"] // count)
        for graph, sums in zip(capture_operators(workload, "cpu")[1:4:2], ((2, 2), (3, 4)), strict=True):
            columns = ("query", "key", "value", "expand", "gate")
            weights = {
                name: 0 if name.split(".")[-2] in columns else 1
                for name in graph.weights
                if "norm" not in name and name.endswith("weight")
            }
            moves = carried_out(graph, weights, size, whole_sums=True).moves
            names = tuple(Counter(move.name for move in moves[way]) for way in ("forward", "backward"))
            assert names == tuple(Counter(all_reduce=number) for number in sums)


@pytest.mark.parametrize("name", ["gpt", "llama", "mlp", "cnn"])
@pytest.mark.parametrize("of_a_byte", [0.0, 10.0, 1e9])
def test_what_is_found_costs_no_more_than_any_single_split(name: str, of_a_byte: float) -> None:
    """Where time is all, and devices can talk for nothing, something is split; where talking is dear, nothing is."""
    layer, prices = layers_of(name)[1], prices_of(2, of_a_byte)
    found = find(layer, prices, 0.0)
    if name in ("gpt", "mlp") and of_a_byte != 10.0:  # convolutions stay whole, and moves that a view follows
        assert bool(found.weights) == (of_a_byte == 0.0)
    for weight in layer.weights:
        for dim in (0, 1):
            try:
                one = carried_out(layer, {weight: dim}, 2)
            except (ShardingError, IndexError):
                continue
            kernels = [kernel for way in one.kernels.values() for kernel in way]
            moved = sum(move.size_bytes for way in one.moves.values() for move in way)
            assert found.cost_seconds <= float(by_flops(kernels).sum()) + of_a_byte * moved + 1e-6


def test_a_plan_keeps_its_splits_and_is_the_same_without() -> None:
    split = LayerSplit("block0", 2, (("expand.weight", 0),))
    plan = Plan((Stage(0, 3, one_device(1, 2)),), "1f1b", 2)
    found = replace(plan, splits=(split,))
    assert found == plan and "splits" not in plan.to_dict()
    read = Plan.from_dict(json.loads(json.dumps(found.to_dict())))
    assert read.splits == (split,) and read.split_of("block0", 2) == split
    assert not read.split_of("block0", 4) and not read.split_of("block1", 2)


def cluster_of(memory_bytes: float) -> Cluster:
    group = NodeGroup("g", 1, (), ((DEVICE, 2),), Link(150e9, 5e-6))
    kind = replace(catalogue()[DEVICE], memory_bytes=int(memory_bytes))
    return Cluster("two", (group,), {DEVICE: kind}, {("g", "g"): Link(25e9 / 8, 25e-6)})


def test_wide_layers_of_a_module_are_offered_split(tmp_path: Path) -> None:
    request = PlanRequest(WIDE, cluster_of(0.8e9), tmp_path, Parallelism(), microbatches=(8,))
    prices = Prices(request)
    assert any(one.tensor_parallel == 2 for one in prices.priced(8).problem.configurations)
    wide = [layer for layer in prices.graph_of(8).layers if layer.parameter_bytes > 1e8]
    assert len(wide) == 2
    again = pickle.loads(pickle.dumps(prices))  # as a flow keeps its choice
    found = [[[split.weights for split in layer.found] for layer in one.graph(4).layers] for one in (again, prices)]
    assert found[0] == found[1] and any(found[0])
    for layer in wide:
        (split,) = layer.found
        assert split.degree == 2 and split.weights
        assert split.largest_parameter_bytes <= split.parameter_bytes < layer.parameter_bytes


@pytest.mark.integration
@pytest.mark.slow
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    stage, small = [one_device(1, 2)], DROPOUT.model_copy(update={"num_steps": 3, "evaluate_every": 0})
    whole = (0, len(builders_of(small)))
    jobs = {name: found_job(workload_of(name, tmp_path), "1f1b", (0, 4), stage) for name in ("gpt", "bert")}
    jobs["own"] = found_job(workload_of("own module", tmp_path), "zbv", (0, 4, 11), stage)
    jobs["ZeRO"] = found_job(workload_of("own module", tmp_path), "1f1b", (0, 11), [one_device(2, 2, zero_level=3)])
    away = [one_device(2, 2, offload=Offload("host", "host"))]
    jobs["offload"] = found_job(workload_of("own module", tmp_path), "1f1b", (0, 11), away)
    jobs["dropout, recomputed"] = found_job(small, "1f1b", whole, [one_device(1, 2, recompute=True)])
    assert all(job.binding.plan.splits for job in jobs.values())
    for job, done in zip(jobs.values(), train_all(list(jobs.values())), strict=True):
        assert difference(job, done.losses) <= WANTED


@pytest.mark.integration
@pytest.mark.slow
def test_a_training_goes_on_under_another_plan_and_back(tmp_path: Path) -> None:
    own = workload_of("own module", tmp_path).model_copy(update={"checkpoint_every": 2})
    found = replace(found_job(own, "1f1b", (0, 11), [one_device(1, 2)]), folder=str(tmp_path / "run"), last_step=2)
    assert found.binding.plan.splits
    binding = by_hand("1f1b", (0, 4, 11), [one_device(), one_device()], own.num_microbatches)
    alone = replace(found, binding=binding, last_step=4)
    for job, resumed in ((found, None), (alone, 2), (replace(found, last_step=6), 4)):
        done = launch(job)
        assert done.resumed_from_step == resumed
    expected = train_single(own, found.draw, range(6))
    assert max(abs(a - b) for a, b in zip(done.losses, expected, strict=True)) <= WANTED
