"""Heuristics for shardings: never below the best, equal to it where that can be proved, the same for the same seed."""

from __future__ import annotations

import itertools
from math import isfinite, log
from pathlib import Path

import numpy as np
import pytest
import torch

from dejavu.graphs.dtensor import REPLICATED
from dejavu.q_learning import Settings
from dejavu.sharding.assembly import Option, Sharded
from dejavu.sharding.by_hand import megatron
from dejavu.sharding.links import links_along, links_of
from dejavu.sharding.operator_graph import OperatorGraph
from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError
from dejavu.sharding.solvers.dqn import Board, Dqn, Game, Learned, best_game
from dejavu.sharding.solvers.dqn.environment import SPLIT, UNDECIDED, WHOLE
from dejavu.sharding.solvers.elimination import Elimination
from dejavu.sharding.solvers.flat import change, descend, flattened, scale_of
from dejavu.sharding.solvers.groups import CONFLICT, group_of, linkage_groups, links_by_price
from dejavu.sharding.solvers.linkage import GroupOptions, Linkage, Presolved
from tests.test_sharding import captured, choices, least, of_weights, posed, workload_of

QUICK = Settings(num_steps=40, epsilon_steps=30, batch_size=8, width=16, capacity=50, target_steps=10)
HEURISTICS = {
    "linkage": Linkage(),
    "dqn": Dqn(settings=QUICK),
    "dqn by price": Dqn(settings=QUICK, reward="price"),
    "linkage after linkage": Presolved(Linkage(), Linkage()),
}
every_heuristic = pytest.mark.parametrize("name", HEURISTICS)
SPLIT_IN_MEGATRON = {
    "qkv.weight": 0,
    "qkv.bias": 0,
    "projection.weight": 1,
    "expand.weight": 0,
    "expand.bias": 0,
    "contract.weight": 1,
}


@every_heuristic
@pytest.mark.parametrize("seed", range(15))
def test_no_heuristic_is_below_the_best_or_proves_what_is_not_so(name: str, seed: int) -> None:
    problem = choices(np.random.default_rng(seed))
    wanted = least(problem)
    try:
        found = HEURISTICS[name].run(problem)
    except ShardingError:
        return  # some options are not possible, and a heuristic may end with one
    assert len(found.chosen) == len(problem.seconds)
    assert all(0 <= option < len(own) for option, own in zip(found.chosen, problem.seconds, strict=True))
    assert isfinite(wanted) and found.seconds >= wanted - 1e-9
    assert found.seconds == pytest.approx(problem.price(found.chosen), abs=1e-12)
    assert found.lower_bound_seconds <= wanted + 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_linkage_groups_are_exact_where_every_disagreement_costs_more_than_all_else(seed: int) -> None:
    """Then each connected part is one group an option, and trying the groups one after another is trying everything."""
    rng, count, options = np.random.default_rng(seed), 9, 3
    names = [rng.permutation(options) for _ in range(count)]  # each node has the same options under other numbers
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.3]
    edges = {(a, b): np.where(names[a][:, None] == names[b], 0.0, 2.0 * count) for a, b in pairs}
    problem = ChoiceProblem(tuple(rng.random(options) for _ in range(count)), edges)
    assert Linkage().run(problem).seconds == pytest.approx(Elimination().run(problem).seconds)


@pytest.mark.parametrize("seed", range(40))
def test_a_change_of_a_choice_costs_the_difference_and_descending_saves_what_it_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = choices(rng)
    possible = {pair: np.where(np.isfinite(table), table, 7.0) for pair, table in problem.edges.items()}
    problem = ChoiceProblem(tuple(np.where(np.isfinite(own), own, 7.0) for own in problem.seconds), possible)
    scale, sizes = scale_of(problem), [len(own) for own in problem.seconds]
    flat, chosen = flattened(problem, scale), rng.integers(0, sizes)
    nodes = rng.permutation(len(sizes))[: int(rng.integers(1, len(sizes) + 1))]
    options = rng.integers(0, np.array(sizes)[nodes])
    after = chosen.copy()
    after[nodes] = options
    assert change(flat, chosen, nodes, options) * scale == pytest.approx(problem.price(after) - problem.price(chosen))
    lower = after.copy()
    saved = descend(flat, lower, np.isin(np.arange(len(sizes)), nodes), 0.0) * scale
    assert saved == pytest.approx(problem.price(after) - problem.price(lower)) and saved >= 0
    assert (lower[nodes] == options).all()


