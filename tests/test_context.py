"""Context parallelism: which plans may have it, what a device computes, sends and holds, and what cannot run so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.cost.collectives.inside_stages import StageCollectives
from dejavu.cost.kernels.sequence import (
    OwnTokens,
    attended_bytes,
    context_length,
    gathers_output,
    keys_and_values_bytes,
)
from dejavu.cost.kernels.sharding import layer_kernels
from dejavu.cost.memory import configuration_memory
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.launch.preflight import check_compiled, check_spreading
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest
from dejavu.planning.prices import price_workload
from dejavu.plans import StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.single import train_single
from dejavu.workload import TrialSettings, Workload
from dejavu.workload.models import Model, layers_of, model_of
from dejavu.workload.models.modules.positions import chunk_numbers, having_part, positions

GPU = "H200-SXM-141GB"
LENGTH = 64
TEXT = {"data": "synthetic", "synthetic": {"num_classes": 512}, "sequence_length": LENGTH}
MODELS = {
    "gpt": {"num_blocks": 2, "width": 64, "num_heads": 4},
    "bert": {"num_blocks": 2, "width": 64, "num_heads": 4},
    "llama": {"num_blocks": 2, "width": 64, "num_kv_heads": 2},
    "mixtral": {"num_blocks": 1, "width": 64, "num_kv_heads": 2, "num_experts": 4},
}
OTHERS = {
    "t5": {"num_blocks": 1, "width": 64, "num_heads": 4, "head_width": 16, "feedforward": 64},
    "moe": {"num_blocks": 2, "width": 64, "num_heads": 4, "num_experts": 4},
}
every_model = pytest.mark.parametrize("name", MODELS)


def workload_of(name: str, **fields: object) -> Workload:
    given = {"batch_size": 8, "num_microbatches": 4, "trials": TrialSettings(count=0), **TEXT, **fields}
    return Workload.model_validate({"model": name, "model_options": (MODELS | OTHERS)[name], **given})


@cache
def graph_of(name: str) -> Graph:
    return capture(workload_of(name), "cuda")


def cluster_of(nodes: int = 2, per_node: int = 4) -> Cluster:
    group, link = NodeGroup("g", nodes, (), ((GPU, per_node),), Link(450e9, 5e-6)), Link(50e9, 1e-5)
    return Cluster("test", (group,), {GPU: catalogue()[GPU]}, {("g", "g"): link})


def priced(name: str, folder: Path, **ways: object) -> PricedProblem:
    workload = workload_of(name, batch_size=4)  # one example a microbatch
    return price_workload(workload, cluster_of(), folder, parallelism=Parallelism(**ways))


@pytest.mark.parametrize("microbatch", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("length", [64, 63, 0])
def test_replicas_share_examples_where_these_are_too_few(microbatch: int, length: int) -> None:
    """And as few share them as must; all other ways are as without."""
    cluster = cluster_of(3, 4)
    found = Parallelism().configurations(cluster, microbatch, 4, 64, 0, length)
    assert len(set(found)) == len(found)
    own = {one for one in found if one.context_parallel == 1}
    assert own == set(Parallelism(context_parallel=False).configurations(cluster, microbatch, 4, 64, 0, length))
    assert own == set(Parallelism().configurations(cluster, microbatch, 4, 64))
    for one in found:
        degree, replicas = one.context_parallel, one.data_parallel
        would_do = [c for c in range(1, replicas + 1) if replicas % c == 0 and microbatch % (replicas // c) == 0]
        assert degree == min(would_do)
        assert degree == 1 or (length and length % degree == 0)
        assert degree == 1 or one.zero_level in (1, 3)
    degrees = {one.context_parallel for one in found}
    plain = Parallelism(zero_levels=(0,)).configurations(cluster, microbatch, 4, 64, 0, length)
    assert {one.context_parallel for one in plain} == degrees, "where no other level is allowed"
    if length == 64:
        assert max(degrees) > 1
    if not length:
        assert degrees == {1}
    assert not any(
        one.context_parallel > 1 for one in Parallelism.one_device().configurations(cluster, 1, 4, 64, 0, 64)
    )


def test_a_plan_of_one_s_own_has_to_be_possible() -> None:
    sharing = StageConfiguration(GPU, 1, 4, 4, 1, context_parallel=4)

    def asked(one: StageConfiguration, microbatch: int = 1, length: int = 64) -> tuple[StageConfiguration, ...]:
        return Parallelism(only=(one,)).configurations(cluster_of(), microbatch, 4, 64, 0, length)

    assert asked(sharing) == (sharing,)
    with pytest.raises(InputError, match="do not divide the sequence of 66"):
        asked(sharing, length=66)
    with pytest.raises(InputError, match="cannot split the sequence"):
        asked(sharing, length=0)
    with pytest.raises(InputError, match="2 replicas do not divide a microbatch of 1"):
        asked(replace(sharing, context_parallel=2))


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_only_layers_that_say_so_are_given_a_part_of_the_sequence(name: str) -> None:
    assert context_length(graph_of(name)) == (LENGTH if name in MODELS else 0)
    job = job_of(workload_of(name, batch_size=8), by_hand("1f1b", (0, 3), [one_device(2, context_parallel=2)], 4), 1)
    if name in OTHERS:
        with pytest.raises(LaunchError, match="wanted context_parallel 1"):
            check_spreading(job)


def test_what_cannot_run_says_so() -> None:
    binding = by_hand("1f1b", (0, 4), [one_device(3, context_parallel=3)], 4)
    with pytest.raises(LaunchError, match="splits 64 positions among 3 devices"):
        check_spreading(job_of(workload_of("gpt"), binding, 1))
    with pytest.raises(InputError, match="wanted context_parallel 1, or compile: false"):
        check_compiled(job_of(workload_of("gpt", compile=True), binding, 1))


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@every_model
def test_devices_do_equal_parts_of_the_work(name: str, direction: str, degree: int) -> None:
    """But for the loss, which each computes of all tokens."""
    layers = graph_of(name).layers
    for layer in layers:
        has_loss = layer is layers[-1] and gathers_output(layer)
        whole = list(layer_kernels(layer, direction))
        parts = list(layer_kernels(layer, direction, tokens=OwnTokens(degree, has_loss)))
        for kernel, part in zip(whole, parts, strict=True):
            if has_loss and kernel.family != "matmul":
                assert part == kernel
            else:
                assert degree * part.flops >= kernel.flops * (1 - 1e-9)
                sizes = [(one.batch, one.m, one.n, one.k) for one in (kernel, part)]
                assert sum(a != b for a, b in zip(*sizes, strict=True)) <= 1
                if kernel.m % degree == kernel.k % degree == 0:
                    is_halved = kernel.m % (2 * degree) == 0  # else the last device's queries see nearly all keys
                    most = 2 - 1 / degree if kernel.is_causal and not is_halved else 1
                    assert degree * part.flops == pytest.approx(most * kernel.flops)


@every_model
def test_keys_and_values_of_all_positions_are_gathered(name: str, tmp_path: Path) -> None:
    """A device's time is that of its tokens and of what it gathers, forward, again if recomputed, and backward."""
    heads = 4  # in 32 bits a GPU's attention with shared heads is written out, with each head's keys
    blocks = [layer for layer in graph_of(name).layers if layer.name.startswith("block")]
    width = 64 // 4
    for block in blocks:
        assert keys_and_values_bytes(block) == [4.0 * prod((2, heads, LENGTH, width))] * 2
    assert [keys_and_values_bytes(layer) for layer in capture(workload_of("llama")).layers][1] == [
        4.0 * prod((2, 2, LENGTH, width))
    ] * 2
    assert not any(keys_and_values_bytes(layer) for layer in graph_of(name).layers if layer not in blocks)
    found = priced(name, tmp_path)
    configurations, costs = found.problem.configurations, found.problem.costs
    collectives = StageCollectives(cluster_of(), None, "float32")
    number = 0
    for c, one in enumerate(configurations):
        again = replace(one, recompute=True)
        if (
            one.context_parallel == 1
            or one.recompute
            or one.zero_level != 1
            or one.offload
            or again not in configurations
        ):
            continue
        number += 1
        size = sum(keys_and_values_bytes(blocks[0])) / 2 / one.tensor_parallel / 2  # two examples were captured
        gathered = 2 * collectives.context_seconds(one, [size], "all_gather")
        returned = 2 * collectives.context_seconds(one, [size], "reduce_scatter")
        assert gathered > 0 and returned > 0
        place = [layer.name for layer in graph_of(name).layers].index("block0")
        assert found.forward_seconds_CL[c, place] > gathered
        assert found.backward_seconds_CL[c, place] > returned
        e, forward = configurations.index(again), found.forward_seconds_CL[c, place]
        # Keys and values are gathered again; a block's last product is not run again, but where a norm follows it.
        repeated = found.backward_seconds_CL[e, place] - found.backward_seconds_CL[c, place]
        assert gathered < repeated <= forward * (1 + 1e-9)
        assert (costs.fixed_bytes_CL[e] == costs.fixed_bytes_CL[c]).all()
    assert number


