"""Differentiable search with more and more restarts at once: what a descent takes, and what the search then finds.

Each row is a number of restarts on one problem on one device, with the search's own descent; the search itself runs on
the GPU where there is one. A CPU is not asked for more restarts where its last descent was long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.search.generated import heterogeneous
from benchmarks.search.runs import run, warm_up
from dejavu.plans import Problem, SearchResult
from dejavu.search import Differentiable
from dejavu.search.differentiable.decode import Decoder
from dejavu.search.differentiable.relaxed import Relaxation
from dejavu.search.differentiable.torch_threads import one_thread
from dejavu.search.shared.options import Options
from dejavu.search.shared.suffix_table import chain_bounds

SIZES = ((4, 64, 96), (3, 48, 64), (2, 64, 96))  # types, devices, layers: no beam tries everything
COUNTS = (32, 256, 1024, 4096)
FIRST_PLAN_SECONDS = 5.0
MOST_SECONDS = 2.5  # of the last descent on a CPU, for a longer one to be tried
QUICK = {"num_problems": 1, "budget_seconds": 2.0}


def table(
    *, num_problems: int = 3, seed: int = 0, budget_seconds: float = 10.0, most_seconds: float = math.inf
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every number of restarts on every problem and device.

    Args:
        most_seconds: searches that do not fit into so many are left out, and so is a descent that they cut off.
    """
    ends = time.monotonic() + most_seconds
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    warm_up([Differentiable()], [_problem(0, seed)])
    rows: list[dict[str, Any]] = []
    for number in range(num_problems):
        problem, (types, num_devices, layers) = _problem(number, seed), SIZES[number % len(SIZES)]
        about = {"types": types, "devices": num_devices, "layers": layers, "seed": seed + number}
        of_case: list[dict[str, Any]] = []
        for device in devices:
            searches = device == devices[0]
            for count, seconds in _descents(problem, device, seed, ends):
                row = {**about, "device": _name(device), "restarts": count, "descent_seconds": seconds}
                if searches and time.monotonic() + budget_seconds <= ends:
                    found = run(Differentiable(num_restarts=count), problem, budget_seconds, seed)
                    row |= {"step_seconds": found.step_seconds, "search_wall_seconds": found.wall_seconds}
                of_case.append(row)
        best = min((row["step_seconds"] for row in of_case if "step_seconds" in row), default=0.0)
        rows += [row | {"over_best_percent": _over(row.get("step_seconds"), best)} for row in of_case]
    return f"Restarts of the differentiable search at once, {budget_seconds:g} s each", rows, summary(rows, devices)


def _problem(number: int, seed: int) -> Problem:
    types, devices, layers = SIZES[number % len(SIZES)]
    return heterogeneous(seed + number, num_types=types, num_devices=devices, num_layers=layers)


def _over(seconds: float | None, best: float) -> float | None:
    return None if seconds is None else 100.0 * (seconds / best - 1.0)


def _name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "CPU, one thread"


def _descents(problem: Problem, device: str, seed: int, ends: float = math.inf) -> Iterator[tuple[int, float]]:
    """Yield each number of restarts, and the seconds of a descent that is not the first on the device.

    Args:
        ends: when, on the monotonic clock, descending is cut off.
    """
    search = Differentiable()
    left = ends - time.monotonic()
    if left <= 0:
        return
    known = replace(search, num_rounds=0).run(
        problem, budget_seconds=min(FIRST_PLAN_SECONDS, left)
    )  # what its descents begin with
    if not isinstance(known, SearchResult):
        return

    def is_over() -> bool:
        return time.monotonic() > ends

    options = Options.of(problem)
    decoder = Decoder(problem, options)
    value_T = decoder.values(chain_bounds(options.first_L1, options.stop_N, options.seconds_N, options.busy_N)[0])
    with one_thread():
        relaxation = Relaxation(
            options,
            decoder.counts_T,
            decoder.type_G,
            decoder.taken_G,
            known.step_seconds,
            search.max_blocks,
            device,
        )
        relaxation.descend(relaxation.start(COUNTS[0], seed, value_T), 2, lambda: False)  # CUDA loads kernels
        for count in COUNTS:
            point = relaxation.start(count, seed, value_T)
            began = time.perf_counter()
            relaxation.descend(point, search.num_steps, is_over)  # its results are numbers of the host: all done
            seconds = time.perf_counter() - began
            if is_over():
                return
            yield count, seconds
            if device == "cpu" and seconds > MOST_SECONDS:
                return


def summary(rows: list[dict[str, Any]], devices: list[str]) -> dict[str, Any]:
    """Seconds of the descents, and how far the plans were from the best of all numbers of restarts."""
    found: dict[str, Any] = {"devices": [_name(device) for device in devices]}
    for device in devices:
        for count in COUNTS:
            own = [row for row in rows if row["device"] == _name(device) and row["restarts"] == count]
            if own:
                found[f"{device}_{count}_descent_seconds"] = sum(row["descent_seconds"] for row in own) / len(own)
            over = [row["over_best_percent"] for row in own if row["over_best_percent"] is not None]
            if over:
                found[f"{device}_{count}_worst_over_best_percent"] = max(over)
    return found
