"""Virtual workers, planned: devices divided once, examples shared out as well as can be, sums as formulas have them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dejavu.binding import VirtualWorker, bind_in_order
from dejavu.cluster import Cluster, load_cluster
from dejavu.cost.collectives.costs import CollectiveCosts
from dejavu.foundation.errors import InputError
from dejavu.foundation.units import format_seconds
from dejavu.graphs.capture import capture
from dejavu.launch.preflight import check_plan, check_spreading
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest, Prices
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.layout import World
from dejavu.virtual_workers import NoTeam, SharedSums, Team, Teams, balanced, divisions, team_tables, what_a_team_yields
from dejavu.virtual_workers.shares import MOST_UNITS, num_units
from dejavu.virtual_workers.team import together
from dejavu.workload import Workload
from dejavu.workload.data_settings import SyntheticSettings
from dejavu.workload.slices import slice_lengths
from flows.launching import job_to_launch
from tests.launching import DRAW

EXAMPLES = sorted(Path("examples/clusters").glob("*.yaml"))
MIXED = """
name: mixed
nodes:
  - {name: new, count: 2, devices: {type: A100-SXM4-80GB, count: 4}, link: {bandwidth: 200 GB/s, latency: 5 us}}
  - name: old
    count: 2
    devices: {type: T4, count: 2}
    link: {bandwidth: 10 GB/s, latency: 8 us}
    host_memory: {size: 64 GiB, bandwidth: 8 GB/s}
links:
  default: {bandwidth: 10 Gbit/s, latency: 25 us}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Cluster:
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    return load_cluster(path)


