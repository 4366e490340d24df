"""Weights in the host's memory: the same gradients to the last bit, and on the device only while their layer runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.cost._memory_rank import allocator_peak_bytes
from dejavu.graphs import offload
from dejavu.graphs.in_parts.split_backward import backward_input, backward_weight
from dejavu.init import Draw
from dejavu.parallelism import OFFLOADS, Parallelism
from dejavu.planning import Planner, PlanRequest, Prices
from dejavu.planning.sentences import what_is_proved, within
from dejavu.plans import Infeasible, Offload, Stage, StageConfiguration
from dejavu.plans.stage_costs import AdditiveCosts, PlanError
from dejavu.runtime.batches import Reader
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.training import Layers, WholeModel, build_layers
from dejavu.search import SEARCHES
from dejavu.workload import GradientSettings
from dejavu.workload.models import model_of
from tests.test_models import ZOO
from tests.test_offload import CPU, KEPT, LONG, WIDE, cluster, gradients, request, stages

WEIGHTS, ALL = Offload(None, "host", "host"), Offload("host", "host", "host")


class Fetches:
    """The copies of weights: which are there, and how many bytes have come."""

    def __init__(self) -> None:
        self.known: list[tuple[StorageWeakRef, int]] = []
        self.moved_bytes = self.most_bytes = 0

    @property
    def there_bytes(self) -> int:
        return sum(size for copy, size in self.known if not copy.expired())

    def note(self, copy: torch.Tensor) -> None:
        self.known.append((StorageWeakRef(copy.untyped_storage()), copy.nbytes))
        self.moved_bytes += copy.nbytes
        self.most_bytes = max(self.most_bytes, self.there_bytes)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    found, plain = Fetches(), offload._fetched

    def told(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = plain(weight, device)
        found.note(copy)
        return copy

    monkeypatch.setattr(offload, "_fetched", told)
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_the_same_to_the_last_bit(name: str, recompute: bool) -> None:
    plain = gradients(name, recompute=recompute)
    for away in (WEIGHTS, ALL):
        again = gradients(name, recompute=recompute, offload=away)
        assert len(plain) == len(again) > 0
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def layers_and_batch(name: str, **options: Any) -> tuple[Layers, torch.Tensor, torch.Tensor]:
    layers = build_layers(ZOO[name], Draw(), CPU, **options)
    _, inputs, targets = next(iter(Reader(ZOO[name], range(1), None)))
    return layers, inputs, targets


def bytes_of(layer: nn.Module) -> int:
    return sum(weight.nbytes for weight in layer.parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_a_layer_s_weights_are_there_while_it_runs(name: str, recompute: bool, fetches: Fetches) -> None:
    """One layer's at a time, twice in each microbatch, and nothing stays; going backward only what operators saved."""
    layers, inputs, targets = layers_and_batch(name, recompute=recompute, offload=WEIGHTS)
    number, sizes = ZOO[name].num_microbatches, [bytes_of(layer) for layer in layers]
    with torch.no_grad():
        layers(inputs.chunk(number)[0])
    assert (fetches.moved_bytes, fetches.there_bytes) == (sum(sizes), 0)
    WholeModel(layers, ZOO[name])(0, inputs, targets)
    assert fetches.there_bytes == 0 and fetches.most_bytes == max(sizes)
    assert (1 + number) * sum(sizes) < fetches.moved_bytes <= (1 + 2 * number) * sum(sizes)


@pytest.mark.parametrize("name", ZOO)
def test_each_part_of_a_backward_pass_fetches_by_itself(name: str, fetches: Fetches) -> None:
    """All first parts before the second ones: in between nothing stays, and gradients are those without, to the bit."""
    found: list[list[torch.Tensor | None]] = []
    count, sizes, last = ZOO[name].num_microbatches, [], 0
    for away in (Offload(), WEIGHTS):
        layers, inputs, targets = layers_and_batch(name, offload=away)
        layers.in_parts, loss_of, waiting = True, model_of(ZOO[name]).loss, []
        sizes = [bytes_of(layer) for layer in layers]
        batches = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        for layers.microbatch, (x, y) in enumerate(batches):
            x = x.requires_grad_(x.is_floating_point())
            waiting.append((x, loss_of(layers(x), y) / count))
        forward_bytes = fetches.moved_bytes
        parts = []
        for x, loss in waiting:
            before, fetches.most_bytes = fetches.moved_bytes, 0
            parts.append(backward_input([loss], None, [x], layers.parameters())[1])
            assert fetches.there_bytes == 0 and fetches.most_bytes <= max(sizes), "a layer at a time"
            assert fetches.moved_bytes - before <= sum(sizes)
        last = fetches.moved_bytes
        for groups in parts:
            backward_weight(layers.parameters(), groups)
        found.append([weight.grad for weight in layers.parameters()])
        assert fetches.there_bytes == 0
    assert forward_bytes == count * sum(sizes) and last - forward_bytes > 0
    assert fetches.moved_bytes - last <= count * sum(sizes)
    for plain, again in zip(*found, strict=True):
        assert (plain is None) == (again is None) and (plain is None or torch.equal(plain, again))