@pytest.mark.parametrize("reward", ["published", "price"])
def test_an_agent_draws_from_its_seed_alone(reward: str) -> None:
    problem, heard = choices(np.random.default_rng(3)), list[list[object]]()

    def answer(seed: int) -> tuple[Learned, list[object]]:
        heard.append([])
        agent = Dqn(
            settings=QUICK, reward="price" if reward == "price" else "published", every=10, told=heard[-1].append
        )
        return agent.learn(problem, seed=seed), heard[-1]

    torch.manual_seed(0)
    before = torch.get_rng_state()
    (one, told), (same, told_again) = answer(5), answer(5)
    assert one.best.score == same.best.score and one.own.places() == same.own.places() and told == told_again and told
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("reward", ["published", "price"])
def test_every_game_decides_everything_and_no_score_is_above_the_proved_one(reward: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = choices(rng)
    possible = ChoiceProblem(
        tuple(np.where(np.isfinite(own), own, 9.0) for own in problem.seconds),
        {pair: np.where(np.isfinite(table), table, 9.0) for pair, table in problem.edges.items()},
    )
    board = Board.of(possible, links_by_price(possible), range(len(possible.seconds)))
    game = Game(board, "price" if reward == "price" else "published")
    best, is_proved = best_game(game, 4096)
    whole, total, moves = game.seconds, 0.0, 0
    while not game.is_over:
        assert game.allowed_A.all() and set(game.state[: game.num_dimensions]) <= {UNDECIDED, WHOLE, SPLIT}
        total, moves = total + game.move(int(rng.integers(2))), moves + 1
    assert set(game.decided_D.tolist()) <= {WHOLE, SPLIT} and moves <= game.num_dimensions
    assert game.score == pytest.approx(total) and is_proved and best.score >= total - 1e-9
    if reward == "price":
        assert game.seconds == pytest.approx(possible.price(game.chosen_N.tolist()), abs=1e-9)
        assert total == pytest.approx(log(whole / game.seconds), abs=1e-6) if game.num_dimensions else True


# --- On captured operators. ---


def weights_of(sharded: Sharded, graphs: tuple[OperatorGraph, ...]) -> tuple[int, ...]:
    return tuple(sharded.of_node[number, k] for number, graph in enumerate(graphs) for k in graph.weights.values())


@pytest.mark.parametrize("model", ["gpt", "bert", "llama", "cnn", "mlp"])
def test_heuristics_are_valid_on_models(model: str, tmp_path: Path) -> None:
    workload = workload_of(model)
    sharded, graphs = posed(workload, (4,), tmp_path), captured(workload)
    problem, best = sharded.problem, Elimination().run(sharded.problem).seconds
    decided, links = (sharded.cuts[0][0], *weights_of(sharded, graphs)), links_of(sharded)
    linkage = Linkage(links_along(sharded, with_sums=True), decided)
    found: dict[str, Answer] = {
        "linkage": linkage.run(problem),
        "presolved": Presolved(linkage).run(problem),
        "megatron": Elimination().run(megatron(graphs, sharded)),
        "dqn": Dqn(links, decided, settings=QUICK).run(problem),
        "dqn by price": Dqn(links, decided, "price", QUICK).run(problem),
    }
    for name, answer in found.items():
        assert answer.seconds == pytest.approx(problem.price(answer.chosen), rel=1e-12), name
        assert answer.seconds >= best * (1 - 1e-9), name
    assert found["presolved"].seconds == pytest.approx(best, rel=1e-9)
    whole = problem.price([0] * len(problem.seconds))
    assert found["linkage"].seconds <= whole * (1 + 1e-9)


def test_a_block_s_linkage_groups_are_columns_then_rows(tmp_path: Path) -> None:
    workload = workload_of("gpt")
    sharded, graph = posed(workload, (4,), tmp_path), captured(workload)[1]
    at = {name: sharded.of_node[1, k] for name, k in graph.weights.items()}
    asked = [(at[name], 1) for name in ("qkv.weight", "expand.weight")]
    for group, implied in zip(
        group_of(sharded.problem, links_of(sharded), asked),
        (
            {"qkv.weight": 0, "qkv.bias": 0, "projection.weight": 1},
            {"expand.weight": 0, "expand.bias": 0, "contract.weight": 1},
        ),
        strict=True,
    ):
        chosen = dict(zip(group.nodes.tolist(), group.options.tolist(), strict=True))
        split = {name: sharded.options[node][chosen[node]].outputs[0][0] for name, node in at.items() if node in chosen}
        assert split == implied and group.conflicts == 0


@pytest.mark.parametrize("model", ["gpt", "llama", "mlp"])
def test_a_decision_on_one_dimension_of_a_mesh_implies_what_it_does_on_a_mesh_of_that_one(
    model: str, tmp_path: Path
) -> None:
    """What is split along the other dimension stays as it is wherever an option does both."""
    one, two = (posed(workload_of(model), mesh, tmp_path) for mesh in ((2,), (2, 2)))
    graphs, longest = captured(workload_of(model)), 0
    (wanted_along,), along = links_along(one), links_along(two)
    options_of = GroupOptions(along)
    for dim, seed in itertools.product((0, 1), (one.cuts[0][0], *weights_of(one, graphs))):
        rng, sizes = np.random.default_rng(seed), [len(own) for own in two.options]
        for wanted, found in zip(linkage_groups(wanted_along, [seed]), linkage_groups(along[dim], [seed]), strict=True):
            longest = max(longest, len(wanted.nodes))
            chosen = rng.integers(0, sizes)
            options = options_of.group(dim, found, chosen)
            assert found.nodes.tolist() == wanted.nodes.tolist() and found.conflicts == wanted.conflicts
            for node, option, told in zip(
                wanted.nodes.tolist(), options.tolist(), wanted.options.tolist(), strict=True
            ):
                now, before = two.options[node][option], two.options[node][int(chosen[node])]
                assert _does(now, dim) == _does(one.options[node][told], 0)
                others = {_does(same, 1 - dim) for same in two.options[node] if _does(same, dim) == _does(now, dim)}
                assert _does(now, 1 - dim) == _does(before, 1 - dim) or _does(before, 1 - dim) not in others
    assert longest > 5


def _does(option: Option, dim: int) -> tuple[int, ...]:
    return tuple(place[dim] for place in (*option.inputs, *option.outputs))


def test_splits_that_have_to_be_moved_conflict_and_whole_tensors_say_nothing(tmp_path: Path) -> None:
    sharded = posed(workload_of("gpt"), (4,), tmp_path)
    links = links_of(sharded)
    for pair, says in links.items():
        free = says != CONFLICT
        assert (says[0] != CONFLICT).any() and free.any()  # what is whole suits somebody
        assert (sharded.problem.edges[pair][says == 1] == 0).all()  # and what agrees is not moved


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_megatron_s_plan_by_hand_and_by_the_published_reward_are_one(model: str, tmp_path: Path) -> None:
    workload = workload_of(model)
    sharded, graphs = posed(workload, (4,), tmp_path), captured(workload)
    answer = Elimination().run(megatron(graphs, sharded))
    block = of_weights(sharded, answer, graphs[1], 1)
    assert block == {name: (SPLIT_IN_MEGATRON.get(name, REPLICATED),) for name in block}
    board = Board.of(sharded.problem, links_of(sharded), weights_of(sharded, graphs))
    best, is_proved = best_game(Game(board, "published"), 3000)
    places = best.places()
    of_game = {
        name: sharded.options[node][places[node]].outputs[0]
        for name, k in graphs[1].weights.items()
        if (node := sharded.of_node[1, k]) in places
    }
    assert is_proved and of_game == block
