"""Agents that learn to cut: online on each problem, and beforehand on generated arrays; beside as many random plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from dejavu.operator_cuts import (
    CONFIGURATIONS,
    CutProblem,
    Dqn,
    DqnOffline,
    Found,
    LabelProgram,
    OperatorArrays,
    generated_arrays,
)
from dejavu.operator_cuts.dqn import train_offline

ONLINE_MODEL, SPACES = "bert-48", ("boundaries", "radius 3")
CONVERGED_PERCENT = 1.0  # within so much of the proved best
UNSEEN = 20  # generated arrays that an offline agent never saw, of each draw


Rows = list[dict[str, Any]]


class Trainings:
    """Agents that are trained in processes beside this one, from when this is made.

    Args:
        points: by model; memory is not looked at where nothing would fit.
    """

    def __init__(self, points: Mapping[str, OperatorArrays], seeds: int, steps: int, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"))
        problems = {name: _problem(arrays) for name, arrays in points.items() if len(arrays) == 128}
        online = [(space, seed) for space in SPACES for seed in range(seeds) if ONLINE_MODEL in problems]
        ask = self._pool.submit
        self._online = {
            (space, seed): ask(_online, ONLINE_MODEL, problems[ONLINE_MODEL], space, seed, steps)
            for space, seed in reversed(online)  # the longest first
        }
        draws = [(draw, seed) for draw in ("uniform", "normal") for seed in range(seeds) if problems]
        self._offline = [ask(_offline, draw, problems, seed, steps) for draw, seed in draws]

    def finished(self, figures: Path | None) -> tuple[Rows, dict[str, Any]]:
        """Wait for all, and return the rows and the summary."""
        rows, curves = Rows(), dict[str, list[dict[str, Any]]]()
        for (space, _), training in sorted(self._online.items()):
            row, curve = training.result()
            rows.append(row)
            curves.setdefault(f"{ONLINE_MODEL}, {space}", []).append(curve)
        rows += [row for training in self._offline for row in training.result()]
        self._pool.shutdown()
        if figures is not None and curves:
            draw_curves(curves, figures)
        return rows, {"agents": _summary(rows), "curves": curves}


def _problem(arrays: OperatorArrays, space: str = "boundaries") -> CutProblem:
    servers = CONFIGURATIONS["C"]
    problem = CutProblem(arrays, servers, servers.boundaries if space == "boundaries" else servers.near_boundaries())
    if not isinstance(LabelProgram().run(problem), Found):
        problem = replace(problem, servers=replace(servers, memory_bytes=float("inf")))
    return problem


def _above_percent(step_seconds: float, problem: CutProblem) -> float:
    """Return how much longer than the proved best a step is."""
    best = LabelProgram().run(problem)
    assert isinstance(best, Found)
    return 100.0 * (step_seconds / best.step_seconds - 1.0)


def _online(name: str, problem: CutProblem, space: str, seed: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train one agent on the problem itself; return its row and its convergence curve."""
    if space != "boundaries":
        problem = replace(problem, device_cuts=problem.servers.near_boundaries())
    heard: list[tuple[int, float, float]] = []

    def told(moves: int, best: float, greedy: float) -> None:
        if not heard or moves - heard[-1][0] >= 250:
            heard.append((moves, best, greedy))

    settings = replace(Dqn().settings, num_steps=steps)
    answer = Dqn(settings, told=told).run(problem, seed=seed)
    best = LabelProgram().run(problem)
    assert isinstance(answer, Found) and isinstance(best, Found)

    def above(step_seconds: float) -> float:
        return 100.0 * (step_seconds / best.step_seconds - 1.0)

    row = {
        "model": name,
        "agent": f"dqn online, {space}",
        "seed": seed,
        "above_best_percent": above(answer.step_seconds),
        "greedy_above_best_percent": above(heard[-1][2]),
        "random_above_best_percent": above(_random(problem, steps, seed)),
        "agent_cpu_s": answer.cpu_seconds,
        "operator_cuts": str(answer.plan.operator_cuts),
        "device_cuts": str(answer.plan.device_cuts),
    }
    curve = {
        "seed": seed,
        "moves": [moves for moves, _, _ in heard],
        "best_above_percent": [above(found) for _, found, _ in heard],
        "greedy_above_percent": [above(own) for _, _, own in heard],
    }
    return row, curve


