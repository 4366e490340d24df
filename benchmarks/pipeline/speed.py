"""How fast the simulator runs a step, torch's own listing of the actions included, and how that grows."""

from __future__ import annotations

import time
from typing import Any

from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, actions_of
from dejavu.simulation import Message, StageSeconds, simulate
from dejavu.simulation._action_table import action_table

SIZES = ((8, 64), (16, 256), (32, 512), (64, 1024))  # stages, microbatches
QUICK: dict[str, Any] = {"sizes": SIZES[1:2]}


def table(*, sizes: tuple[tuple[int, int], ...] = SIZES) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every schedule at every size; compiled loops are loaded before anything is timed."""
    _play("1f1b", 4, 8)
    rows = []
    for name in SCHEDULES:
        for num_stages, num_microbatches in sizes:
            actions_of.cache_clear()
            action_table.cache_clear()
            first, simulation = _play(name, num_stages, num_microbatches)
            again, _ = _play(name, num_stages, num_microbatches)
            rows.append(
                {
                    "schedule": name,
                    "stages": num_stages,
                    "microbatches": num_microbatches,
                    "wall_seconds": first[0],
                    "cpu_seconds": first[1],
                    "again_wall_seconds": again[0],
                    "bubble_percent": 100.0 * simulation.bubble_fraction,
                }
            )
    largest = [row for row in rows if row["stages"] == sizes[-1][0]]
    summary = {
        "simulator_stages": sizes[-1][0],
        "simulator_microbatches": sizes[-1][1],
        "simulator_worst_wall_seconds": max(row["wall_seconds"] for row in largest),
        "simulator_worst_cpu_seconds": max(row["cpu_seconds"] for row in largest),
    }
    return "The simulator's own time", rows, summary


def _play(name: str, num_stages: int, num_microbatches: int) -> tuple[tuple[float, float], Any]:
    configuration = StageConfiguration("device")
    plan = Plan(tuple(Stage(s, s + 1, configuration) for s in range(num_stages)), name, num_microbatches)
    wall, cpu = time.perf_counter(), time.process_time()
    simulation = simulate(
        plan, [StageSeconds(1.0, 2.0, 0.5)] * num_stages, messages=[Message(0.05, 0.1)] * (num_stages - 1)
    )
    return (time.perf_counter() - wall, time.process_time() - cpu), simulation
