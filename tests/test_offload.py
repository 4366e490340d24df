"""Activations in the host's memory: the same gradients to the last bit, and what is priced is what is moved."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.cluster import Cluster, HostMemory, load_cluster
from dejavu.cost.offload.updates import traffic
from dejavu.cost.sources.launches import KNOWN, num_weights
from dejavu.foundation.errors import InputError
from dejavu.graphs import offload
from dejavu.init import Draw
from dejavu.launch.preflight import check_spreading
from dejavu.parallelism import OFFLOADS, Parallelism
from dejavu.planning import Planner, PlanRequest, Prices
from dejavu.planning.schedules import fits
from dejavu.plans import Offload, Plan, SearchResult, Stage, StageConfiguration
from dejavu.plans.answers import NoPlanError
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import PlanError
from dejavu.runtime.batches import Reader
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.training import WholeModel, build_layers
from dejavu.search import SEARCHES
from dejavu.simulation import simulate_plan
from dejavu.what_if.own_plan import price_own_plan
from dejavu.workload import OptimizerSettings, Workload
from tests.conftest import spread
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


def gradients(name: str, **options: Any) -> list[torch.Tensor]:
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
    again = gradients(name, recompute=recompute, offload=AWAY)
    assert moved or recompute  # of a model of two layers the first has the batch, and the last is not moved
    assert len(plain) == len(again) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class InTurn(nn.Module):
    """Writes to one part of a storage after the other, when the parts before it are saved already."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.map(x).unsafe_chunk(3, -1)
        return torch.sigmoid_(a) * torch.tanh_(b) + torch.exp_(c.clamp_(max=1.0)) * x


