"""Whole experts on tensor-parallel devices: what they compute, what it is priced at, and when plans consider them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dejavu
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.cluster import Cluster, DeviceType, Link, NodeGroup, catalogue
from dejavu.cost.kernels.experts import experts_to_share, fullest_part, most_rows
from dejavu.cost.kernels.sharding import layer_kernels
from dejavu.cost.priced_problem import SPLIT_MARGIN
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.graphs.kernels import base_name, kernel_of
from dejavu.launch.preflight import check_compiled, check_split
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest
from dejavu.planning.prices import price_workload
from dejavu.plans import Plan, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.stage_costs import PlanError
from dejavu.runtime.process.failures import LaunchError
from dejavu.workload import Workload
from dejavu.workload.models import WholeExperts, layers_of
from dejavu.workload.models.modules.experts import Experts
from dejavu.workload.models.moe import Experts as PaddedExperts
from tests.conftest import some
from tests.rows import fast_hosts

GPU = "H200-SXM-141GB"
TEXT = {"data": "synthetic", "synthetic": {"num_classes": 512}, "sequence_length": 2048, "dtype": "bfloat16"}
HEADS = {"num_heads": 8, "num_kv_heads": 8}
# Small experts, of which a device's part is so narrow that its products waste tiles; and two wide ones.
MODELS = {
    "small": {**HEADS, "num_blocks": 1, "width": 1024, "feedforward": 512, "num_experts": 64, "num_choices": 6},
    "wide": {**HEADS, "num_blocks": 1, "width": 512, "feedforward": 4096, "num_experts": 8},
}


def workload_of(name: str, **fields: object) -> Workload:
    given = {"batch_size": 64, "num_microbatches": 4, "trials": {"count": 0}, **TEXT, **fields}
    model = {"model": "mixtral", "model_options": MODELS.get(name, {})}
    if name == "padded":
        model = {"model": "moe", "model_options": {"num_blocks": 2, "width": 256, "num_heads": 8, "num_experts": 32}}
    return Workload.model_validate({**model, **given})


@cache
def graph_of(name: str) -> Graph:
    return capture(workload_of(name), "cuda")


def cluster_of(per_node: int = 8, memory_bytes: float | None = None) -> Cluster:
    kind: DeviceType = catalogue()[GPU]
    kind = replace(kind, memory_bytes=int(memory_bytes or kind.memory_bytes))
    return Cluster("test", (NodeGroup("g", 1, (), ((GPU, per_node),), Link(450e9, 5e-6)),), {GPU: kind}, {})


@pytest.mark.parametrize(("degree", "experts"), [(2, (8, 2)), (4, (8, 2)), (8, (8, 2)), (4, (64, 6)), (2, (2, 1))])
def test_the_fullest_part_is_what_random_routing_gives(degree: int, experts: tuple[int, int]) -> None:
    rng, (E, C), num_tokens = np.random.default_rng(0), experts, 256
    chosen = rng.random((400, num_tokens, E)).argpartition(C - 1, axis=-1)[..., :C] // (E // degree)
    rows = np.stack([(chosen == device).sum(axis=(1, 2)) for device in range(degree)])
    expected = rows.max(axis=0).mean() / (num_tokens * C / degree)
    assert fullest_part(WholeExperts(E, C), degree, num_tokens) == pytest.approx(expected, rel=0.01)
    assert rows.max() <= most_rows(WholeExperts(E, C), degree) * num_tokens * C


def test_the_fullest_part_has_limits() -> None:
    top_2_of_8 = WholeExperts(8, 2)
    assert fullest_part(top_2_of_8, 1, 100) == fullest_part(WholeExperts(8), 4, 100) == 1.0
    parts = [fullest_part(top_2_of_8, 8, tokens) for tokens in (1, 2, 16, 1024, 10**9)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] <= 4.0 and parts[-1] == pytest.approx(1.0, abs=1e-3)
    assert fullest_part(WholeExperts(4, 4), 2, 16) == most_rows(WholeExperts(4, 4), 2) * 2 == 1.0


def ran(
    module: nn.Module, own: range | None, x: torch.Tensor, share: torch.Tensor, choice: torch.Tensor
) -> list[torch.Tensor]:
    """The output for all of the experts or some, and the gradients of the tokens and shares."""
    x, share = (one.detach().clone().requires_grad_() for one in (x, share))
    output = module(x, share, choice, own=own)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return [output.detach(), x.grad, share.grad]


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("kind", ["none dropped", "all places"])
def test_devices_own_experts_add_up_to_all(kind: str, degree: int) -> None:
    """Output and gradients, also where no token goes to a device's experts."""
    torch.manual_seed(0)
    E, N, W = 4, 12, 8
    whole = Experts(W, 16, E) if kind == "none dropped" else PaddedExperts(W, 16, E, 1.0)
    x, share = torch.randn(N, W), torch.rand(N, 2)
    for allowed in (E, 2):  # with two experts the second device gets nothing
        choice = torch.stack([torch.randperm(allowed)[:2] for _ in range(N)])
        expected, parts = ran(whole, None, x, share, choice), []
        for device in range(degree):
            own = range(device * E // degree, (device + 1) * E // degree)
            part = Experts(W, 16, E) if kind == "none dropped" else PaddedExperts(W, 16, E, 1.0)
            for name, weight in whole.named_parameters():
                part.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(weight[own.start : own.stop])
            parts.append(ran(part, own, x, share, choice))
            assert all(one.grad is not None and one.grad.isfinite().all() for one in part.parameters())
        for found, wanted in zip(zip(*parts, strict=True), expected, strict=True):
            assert torch.allclose(sum(found), wanted, atol=1e-5)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("name", ["small", "wide", "padded"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_whole_experts_do_the_work_of_their_rows(name: str, degree: int, direction: str) -> None:
    """A group's products are those of one device; of whole experts the fullest's are counted, rounded up to rows."""
    for layer in graph_of(name).layers:
        experts = layer.tensor_parallel.experts if layer.tensor_parallel else None
        whole, parts, wholes = (
            list(layer_kernels(layer, direction, t, expert_parallel=by_expert))
            for t, by_expert in ((1, False), (degree, False), (degree, True))
        )
        if experts is None:
            assert parts == wholes
            continue
        fullest = fullest_part(experts, degree, 16 * 2048)
        operators = [one for one in layer.operators if one.direction == direction and kernel_of(one)]
        for operator, kernel, part, own in zip(operators, whole, parts, wholes, strict=True):
            if kernel.family == "matmul" and kernel.batch == experts.count:
                assert base_name(operator.kind) in ("grouped_mm", "grouped_outer", "bmm")
                assert part.batch == experts.count and own.batch * degree == experts.count
                assert degree * part.flops == pytest.approx(kernel.flops)
                assert degree * own.flops == pytest.approx(kernel.flops * fullest, rel=0.01)
                assert max(own.n, own.m, own.k) >= max(part.n, part.m, part.k) or degree == 2
            assert own.read_bytes <= part.read_bytes * fullest * 1.01 or kernel.family == "matmul"


def priced(name: str, tmp_path: Path, **parallelism: object) -> PricedProblem:
    return price_workload(workload_of(name), cluster_of(), fast_hosts(tmp_path / "db", GPU), Parallelism(**parallelism))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", some(["small", "wide", "padded"], ["small", "padded"]))
def test_whole_experts_are_considered_where_they_are_surely_faster(name: str, tmp_path: Path) -> None:
    everything, offered = priced(name, tmp_path, also_unsplit=True).problem, priced(name, tmp_path).problem
    parts = [one for one in everything.configurations if one.tensor_parallel > 1 and not one.expert_parallel]
    assert parts and all(replace(one, expert_parallel=True) in everything.configurations for one in parts)
    costs = everything.costs
    for one in parts:
        c, e = everything.index(one), everything.index(replace(one, expert_parallel=True))
        assert (costs.fixed_bytes_CL[e] == costs.fixed_bytes_CL[c]).all()
        assert (costs.message_bytes_CL1[e] == costs.message_bytes_CL1[c]).all()
        held, most = (
            [(costs.activation_bytes_CL + k * costs.temporary_bytes_CL)[row] for row in (e, c)] for k in (0, 1)
        )
        if name != "padded":  # all choices may be of one device's experts
            assert (held[0] >= held[1]).all() and (most[0] >= most[1]).all()
        faster = costs.seconds_CL[c].sum() > costs.seconds_CL[e].sum() * (1 + SPLIT_MARGIN)
        if replace(one, expert_parallel=True) in offered.configurations:
            assert faster
        elif one in offered.configurations:
            assert not faster
    assert any(one.expert_parallel for one in offered.configurations) == (name == "small")
    only = priced(name, tmp_path, expert_parallel=(False,)).problem
    assert not any(one.expert_parallel for one in only.configurations)


def test_whole_experts_need_a_degree_that_divides_them(tmp_path: Path) -> None:
    graph, cluster = graph_of("wide"), cluster_of()
    assert (experts_to_share(graph), experts_to_share(graph_of("small"))) == (8, 64)
    found = Parallelism().configurations(cluster, 16, 4, 0, 6)
    assert {one.tensor_parallel for one in found if one.expert_parallel} == {2}
    assert not any(one.expert_parallel for one in Parallelism().configurations(cluster, 16, 4))
    with pytest.raises(PlanError, match="wanted more than one"):
        StageConfiguration(GPU, expert_parallel=True)
    with pytest.raises(InputError, match=r"expert_parallel is \(\)"):
        Parallelism(expert_parallel=())
    compiled = price_workload(
        workload_of("small", compile=True), cluster, tmp_path / "none", Parallelism(also_unsplit=True)
    )
    assert not any(one.expert_parallel for one in compiled.problem.configurations)


def test_experts_that_cannot_be_shared_are_named() -> None:
    odd = workload_of("wide").model_copy(update={"model_options": {**MODELS["wide"], "num_experts": 6}})
    with pytest.raises(LaunchError, match="layer 'block0' has 6 experts, which 4 devices cannot share whole"):
        check_split(layers_of(odd), one_device(1, 4, expert_parallel=True))
    check_split(layers_of(odd), one_device(1, 2, expert_parallel=True))
    job = job_of(
        workload_of("wide", compile=True), by_hand("1f1b", (0, 3), [one_device(1, 2, expert_parallel=True)], 4), 1
    )
    with pytest.raises(InputError, match="wanted expert_parallel false, or compile: false"):
        check_compiled(job)


def chosen(name: str, tmp_path: Path) -> Choice:
    """The plan on devices of which none has room for the block's experts."""
    room = {"small": 0.8e9, "padded": 0.25e9}[name]
    request = PlanRequest(
        workload_of(name),
        cluster_of(memory_bytes=room),
        tmp_path / "none",
        Parallelism(expert_parallel=(True,), context_parallel=False),
        microbatches=(64,),
    )
    return Planner().plan(request)


@pytest.mark.parametrize("name", ["small", "padded"])
def test_a_plan_says_what_it_assumes_of_routers(name: str, tmp_path: Path) -> None:
    choice = chosen(name, tmp_path)
    assert any(stage.configuration.expert_parallel for stage in choice.plan.stages), choice.plan
    said = dejavu.explain(choice)
    told = "Predicted for routers that choose all experts alike: the fullest of a group's devices then has"
    assert (told in said) == (name == "small")  # with equal places it does not matter
    assert Plan.from_dict(json.loads(json.dumps(choice.plan.to_dict()))) == choice.plan
