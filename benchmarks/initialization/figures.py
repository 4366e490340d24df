"""What the comparison looks like: every trial's losses, the space, steps by start, gain by number of trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.initialization import gains
from benchmarks.initialization.gains import Repeat
from benchmarks.initialization.runs import Run
from benchmarks.initialization.tasks import TASKS
from dejavu.report import losses_figure, space_figure


def draw(measured: Sequence[Repeat], folder: Path) -> None:
    """Pictures of the first repeat's trials, and of what all repeats say."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = gains.by_task(measured)
    for task, repeats in tasks.items():
        main = [name for name in repeats[0].methods if name.startswith("N = ")][-1]
        trials = repeats[0].trials[main]
        _save(losses_figure(trials.results, trials.winner, None), folder / f"initialization-{task}-trials.png")
        _save(space_figure(trials.results, trials.winner), folder / f"initialization-{task}-space.png")
    _save(_steps(tasks), folder / "initialization-steps.png")
    _save(_by_count(tasks), folder / "initialization-count.png")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _steps(tasks: dict[str, list[Repeat]]) -> Figure:
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.2 * len(tasks), 4.2), squeeze=False)
    for at, (task, repeats) in zip(axes[0], tasks.items(), strict=True):
        starts = [*repeats[0].families, *repeats[0].methods]
        runs = [
            [gains.steps_to("train", run) for row in repeats for run in (*row.families.get(s, []), *_method(row, s))]
            for s in starts
        ]
        at.boxplot(runs, orientation="horizontal", tick_labels=starts, medianprops={"color": "C3"})
        at.invert_yaxis()
        at.axvline(max(run.most_steps for row in repeats for run in row.methods.values()), color="0.8", linewidth=1)
        at.set_xlabel(f"steps to a training loss of {TASKS[task].train_loss:g}")
        at.set_title(task, loc="left", fontsize=10)
    figure.tight_layout()
    return figure


def _method(row: Repeat, name: str) -> list[Run]:
    return [row.methods[name]] if name in row.methods else []


def _by_count(tasks: dict[str, list[Repeat]]) -> Figure:
    figure, at = plt.subplots(figsize=(6, 3.6))
    for task, repeats in tasks.items():
        counts = [name for name in repeats[0].methods if name.startswith("N = ")]
        three = [gains.fewer_percent(repeats, name, gains.DEFAULT) for name in counts]
        numbers = [int(name.removeprefix("N = ")) for name in counts]
        at.plot(numbers, [mean for mean, _, _ in three], marker="o", label=task)
        at.fill_between(numbers, [low for _, low, _ in three], [high for _, _, high in three], alpha=0.15)
    at.axhline(0, color="0.7", linewidth=1)
    at.set_xlabel("trials")
    at.set_ylabel("fewer steps than the median default (%)")
    at.legend(frameon=False)
    figure.tight_layout()
    return figure