def clusters(mixed: Cluster) -> list[Cluster]:
    return [mixed, *(load_cluster(path) for path in EXAMPLES)]


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_worker_takes_as_little_as_by_any_shares(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_workers, units = int(random.integers(1, 5)), int(random.integers(1, 9))
    times = (
        random.uniform(0.1, 5.0, (num_workers, units))
        if seed % 2
        else random.uniform(0.1, 1.0, (num_workers, 1)) * np.arange(1, units + 1)
    )
    times[random.random(times.shape) < 0.2 * (seed % 3)] = np.inf
    every = [
        max(times[v, k - 1] for v, k in enumerate(shares))
        for shares in itertools.product(range(1, units + 1), repeat=num_workers)
        if sum(shares) == units
    ]
    found = balanced(times.tolist())
    if found is None:
        assert not np.isfinite(min(every, default=np.inf))
        return
    assert sum(found) == units and min(found) >= 1
    assert max(times[v, k - 1] for v, k in enumerate(found)) == min(every)


def test_a_batch_is_shared_out_in_equal_units() -> None:
    for examples in range(1, 300):
        units = num_units(examples)
        assert examples % units == 0 and units <= MOST_UNITS
        assert all(examples % more for more in range(units + 1, min(MOST_UNITS, examples) + 1))


def test_every_device_has_one_worker(mixed: Cluster) -> None:
    for cluster in clusters(mixed):
        every = set(cluster.devices())
        for division in divisions(cluster):
            seen = []
            for worker in division.workers:
                own = worker.cluster(cluster)
                assert dict(worker.counts(cluster)) == own.device_counts
                for device in own.devices():
                    actual = worker.actual(device, cluster)
                    assert actual.type_name == device.type_name and actual.host == device.host
                    seen.append(actual)
                for a, b in itertools.combinations(own.devices(), 2):
                    link = cluster.link(worker.actual(a, cluster), worker.actual(b, cluster))
                    assert own.link(a, b).latency_seconds == link.latency_seconds
                    assert own.link(a, b).bytes_per_second <= link.bytes_per_second
            assert len(seen) == len(set(seen)) and set(seen) == every, division.name


def test_divisions_are_those_of_hetpipe(mixed: Cluster) -> None:
    found = {division.name: division for division in divisions(mixed)}
    assert {"a node each", "a group of nodes each", "fast nodes paired with slow ones"} <= set(found)
    assert [dict(one.counts(mixed)) for one in found["fast nodes paired with slow ones"].workers] == [
        {"A100-SXM4-80GB": 4, "T4": 2}
    ] * 2
    four = found["4 equal parts of all nodes"].workers
    assert [dict(one.counts(mixed)) for one in four] == [{"A100-SXM4-80GB": 2, "T4": 1}] * 4
    # Half a node has half of its network card, and of its memory.
    own, link = four[0].cluster(mixed), mixed.links_between["new", "old"]
    assert own.links_between["new", "old"].bytes_per_second == link.bytes_per_second / 2
    memory = own.group("old").host_memory
    assert memory is not None and memory.size_bytes == 32 * 2**30


MLP = Workload(model="mlp", data="digits", batch_size=96, num_microbatches=1, num_steps=2)


def test_sums_take_what_the_collectives_take(mixed: Cluster, tmp_path: Path) -> None:
    """One stage each: one all-reduce of everything; two stages on a node: both share its network card."""
    rows, graph = ProfileDatabase(tmp_path / "db").snapshot(), capture(MLP, "cuda")
    (division,) = (one for one in divisions(mixed) if one.name == "a group of nodes each")
    sums, costs = SharedSums(mixed, rows, graph), CollectiveCosts(mixed, rows)
    L = len(graph.layers)

    def team(cuts: tuple[int, ...]) -> World:
        from dataclasses import replace

        from benchmarks.pipeline.plans import by_hand, one_device

        workers = []
        for worker, examples in zip(division.workers, (64, 32), strict=True):
            own = worker.cluster(mixed)
            way = replace(one_device(), device_type=next(iter(own.device_counts)))
            plan = by_hand("1f1b", (0, *cuts, L), [way] * (1 + len(cuts)), 2).plan
            workers.append((worker, bind_in_order(plan, own), examples))
        return World.of(together(mixed, workers), MLP)

    new, old = ([device for device in mixed.devices() if device.group == name] for name in ("new", "old"))

    def seconds(layers: slice, k: int) -> float:
        size = sum(layer.parameter_bytes for layer in graph.layers[layers])
        return costs.estimate("all_reduce", size, [[new[k], old[k]]], MLP.dtype).seconds

    assert sums.seconds(team(())) == pytest.approx(seconds(slice(0, L), 0))
    assert sums.seconds(team((2,))) == pytest.approx(seconds(slice(0, 2), 0) + seconds(slice(2, L), 1))


@pytest.fixture(scope="module")
def planned() -> Team:
    cluster = load_cluster(Path("examples/clusters/two-generations.yaml"))
    planner = Planner()
    request = PlanRequest(MLP, cluster, searches=("exact",), budget_seconds=1.0)
    team = Teams(planner.plan(request), planner).best()
    assert isinstance(team, Team)
    return team


def test_a_team_is_a_whole_training(planned: Team) -> None:
    workload, binding = planned.workload, planned.binding
    assert sum(worker.num_examples for worker in planned.workers) == workload.run_size
    assert planned.step_seconds == max(one.seconds for one in planned.workers) + planned.sum_seconds
    assert len({placed.device for placed in binding.placements}) == len(binding.placements)
    assert binding.workers == tuple(
        VirtualWorker(b.plan, w.num_examples) for b, w in zip(binding.pipelines, planned.workers, strict=True)
    )
    job = TrainingJob(workload.model_copy(update={"num_microbatches": 1}), binding, DRAW, None, 0, 2, folder="")
    check_plan(job)
    check_spreading(job)
    assert planned.sum_seconds == SharedSums(
        planned.cluster, planned.alone.prices.rows, planned.alone.prices.graph_of(planned.alone.plan.num_microbatches)
    ).seconds(World.of(binding, workload))


def test_its_sentences_say_what_is_predicted(planned: Team) -> None:
    said = what_a_team_yields(planned)
    for seconds in (planned.step_seconds, planned.sum_seconds, planned.alone.simulated_seconds):
        assert format_seconds(seconds) in said
    assert "None" not in said and planned.to_dict()["workers"][0]["examples"] == planned.workers[0].num_examples


GPT = Workload(
    model="gpt",
    model_options={"num_blocks": 2, "width": 16, "num_heads": 2},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=32),
    sequence_length=16,
    batch_size=8,
    num_microbatches=2,
    schedule="1f1b",
    num_steps=2,
)
TWO_TYPES = Path("examples/clusters/two-generations.yaml")


