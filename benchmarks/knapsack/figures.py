"""How the relaxations come to their answers, beside what needs no gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.knapsack.relaxations import LISTING
from benchmarks.knapsack.ways import Answer


def draw(answers: Mapping[str, tuple[Answer, float]], best: int, greedy_value: int, folder: Path) -> Path:
    """Draw the value found against time, in percent of the optimum.

    Args:
        answers: by way, what it found and the seconds it took.
        best: the proved optimum.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure, at = plt.subplots(figsize=(7.2, 3.8))
    for name, (answer, _) in answers.items():
        if not answer.curve:
            continue
        seconds = [point.seconds for point in answer.curve]
        fitting = [100 * point.fitting_value / best for point in answer.curve]
        (line,) = at.plot(seconds, fitting, label=f"{name}, what fits" if name == LISTING else name)
        if answer.fitting is not None:
            kept = [100 * point.kept_value / best for point in answer.curve]
            at.plot(seconds, kept, color=line.get_color(), linestyle=":", label=f"{name}, what it keeps (too heavy)")
    at.axhline(100, color="0.6", linewidth=1)
    at.axhline(100 * greedy_value / best, color="0.6", linewidth=1, linestyle="--", label="greedy, at once")
    at.set_ylim(80, 101)
    at.set_xscale("log")
    at.set_xlabel("CPU seconds")
    at.set_ylabel("value, % of the optimum")
    at.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path = folder / "knapsack.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