class Differentiates(nn.Module):
    """Its output is the gradient of something that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(torch.tanh(self.map(x)).square().sum(), x, create_graph=True)
        return found


class Conjugates(nn.Module):
    """What it saves are views that negate imaginary parts: of what it computes, of its input and of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, computed, weight = (torch.view_as_complex(one.unflatten(-1, (-1, 2))) for one in self._numbers(x))
        product = given.conj() * (computed * weight.conj()) + computed.conj()
        return (product @ computed.mH).real + product.conj().imag.sum(-1, keepdim=True) * x[:, :6]

    def _numbers(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, self.map(x), self.weight.flatten()


class Forward(nn.Module):
    """Its output is a derivative that is computed going forward; of weights, that of zeros without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.jvp(lambda y: torch.tanh(self.map(y)), (x,), (torch.ones_like(x),))[1]
        return found


OF_STORAGES = {
    "GRU": lambda: nn.GRU(8, 8),
    "GRU, 2 layers both ways": lambda: nn.GRU(8, 4, num_layers=2, bidirectional=True),
    "LSTM": lambda: nn.LSTM(8, 8),
    "LSTM, 2 layers both ways": lambda: nn.LSTM(8, 4, num_layers=2, bidirectional=True),
    "RNN": lambda: nn.RNN(8, 8),
    "GRU cell": lambda: nn.GRUCell(8, 8),
    "LSTM cell": lambda: nn.LSTMCell(8, 8),
    "parts in turn": InTurn,
    "a gradient of its own": Differentiates,
    "conjugated views": Conjugates,
    "a derivative going forward": Forward,
}


@pytest.mark.parametrize("kind", OF_STORAGES)
def test_what_is_kept_in_unusual_ways_comes_back(kind: str, moved: list[int]) -> None:
    """As torch's recurrent layers do: what comes back is what was there when the layer's forward pass ended."""
    torch.manual_seed(3)
    layer, x, found = OF_STORAGES[kind](), torch.randn(6, 8, requires_grad=True), list[list[torch.Tensor]]()
    for activations in (False, True):
        with offload.offloading(layer, x, activations=activations):
            y = layer(x)
        first = y if isinstance(y, torch.Tensor) else y[0]
        found.append(list(torch.autograd.grad(first.square().sum(), (x, *layer.parameters()), allow_unused=True)))
    assert moved
    for plain, again in zip(*found, strict=True):
        assert plain is None or torch.equal(plain, again)


@pytest.mark.parametrize("name", spread(ZOO, 8))
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
  - {{name: a, count: 1, devices: {{type: Small, count: {count}}}, link: {{bandwidth: 100 GB/s, latency: 5 us}}{host}}}
devices:
  Small: {{kind: cuda, memory: {memory}, bandwidth: {bandwidth}, float32: 10 TFLOP/s, bfloat16: 20 TFLOP/s}}
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
WIDE = LONG.model_copy(update={"sequence_length": 32})  # of short sequences most memory is the optimizer's
KEPT = Parallelism(recompute=(False,), zero_levels=(0,), offload=(Offload(), AWAY))


def cluster(
    folder: Path,
    host: str = "",
    memory: str = "4 GiB",
    nvme: str = "",
    count: int = 4,
    bandwidth: str = "900 GB/s",
) -> Cluster:
    path = folder / "cluster.yaml"
    places = f", host_memory: {{{host}}}" if host else ""
    places += f", nvme: {{{nvme}}}" if nvme else ""
    path.write_text(FILE.format(host=places, memory=memory, count=count, bandwidth=bandwidth))
    return load_cluster(path)


def request(here: Cluster, folder: Path, kept: Parallelism = KEPT, workload: Workload = LONG) -> PlanRequest:
    return PlanRequest(workload, here, folder / "db", kept, microbatches=(8,), searches=("auto",), budget_seconds=1.0)


def stages(
    here: Cluster, folder: Path, kept: Parallelism = KEPT, workload: Workload = LONG
) -> list[StageConfiguration]:
    """The planned stages; none where nothing fits."""
    try:
        chosen = Planner().plan(request(here, folder, kept, workload)).chosen
    except NoPlanError:
        return []
    assert chosen.fits
    return [stage.configuration for stage in chosen.plan.stages]


def test_a_cluster_s_host_memory_is_shared_by_the_devices_of_a_node(tmp_path: Path) -> None:
    plain, hosted = cluster(tmp_path), cluster(tmp_path, "size: 64 GiB, bandwidth: 20 GB/s")
    assert plain.host_memory_of("Small") is None
    assert hosted.host_memory_of("Small") == HostMemory(16 << 30, 20e9, 20e9)
    assert Cluster.from_dict(hosted.to_dict()) == hosted and Cluster.from_dict(plain.to_dict()) == plain
    assert plain.fingerprint != hosted.fingerprint
    mixed = replace(hosted, groups=(*hosted.groups, replace(plain.groups[0], name="b")))
    assert mixed.host_memory_of("Small") is None


def test_offloading_is_considered_where_nodes_have_memory_for_it_and_priced_by_its_copies(tmp_path: Path) -> None:
    here = cluster(tmp_path, "size: 64 GiB, bandwidth: 20 GB/s", "200 MiB")
    priced = Prices(request(here, tmp_path)).priced(8)
    problem, costs = priced.problem, priced.problem.costs
    offloaded = [c for c in problem.configurations if c.offload]
    plain = set(problem.configurations) - set(offloaded)
    alone = plain - {replace(configuration, offload=Offload()) for configuration in offloaded}
    assert len(plain) == len(offloaded) + len(alone)  # copies make the same gain a smaller part: fewer are considered
    assert all(one.tensor_parallel > 1 and not one.sequence_parallel for one in alone)
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


HOST = "size: 64 GiB, bandwidth: 20 GB/s, update_bandwidth: 100 GB/s"
DISKS = "size: 1 TB, read: 8 GB/s, write: 4 GB/s"
EVERY_PLACE = replace(KEPT, offload=OFFLOADS, zero_levels=(0, 1, 2, 3))


def test_the_optimizer_s_state_is_what_leaves_a_device_and_its_way_is_priced(tmp_path: Path) -> None:
    """Of fp32 weights under AdamW: per byte of weight 2 of state, 3 copied, and 7 read or written by a fused update.

    What a rank takes to launch the update of each weight it takes here as there.
    """
    here = cluster(tmp_path, HOST, "150 MiB", DISKS)
    prices = Prices(request(here, tmp_path, replace(EVERY_PLACE, also_unsplit=True)))
    priced = prices.priced(8)
    problem, costs, on_disk = priced.problem, priced.problem.costs, priced.on_disk
    assert on_disk is not None
    layers = prices.graph_of(8).layers
    weights_L = np.array([layer.parameter_bytes for layer in layers], dtype=float)
    launched_L = np.array([num_weights(layer) for layer in layers]) * KNOWN.weight_seconds
    compared = Counter[Offload]()
    for c, configuration in enumerate(problem.configurations):
        twin = replace(configuration, offload=replace(configuration.offload, optimizer=None))
        if configuration.offload.optimizer is None or twin not in problem.configurations:
            continue
        compared[configuration.offload] += 1
        plain = problem.index(twin)
        away_L = costs.host_fixed_bytes_CL[c] + on_disk.bytes_CL[c]
        np.testing.assert_allclose(costs.fixed_bytes_CL[c] + away_L, costs.fixed_bytes_CL[plain])
        assert (costs.host_fixed_bytes_CL[c] > 0).any() == (configuration.offload.optimizer == "host")
        for name in ("temporary_bytes_CL", "step_bytes_CL", "activation_bytes_CL", "seconds_CL"):
            assert (getattr(costs, name)[c] <= getattr(costs, name)[plain]).all()
        if configuration.tensor_parallel > 1:
            continue
        shards = configuration.data_parallel if configuration.zero_level else 1
        np.testing.assert_allclose(away_L, 2 * weights_L / shards)
        here_L = prices._parallel.computing.passes(twin, LONG.microbatch_size).optimizer_L
        seconds_L = launched_L + (weights_L / shards) * (3 / 20e9 + 7 / (100e9 / 4))
        if configuration.offload.optimizer == "nvme":
            seconds_L += away_L / 2e9 + away_L / 1e9
        found_L = costs.per_step_seconds_CL[c] - costs.per_step_seconds_CL[plain] + here_L
        np.testing.assert_allclose(found_L, seconds_L, atol=1e-12)
    assert set(compared) == {one for one in OFFLOADS if one.optimizer == "host" and not one.parameters}


@pytest.mark.parametrize("masters", [False, True])
def test_an_update_of_one_pass_moves_less_than_one_of_many(masters: bool) -> None:
    """Tensors that torch's steps read and write, each as large as the weight in float32; masters are cast besides."""
    dtype = "bfloat16" if masters else "float32"
    for settings, fused, in_passes in (
        (OptimizerSettings(), 7, 20),
        (OptimizerSettings(name="sgd"), 3, 6),
        (OptimizerSettings(name="sgd", momentum=0.9), 5, 6),
    ):
        own = settings.model_copy(update={"master_weights": masters})
        wide, cast = (2, 3) if masters else (1, 0)  # float32 for each byte of bfloat16: read, and bfloat16 written
        assert traffic(own, dtype, is_fused=True) == pytest.approx(wide * fused + cast)
        assert traffic(own, dtype, is_fused=False) == pytest.approx(wide * in_passes + cast)


def test_nothing_is_away_where_devices_have_room_for_all_and_disks_only_where_nodes_have_not(tmp_path: Path) -> None:
    def considered(host: str, memory: str) -> set[Offload]:
        here = cluster(tmp_path, host, memory, DISKS)
        return {one.offload for one in Prices(request(here, tmp_path, EVERY_PLACE)).priced(8).problem.configurations}

    assert considered(HOST, "64 GiB") == {Offload()}
    on_devices = {one for one in OFFLOADS if not one.parameters}
    assert considered(HOST, "150 MiB") == {one for one in on_devices if one.optimizer != "nvme"}
    assert considered("size: 100 MiB, bandwidth: 20 GB/s", "150 MiB") == on_devices


@pytest.mark.parametrize("bandwidth", ["900 GB/s", "1 GB/s"])
def test_what_is_left_out_for_more_memory_would_have_been_no_faster(bandwidth: str, tmp_path: Path) -> None:
    """Also where an update is little but its launches, and where a node's processors are faster than its devices."""
    one_each = replace(EVERY_PLACE, max_data_parallel=1, max_tensor_parallel=1)
    tight, roomy = (
        Prices(request(cluster(tmp_path, HOST, memory, bandwidth=bandwidth), tmp_path, one_each, WIDE)).priced(8)
        for memory in ("64 KiB", "64 GiB")
    )
    passes_CL = tight.problem.costs.seconds_CL
    step_CL = passes_CL + tight.problem.costs.per_step_seconds_CL
    kept = [tight.problem.index(one) for one in roomy.problem.configurations]
    assert len(kept) < len(tight.problem.configurations)
    for c in range(len(tight.problem.configurations)):
        assert any((passes_CL[k] <= passes_CL[c]).all() and (step_CL[k] <= step_CL[c]).all() for k in kept)
    assert {one.offload.optimizer for one in roomy.problem.configurations} == (
        {None} if bandwidth == "900 GB/s" else {None, "host"}
    )


@pytest.mark.parametrize("memory", ["12 MiB", "20 MiB", "24 MiB", "28 MiB", "32 MiB", "44 MiB", "64 MiB"])
@pytest.mark.parametrize("host", ["size: 16 MiB, bandwidth: 20 GB/s", "size: 50 MiB, bandwidth: 20 GB/s", HOST])
def test_the_exact_search_chooses_as_trying_every_plan_does(host: str, memory: str, tmp_path: Path) -> None:
    """Where the nodes' memory is short, its limit is the searches' own: the planner has nothing to reject."""
    here = cluster(tmp_path, host, memory, DISKS, count=2)
    one_each = replace(EVERY_PLACE, max_data_parallel=1, max_tensor_parallel=1)
    priced = Prices(request(here, tmp_path, one_each, WIDE)).priced(8)
    best, found = (SEARCHES[name]().run(priced.problem, budget_seconds=60) for name in ("exhaustive", "exact"))
    assert isinstance(best, SearchResult) == isinstance(found, SearchResult)
    if isinstance(best, SearchResult) and isinstance(found, SearchResult):
        assert found.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
        assert fits(priced, found.plan, simulate_plan(priced, found.plan))


def test_a_plan_is_found_where_only_the_optimizer_s_leaving_makes_room(tmp_path: Path) -> None:
    small, one_each = "44 MiB", replace(EVERY_PLACE, max_data_parallel=1, max_tensor_parallel=1)
    on_devices = stages(cluster(tmp_path, memory=small, count=2), tmp_path, one_each, WIDE)
    without = replace(one_each, offload=(Offload(), AWAY))
    of_activations = stages(cluster(tmp_path, HOST, small, count=2), tmp_path, without, WIDE)
    on_host = stages(cluster(tmp_path, HOST, small, count=2), tmp_path, one_each, WIDE)
    tight = "size: 16 MiB, bandwidth: 20 GB/s"
    on_disk = stages(cluster(tmp_path, tight, small, DISKS, count=2), tmp_path, one_each, WIDE)
    assert not on_devices and not of_activations
    assert any(one.offload.optimizer == "host" for one in on_host)
    assert any(one.offload.optimizer == "nvme" for one in on_disk)


def test_plans_of_before_are_read_and_what_is_no_place_is_refused() -> None:
    row = {"device_type": "Small", "num_nodes": 1, "devices_per_node": 1, "recompute": True}
    assert StageConfiguration.from_dict(row | {"offload": True}).offload == AWAY
    assert not StageConfiguration.from_dict(row | {"offload": False}).offload
    for away in OFFLOADS:
        one = StageConfiguration("Small", offload=away)
        plan = Plan((Stage(0, 4, one),), "1f1b", 4)
        written = json.loads(json.dumps(plan.to_dict()))
        assert Plan.from_dict(written) == plan and StageConfiguration.from_dict(asdict(one)) == one
        assert (written["stages"][0]["configuration"]["offload"] in (True, False)) == (away.optimizer is None)
        named = ("activations", "parameters" if away.parameters else "optimizer")
        assert all(what in str(one) for what in named if getattr(away, what))
    for wrong in ({"optimizer": "tape"}, {"activations": "nvme"}, {"weights": "host"}, "host", 1):
        with pytest.raises(PlanError, match="offload"):
            StageConfiguration.from_dict(row | {"offload": wrong})


def test_a_plan_of_one_s_own_is_priced_also_where_a_node_is_too_small(tmp_path: Path) -> None:
    plan = Plan((Stage(0, 8, StageConfiguration("Small", offload=Offload("host", "host"))),), "1f1b", 8)
    fitting = {}
    for size in ("64 GiB", "100 MiB"):
        here = cluster(tmp_path, f"size: {size}, bandwidth: 20 GB/s")
        found = price_own_plan(request(here, tmp_path), plan)
        row = found.to_dict()["stages"][0]
        fitting[size] = found.fits
        assert found.fits == (row["host_bytes"] <= row["host_capacity_bytes"]) and row["host_bytes"] > 0
        assert found.simulated_seconds > 0
    assert fitting == {"64 GiB": True, "100 MiB": False}


def test_disks_are_trained_on_where_the_cluster_file_says_where() -> None:
    workload = ZOO["gpt"]
    plan = by_hand("1f1b", [0, 1, len(graph_of("gpt").layers)], [one_device(offload=Offload(None, "nvme"))] * 2, 2)
    workload = workload.model_copy(update={"num_microbatches": 2})
    with pytest.raises(LaunchError, match="not say where on localhost; wanted nvme: "):
        check_spreading(job_of(workload, plan, 1))
    bounds = [0, 1, len(graph_of("gpt").layers)]
    said = by_hand("1f1b", bounds, [one_device(offload=Offload(None, "nvme"))] * 2, 2, disk_folder="/tmp")
    check_spreading(job_of(workload, said, 1))


def test_a_folder_on_a_node_s_disks_is_each_device_s_and_no_plan_s(tmp_path: Path) -> None:
    said = cluster(tmp_path, HOST, nvme=f"{DISKS}, folder: /mnt/fast")
    unsaid = cluster(tmp_path, HOST, nvme=DISKS)
    assert {one.disk_folder for one in said.devices()} == {"/mnt/fast"}
    assert {one.disk_folder for one in unsaid.devices()} == {""}
    assert said.fingerprint == unsaid.fingerprint and said.nvme_of("Small") == unsaid.nvme_of("Small")
    assert Cluster.from_dict(said.to_dict()) == said != unsaid
    with pytest.raises(InputError, match="folder"):
        cluster(tmp_path, HOST, nvme=f"{DISKS}, folder: relative/path")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("away", [AWAY, Offload(None, "host", "host"), Offload("host", "host", "host")], ids=str)
@pytest.mark.parametrize("schedule", [name for name, one in SCHEDULES.items() if one.splits_backward])
def test_what_comes_back_once_is_refused_where_a_pass_has_two_parts(
    schedule: str, away: Offload, recompute: bool
) -> None:
    """Activations, and weights that recomputation fetches; others come back for each part."""
    workload = ZOO["gpt"].model_copy(update={"schedule": schedule})
    count = 2 * SCHEDULES[schedule].stages_per_rank
    layers = len(graph_of("gpt").layers)
    bounds = [*range(count), layers]
    ranks = [one_device(offload=away, recompute=recompute)] * 2
    job = job_of(workload, by_hand(schedule, bounds, ranks, workload.num_microbatches), 1)
    if away.activations is None and not recompute:
        check_spreading(job)
        return
    with pytest.raises(LaunchError, match="runs the backward pass in two parts; wanted them on the device"):
        check_spreading(job)
