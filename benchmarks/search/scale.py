"""Thousands of operators on hundreds of devices: seconds, memory and proved gap as both grow.

Every row is a process of its own, so that the peak of memory is that row's; it is read from the kernel (VmHWM) after
the search, and holds the interpreter, the libraries and the problem too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.search import figures as drawing
from benchmarks.search.generated import operators
from benchmarks.search.runs import chosen, run, warm_up
from dejavu.foundation.errors import DejavuError
from dejavu.foundation.registry import named
from dejavu.search import SEARCHES

SIZES = ((1_000, 64), (2_000, 128), (4_000, 256), (7_000, 512), (10_000, 1_024))  # operators, devices
NUM_TYPES = 4
WARM_UP_OPERATORS, WARM_UP_DEVICES = 600, 48
QUICK = {"sizes": SIZES[:2], "budget_seconds": 20.0}


@dataclass(frozen=True)
class Question:
    """What a child process is asked, as JSON on its command line."""

    search: str
    operators: int
    devices: int
    seed: int
    budget_seconds: float


def table(
    *,
    searches: str = "",
    seed: int = 0,
    budget_seconds: float = 52.0,
    figures: Path | None = None,
    sizes: tuple[tuple[int, int], ...] = SIZES,
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every search on every size, each in a fresh process.

    Raises:
        DejavuError: a child process failed.
    """
    picked = list(chosen(searches, ("coarse",)) or chosen("", ("exact",)))
    rows = [_ask(Question(name, *size, seed, budget_seconds)) for size in sizes for name in picked]
    summary: dict[str, Any] = {}
    for name in picked:
        own = [row for row in rows if row["search"] == name]
        top = own[-1]
        summary[f"{name}_worst_gap_percent"] = max(row["gap_percent"] for row in own)
        summary[f"{name}_worst_wall_seconds"] = max(row["wall_seconds"] for row in own)
        summary[f"{name}_largest_peak_bytes"] = max(row["peak_bytes"] for row in own)
        for key in ("operators", "devices", "wall_seconds", "peak_bytes", "gap_percent"):
            summary[f"{name}_at_the_top_{key}"] = top[key]
    if figures is not None:
        summary["figure"] = str(drawing.save(drawing.growth(rows), figures / "search-scale.png"))
    return f"Operators of one model on {NUM_TYPES} kinds of devices, {budget_seconds:g} s each", rows, summary


def _ask(question: Question) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.search.scale", json.dumps(asdict(question))]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise DejavuError(f"the process for {question} failed with {child.returncode}: {child.stderr[-2000:]}")
    return json.loads(child.stdout.splitlines()[-1])


def answer(question: Question) -> dict[str, Any]:
    """The row, from inside the child process."""
    search = named(SEARCHES, question.search)()
    small = operators(question.seed, num_operators=WARM_UP_OPERATORS, num_devices=WARM_UP_DEVICES, num_types=NUM_TYPES)
    warm_up([search], [small])
    problem = operators(
        question.seed, num_operators=question.operators, num_devices=question.devices, num_types=NUM_TYPES
    )
    before = peak_bytes()
    one = run(search, problem, question.budget_seconds, question.seed)
    return {
        "operators": question.operators,
        "devices": question.devices,
        "types": NUM_TYPES,
        "configurations": len(problem.configurations),
        "search": question.search,
        "step_seconds": one.result and one.result.step_seconds,
        "lower_bound_seconds": one.result and one.result.lower_bound_seconds,
        "gap_percent": one.gap_percent,
        "wall_seconds": one.wall_seconds,
        "cpu_seconds": one.cpu_seconds,
        "peak_bytes": peak_bytes(),
        "problem_bytes": before,
        "stages": one.result and len(one.result.plan.stages),
        "complaint": one.complaint[:80] or None,
    }


def peak_bytes() -> int:
    """The most memory this process has had; getrusage would count the parent's, from before exec."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise DejavuError("/proc/self/status has no VmHWM; wanted Linux")
    return 1024 * int(found.group(1))


if __name__ == "__main__":
    print(json.dumps(answer(Question(**json.loads(sys.argv[1])))))
