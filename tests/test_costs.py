"""Costs, the problem they pose, and the binding, by families and by brute force."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from benchmarks.cost.stage_memory import fixed_bytes
from dejavu.cluster import Cluster, catalogue, load_cluster
from dejavu.cluster.islands import Island
from dejavu.cost import SOURCES, CostError, cost_table, sources, transfer_cost
from dejavu.cost.collectives.inside_stages import between_link
from dejavu.cost.collectives.transfer import fastest_link, fit
from dejavu.cost.memory import example_bytes, message_bytes
from dejavu.cost.memory.layers import layer_activation_bytes, layer_temporary_bytes
from dejavu.cost.sources.measured import subject_of
from dejavu.cost.sources.predicted import Predicted, layer_kernels
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.parallelism import Parallelism
from dejavu.planning.prices import price_workload
from dejavu.plans import Plan, Stage, price
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.simulation import simulate_plan
from dejavu.testing.cost_sources import CASES as EVERY_CASE
from dejavu.testing.cost_sources import evidence, questions
from dejavu.workload import OptimizerSettings, Workload
from tests.conftest import some
from tests.rows import row

ADAM = OptimizerSettings()
EXAMPLES = sorted((Path(__file__).parents[1] / "examples" / "clusters").glob("*.yaml"))


def timed(device_type: str, seconds: float) -> list[Measurement]:
    return [
        row(
            kind="transfer",
            subject="s",
            device_type=device_type,
            peer_device_type=device_type,
            size_bytes=size,
            seconds=seconds,
        )
        for size in (1000, 2000)
    ]


@pytest.fixture
def graph(tiny: Workload) -> Graph:
    return capture(tiny)


@pytest.fixture
def empty(tmp_path: Path) -> ProfileDatabase:
    return ProfileDatabase(tmp_path / "profiles_db")


def cluster_from(tmp_path: Path, text: str) -> Cluster:
    (tmp_path / "cluster.yaml").write_text(text)
    return load_cluster(tmp_path / "cluster.yaml")


def on_one_device(workload: Workload, cluster: Cluster, database: ProfileDatabase) -> PricedProblem:
    return price_workload(workload, cluster, database.path, Parallelism.one_device())


def measure(graph: Graph, device_type: str, seconds: float) -> list[Measurement]:
    return [
        row(
            kind="layer",
            subject=subject_of(signature, direction, ADAM),
            device_type=device_type,
            direction=direction,
            microbatch_size=graph.microbatch_size,
            seconds=seconds,
        )
        for signature in {layer.signature for layer in graph.layers}
        for direction in ("forward", "backward", "optimizer")
    ]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.__name__)
def test_every_source_has_a_sound_number_or_none(name: str, case: Callable, tmp_path: Path) -> None:
    known = evidence(tmp_path)
    case(SOURCES[name], known)
    source = SOURCES[name](known)
    assert any(source.estimate(*question) is not None for question in questions())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_cluster_can_be_priced_and_posed(
    path: Path, graph: Graph, tiny: Workload, empty: ProfileDatabase
) -> None:
    cluster = load_cluster(path)
    table = cost_table(graph, cluster, sources(empty, ADAM))
    assert table.num_known == 0
    assert table.num_prices == 3 * len(graph.layers) * len(cluster.device_counts)
    for grid in table.grids.values():
        assert (grid.low_seconds_LD <= grid.seconds_LD).all() and (grid.seconds_LD <= grid.high_seconds_LD).all()
    assert (table.forward.low_seconds_LD < table.forward.high_seconds_LD).all() and (table.forward.seconds_LD > 0).all()
    assert on_one_device(tiny, cluster, empty).problem.device_counts == cluster.device_counts


def test_a_measurement_overrides_a_prediction_and_says_so(graph: Graph, empty: ProfileDatabase, tmp_path: Path) -> None:
    cluster = cluster_from(
        tmp_path,
        "nodes:\n"
        "- {name: a, count: 1, devices: {type: T4, count: 2}}\n"
        "- {name: b, count: 1, devices: {type: L4, count: 2}}\n"
        "links: {default: {bandwidth: 25 Gbit/s}}\n",
    )
    empty.append(measure(graph, "T4", 0.00125))
    table = cost_table(graph, cluster, sources(empty, ADAM))
    assert table.device_types == ("T4", "L4")
    for grid in table.grids.values():
        assert set(grid.source_LD[:, 0]) == {"measured"} and "measured" not in grid.source_LD[:, 1]
        assert (grid.seconds_LD[:, 0] == 0.00125).all()
    assert table.num_known == 3 * len(graph.layers)
    assert table.to_arrow(graph).num_rows == 2 * len(graph.layers)


def test_another_optimizer_s_times_are_not_taken(graph: Graph, empty: ProfileDatabase) -> None:
    empty.append(measure(graph, "T4", 0.00125))
    sgd = OptimizerSettings(name="sgd")
    device = catalogue()["T4"]
    for layer in graph.layers:
        assert sources(empty, ADAM)[0].estimate(layer, "optimizer", graph, device) is not None
        assert sources(empty, sgd)[0].estimate(layer, "optimizer", graph, device) is None
        adam, plain = (
            sources(empty, settings)[-1].estimate(layer, "optimizer", graph, device) for settings in (ADAM, sgd)
        )
        assert adam is not None and plain is not None and adam.seconds >= plain.seconds
        passes = [
            Predicted(empty, one).prices(layer_kernels(layer, "optimizer", graph.dtype, one), device)
            for one in (ADAM, sgd)
        ]
        assert passes[0].seconds_K.sum() > passes[1].seconds_K.sum()


def test_other_microbatches_and_dtypes_are_not_mistaken_for_it(tiny: Workload, empty: ProfileDatabase) -> None:
    empty.append(measure(capture(tiny), "T4", 0.125))
    known = sources(empty, ADAM)[0]
    for change in ({"batch_size": 16}, {"dtype": "bfloat16"}):
        other = capture(tiny.model_copy(update=change))
        assert all(known.estimate(layer, "forward", other, catalogue()["T4"]) is None for layer in other.layers)


@pytest.mark.parametrize("seconds", [2e-7, 1e4])
def test_an_absurd_measurement_is_not_used_and_named(
    seconds: float, tiny: Workload, empty: ProfileDatabase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = capture(tiny)
    empty.append(measure(graph, "T4", seconds))
    cluster = cluster_from(tmp_path, "nodes: [{name: a, count: 1, devices: {type: T4, count: 2}}]\n")
    found = cost_table(graph, cluster, sources(empty, ADAM))
    assert found.num_known == 0
    assert f"was measured at {seconds:.3g} s on 2026-01-01 00:00, expected between" in caplog.text


def test_an_absent_number_is_an_error_that_says_what_to_do(
    tiny: Workload, empty: ProfileDatabase, tmp_path: Path
) -> None:
    cluster = cluster_from(tmp_path, "nodes: [{name: a, count: 1, devices: {type: V100-SXM2-16GB, count: 2}}]\n")
    graph = capture(tiny.model_copy(update={"dtype": "bfloat16"}))  # a V100 has no bfloat16
    said = r"layer 'embedding' on 'V100-SXM2-16GB' in bfloat16, with microbatches of 2: .*`dejavu .*--microbatches 2`"
    with pytest.raises(CostError, match=said):
        cost_table(graph, cluster, sources(empty, ADAM))


KNOWN = [known for n in (1, 2, 3) for known in itertools.combinations(("float32", "float16", "bfloat16"), n)]


@pytest.mark.parametrize(
    "asked", some([{"dtype": "bfloat16"}, {"dtype": "float32"}, {"mixed_precision": True}], [{"mixed_precision": True}])
)
def test_what_an_unknown_peak_wants_can_be_done(
    asked: dict[str, object], tiny: Workload, empty: ProfileDatabase, tmp_path: Path
) -> None:
    """The line is written where the sentence says, or another workload priced: then there is a number."""

    def priced(told: dict[str, object], devices: str, name: str) -> str:
        node = f"nodes: [{{name: a, count: 1, devices: {{type: {name}, count: 1}}}}]\n"
        cluster = cluster_from(tmp_path, node + devices)
        try:
            cost_table(capture(tiny.model_copy(update=told)), cluster, sources(empty, ADAM))
        except CostError as error:
            return str(error)
        return ""

    def own(known: Sequence[str]) -> str:
        return (
            "devices:\n  Own: {kind: cuda, memory: 16 GiB, bandwidth: 300 GB/s"
            + "".join(f", {one}: 9 TFLOP/s" for one in known)
            + "}\n"
        )

    num_refused = 0
    for known in [*KNOWN, None]:  # None: the catalogue's T4
        name, devices = ("T4", "") if known is None else ("Own", own(known))
        said = priced(asked, devices, name)
        if not said:
            continue
        num_refused += 1
        peaks = list(known or ("float32", "float16"))
        assert f"known are {', '.join(peaks)}; wanted " in said
        line, others = re.search(r"`(\w+): … TFLOP/s`", said), re.search(r"a workload in (.*) \(dtype", said)
        assert line and ("at 'Own' under `devices:`" if known else "a device of another name with") in said
        now = priced(asked, own([*peaks, line[1]]), "Own")
        assert now != said and (not now or "mixed_precision" in asked)  # which needs two
        assert (others is None) == (not {"float32", "bfloat16"} & set(peaks))
        for dtype in others[1].split(" or ") if others else ():
            assert not priced({"dtype": dtype}, devices, name)
    assert num_refused > 2


def test_a_faster_device_is_predicted_faster_but_never_than_physics_allows(empty: ProfileDatabase) -> None:
    large = {"num_blocks": 1, "width": 1024, "num_heads": 16}
    graph = capture(Workload(model_options=large, sequence_length=512, batch_size=32, num_microbatches=4))
    slow, fast = catalogue()["T4"], catalogue()["A100-SXM4-80GB"]
    predicted = sources(empty, ADAM)[-1]
    for direction in ("forward", "backward"):
        for layer in graph.layers:
            a, b = (predicted.estimate(layer, direction, graph, device) for device in (slow, fast))
            assert a is not None and b is not None
            assert b.seconds <= a.seconds
            assert b.seconds >= layer.flops(direction) / fast.peak_flops_per_second["float32"]


def test_latency_and_bandwidth_are_found_again(empty: ProfileDatabase) -> None:
    rows = [
        row(kind="transfer", subject="s", device_type="c", peer_device_type="c", size_bytes=n, seconds=5e-5 + n * 2e-10)
        for n in (4096, 65536, 2**19, 2**22)
    ]
    found = fit(rows)
    assert found.latency_seconds == pytest.approx(5e-5)
    assert found.seconds_per_byte == pytest.approx(2e-10)
    assert found.source == "measured"


def test_what_a_person_declared_is_kept(empty: ProfileDatabase, tmp_path: Path) -> None:
    declared = cluster_from(
        tmp_path,
        "nodes: [{name: a, count: 1, devices: {type: T4, count: 2}, link: {bandwidth: 8 Gbit/s, latency: 3 us}}]\n",
    )
    empty.append(timed("T4", 1.0))
    cost = transfer_cost(declared, empty, Island("T4"), Island("T4"))
    assert (cost.latency_seconds, cost.seconds_per_byte, cost.source) == (3e-6, 1e-9, "declared")


def test_a_link_inside_a_node_is_never_taken_for_one_between_nodes(empty: ProfileDatabase, tmp_path: Path) -> None:
    """Nor does a missing latency make a declared bandwidth a guess."""
    empty.append(timed("T4", 1e-6))
    apart = cluster_from(
        tmp_path,
        "nodes:\n- {name: a, count: 4, devices: {type: T4, count: 1}}\nlinks: {default: {bandwidth: 1 Gbit/s}}\n",
    )
    assert transfer_cost(apart, empty, Island("T4"), Island("T4")).seconds_per_byte == pytest.approx(8e-9)
    mixed = cluster_from(
        tmp_path,
        "nodes:\n- name: a\n  count: 2\n"
        "  devices: [{type: T4, count: 1}, {type: L4, count: 1}]\n"
        "  link: {bandwidth: 100 GB/s, latency: 1 us}\n"
        "links: {default: {bandwidth: 1 Gbit/s, latency: 1 us}}\n",
    )
    assert transfer_cost(mixed, empty, Island("T4"), Island("T4")).seconds_per_byte == pytest.approx(8e-9)
    assert transfer_cost(mixed, empty, Island("T4"), Island("L4")).seconds_per_byte == pytest.approx(1e-11)


@pytest.mark.parametrize("seed", range(8))
def test_links_of_two_types_are_the_fastest_they_have_whatever_the_order(seed: int, tmp_path: Path) -> None:
    """A type may be in several groups of nodes; neither the sender's first one decides nor the file's order."""
    random = Random(seed)
    groups = [(f"g{k}", random.choice(("T4", "L4", "P4")), random.randint(1, 3)) for k in range(random.randint(2, 5))]
    speeds = {
        (a, b): random.choice((1, 10, 100))
        for (a, _, count), (b, _, _) in itertools.combinations_with_replacement(groups, 2)
        if a != b or count > 1
    }
    pairs = [
        f"  - {{between: [{a}, {b}], bandwidth: {speed} Gbit/s, latency: 9 us}}" for (a, b), speed in speeds.items()
    ]

    def listed(order: Sequence[tuple[str, str, int]]) -> Cluster:
        nodes = [
            f"  - {{name: {name}, count: {count}, devices: {{type: {of}, count: 1}}}}" for name, of, count in order
        ]
        return cluster_from(tmp_path, "\n".join(("nodes:", *nodes, "links:", "  pairs:", *pairs, "")))

    cluster, turned = listed(groups), listed(groups[::-1])
    for a, b in itertools.product(cluster.device_counts, repeat=2):
        devices = [[one for one in cluster.devices() if one.type_name == name] for name in (a, b)]
        links = [cluster.link(x, y) for x, y in itertools.product(*devices) if x != y]
        if links:
            for one in (cluster, turned):
                assert fastest_link(one, Island(a), Island(b)) == fastest_link(one, Island(b), Island(a))
                assert fastest_link(one, Island(a), Island(b)).bytes_per_second == max(
                    link.bytes_per_second for link in links
                )
                if a == b:  # inside a stage: every collective waits for the slowest
                    assert between_link(one, Island(a)).bytes_per_second == min(link.bytes_per_second for link in links)


def test_adam_keeps_two_moments() -> None:
    assert fixed_bytes(100, OptimizerSettings(name="adamw")) == 400
    assert fixed_bytes(100, OptimizerSettings(name="sgd")) == 200


def test_the_problem_s_memory_is_the_layers_sum(tiny: Workload, empty: ProfileDatabase) -> None:
    cluster = load_cluster(EXAMPLES[0])
    graph, problem = capture(tiny, cluster.kind), on_one_device(tiny, cluster, empty).problem
    layers = graph.layers[1:3]
    held = sum(4 * layer.parameter_bytes + 2 * layer_activation_bytes(layer) for layer in layers)
    largest = max(layer_temporary_bytes(layer, tiny.optimizer) for layer in layers) + example_bytes(tiny)
    cuts = (graph.layers[0].output_bytes, graph.layers[2].output_bytes)
    messages = sum(message_bytes(cut, tiny.num_microbatches) for cut in cuts)
    assert problem.costs.peak_bytes(1, 3, 0, 2) == pytest.approx(held + largest + messages)


def test_the_price_is_close_to_what_the_simulator_plays(graph: Graph, tiny: Workload, empty: ProfileDatabase) -> None:
    """Where messages are cheap and the same stage bounds forward and backward; elsewhere only simulation tells."""
    priced = on_one_device(tiny, load_cluster(EXAMPLES[0]), empty)
    device = priced.problem.configurations[0]
    for cut in range(1, len(graph.layers)):
        plan = Plan((Stage(0, cut, device), Stage(cut, len(graph.layers), device)), "1f1b", tiny.num_microbatches)
        parts = price(priced.problem, plan)
        simulated = simulate_plan(priced, plan)
        assert simulated.step_seconds == pytest.approx(parts.step_seconds, rel=0.15)


@pytest.mark.parametrize("frozen", some([(), (0,), (2,), (0, 2), (2, 3)], [(), (0, 2)]))
@pytest.mark.parametrize("spread", [Parallelism.one_device(), Parallelism()], ids=["one device", "several"])
def test_what_is_not_trained_has_no_gradient_and_no_optimizer(
    frozen: tuple[int, ...], spread: Parallelism, empty: ProfileDatabase
) -> None:
    """Nor a backward pass, where nothing that is trained comes before it."""
    workload = Workload(
        model="tests.own_models:with_frozen", model_options={"layers": list(frozen)}, data="synthetic",
        synthetic={"num_classes": 256}, sequence_length=8, batch_size=8, num_microbatches=2,
    )  # fmt: skip
    cluster = load_cluster("examples/clusters/4x8-v100.yaml")
    priced = price_workload(workload, cluster, empty.path, spread)
    assert (len(priced.problem.configurations) > 1) == (spread != Parallelism.one_device())
    layers, costs = capture(workload, "cuda").layers, priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    for c, one in enumerate(priced.problem.configurations):
        whole = 4 if one.zero_level == 0 and one.tensor_parallel == 1 and not one.offload else None
        for k, layer in enumerate(layers):
            comes_back = (layer.parameter_bytes > 0 and k not in frozen) or min({0, 2, 3} - set(frozen)) < k
            if not one.zero_level:  # what is sharded is gathered, trained or not
                assert (priced.backward_seconds_CL[c, k] > 0) == comes_back
                assert (costs.per_step_seconds_CL[c, k] > 0) == (layer.parameter_bytes > 0 and k not in frozen)
            if whole is not None:
                times = 1 if k in frozen else whole
                assert costs.fixed_bytes_CL[c, k] == times * layer.parameter_bytes