def weights_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    return ((name, id(weight)) for name, weight in module.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("name", ["gpt", "user_tied", "wide_resnet"])
def test_a_module_has_its_own_weights_again_also_when_it_failed(name: str) -> None:
    layers, inputs, _ = layers_and_batch(name, offload=WEIGHTS)
    before = list(weights_of(layers))
    layers(inputs[:2])
    assert list(weights_of(layers)) == before
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)):
        layers(torch.zeros(1, 1, 1, 1, 1))
    assert list(weights_of(layers)) == before


@pytest.mark.parametrize("shared", [{"tensor_parallel": 2}, {"data_parallel": 2, "zero_level": 1}])
def test_weights_that_devices_share_are_not_fetched(shared: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=r"wanted tensor_parallel 1, and zero_level 0 where there are replicas"):
        StageConfiguration("core", 1, 2, **{"data_parallel": 1, **shared}, offload=WEIGHTS)
    StageConfiguration("core", 1, 2, 2, offload=WEIGHTS)


@pytest.mark.parametrize("rule", ["mean", "median", "suspicion"])
def test_gradients_in_a_node_s_memory_are_summed_and_not_compared(rule: str) -> None:
    said = GradientSettings.model_validate({"rule": rule}).misfit(StageConfiguration("core", 1, 4, 4, offload=WEIGHTS))
    assert ("wanted parameters on the device" in said) == (rule != "mean")


def test_weights_take_the_optimizer_s_state_with_them() -> None:
    assert Offload.from_json({"parameters": "host"}) == WEIGHTS
    for optimizer in (None, "nvme"):
        with pytest.raises(PlanError, match="and with them the optimizer's state on the 'host'"):
            Offload(None, optimizer, "host")  # type: ignore[arg-type]


ROOMY = "size: 64 GiB, bandwidth: 20 GB/s, update_bandwidth: 100 GB/s"
EVERY = replace(KEPT, recompute=(False, True), offload=(*OFFLOADS, Offload()))  # named, so considered everywhere


@pytest.mark.parametrize("masters", [False, True])
def test_three_copies_of_a_layer_s_weights_are_priced_for_each_microbatch(masters: bool, tmp_path: Path) -> None:
    """Compared with the optimizer's state alone there, which copies gradients and weights once a step."""
    settings = LONG.optimizer.model_copy(update={"master_weights": masters})
    workload = LONG.model_copy(update={"optimizer": settings, "dtype": "bfloat16" if masters else "float32"})
    prices = Prices(request(cluster(tmp_path, ROOMY, "150 MiB"), tmp_path, replace(EVERY, also_unsplit=True), workload))
    priced = prices.priced(8)
    problem, compared = priced.problem, 0
    costs = problem.costs
    weights_L = np.array([layer.parameter_bytes for layer in prices.graph_of(8).layers], dtype=float)
    buffers_L = np.array([layer.footprint.buffer_bytes for layer in prices.graph_of(8).layers], dtype=float)
    gradients, added = (2, 3 + 6) if masters else (1, 3)  # a bfloat16 gradient is cast: 1 read, 2 written
    assert isinstance(costs, AdditiveCosts)
    for c, configuration in enumerate(problem.configurations):
        away = configuration.offload
        twin = replace(configuration, offload=Offload(away.activations, "host"))
        if not away.parameters or twin not in problem.configurations:
            continue
        compared += 1
        other = problem.index(twin)
        copied_L, host = weights_L / 20e9, 100e9 / 4
        np.testing.assert_allclose(
            costs.seconds_CL[c] - costs.seconds_CL[other], 3 * copied_L + added * weights_L / host, atol=1e-12
        )
        # In two parts the weights come for each of them; gradients leave and add up in the second.
        more_L2 = priced.parts_seconds_CL2[c] - priced.parts_seconds_CL2[other]
        np.testing.assert_allclose(more_L2[:, 0], copied_L, atol=1e-12)
        np.testing.assert_allclose(more_L2[:, 1], 2 * copied_L + added * weights_L / host, atol=1e-12)
        sums_L = 2 * gradients * copied_L * (configuration.data_parallel > 1)
        away_once_L = (gradients + 1 + (0 if masters else 1)) * copied_L
        np.testing.assert_allclose(
            costs.per_step_seconds_CL[c] - costs.per_step_seconds_CL[other], sums_L - away_once_L, atol=1e-12
        )
        np.testing.assert_allclose(costs.fixed_bytes_CL[c], buffers_L)
        np.testing.assert_allclose(
            costs.host_fixed_bytes_CL[c] - costs.host_fixed_bytes_CL[other], (1 + gradients) * weights_L
        )
        more_L = costs.temporary_bytes_CL[c] - costs.temporary_bytes_CL[other]
        assert (more_L <= 2 * weights_L + 1e-6).all() and (more_L[1:-1] > 0).all()
        assert (costs.activation_bytes_CL[c] == costs.activation_bytes_CL[other]).all()
    assert compared >= 8


