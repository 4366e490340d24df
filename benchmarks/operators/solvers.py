"""All ways to choose the shardings of a model, at one price; what Auto-MAP's reward gives, and its tables 3 and 4."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejavu.graphs.dtensor import REPLICATED
from dejavu.sharding.assembly import Sharded
from dejavu.sharding.by_hand import megatron, place_in_megatron, weights_by_hand
from dejavu.sharding.data_parallel import data_parallel
from dejavu.sharding.links import links_along, links_of
from dejavu.sharding.operator_graph import OperatorGraph
from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError, Solver
from dejavu.sharding.solvers.dqn import Board, Game, best_game, with_places
from dejavu.sharding.solvers.dqn.environment import CONFLICT_REWARD, SPLIT_REWARD, WHOLE_REWARD
from dejavu.sharding.solvers.elimination import Elimination
from dejavu.sharding.solvers.groups import CONFLICT, Links
from dejavu.sharding.solvers.ilp import IntegerProgram
from dejavu.sharding.solvers.linkage import Linkage, Presolved
from dejavu.sharding.solvers.repeated import Repeated

WIDTH = 32  # positions that a search for the game of the highest reward keeps
Weights = dict[str, dict[str, int]]  # of each kind of weight: how many are placed how
Chosen = Mapping[int, int] | Sequence[int]  # the option of a node


@dataclass(frozen=True, eq=False)
class Model:
    """A model's operators and problem, the nodes of its weights, and those that solvers decide: its input's as well."""

    name: str
    graphs: tuple[OperatorGraph, ...]
    sharded: Sharded

    @property
    def problem(self) -> ChoiceProblem:
        return self.sharded.problem

    @property
    def weights(self) -> tuple[int, ...]:
        return tuple(self.sharded.of_node[n, k] for n, graph in enumerate(self.graphs) for k in graph.weights.values())

    @property
    def decided(self) -> tuple[int, ...]:
        return (self.sharded.cuts[0][0], *self.weights)

    def placed(self, chosen: Chosen) -> Weights:
        """Count the placements of each kind of weight, by name and shape."""
        found: dict[str, Counter[str]] = {}
        for number, graph in enumerate(self.graphs):
            for name, k in graph.weights.items():
                node, shape = self.sharded.of_node[number, k], graph.nodes[k].outputs[0].shape
                placement = self.sharded.options[node][chosen[node]].outputs[0][0]
                kind = f"{name} {' × '.join(map(str, shape))}"
                found.setdefault(kind, Counter())["whole" if placement == REPLICATED else str(placement)] += 1
        return {kind: dict(own) for kind, own in found.items()}

    def partitioned(self, chosen: Chosen) -> int:
        """Count the weights that are split."""
        return sum(count for own in self.placed(chosen).values() for place, count in own.items() if place != "whole")


def timed(solver: Solver, problem: ChoiceProblem) -> tuple[Answer | None, float]:
    """Return the answer, if there is one, and the CPU seconds that it took."""
    began = time.process_time()
    try:
        return solver.run(problem), time.process_time() - began
    except ShardingError:
        return None, time.process_time() - began


def compared(model: Model, best: Answer, referee_seconds: float) -> tuple[list[dict[str, Any]], dict[str, Weights]]:
    """Return a row for each solver, and where each puts the weights."""
    problem, blocks, graphs = model.problem, Repeated(model.sharded.blocks), model.graphs
    began = time.process_time()
    linkage = Linkage(links_along(model.sharded, with_sums=True), model.decided)
    linking = time.process_time() - began
    asked: dict[str, tuple[Solver, ChoiceProblem, float]] = {
        "elimination": (Elimination(), problem, 0.0),
        "elimination, equal layers once": (blocks, problem, 0.0),
        "linkage": (linkage, problem, linking),
        "elimination after linkage": (Presolved(linkage), problem, linking),
        "data_parallel": (blocks, data_parallel(graphs, model.sharded), 0.0),
        "megatron": (blocks, megatron(graphs, model.sharded), 0.0),
    }
    if model.name != "bert48":
        tables = weights_by_hand(graphs, model.sharded, _place_in_tables)
        asked["weights of Auto-MAP's tables 3 and 4"] = (blocks, tables, 0.0)
    if referee_seconds > 0:
        asked["ilp"] = (IntegerProgram(referee_seconds), problem, 0.0)
        asked["ilp after linkage"] = (Presolved(linkage, IntegerProgram(referee_seconds)), problem, linking)
    rows, placed = [], {}
    for name, (solver, posed, before) in asked.items():
        answer, spent = timed(solver, posed)
        row = {"model": model.name, "solver": name} | priced(model, best, answer)
        rows.append(row | {"cpu_seconds": before + spent})
        if answer is not None:
            placed[name] = model.placed(answer.chosen)
    return rows, placed


def priced(model: Model, best: Answer, answer: Answer | None) -> dict[str, Any]:
    """Return what an answer costs beside the proved best."""
    if answer is None:
        return {"pass_seconds": None, "above_best_percent": None, "partitioned": None}
    return {
        "pass_seconds": answer.seconds,
        "above_best_percent": 100.0 * max(0.0, answer.seconds / best.seconds - 1.0),
        "partitioned": model.partitioned(answer.chosen),
    }


def _place_in_tables(layer: OperatorGraph, name: str) -> int:
    """Return what Auto-MAP's tables 3 (T5) and 4 (VGG-19) say of a weight; -1: whole, or not in a table.

    torch's weights are (outputs, inputs) and XLA's kernels (inputs, outputs): dimension 1 there is 0 here.
    """
    shape = layer.nodes[layer.weights[name]].outputs[0].shape
    if name == "linear.weight":
        return 1 if shape[0] == shape[1] else 0  # the second of VGG's is square
    if name in ("linear.bias", "bias") or (name == "weight" and len(shape) == 2):
        return 0
    return place_in_megatron(layer, name)


def rewarded(model: Model, best: Answer) -> tuple[dict[str, Any], dict[str, Weights]]:
    """Find what Auto-MAP's reward is highest for, played as a game and scored as a whole; price it by our prices."""
    links = links_of(model.sharded)
    game, is_proved = best_game(Game(Board.of(model.problem, links, model.weights), "published"), WIDTH)
    places = game.places()
    scored = Repeated(model.sharded.blocks).run(_scored(model, links, -CONFLICT_REWARD))
    free = Repeated(model.sharded.blocks).run(_scored(model, links, 0.0))
    answer, _ = timed(Elimination(), with_places(model.problem, places))
    alike, of_blocks = _like_megatron(model, places)
    found = {
        "model": model.name,
        "game_score": float(game.score),
        "game_is_proved": is_proved,
        "game_partitioned": model.partitioned(places),
        "of_block_weights_as_megatron": f"{alike} of {of_blocks}",
        "game_pass_seconds": answer and answer.seconds,
        "game_above_best_percent": answer and 100.0 * (answer.seconds / best.seconds - 1.0),
        "scored_partitioned": model.partitioned(scored.chosen),
        "scored_gap_percent": scored.gap_percent,
        "without_conflicts_partitioned": model.partitioned(free.chosen),
        "cheapest_partitioned": model.partitioned(best.chosen),
        "weights": len(model.weights),
    }
    placed = {"published reward": model.placed(places), "published reward, no conflicts": model.placed(free.chosen)}
    return found, placed


