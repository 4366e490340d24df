"""Activations in the host's memory: the same gradients to the last bit, and what is priced is what is moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.cluster import Cluster, HostMemory, load_cluster
from dejavu.graphs import offload
from dejavu.init import Draw
from dejavu.launch.preflight import check_spreading
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest, Prices
from dejavu.plans import Offload, StageConfiguration
from dejavu.plans.answers import NoPlanError
from dejavu.plans.schedule import SCHEDULES
from dejavu.runtime.batches import Reader
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.training import WholeModel, build_layers
from dejavu.workload import Workload
from tests.test_models import ZOO, graph_of

CPU = torch.device("cpu")
AWAY = Offload("host")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each storage that is moved to the host's memory."""
    found: list[int] = []

    class Told(offload._Storage):
        def __init__(self, storage: torch.UntypedStorage) -> None:
            found.append(storage.nbytes())
            super().__init__(storage)

    monkeypatch.setattr(offload, "_Storage", Told)
    return found


def gradients(name: str, **options: bool) -> list[torch.Tensor]:
    workload = ZOO[name]
    module = build_layers(workload, Draw(), CPU, **options)
    _, inputs, targets = next(iter(Reader(workload, range(1), None)))
    WholeModel(module, workload)(0, inputs, targets)
    return [one.grad for one in module.parameters() if one.grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_the_same_to_the_last_bit(name: str, recompute: bool, moved: list[int]) -> None:
    plain = gradients(name, recompute=recompute)
    assert not moved
    again = gradients(name, recompute=recompute, offload=True)
    assert moved or recompute  # of a model of two layers the first has the batch, and the last is not moved
    assert len(plain) == len(again) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_what_is_moved_is_what_the_capture_says_is_kept(name: str, moved: list[int]) -> None:
    graph = graph_of(name)
    module = build_layers(ZOO[name], Draw(), CPU)
    _, inputs, _ = next(iter(Reader(ZOO[name], range(1), None)))
    x: Any = inputs.chunk(ZOO[name].num_microbatches)[0]
    for layer, known in list(zip(module, graph.layers, strict=True))[:-1]:
        moved.clear()
        with offload.offloading(layer, x):
            y = layer(x)
        staying = known.footprint.input_bytes * (known.footprint.holds_input and not x.requires_grad)
        # The capture also counts what batch norms keep of their inputs on GPUs, and the CPU's kernel does not.
        expected = known.activation_bytes - staying
        assert sum(moved) <= expected and (sum(moved) == expected or "resnet" in name), known.name
        moved.clear()
        if x.requires_grad:
            with offload.offloading(layer, x):
                checkpoint(layer, x, use_reentrant=False)
            assert sum(moved) == known.footprint.input_bytes, known.name
        x = y.detach().requires_grad_(y.requires_grad)


FILE = """
nodes:
  - {{name: a, count: 1, devices: {{type: Small, count: 4}}, link: {{bandwidth: 100 GB/s, latency: 5 us}}{host}}}
devices:
  Small: {{kind: cuda, memory: {memory}, bandwidth: 900 GB/s, float32: 10 TFLOP/s}}
"""
LONG = Workload.model_validate(
    {
        "model": "gpt",
        "model_options": {"num_blocks": 6, "width": 256, "num_heads": 8},
        "data": "synthetic",
        "synthetic": {"num_classes": 512},
        "sequence_length": 512,
        "batch_size": 32,
        "num_microbatches": 8,
        "schedule": "1f1b",
        "trials": {"count": 0},
    }
)
KEPT = Parallelism(recompute=(False,), zero_levels=(0,), offload=(Offload(), AWAY))


def cluster(folder: Path, host: str = "", memory: str = "4 GiB") -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(FILE.format(host=f", host_memory: {{{host}}}" if host else "", memory=memory))
    return load_cluster(path)


def request(here: Cluster, folder: Path) -> PlanRequest:
    return PlanRequest(LONG, here, folder / "db", KEPT, microbatches=(8,), searches=("auto",))


def stages(here: Cluster, folder: Path) -> list[StageConfiguration]:
    """The planned stages; none where nothing fits."""
    try:
        return [stage.configuration for stage in Planner().plan(request(here, folder)).chosen.plan.stages]
    except NoPlanError:
        return []


def test_a_cluster_s_host_memory_is_shared_by_the_devices_of_a_node(tmp_path: Path) -> None:
    plain, hosted = cluster(tmp_path), cluster(tmp_path, "size: 64 GiB, bandwidth: 20 GB/s")
    assert plain.host_memory_of("Small") is None
    assert hosted.host_memory_of("Small") == HostMemory(16 << 30, 20e9, 20e9)
    assert Cluster.from_dict(hosted.to_dict()) == hosted and Cluster.from_dict(plain.to_dict()) == plain
    assert plain.fingerprint != hosted.fingerprint
    mixed = replace(hosted, groups=(*hosted.groups, replace(plain.groups[0], name="b")))
    assert mixed.host_memory_of("Small") is None


def test_offloading_is_considered_where_nodes_have_memory_for_it_and_priced_by_its_copies(tmp_path: Path) -> None:
    here = cluster(tmp_path, "size: 64 GiB, bandwidth: 20 GB/s")
    priced = Prices(request(here, tmp_path)).priced(8)
    problem, costs = priced.problem, priced.problem.costs
    offloaded = [c for c in problem.configurations if c.offload]
    assert len(offloaded) * 2 == len(problem.configurations)
    for configuration in offloaded:
        c, plain = problem.index(configuration), problem.index(replace(configuration, offload=Offload()))
        moved_L = costs.host_activation_bytes_CL[c]
        assert (moved_L[:-1] > 0).all() and moved_L[-1] == 0 and not costs.host_activation_bytes_CL[plain].any()
        np.testing.assert_allclose(costs.seconds_CL[c] - costs.seconds_CL[plain], 2 * moved_L / 20e9, atol=1e-12)
        held, before = costs.activation_bytes_CL[c], costs.activation_bytes_CL[plain]
        assert not held[:-1].any() and held[-1] >= before[-1] and (before[:-1] > 0).all()
        assert (costs.temporary_bytes_CL[c] >= costs.temporary_bytes_CL[plain]).all()
        assert (costs.fixed_bytes_CL[c] == costs.fixed_bytes_CL[plain]).all()
    without = Prices(request(cluster(tmp_path), tmp_path)).priced(8)
    assert not any(configuration.offload for configuration in without.problem.configurations)
    only = PlanRequest(LONG, here, tmp_path / "db", replace(KEPT, offload=(AWAY,)), microbatches=(8,))
    assert all(configuration.offload for configuration in Prices(only).priced(8).problem.configurations)


def test_a_plan_is_found_where_only_the_host_has_room_and_not_where_it_has_none(tmp_path: Path) -> None:
    small = "90 MiB"
    alone = stages(cluster(tmp_path, memory=small), tmp_path)
    roomy = stages(cluster(tmp_path, "size: 64 GiB, bandwidth: 20 GB/s", small), tmp_path)
    tight = stages(cluster(tmp_path, "size: 1 MiB, bandwidth: 20 GB/s", small), tmp_path)
    assert not alone and any(configuration.offload for configuration in roomy)
    assert not any(configuration.offload for configuration in tight)


@pytest.mark.parametrize("schedule", [name for name, one in SCHEDULES.items() if one.splits_backward])
def test_a_schedule_that_goes_back_in_two_parts_is_refused(schedule: str, tmp_path: Path) -> None:
    workload = ZOO["gpt"].model_copy(update={"schedule": schedule})
    count = 2 * SCHEDULES[schedule].stages_per_rank
    layers = len(graph_of("gpt").layers)
    bounds = [*range(count), layers]
    plan = by_hand(schedule, bounds, [one_device(offload=AWAY)] * 2, workload.num_microbatches)
    with pytest.raises(LaunchError, match="runs the backward pass in two parts; wanted them on the device"):
        check_spreading(job_of(workload, plan, 1))
