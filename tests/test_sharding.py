"""Shardings of operators: every way to split one is true, every solver finds the same, and known plans are found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.cost.sources.predicted import Predicted
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.graphs.dtensor import AVERAGED, REPLICATED, SUMMED
from dejavu.graphs.kernels import kernel_of
from dejavu.planning.shardings.prices import prices_on
from dejavu.profiles import ProfileDatabase
from dejavu.sharding.assembly import Sharded, assemble
from dejavu.sharding.capture import capture_operators
from dejavu.sharding.data_parallel import data_parallel
from dejavu.sharding.operator_graph import Node, OperatorGraph, TensorType
from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError
from dejavu.sharding.solvers.cut_tables import CutTable, Effort
from dejavu.sharding.solvers.elimination import Elimination
from dejavu.sharding.solvers.ilp import IntegerProgram
from dejavu.sharding.solvers.linkage import Linkage, Presolved
from dejavu.sharding.solvers.memory import NothingFitsError, WithinMemory
from dejavu.sharding.solvers.messages import bounds
from dejavu.sharding.solvers.pruning import pruned
from dejavu.sharding.solvers.repeated import Block, Repeated
from dejavu.sharding.strategies import Strategy, strategies_of, without_rule
from dejavu.workload import Workload
from tests.conftest import draws, some

DEVICE = "V100-SXM2-16GB"
TEXT = {"data": "synthetic", "synthetic": {"num_classes": 64}, "sequence_length": 16}
BATCH = {"batch_size": 8, "num_microbatches": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", "model_options": {"num_blocks": 1, "width": 32, "num_heads": 4}, **TEXT},
    "bert": {"model": "bert", "model_options": {"num_blocks": 1, "width": 32, "num_heads": 4}, **TEXT},
    "llama": {"model": "llama", "model_options": {"num_blocks": 1, "width": 32, "num_kv_heads": 4}, **TEXT},
    "t5": {
        "model": "t5",
        "model_options": {"num_blocks": 1, "width": 32, "num_heads": 4, "head_width": 8, "feedforward": 64},
        **TEXT,
    },
    "mixtral": {"model": "mixtral", "model_options": {"num_blocks": 1, "width": 32, "num_kv_heads": 4}, **TEXT},
    "cnn": {"model": "cnn", "model_options": {"num_blocks": 2, "width": 8}, "data": "digits"},
    "mlp": {"model": "mlp", "data": "digits"},
}
every_model = pytest.mark.parametrize("name", MODELS)


def workload_of(name: str, **fields: Any) -> Workload:
    return Workload.model_validate({**MODELS[name], **BATCH, **fields})


@cache
def graphs_of(name: str, kind: str = "cpu") -> tuple[OperatorGraph, ...]:
    return capture_operators(workload_of(name), "cuda" if kind == "cuda" else "cpu")


@cache
def _captured(workload: str) -> tuple[OperatorGraph, ...]:
    return capture_operators(Workload.model_validate_json(workload))


def captured(workload: Workload) -> tuple[OperatorGraph, ...]:
    return _captured(workload.model_dump_json())


def cluster_of(nodes: int = 4, each: int = 8) -> Cluster:
    group = NodeGroup("g", nodes, (), ((DEVICE, each),), Link(150e9, 5e-6))
    return Cluster("test", (group,), {DEVICE: catalogue()[DEVICE]}, {("g", "g"): Link(25e9 / 8, 25e-6)})


def posed(workload: Workload, mesh: tuple[int, ...], database: Path) -> Sharded:
    prices = prices_on(cluster_of(), DEVICE, mesh, workload, ProfileDatabase(database))
    return assemble(captured(workload), prices)


def choices(rng: np.random.Generator, *, held: bool = False) -> ChoiceProblem:
    """A small problem with some options and pairs that are not possible."""
    sizes = rng.integers(1, 4, int(rng.integers(2, 8)))
    seconds = tuple(np.where(rng.random(size) < 0.1, np.inf, rng.random(size)) for size in sizes)
    edges = {
        (a, b): np.where(rng.random((sizes[a], sizes[b])) < 0.1, np.inf, rng.integers(0, 4, (sizes[a], sizes[b])) / 3)
        for a in range(len(sizes))
        for b in range(a + 1, len(sizes))
        if rng.random() < 0.5
    }
    used = tuple(rng.integers(0, 100, size).astype(float) for size in sizes) if held else ()
    return ChoiceProblem(seconds, edges, used, float(rng.integers(20, 70) * len(sizes)) if held else np.inf)


def every_choice(problem: ChoiceProblem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(own)) for own in problem.seconds))


def least(problem: ChoiceProblem) -> float:
    fitting = (one for one in every_choice(problem) if problem.held_bytes(one) <= problem.capacity_bytes)
    return min(map(problem.price, fitting), default=np.inf)


@draws(range(30), range(30, 100))
@pytest.mark.parametrize(
    "solver",
    [
        Elimination(),
        Elimination(easy_cells=0, passes=3, tried_cells=9),
        IntegerProgram(),
        Presolved(Linkage(), Elimination()),
        Presolved(Linkage(), IntegerProgram()),
    ],
)
def test_every_solver_finds_the_least(solver: Elimination | IntegerProgram | Presolved, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        problem = choices(np.random.default_rng(seed))
        wanted = least(problem)
        if not isfinite(wanted):
            with pytest.raises(ShardingError):
                solver.run(problem)
            continue
        found = solver.run(problem)
        assert problem.price(found.chosen) == found.seconds == pytest.approx(wanted, abs=1e-9), seed
        assert wanted - 2e-5 <= found.lower_bound_seconds <= wanted + 1e-9, seed


@pytest.mark.parametrize("solver", [Elimination(), IntegerProgram()])
def test_no_bound_is_above_the_least_whatever_the_magnitudes(solver: Elimination | IntegerProgram) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        drawn_as = choices(rng, held=True)
        seconds = tuple(10.0 ** rng.uniform(-12, 6, own.shape) for own in drawn_as.seconds)
        edges = {pair: 10.0 ** rng.uniform(-12, 6, table.shape) for pair, table in drawn_as.edges.items()}
        wide = ChoiceProblem(seconds, edges)
        found, wanted = solver.run(wide), least(wide)
        assert found.lower_bound_seconds <= wanted * (1 + 1e-9) <= found.seconds * (1 + 2e-9), seed
        nothing = tuple(np.where(np.arange(len(own)) == 0, 0.0, own) for own in drawn_as.bytes)
        empty = replace(wide, bytes=nothing, capacity_bytes=0.0)
        assert empty.held_bytes(IntegerProgram().run(empty).chosen) == 0.0, seed


@pytest.mark.parametrize("seed", range(100))
def test_a_limit_of_memory_is_kept_and_its_gap_is_true(seed: int) -> None:
    problem = choices(np.random.default_rng(seed), held=True)
    wanted = least(problem)
    if not isfinite(wanted):
        with pytest.raises(ShardingError):
            WithinMemory().run(problem)
        return
    found = WithinMemory().run(problem)
    assert problem.held_bytes(found.chosen) <= problem.capacity_bytes
    assert found.lower_bound_seconds <= wanted + 1e-9 and found.seconds >= wanted - 1e-9
    assert found.seconds * (1 - found.gap_percent / 100) <= wanted + 1e-9
    assert IntegerProgram().run(problem).seconds == pytest.approx(wanted, abs=1e-9)


def test_what_never_fits_is_proved_with_the_least_that_would_do() -> None:
    problem = ChoiceProblem((np.zeros(2), np.zeros(2)), {}, (np.array([3e9, 2e9]), np.array([1e9, 4e9])), 2.5e9)
    with pytest.raises(NothingFitsError, match=r"holds 2\.79 GiB or more"):
        WithinMemory().run(problem)


@pytest.mark.parametrize("seed", range(60))
def test_bounds_of_options_are_below_every_choice_with_them(seed: int) -> None:
    problem = choices(np.random.default_rng(seed))
    found = bounds(problem, 20)
    if not isfinite(least(problem)):
        return
    assert found.least_seconds <= least(problem) + 1e-9
    for node, own in enumerate(found.options):
        for option, bound in enumerate(own):
            with_it = (problem.price(one) for one in every_choice(problem) if one[node] == option)
            assert bound <= min(with_it) + 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_options_that_can_always_be_replaced_are_not_missed(seed: int) -> None:
    problem = choices(np.random.default_rng(seed))
    smaller, options = pruned(problem)
    assert least(smaller) == pytest.approx(least(problem), rel=1e-12)
    chosen = min(every_choice(smaller), key=smaller.price)
    back = [int(own[k]) for own, k in zip(options, chosen, strict=True)]
    assert problem.price(back) == pytest.approx(smaller.price(chosen)) or not isfinite(least(problem))


@draws(range(5), range(5, 20))
def test_where_tables_would_be_too_large_the_gap_is_true(seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        rng, size = np.random.default_rng(seed), 8
        edges = {(a, b): rng.random((4, 4)) for a in range(size) for b in range(a + 1, size)}
        problem = ChoiceProblem(tuple(rng.random(4) for _ in range(size)), edges)
        found = Elimination(most_cells=100, easy_cells=0, tried_cells=20, passes=5).run(problem)
        exact = Elimination().run(problem)
        assert exact.gap_percent == 0 and exact.seconds == pytest.approx(least(problem)), seed
        assert found.lower_bound_seconds <= exact.seconds * (1 + 1e-9), seed
        assert exact.seconds <= found.seconds * (1 + 1e-9), seed


def layers_of_choices(rng: np.random.Generator) -> tuple[ChoiceProblem, tuple[Block, ...]]:
    """Layers of two kinds between cuts of two nodes at most; some options and pairs are not possible."""
    count, width = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    seconds = [rng.random(3) * rng.integers(2) for _ in range((count + 1) * width)]
    cuts = [tuple(range(n * width, (n + 1) * width)) for n in range(count + 1)]
    edges: dict[tuple[int, int], np.ndarray] = {}
    drawn: dict[int, tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]] = {}
    blocks = []
    for number in range(count):
        kind, first = int(rng.integers(2)), len(seconds)
        if kind not in drawn:
            own = [np.where(rng.random(3) < 0.1, np.inf, rng.random(3)) for _ in range(3)]
            pairs = [(a, b) for a in range(2 * width + 3) for b in range(max(a + 1, 2 * width), 2 * width + 3)]
            tables = {pair: np.where(rng.random((3, 3)) < 0.1, np.inf, rng.random((3, 3))) for pair in pairs}
            drawn[kind] = own, {pair: table for pair, table in tables.items() if rng.random() < 0.8}
        nodes = (*cuts[number], *cuts[number + 1], *range(first, first + 3))
        seconds += drawn[kind][0]
        edges |= {(nodes[a], nodes[b]): table for (a, b), table in drawn[kind][1].items()}
        blocks.append(Block(kind, cuts[number], cuts[number + 1], tuple(range(first, first + 3))))
    return ChoiceProblem(tuple(seconds), edges), tuple(blocks)


@draws(range(25), range(25, 150))
@pytest.mark.parametrize("passes", [0, 3])
def test_layers_whose_tables_are_bounds_at_first_are_solved_exactly(passes: int, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        problem, blocks = layers_of_choices(np.random.default_rng(seed))
        cells = 9 ** len(blocks[0].before)  # no table with another node
        solver = Repeated(blocks, most_cells=cells, tried_cells=cells, passes=passes)
        try:
            wanted = Elimination().run(problem)
        except ShardingError:
            with pytest.raises(ShardingError):
                solver.run(problem)
            continue
        found = solver.run(problem)
        assert found.seconds == problem.price(found.chosen), seed
        assert found.seconds == pytest.approx(wanted.seconds, abs=1e-9), seed
        assert found.lower_bound_seconds == pytest.approx(wanted.seconds, abs=1e-6), seed


@draws(range(6), range(6, 40))
def test_a_layer_s_table_never_exceeds_the_least_and_is_the_least_where_it_is_settled(seeds: tuple[int, ...]) -> None:
    opened = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        problem, blocks = layers_of_choices(rng)
        layer = ChoiceProblem(*_first_layer(problem, blocks[0]))
        width = len(blocks[0].before)
        table = CutTable(layer, (width, width), Effort(9**width, 9, 2), Elimination())
        wanted = np.full((3**width, 3**width), np.inf)
        for one in every_choice(layer):
            at = tuple(np.ravel_multi_index(part, (3,) * width) for part in (one[:width], one[width : 2 * width]))
            wanted[at] = min(wanted[at], layer.price(one))
        opened += not table.is_settled_BA.all()
        for _ in range(12):
            assert (table.seconds_BA <= wanted + 1e-9).all(), seed
            assert table.seconds_BA[table.is_settled_BA] == pytest.approx(wanted[table.is_settled_BA], abs=1e-9), seed
            before, after = (int(one) for one in rng.integers(0, 3**width, 2))
            while not table.is_settled_BA[before, after]:
                table.tighten(before, after)
            if isfinite(wanted[before, after]):
                cuts = [int(one) for state in (before, after) for one in np.unravel_index(state, (3,) * width)]
                chosen = (*cuts, *table.inside(before, after))
                assert layer.price(chosen) == pytest.approx(wanted[before, after], abs=1e-9), seed
    assert opened > len(seeds) // 2


def _first_layer(problem: ChoiceProblem, block: Block) -> tuple[Any, Any]:
    nodes = (*block.before, *block.after, *block.inside)
    at = {node: k for k, node in enumerate(nodes)}
    own = {(at[a], at[b]): table for (a, b), table in problem.edges.items() if b in block.inside}
    return tuple(problem.seconds[node] for node in nodes), own


# --- Every way to split an operator gives what the whole operator gives. ---


def pieces(tensor: torch.Tensor, placement: int, size: int, seed: torch.Generator) -> list[torch.Tensor]:
    """Give each device its part."""
    if placement >= 0:
        return [part.contiguous() for part in tensor.chunk(size, placement)]
    if placement == REPLICATED:
        return [tensor] * size
    noise = [torch.randint(-9, 9, tensor.shape, generator=seed).to(tensor.dtype) for _ in range(size - 1)]
    whole = tensor * size if placement == AVERAGED else tensor
    return [*noise, whole - sum(noise, torch.zeros_like(tensor))]


def together(parts: Sequence[torch.Tensor], placement: int) -> torch.Tensor:
    if placement >= 0:
        return torch.cat(list(parts), placement)
    if placement == REPLICATED:
        return parts[0]
    total = torch.stack(list(parts)).sum(0)
    return total / len(parts) if placement == AVERAGED else total


def drawn(tensor: TensorType, most: int, seed: torch.Generator) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.rand(tensor.shape, generator=seed, dtype=torch.float64) + 0.5
    if tensor.dtype is torch.bool:
        return torch.rand(tensor.shape, generator=seed) < 0.5
    return torch.randint(0, most, tensor.shape, generator=seed, dtype=tensor.dtype)


# Their arguments are of the whole tensor (shapes, places), or they draw at random.
_OF_THE_WHOLE = (
    "view reshape expand slice select new_ zeros ones empty full arange dropout split unbind index sort topk"
)
_OF_THE_WHOLE += " gather scatter bincount embedding nll_loss grouped cumsum stack repeat as_strided pool group_norm"


@every_model
@pytest.mark.parametrize("size", [2, 4])
def test_every_way_to_split_gives_what_the_whole_operator_gives(name: str, size: int) -> None:
    seen, tried = set[Any](), 0
    for graph in graphs_of(name):
        for node in graph.nodes:
            inputs = [graph.type_of(value) for value in node.inputs]
            key = (node.kind, tuple(inputs), str(node.arguments))
            if node.is_source or key in seen or any(word in node.kind for word in _OF_THE_WHOLE.split()):
                continue
            seen.add(key)
            for strategy in strategies_of(node, inputs, size):
                tried += strategy.is_split
                check(node, inputs, strategy, size)
    assert tried > 5


def check(node: Node, inputs: Sequence[TensorType], strategy: Strategy, size: int) -> None:
    seed = torch.Generator().manual_seed(0)
    tensors = [drawn(one, 8, seed) for one in inputs]
    if "backward" in node.kind and "norm" in node.kind:
        return  # of means that belong to the input: not any numbers
    given = [pieces(t, p, size, seed) for t, p in zip(tensors, strategy.inputs, strict=True)]
    wanted = called(node, tensors)
    found = [called(node, [one[device] for one in given]) for device in range(size)]
    for output, placement in enumerate(strategy.outputs):
        got = together([device[output] for device in found], placement)
        torch.testing.assert_close(got, wanted[output], rtol=1e-6, atol=1e-6, msg=f"{node.kind} {strategy}")


def called(node: Node, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    arguments, options = node.arguments_with(tensors)
    options = {k: torch.float64 if v is torch.float32 else v for k, v in options.items()}
    return [one for one in tree_leaves(node.call(*arguments, **options)) if isinstance(one, torch.Tensor)]


@every_model
def test_nearly_all_that_takes_time_can_be_split(name: str) -> None:
    """What has no rule is whole, and costs next to nothing here."""
    assert set(without_rule(graphs_of(name, "cuda"))) <= {"aten.lift_fresh", "aten.bincount"}


# --- Prices and plans. ---


@every_model
def test_whole_operators_cost_what_the_layers_cost(name: str, tmp_path: Path) -> None:
    workload = workload_of(name)
    problem = posed(workload, (4,), tmp_path).problem
    predicted = Predicted(ProfileDatabase(tmp_path), workload.optimizer)
    layers = capture(workload, "cuda").layers
    kernels = [k for layer in layers for operator in layer.operators if (k := kernel_of(operator)) is not None]
    wanted = predicted.prices(kernels, catalogue()[DEVICE]).seconds_K.sum()
    assert sum(float(own[0]) for own in problem.seconds) == pytest.approx(wanted, rel=1e-6)


@every_model
@pytest.mark.parametrize("mesh", some([(2,), (4,)], [(4,)]))
def test_equal_layers_solved_once_and_all_together_and_the_integer_program_agree(
    name: str, mesh: tuple[int, ...], tmp_path: Path
) -> None:
    options = MODELS[name].get("model_options", {})
    more = {**options, "num_blocks": 3} if "num_blocks" in options and name != "t5" else options
    sharded = posed(workload_of(name, model_options=more), mesh, tmp_path)
    found = Elimination().run(sharded.problem)
    assert found.gap_percent < 1e-6
    assert found.seconds == pytest.approx(IntegerProgram(60).run(sharded.problem).seconds, rel=1e-6)
    one_by_one = Repeated(sharded.blocks).run(sharded.problem)
    assert one_by_one.gap_percent == 0 and one_by_one.seconds == pytest.approx(found.seconds, rel=1e-9)


@every_model
def test_the_input_s_batch_dimension_is_found(name: str, tmp_path: Path) -> None:
    workload = workload_of(name)
    sharded, graphs = posed(workload, (2,), tmp_path), captured(workload)
    found = Repeated(sharded.blocks).run(data_parallel(graphs, sharded))
    assert sharded.options[sharded.cuts[0][0]][found.chosen[sharded.cuts[0][0]]].outputs == ((0,),)
    for layer, graph in enumerate(graphs):
        assert set(of_weights(sharded, found, graph, layer).values()) <= {(REPLICATED,)}


def of_weights(found: Sharded, answer: Answer, graph: OperatorGraph, layer: int) -> dict[str, tuple[int, ...]]:
    at = {name: found.of_node[layer, k] for name, k in graph.weights.items()}
    return {name: found.options[n][answer.chosen[n]].outputs[0] for name, n in at.items()}


def test_megatron_s_plan_is_found_for_one_long_text(tmp_path: Path) -> None:
    """Shoeybi et al., 2019: columns of the first product, rows of the second, biases of the second whole."""
    options = {"num_blocks": 2, "width": 4096, "num_heads": 32}
    long = workload_of("gpt", model_options=options, sequence_length=512, batch_size=1, num_microbatches=1)
    found = posed(long, (8,), tmp_path)
    answer = Elimination().run(found.problem)
    block = of_weights(found, answer, captured(long)[1], 1)
    split = {"qkv.weight": 0, "qkv.bias": 0, "projection.weight": 1, "expand.weight": 0, "expand.bias": 0}
    split["contract.weight"] = 1
    assert block == {name: (split.get(name, REPLICATED),) for name in block}


def test_data_parallelism_is_found_for_many_short_ones(tmp_path: Path) -> None:
    options = {"num_blocks": 2, "width": 1024, "num_heads": 16}
    many = workload_of("gpt", model_options=options, batch_size=64, num_microbatches=1, sequence_length=256)
    found = posed(many, (8,), tmp_path)
    answer = Elimination().run(found.problem)
    for layer, graph in enumerate(captured(many)):
        assert set(of_weights(found, answer, graph, layer).values()) == {(REPLICATED,)}
    assert [found.options[cut][answer.chosen[cut]].outputs[0] for cut, _ in found.cuts[1:-1]] == [(0,)] * (
        len(found.cuts) - 2
    )


def test_less_memory_splits_more_weights(tmp_path: Path) -> None:
    found = posed(workload_of("gpt", batch_size=64, num_microbatches=1), (8,), tmp_path)
    free = Elimination().run(found.problem)
    held = found.problem.held_bytes(free.chosen)
    limited = replace(found.problem, capacity_bytes=0.5 * held)
    tight = WithinMemory().run(limited)
    assert found.problem.held_bytes(tight.chosen) <= 0.5 * held and tight.seconds >= free.seconds
    assert tight.lower_bound_seconds <= tight.seconds


def test_a_mesh_that_is_not_there_is_refused(tmp_path: Path) -> None:
    workload = workload_of("gpt")
    for mesh, said in (((64,), "the cluster has 32"), ((2, 2, 2), "wanted"), ((0,), "wanted")):
        with pytest.raises(InputError, match=said):
            prices_on(cluster_of(), DEVICE, mesh, workload, ProfileDatabase(tmp_path))


def test_a_dimension_that_does_not_divide_is_not_split() -> None:
    for graph in graphs_of("gpt"):
        for node in graph.nodes:
            inputs = [graph.type_of(value) for value in node.inputs]
            if not node.is_source:
                for strategy in strategies_of(node, inputs, 3):
                    for tensor, placement in zip(inputs, strategy.inputs, strict=True):
                        assert placement in (REPLICATED, SUMMED, AVERAGED) or tensor.shape[placement] % 3 == 0


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_of_two_dimensions_too(name: str, tmp_path: Path) -> None:
    sharded = posed(workload_of(name), (2, 2), tmp_path)
    problem = sharded.problem
    found = Elimination().run(problem)
    once = Repeated(sharded.blocks, most_cells=100_000, tried_cells=1_000).run(problem)
    assert once.seconds == pytest.approx(found.seconds, rel=1e-9) and once.gap_percent < 1e-6
    assert found.seconds == pytest.approx(IntegerProgram(60).run(problem).seconds, rel=1e-6)
    one = Elimination().run(posed(workload_of(name), (2,), tmp_path).problem)
    assert found.seconds <= one.seconds * (1 + 1e-9), "a dimension may also be left unused"