def _random(problem: CutProblem, steps: int, seed: int) -> float:
    """Return the best of as many random moves."""
    settings = replace(Dqn().settings, num_steps=steps, batch_size=steps + 1, last_epsilon=1.0)  # it never learns
    answer = Dqn(settings).run(problem, seed=seed)
    assert isinstance(answer, Found)
    return answer.step_seconds


def _offline(draw: Any, problems: Mapping[str, CutProblem], seed: int, steps: int) -> Rows:
    """Train on generated arrays; cut every model, and arrays of both draws that were never seen."""
    first = next(iter(problems.values()))
    began = time.process_time()
    member = DqnOffline(draw)
    agent = train_offline(first, draw, replace(member.settings, num_steps=steps), seed)
    training = time.process_time() - began
    asked = {name: [problem] for name, problem in problems.items()}
    for other in ("uniform", "normal"):
        arrays = [generated_arrays(other, 128, 10**6 + number) for number in range(UNSEEN)]
        asked[f"{UNSEEN} × {other}"] = [_problem(one) for one in arrays]
    rows = []
    for name, cases in asked.items():
        answers = [(problem, member.infer(problem, agent)) for problem in cases]
        # Memory decides what fits, and an agent's few plans may not: that is counted, not hidden.
        above = [_above_percent(answer.step_seconds, one) for one, answer in answers if isinstance(answer, Found)]
        rows.append(
            {
                "model": name,
                "agent": f"dqn trained on {draw} arrays",
                "seed": seed,
                "above_best_percent": statistics.mean(above) if above else None,
                "without_plan": len(cases) - len(above),
                "agent_cpu_s": statistics.mean(answer.cpu_seconds for _, answer in answers),
                "training_cpu_s": training,
            }
        )
    return rows


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in dict.fromkeys((str(row["agent"]), str(row["model"])) for row in rows):
        own = [row for row in rows if (row["agent"], row["model"]) == key]
        above = [row["above_best_percent"] for row in own if row["above_best_percent"] is not None]
        one = {
            "seeds": len(own),
            "median_above_best_percent": statistics.median(above) if above else None,
            "most_above_best_percent": max(above, default=None),
            "converged_seeds": sum(value <= CONVERGED_PERCENT for value in above),
            "median_cpu_s": statistics.median(row["agent_cpu_s"] for row in own),
        }
        for extra in ("greedy_above_best_percent", "random_above_best_percent", "training_cpu_s"):
            values = [row[extra] for row in own if row.get(extra) is not None]
            if values:
                one[f"median_{extra}"] = statistics.median(values)
        found[", ".join(key)] = one
    return found


def draw_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> Path:
    """Draw how far above the proved best the best plan so far is, and the plan that the agent holds best."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.4), sharey=True, squeeze=False)
    for at, (name, runs) in zip(axes[0], curves.items(), strict=True):
        for number, run in enumerate(runs):
            labels = ("best plan so far", "the agent's own plan") if not number else (None, None)
            at.plot(run["moves"], run["best_above_percent"], color="C0", linewidth=1.2, label=labels[0])
            at.plot(run["moves"], run["greedy_above_percent"], color="C1", linewidth=0.6, label=labels[1])
        at.set_title(name, fontsize=9)
        at.set_xlabel("moves learned from")
        at.set_yscale("symlog", linthresh=1)
    axes[0][0].set_ylabel("step above the proved best, %")
    # Above the panels, in a strip that they leave free: curves run everywhere.
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 0.92))
    path = folder / "operator-cuts.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