@pytest.fixture(scope="module")
def whole() -> Team:
    return _team_of(GPT.model_copy(update={"slices": 1}))


def _team_of(workload: Workload) -> Team:
    planner = Planner()
    request = PlanRequest(workload, load_cluster(TWO_TYPES), searches=("exact",), budget_seconds=1.0)
    team = Teams(planner.plan(request), planner).best()
    assert isinstance(team, Team)
    return team


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_examples_that_are_said_are_those_of_the_whole_batch(accumulate: int) -> None:
    """Also where a step is several runs of the schedule: on the screen, in JSON, and of divisions in quick plans."""
    team = _team_of(GPT.model_copy(update={"accumulate": accumulate, "num_microbatches": 1, "batch_size": 16}))
    written = team.to_dict()
    assert sum(one["examples"] for one in written["workers"]) == 16
    assert {sum(one["examples"]) for one in written["tried"] if one["examples"]} == {16}
    divided, workers = team_tables(team)
    shares = [str(cell) for cell in divided.columns[2].cells if str(cell) != "–"]
    assert {sum(map(int, said.split(", "))) for said in shares} == {16}
    assert sum(int(str(cell)) for cell in workers.columns[2].cells) == 16
    counts = [one.choice.plan.num_microbatches for one in team.workers]
    runs = "" if accumulate == 1 else f"{accumulate} × "
    assert list(workers.columns[3].cells) == [f"{runs}{count}" for count in counts]


@pytest.mark.parametrize("slices", [2, (12, 4)])
def test_workers_run_whole_sequences_whatever_slices_the_one_pipeline_has(
    slices: int | tuple[int, ...], whole: Team
) -> None:
    found = _team_of(GPT.model_copy(update={"slices": slices}))
    assert found.alone.plan.slices, "or nothing is asked"
    assert [one.choice.plan.slices for one in found.workers] == [()] * len(found.workers)
    assert found.step_seconds == whole.step_seconds and found.tried == whole.tried


def test_a_job_of_virtual_workers_is_of_whole_sequences(tmp_path: Path) -> None:
    asked = GPT.model_dump(mode="json", include=GPT.model_fields_set) | {"slices": 2}
    (tmp_path / "w.yaml").write_text(json.dumps(asked))
    job = job_to_launch(tmp_path / "job", tmp_path / "w.yaml", TWO_TYPES, 1.0, "always")
    assert job.binding.workers and slice_lengths(job.workload) == () and not job.workload.both_ways


@pytest.mark.parametrize("told", [{}, {"schedules": ("chimera",)}])
def test_there_are_no_virtual_workers_of_two_copies_each(told: dict[str, tuple[str, ...]]) -> None:
    given = GPT.model_dump(include=GPT.model_fields_set) | {"schedule": "auto" if told else "chimera"}
    workload = Workload.model_validate(given)
    planner = Planner()
    request = PlanRequest(workload, load_cluster(TWO_TYPES), searches=("exact",), budget_seconds=0.5, **told)
    found = Teams(planner.plan(request), planner).best()
    assert isinstance(found, NoTeam) and "one copy of the model" in what_a_team_yields(found)


def test_one_device_is_no_team() -> None:
    path = Path("examples/clusters/two-generations.yaml")
    one = next(
        worker
        for division in divisions(load_cluster(path))
        if division.name == "a device each"
        for worker in division.workers
    )
    cluster = one.cluster(load_cluster(path))
    planner = Planner()
    choice = planner.plan(PlanRequest(MLP, cluster, searches=("exact",), microbatches=(1,), budget_seconds=0.5))
    found = Teams(choice, planner).best()
    assert found == NoTeam(())


def test_a_degree_that_no_stage_can_have_is_said() -> None:
    cluster = load_cluster(Path("examples/clusters/two-generations.yaml"))
    wanted = Parallelism(min_tensor_parallel=2, max_tensor_parallel=2)
    with pytest.raises(InputError, match=r"no stage can have 2 tensor-parallel devices .* wanted a lower"):
        Prices(PlanRequest(Workload(model="cnn", data="digits"), cluster, parallelism=wanted)).priced(1)