def test_weights_are_fetched_where_nothing_else_fits_or_they_are_named(tmp_path: Path) -> None:
    one_each = replace(KEPT, offload=OFFLOADS, max_data_parallel=1, max_tensor_parallel=1)

    def fetching(memory: str, parallelism: Parallelism) -> tuple[bool, bool]:
        """Whether it is considered, and whether the plan has it."""
        asked = request(cluster(tmp_path, ROOMY, memory, count=2), tmp_path, parallelism, WIDE)
        considered = Prices(asked).priced(8).problem.configurations
        planned = stages(asked.cluster, tmp_path, parallelism, WIDE)
        return any(one.offload.parameters for one in considered), any(one.offload.parameters for one in planned)

    assert fetching("20 MiB", one_each) == (True, True)
    assert fetching("28 MiB", one_each) == (False, False)
    assert fetching("28 MiB", replace(one_each, offload=(*OFFLOADS, Offload()))) == (True, False)
    for host, parallelism in (
        (ROOMY, replace(one_each, offload=tuple(one for one in OFFLOADS if not one.parameters))),
        ("size: 16 MiB, bandwidth: 20 GB/s", one_each),
    ):
        asked = request(cluster(tmp_path, host, "20 MiB", count=2), tmp_path, parallelism, WIDE)
        answer = SEARCHES["exact"]().run(Prices(asked).priced(8).problem, budget_seconds=60)
        assert isinstance(answer, Infeasible)


@pytest.mark.parametrize("memory", ["20 MiB", "28 MiB", "1 GiB"])
def test_a_proof_that_leaves_fetched_weights_out_says_so(memory: str, tmp_path: Path) -> None:
    """A plan that fetches may be faster than all that were compared; where nothing has to be away, none is."""
    usual, named = (replace(KEPT, offload=offload) for offload in (OFFLOADS, (*OFFLOADS, Offload())))
    asked = request(cluster(tmp_path, ROOMY, memory, count=2), tmp_path, usual, WIDE)

    def considered(parallelism: Parallelism) -> tuple[bool, bool, bool]:
        """Whether weights may be away, whether anything may, and whether the proof is said to leave weights out."""
        choice = Planner().plan(replace(asked, parallelism=parallelism, searches=("exact",)))
        away = [one.offload for priced in choice.problems for one in priced.problem.configurations if one.offload]
        left_out = "where weights are in their node's memory only if" in what_is_proved(choice)
        assert left_out == ("where weights are in their node's memory only if" in within(choice))
        return any(one.parameters for one in away), bool(away), left_out

    fetched, away, left_out = considered(usual)
    assert left_out == (away and not fetched) == (memory == "28 MiB")
    assert not considered(named)[2]


@pytest.mark.parametrize("away", [WEIGHTS, ALL], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_planned_holds_what_is_allocated(recompute: bool, away: Offload, tmp_path: Path) -> None:
    """On a CPU device and node are one memory: the sum of both plans, against the allocator's peak of a training."""
    workload = WIDE.model_copy(update={"batch_size": 8, "num_microbatches": 4})
    one = StageConfiguration("Small", recompute=recompute, offload=away)
    only = Parallelism(only=(one,))
    asked = PlanRequest(workload, cluster(tmp_path, ROOMY, count=1), tmp_path / "db", only, microbatches=(4,))
    priced = Prices(asked).priced(4)
    costs, count = priced.problem.costs, priced.problem.costs.num_layers
    _, inputs, targets = next(iter(Reader(workload, range(1), None)))

    def work() -> None:
        module = build_layers(workload, Draw(), CPU, recompute=recompute, offload=away)
        optimizer, executor = make_optimizer(workload.optimizer, module.parameters()), WholeModel(module, workload)
        for step in range(2):
            optimizer.zero_grad(set_to_none=False)
            executor(step, inputs, targets)
            optimizer.step()

    real = allocator_peak_bytes(work)
    planned = costs.peak_bytes(0, count, 0, 1) + priced.away(Stage(0, count, one), 1).host_bytes
    assert real <= planned <= 1.1 * real