@pytest.mark.parametrize("length", [12, 48, 30])
def test_each_part_has_a_chunk_from_each_end(length: int) -> None:
    """And all positions are some part's; of causal attention all parts see as many keys, where they can be halved."""
    device, whole = torch.device("cpu"), torch.arange(length)
    assert torch.equal(positions(length, device), whole)
    for count in (1, 2, 3, 4, 6):
        if length % count:
            continue
        parts = []
        for index in range(count):
            with having_part(index, count):
                parts.append(positions(length // count, device))
        assert torch.equal(torch.cat(parts).sort().values, whole)
        seen = {int((part + 1).sum()) for part in parts}
        assert len(seen) == 1 or length // count % 2
        for index, part in enumerate(parts):
            numbers = chunk_numbers(index, count, length // count)
            assert torch.equal(torch.cat([whole.chunk(len(numbers) * count)[k] for k in numbers]), part)
    assert torch.equal(positions(3, device), torch.arange(3))


@every_model
@pytest.mark.parametrize("degree", [2, 4])
def test_a_device_holds_its_part_and_the_keys_and_values_of_all(name: str, degree: int) -> None:
    """In sum over the layers; a loss that is no mean over positions is computed of all tokens on every device."""
    workload, graph, device = workload_of(name), graph_of(name), catalogue()[GPU]
    for recompute in (False, True):
        one = StageConfiguration(GPU, 1, degree, degree, recompute=recompute, context_parallel=degree)
        alone = StageConfiguration(GPU, recompute=recompute)
        own, whole = (configuration_memory(way, graph, workload, device, 0.0) for way in (one, alone))
        kept = [sum(keys_and_values_bytes(layer)) + attended_bytes(layer) / degree for layer in graph.layers]
        gathered = 0.0 if recompute else np.array(kept)
        parts = whole.activation_bytes_L / degree + gathered
        assert own.activation_bytes_L[:-1] == pytest.approx(parts[:-1])
        is_gathered = name == "bert"
        assert gathers_output(graph.layers[-1]) is is_gathered
        if is_gathered:
            assert own.activation_bytes_L[-1] > whole.activation_bytes_L[-1]
        else:
            assert own.activation_bytes_L[-1] == pytest.approx(parts[-1])
        assert own.message_bytes_L1 == pytest.approx(whole.message_bytes_L1 / degree)
        assert (own.fixed_bytes_L == whole.fixed_bytes_L).all()


@pytest.mark.integration
@pytest.mark.slow
def test_a_loss_of_one_s_own_is_of_the_whole_sequence() -> None:
    """Of a model that takes over a zoo model's layers: each device had the loss of its own positions, another one."""
    workload = workload_of("gpt", model="tests.own_losses:LastOnly", num_steps=2)
    job = job_of(workload, by_hand("1f1b", (0, 2, 4), [one_device(), one_device(2, context_parallel=2)], 4), 2)
    (found,) = train_in_turn([job])
    assert found.losses == pytest.approx(train_single(job.workload, job.draw, range(2)), abs=1e-5)


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_a_device_computes_its_own_loss_where_that_is_a_mean_over_positions(name: str) -> None:
    """Which is so where the model has no loss of its own."""
    workload = workload_of(name)
    split = layers_of(workload)[-1].tensor_parallel
    assert split is not None
    assert split.loss_by_position is (type(model_of(workload)).loss is Model.loss and split.context)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_one_long_example_is_shared_where_heads_do_not_suffice(name: str, tmp_path: Path) -> None:
    """And the search takes it: replicas have no examples of their own, and one device alone is slower."""
    heads = {"num_heads": 2} if name == "gpt" else {"num_heads": 2, "num_kv_heads": 2}
    model = {"model_options": {"num_blocks": 2, "width": 1024, **heads}, "sequence_length": 32768, "dtype": "bfloat16"}
    workload = workload_of(name, batch_size=2, num_microbatches=2).model_copy(update=model)
    request = PlanRequest(workload, cluster_of(1, 8), tmp_path, searches=("exact",), microbatches=(2,))
    choice = Planner().plan(request)
    assert any(stage.configuration.context_parallel > 1 for stage in choice.plan.stages), choice.plan
    without = Planner().plan(replace(request, parallelism=Parallelism(context_parallel=False)))
    assert choice.step_seconds < without.step_seconds
