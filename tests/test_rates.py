"""Samples, tokens and the share of the peak that a predicted step means."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dejavu.cluster import Cluster, load_cluster
from dejavu.cluster.islands import Island
from dejavu.cluster.meshes import parts_of
from dejavu.cost.rates import rates
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest
from dejavu.planning.plan_json import choice_to_dict
from dejavu.planning.sentences import short, what_is_masked, what_it_yields
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.workload import SyntheticSettings, Workload
from tests.conftest import some

CLUSTER = load_cluster(Path(__file__).parents[1] / "examples" / "clusters" / "8x8-h200.yaml")
(KIND,) = CLUSTER.device_types
GPT = Workload(
    model="gpt",
    model_options={"num_blocks": 8, "width": 512, "num_heads": 8},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=1000),
    sequence_length=256,
    batch_size=16,
    num_microbatches=4,
    dtype="bfloat16",
)


def plan_on(devices: int, layers: int) -> Plan:
    return Plan((Stage(0, layers, StageConfiguration(KIND, 1, devices, data_parallel=devices)),), "1f1b", 4)


def test_flops_of_a_transformer_are_six_for_each_weight_and_token() -> None:
    """And twelve for each layer, width and pair of tokens in attention (Kaplan et al., 2020; PaLM, appendix B)."""
    graph = capture(GPT, "cuda")
    found = rates(GPT, graph, CLUSTER, plan_on(2, len(graph.layers)), 2.0)
    tokens, width, blocks = 16 * 256, 512, 8
    weights = 12 * width**2 * blocks + 1000 * width  # tables that are only looked up do not multiply
    attention = 12 * blocks * width * 256
    peak = 2 * CLUSTER.device_types[KIND].peak_flops_per_second["bfloat16"]
    assert found.utilization == pytest.approx((6 * weights + attention) * tokens / 2.0 / peak, rel=1e-6)
    assert (found.samples_per_second, found.tokens_per_second, found.dtype) == (8.0, 8.0 * 256, "bfloat16")


@pytest.mark.parametrize("length", [256, 16384])
def test_a_choice_says_where_mfu_counts_much_that_is_never_computed(length: int, tmp_path: Path) -> None:
    """Half of the scores of causal attention: with long texts MFU may be above 100 %."""
    workload = GPT.model_copy(update={"sequence_length": length, "batch_size": 4})
    options = {"searches": ("uniform",), "schedules": ("1f1b",), "microbatches": (1,)}
    choice = Planner().plan(PlanRequest(workload, CLUSTER, tmp_path, **options))
    weights, attention = 6 * (12 * 512**2 * 8 + 1000 * 512), 12 * 8 * 512 * length
    part, shown = attention / 2 / (weights + attention), choice.rates.utilization
    assert choice.rates.masked_part == pytest.approx(part, rel=1e-6) and shown is not None
    assert choice_to_dict(choice)["masked_flops_percent"] == pytest.approx(100 * part)
    said = what_is_masked(choice)
    assert (f"{part:.0%}" in said and f"{shown * (1 - part):.1%}" in said) if length > 256 else said == ""


@pytest.mark.parametrize("factor", [2, 5])
def test_rates_follow_steps_and_devices(factor: int) -> None:
    graph = capture(GPT, "cuda")
    one = rates(GPT, graph, CLUSTER, plan_on(1, len(graph.layers)), 1.0)
    slower = rates(GPT, graph, CLUSTER, plan_on(1, len(graph.layers)), float(factor))
    spread = rates(GPT, graph, CLUSTER, plan_on(factor, len(graph.layers)), 1.0)
    assert one.utilization is not None and slower.utilization is not None and spread.utilization is not None
    assert one.utilization == pytest.approx(factor * slower.utilization) == pytest.approx(factor * spread.utilization)
    assert one.samples_per_second == spread.samples_per_second == factor * slower.samples_per_second


def test_what_has_no_rate_has_none() -> None:
    """Images are no tokens, and a peak that nobody knows has no share."""
    images = Workload(model="cnn", data="digits", batch_size=16, num_microbatches=4)
    graph = capture(images)
    unknown = replace(CLUSTER.device_types[KIND], peak_flops_per_second={})
    cluster = replace(CLUSTER, device_types={KIND: unknown})
    found = rates(images, graph, cluster, plan_on(1, len(graph.layers)), 1.0)
    assert (found.tokens_per_second, found.utilization) == (None, None)
    assert rates(images, graph, cluster, plan_on(1, len(graph.layers)), 0.0).samples_per_second == math.inf


def test_a_choice_says_its_rates(tmp_path: Path) -> None:
    choice = Planner().plan(PlanRequest(GPT, CLUSTER, tmp_path, searches=("exact",), budget_seconds=5.0))
    content = json.loads(json.dumps(choice_to_dict(choice), allow_nan=False))
    assert content["samples_per_second"] * choice.step_seconds == pytest.approx(16)
    assert content["tokens_per_second"] == pytest.approx(256 * content["samples_per_second"])
    assert 0 < content["model_flops_utilization_percent"] < 100
    said = what_it_yields(choice)
    assert f"{short(choice.rates.tokens_per_second or 0)} tokens/s" in said and "(MFU)" in said
    one = PlanRequest(
        GPT, CLUSTER, tmp_path, Parallelism.one_device(), ("exact",), schedules=("1f1b",), microbatches=(1,)
    )
    alone = Planner().plan(replace(one, budget_seconds=5.0))
    assert alone.chosen.num_devices == 1 and "of the bfloat16 peak of the device it uses (MFU)" in what_it_yields(alone)


@pytest.mark.parametrize(
    ("number", "written"),
    [(0.1234, "0.123"), (1.236, "1.24"), (12.34, "12.3"), (28434.0, "28,400"), (999.9, "1,000"), (math.inf, "inf")],
)
def test_numbers_have_three_digits(number: float, written: str) -> None:
    assert short(number) == written


PRICED = """
nodes:
- {{name: dear, count: 2, devices: {{type: A100-SXM4-80GB, count: 4}}, price: {dear}}}
- {{name: cheap, count: 2, devices: {{type: A100-SXM4-80GB, count: 2}}, price: {cheap}}}
- {{name: other, count: 1, devices: {{type: T4, count: 4}}{other}}}
links: {{default: {{bandwidth: 25 Gbit/s}}}}
"""


def priced(folder: Path, dear: str = "8 USD/hour", cheap: str = "3.50 USD/hour", other: str = "") -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(PRICED.format(dear=dear, cheap=cheap, other=other))
    return load_cluster(path)


@pytest.mark.parametrize(
    ("devices", "cost"),
    [(1, 3.5), (2, 3.5), (3, 7.0), (4, 7.0), (5, 15.0), (8, 15.0), (9, 23.0), (12, 23.0)],
)
def test_whole_nodes_are_paid_and_the_cheapest_of_equal_devices_first(
    devices: int, cost: float, tmp_path: Path
) -> None:
    cluster = priced(tmp_path)
    stages = tuple(Stage(k, k + 1, StageConfiguration("A100-SXM4-80GB")) for k in range(devices))
    graph = capture(GPT, "cuda")
    found = rates(GPT, graph, cluster, Plan(stages, "1f1b", 4), 2.0)
    assert found.cost == (pytest.approx(cost), "USD")
    tokens_per_hour = 3600 * 16 * 256 / 2.0
    assert found.cost_of_1e9_tokens == pytest.approx(cost / tokens_per_hour * 1e9)


@pytest.mark.parametrize("seed", some(range(12), range(4)))
def test_paid_are_as_many_nodes_as_hold_every_stage_in_one_piece(seed: int, tmp_path: Path) -> None:
    """Three stages of four devices each need three nodes of six, not two."""
    random = Random(seed)
    each, count = random.randint(2, 8), random.randint(2, 4)
    node = f"{{name: a, count: {count}, devices: {{type: T4, count: {each}}}, price: 1 USD/hour}}"
    path = tmp_path / "cluster.yaml"
    path.write_text(f"nodes: [{node}]\nlinks: {{default: {{bandwidth: 25 Gbit/s}}}}\n")
    cluster, graph = load_cluster(path), capture(GPT, "cuda")
    for _ in range(8):
        share = random.choice(parts_of(cluster))[Island("T4")]
        meshes, left = list[tuple[int, int]](), share.num_devices
        while (can := [one for one in share.meshes if one[0] * one[1] <= left]) and len(meshes) < 6:
            meshes.append(random.choice(can))
            left -= math.prod(meshes[-1])
        stages = tuple(
            Stage(k, k + 1, StageConfiguration("T4", nodes, width, data_parallel=nodes * width))
            for k, (nodes, width) in enumerate(meshes)
        )
        widths = [width for nodes, width in meshes for _ in range(nodes)]
        found = rates(GPT, graph, cluster, Plan(stages, "1f1b", 4), 1.0).cost
        assert found == (least_nodes(widths, each), "USD"), f"{meshes} on {count} nodes of {each}"


def least_nodes(widths: list[int], each: int) -> int:
    """On how few nodes of so many devices blocks fit: which loads nodes can have is listed block by block."""
    loads: set[tuple[int, ...]] = {()}
    for width in widths:
        loads = {
            tuple(sorted((*load[:k], load[k] + width, *load[k + 1 :])))
            for load in ((*one, 0) for one in loads)
            for k in range(len(load))
            if load[k] + width <= each
        }
        loads = {tuple(used for used in load if used) for load in loads}
    return min(map(len, loads))


def test_what_has_no_price_has_no_cost_and_a_price_changes_no_plan(tmp_path: Path) -> None:
    cluster = priced(tmp_path)
    stage = Stage(0, 3, StageConfiguration("T4"))
    assert rates(GPT, capture(GPT, "cuda"), cluster, Plan((stage,), "1f1b", 4), 1.0).cost is None
    dearer = priced(tmp_path, dear="80 USD/hour")
    assert dearer.fingerprint == cluster.fingerprint and dearer != cluster
    assert Cluster.from_dict(json.loads(json.dumps(dearer.to_dict()))) == dearer


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dear": "8"}, r"cluster.yaml:3:\d+: .*wanted a price such as '2.10 USD/hour'"),
        ({"dear": "-8 USD/hour"}, "is negative; wanted a price"),
        ({"dear": "0 USD/hour"}, "is zero; wanted a price"),
        ({"dear": "8 USD/day"}, "unknown unit 'USD/day'; wanted a price"),
        ({"dear": "8 EUR/hour"}, r"cluster.yaml:4:\d+: .*in USD, and an earlier one in EUR; wanted one currency"),
    ],
)
def test_what_is_no_price_is_refused_with_its_place(fields: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        priced(tmp_path, **fields)