def _scored(model: Model, links: Links, conflict: float) -> ChoiceProblem:
    """Return the problem whose price is what a choice falls short of the reward of splitting every weight.

    Each weight counts once, and each tensor that has to be moved from one split to another costs a conflict.
    """
    weights = set(model.weights)
    seconds = []
    for node, own in enumerate(model.problem.seconds):
        short = np.zeros(len(own))
        if node in weights:
            is_whole = [max(option.outputs[0]) == REPLICATED for option in model.sharded.options[node]]
            short = np.where(is_whole, SPLIT_REWARD - WHOLE_REWARD, 0.0)
        seconds.append(np.where(np.isfinite(own), short, np.inf))
    edges = {
        pair: np.where(np.isfinite(table), conflict * (links[pair] == CONFLICT), np.inf)
        for pair, table in model.problem.edges.items()
    }
    return ChoiceProblem(tuple(seconds), edges)


def _like_megatron(model: Model, places: Chosen) -> tuple[int, int]:
    """Count the weights of the layers between the first and the last that are placed as Megatron-LM's, and all."""
    alike = count = 0
    for number, graph in enumerate(model.graphs[1:-1], 1):
        for name, k in graph.weights.items():
            node = model.sharded.of_node[number, k]
            placement = model.sharded.options[node][places[node]].outputs[0][0]
            alike, count = alike + (placement == place_in_megatron(graph, name)), count + 1
    return alike, count


def beside_tables(model: Model, placed: Mapping[str, Weights]) -> list[dict[str, Any]]:
    """Return for each kind of weight where Auto-MAP's tables put it, and where others do, in torch's dimensions."""
    shown = {
        "auto_map": placed.get("weights of Auto-MAP's tables 3 and 4"),
        "published_reward": placed.get("published reward"),
        "megatron": placed.get("megatron"),
        "cheapest": placed.get("elimination"),
        "linkage": placed.get("linkage"),
    }
    kinds = next(own for own in placed.values())
    return [
        {"model": model.name, "weight": kind, "count": sum(kinds[kind].values())}
        | {who: _said(own[kind]) if own else None for who, own in shown.items()}
        for kind in kinds
    ]


def _said(own: Mapping[str, int]) -> str:
    return next(iter(own)) if len(own) == 1 else ", ".join(f"{place} ({count})" for place, count in own.items())
