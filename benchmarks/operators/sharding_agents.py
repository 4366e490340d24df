"""Auto-MAP's agent for shardings, trained with several seeds, beside as many random moves and the proved best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.operators.solvers import WIDTH, Model, priced, timed
from dejavu.sharding.links import links_of
from dejavu.sharding.problem import Answer
from dejavu.sharding.solvers.dqn import OPERATORS, Board, Dqn, Game, Heard, Learned, best_game, with_places
from dejavu.sharding.solvers.dqn.environment import Reward
from dejavu.sharding.solvers.elimination import Elimination

REWARDS: tuple[Reward, ...] = ("published", "price")
PANELS_IN_A_ROW = 4
CONVERGED_PERCENT = 1.0  # within so much of the proved best, in score or in time
Rows = list[dict[str, Any]]


def trained(model: Model, best: Answer, seeds: int, moves: int) -> tuple[Rows, dict[str, Any]]:
    """Train agents under both rewards; return a row for each, and the convergence curves."""
    rows, curves = Rows(), dict[str, Any]()
    links = links_of(model.sharded)
    for reward in REWARDS:
        decided = model.weights if reward == "published" else model.decided
        board = Board.of(model.problem, links, decided)
        reference = _reference(model, best, reward, board)
        runs = []
        for seed in range(seeds):
            agent = Dqn(links, decided, reward, replace(OPERATORS, num_steps=moves))
            row, curve = _one(model, best, agent, reference, seed)
            row["random_short_percent"] = _short(reward, reference, _random(Game(board, reward), moves, seed))
            rows.append(row)
            runs.append(curve)
        curves[f"{model.name}, {reward}"] = {"reference": reference, "runs": runs}
    return rows, curves


def _reference(model: Model, best: Answer, reward: Reward, board: Board) -> float:
    """Return the score to reach: of the best game that a wide search finds, or of the proved cheapest choice."""
    if reward == "published":
        return best_game(Game(board, reward), WIDTH)[0].score
    return float(np.log(model.problem.price([0] * len(model.problem.seconds)) / best.seconds))


def _short(reward: Reward, reference: float, score: float) -> float:
    """Return by how many per cent a score falls short: of the reward, or by how much longer a pass is."""
    return 100.0 * ((reference - score) / reference if reward == "published" else math.expm1(reference - score))


def _one(model: Model, best: Answer, agent: Dqn, reference: float, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train one agent; return its row and its convergence curve."""
    heard = list[Heard]()
    began = time.process_time()
    learned = replace(agent, told=heard.append).learn(model.problem, seed=seed)
    spent = time.process_time() - began
    row = {
        "model": model.name,
        "reward": agent.reward,
        "seed": seed,
        "moves": agent.settings.num_steps,
        "best_short_percent": _short(agent.reward, reference, learned.best.score),
        "own_short_percent": _short(agent.reward, reference, learned.own.score),
    }
    row |= priced(model, best, _answer(model, agent, learned)) | {"cpu_seconds": spent}
    curve = {
        "seed": seed,
        "moves": [one.moves for one in heard],
        "best_short_percent": [_short(agent.reward, reference, one.best_score) for one in heard],
        "own_short_percent": [_short(agent.reward, reference, one.own_score) for one in heard],
    }
    return row, curve


def _answer(model: Model, agent: Dqn, learned: Learned) -> Answer | None:
    """Return the agent's choice; under the published reward its weights are fixed and the rest is the cheapest."""
    if agent.reward == "price":
        return Answer(learned.chosen, learned.seconds)
    return timed(Elimination(), with_places(model.problem, learned.best.places()))[0]


def _random(game: Game, moves: int, seed: int) -> float:
    """Return the best score of games of random moves, as many as an agent learns from."""
    rng, done, best = np.random.default_rng(seed), 0, -np.inf
    while done < moves:
        game.begin()
        while not game.is_over:
            game.move(int(rng.integers(2)))
            done += 1
        best = max(best, game.score)
    return float(best)


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of each model's and reward's seeds."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys((str(row["model"]), str(row["reward"])) for row in rows):
        own = [row for row in rows if (row["model"], row["reward"]) == key]
        distances = ("best_short_percent", "own_short_percent", "random_short_percent", "above_best_percent")
        one = {f"median_{name}": statistics.median(row[name] for row in own) for name in (*distances, "cpu_seconds")}
        one |= {f"most_{name}": max(row[name] for row in own) for name in distances}
        one["converged_seeds"] = sum(row["own_short_percent"] <= CONVERGED_PERCENT for row in own)
        one |= {"seeds": len(own), "moves": own[0]["moves"]}
        found.setdefault(key[0], {})[f"dqn, {key[1]} reward"] = one
    return found


def draw_curves(curves: Mapping[str, Mapping[str, Any]], folder: Path) -> Path:
    """Draw how far the best game so far, and the game that the agent plays itself, fall short of the best."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = -(-len(curves) // PANELS_IN_A_ROW)
    columns = min(len(curves), PANELS_IN_A_ROW)
    figure, grid = plt.subplots(rows, columns, figsize=(3.2 * columns, 3.2 * rows + 0.3), squeeze=False)
    for unused in grid.ravel()[len(curves) :]:
        unused.set_axis_off()
    for at, (name, curve) in zip(grid.ravel(), curves.items(), strict=False):
        for number, run in enumerate(curve["runs"]):
            labels = ("best game so far", "the agent's own game") if not number else (None, None)
            at.plot(run["moves"], run["best_short_percent"], color="C0", linewidth=1.2, label=labels[0])
            at.plot(run["moves"], run["own_short_percent"], color="C1", linewidth=0.6, label=labels[1])
        at.set_title(name, fontsize=9)
        at.set_xlabel("moves learned from")
        at.set_ylabel("short of the highest reward, %" if "published" in name else "pass above the proved best, %")
        at.set_yscale("symlog", linthresh=1)
        at.set_ylim(bottom=0)
    # Above the panels, in a strip that they leave free: curves run everywhere.
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 1.0 - 0.3 / (3.2 * rows + 0.3)))
    path = folder / "operator-shardings.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
