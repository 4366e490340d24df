"""Steps to a target: the winner of N trials against plain ways to start.

For each repeat (a seed of data order and split that no other has) one training from each of several draws of the
framework's default and of every static family, and the winner of N trials going on from where its trial stopped. A
training that does not reach the target counts with all the steps that it had: the planned ones, in the short form
fewer. The best static family is the one that needs the fewest steps over all repeats, which nobody knows beforehand.
Intervals are bootstrapped over the repeats.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import distributed
import numpy as np
from rich.progress import Progress
from scipy.stats import bootstrap

from benchmarks.initialization.runs import Run, Start, train_to_target, workload_of
from dejavu.foundation.registry import named
from dejavu.init import MENU, PROPOSERS, Draw, space_of
from dejavu.trials import Trials, local_client, probe_draws, search_initialization
from dejavu.workload import Workload

COUNTS, QUICK_COUNTS = (4, 8, 16, 40), (40,)
FIRST_SEED = 1000  # of the repeats
BASELINE_SEED = 500_000  # of the baselines' draws: none that a proposer takes
DEFAULT = "default"
SEEDS, FILTER = "seeds only", "paper's filter"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class How:
    """How much is run.

    Attributes:
        default_draws, family_draws: of the default, and of each other family, in a repeat.
        ended_draws: of the default, that are trained to the end for their final test loss.
        most_steps: of any training; None: as many as are planned.
    """

    repeats: int
    default_draws: int
    family_draws: int
    ended_draws: int
    most_steps: int | None = None


WHOLE, QUICK = How(10, 5, 3, 3), How(5, 3, 1, 1, most_steps=500)


@dataclass(frozen=True)
class Repeat:
    """All trainings of one task and seed: by family one for each draw, by method the winner's.

    Attributes:
        trials: of each method that ran any.
        seconds: wall-clock of the trials of a method.
    """

    task: str
    seed: int
    families: dict[str, list[Run]]
    methods: dict[str, Run]
    trials: dict[str, Trials]
    seconds: dict[str, float]


def ours(count: int) -> str:
    return f"N = {count}"


def measure(names: Sequence[str], repeats: int, counts: Sequence[int], configuration: How) -> list[Repeat]:
    """Every task and repeat, on as many Dask workers as there are cores."""
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="dejavu-initialization-") as folder,
        local_client(_cores(), Path(folder) / "dask") as client,
        Progress() as progress,
    ):
        bar = progress.add_task("repeats", total=len(names) * repeats)
        for name in names:
            for repeat in range(repeats):
                progress.update(bar, description=f"{name}, repeat {repeat + 1}")
                found.append(
                    _repeat(client, name, FIRST_SEED + repeat, counts, configuration, Path(folder) / f"{name}-{repeat}")
                )
                progress.advance(bar)
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _repeat(
    client: distributed.Client, task: str, seed: int, counts: Sequence[int], configuration: How, folder: Path
) -> Repeat:
    families = {
        scheme: [Draw(scheme, seed=BASELINE_SEED + 100 * seed + k) for k in range(draws)]
        for scheme in MENU
        for draws in (configuration.default_draws if scheme == DEFAULT else configuration.family_draws,)
    }
    asked = [
        (scheme, Start(draw), scheme == DEFAULT and k < configuration.ended_draws)
        for scheme, draws in families.items()
        for k, draw in enumerate(draws)
    ]
    workload = workload_of(task, seed)
    most = min(configuration.most_steps or workload.num_steps, workload.num_steps)
    futures = [client.submit(train_to_target, task, seed, start, ends, most, pure=False) for _, start, ends in asked]
    trials, seconds, starts = dict[str, Trials](), dict[str, float](), dict[str, Start]()
    runs = [Run(**plain) for plain in client.gather(futures)]
    for method, proposer, count in [*((ours(n), "mixed", n) for n in counts), (SEEDS, "seeds", counts[-1])]:
        began = time.perf_counter()
        asked_for = _with_trials(workload, proposer, count)
        trials[method] = search_initialization(client, asked_for, folder / method.replace(" ", ""))
        seconds[method] = time.perf_counter() - began
        starts[method] = Start.of(trials[method].winner)
    starts[FILTER] = Start(_filtered(client, _with_trials(workload, "mixed", counts[-1]), folder / "filter"))
    main = ours(counts[-1])
    winners = [
        client.submit(train_to_target, task, seed, start, name == main, most, pure=False)
        for name, start in starts.items()
    ]
    methods = {name: Run(**plain) for name, plain in zip(starts, client.gather(winners), strict=True)}
    by_family = {
        scheme: [run for (own, _, _), run in zip(asked, runs, strict=True) if own == scheme] for scheme in MENU
    }
    return Repeat(task, seed, by_family, methods, trials, seconds)


def _with_trials(workload: Workload, proposer: str, count: int) -> Workload:
    settings = workload.trials.model_copy(update={"proposer": proposer, "count": count})
    return workload.model_copy(update={"trials": settings})


def _filtered(client: distributed.Client, workload: Workload, folder: Path) -> Draw:
    """The paper's rule on the draws that the default proposer makes: one of them, by its first loss and gradient."""
    draws = named(PROPOSERS, "mixed").propose(space_of(workload), workload.trials.count, seed=workload.seed)
    (chosen,) = named(PROPOSERS, "loss_and_gradient").choose(probe_draws(client, workload, draws, folder), 1)
    return chosen


def steps_to(target: str, run: Run) -> int:
    """Until the target; as many as were allowed where it was not reached."""
    reached = run.train_steps if target == "train" else run.test_steps
    return run.most_steps if reached is None else reached


def best_family(repeats: Sequence[Repeat], target: str = "train") -> str:
    """The family that needs the fewest steps, by the mean over repeats of the median over its draws."""
    return min(MENU, key=lambda scheme: mean(_family_steps(row, scheme, target) for row in repeats))


def _other_steps(row: Repeat, name: str, target: str) -> float:
    return steps_to(target, row.methods[name]) if name in row.methods else _family_steps(row, name, target)


def _family_steps(row: Repeat, scheme: str, target: str = "train") -> float:
    return median(steps_to(target, run) for run in row.families[scheme])


def fewer_percent(repeats: Sequence[Repeat], method: str, other: str, target: str = "train") -> list[float]:
    """Mean, and the two ends of its 95 % interval, of how many steps fewer a method needs than another one.

    Args:
        other: a family, by the median over its draws, or a method.
    """
    values = [
        100.0 * (1.0 - steps_to(target, row.methods[method]) / _other_steps(row, other, target)) for row in repeats
    ]
    if min(values) == max(values):
        return [values[0]] * 3
    found = bootstrap((values,), np.mean, confidence_level=CONFIDENCE, rng=0, method="percentile").confidence_interval
    return [mean(values), float(found.low), float(found.high)]


def by_task(measured: Sequence[Repeat]) -> dict[str, list[Repeat]]:
    return {task: [row for row in measured if row.task == task] for task in dict.fromkeys(row.task for row in measured)}


def table(measured: Sequence[Repeat]) -> list[dict[str, Any]]:
    """For people: each task's families and methods."""
    found = []
    for task, repeats in by_task(measured).items():
        best = best_family(repeats)
        for scheme in MENU:
            runs = [run for row in repeats for run in row.families[scheme]]
            about = {"task": task, "start": scheme + (" (best family)" if scheme == best else "")}
            found.append({**about, **_figures(runs)})
        for method in repeats[0].methods:
            runs = [row.methods[method] for row in repeats]
            trials = [row.trials[method] for row in repeats if method in row.trials]
            found.append(
                {
                    "task": task,
                    "start": method,
                    **_figures(runs),
                    "fewer_than_default": _interval(fewer_percent(repeats, method, DEFAULT)),
                    "fewer_than_best_family": _interval(fewer_percent(repeats, method, best)),
                    "fewer_than_default_on_test": _interval(fewer_percent(repeats, method, DEFAULT, "test")),
                    "trial_steps": mean(one.total_steps for one in trials) if trials else 0,
                    "trials_s": mean(row.seconds[method] for row in repeats) if trials else 0.0,
                }
            )
    return found


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "steps_to_train_target": median(steps_to("train", run) for run in runs),
        "steps_to_test_target": median(steps_to("test", run) for run in runs),
        "not_reached": sum(run.train_steps is None for run in runs),
        "runs": len(runs),
    }


def _interval(three: Sequence[float]) -> str:
    return f"{three[0]:.0f} % ({three[1]:.0f} to {three[2]:.0f})"


def rows(measured: Sequence[Repeat]) -> list[dict[str, Any]]:
    """For JSON: every training."""
    found = []
    for row in measured:
        plain = [(scheme, k, run) for scheme, runs in row.families.items() for k, run in enumerate(runs)]
        for start, k, run in [*plain, *((method, 0, run) for method, run in row.methods.items())]:
            about: dict[str, Any] = {"table": "gain", "task": row.task, "seed": row.seed, "start": start, "draw": k}
            about |= {"steps_to_train_target": run.train_steps, "steps_to_test_target": run.test_steps}
            about |= {
                "final_test_loss": run.test_loss if np.isfinite(run.test_loss) else None,
                "steps": len(run.losses),
            }
            if start in row.trials:
                winner = row.trials[start].winner
                about |= {"winner": str(winner.draw), "trial_steps": row.trials[start].total_steps}
                about |= {"trials_seconds": row.seconds[start]}
            found.append(about)
    return found


def summary(measured: Sequence[Repeat]) -> dict[str, dict[str, Any]]:
    """For each task what its last number of trials gains, its ablations, and the gain by number of trials."""
    found = {}
    for task, repeats in by_task(measured).items():
        counts = [method for method in repeats[0].methods if method.startswith("N = ")]
        main, best = counts[-1], best_family(repeats)
        final = [row.methods[main].test_loss for row in repeats]
        ended = [
            [run for run in row.families[DEFAULT] if len(run.losses) == len(row.methods[main].losses)]
            for row in repeats
        ]
        default = [median(run.test_loss for run in runs) for runs in ended if runs]
        found[task] = {
            "fewer_steps_than_default_percent": fewer_percent(repeats, main, DEFAULT),
            "fewer_steps_than_best_family_percent": fewer_percent(repeats, main, best),
            "fewer_steps_than_seeds_only_percent": fewer_percent(repeats, main, SEEDS),
            "seeds_only_percent": fewer_percent(repeats, SEEDS, DEFAULT),
            "papers_filter_percent": fewer_percent(repeats, FILTER, DEFAULT),
            "fewer_steps_than_default_to_test_target_percent": fewer_percent(repeats, main, DEFAULT, "test"),
            "best_family": best,
            "by_count_percent": {name.removeprefix("N = "): fewer_percent(repeats, name, DEFAULT) for name in counts},
            "repeats": len(repeats),
            "never_worse_than_default": all(
                steps_to("train", row.methods[main]) <= _family_steps(row, DEFAULT) for row in repeats
            ),
            "final_test_loss": mean(final),
            "default_final_test_loss": mean(default) if default else None,
        }
    return found


def flat(found: dict[str, Any]) -> dict[str, Any]:
    """A row of the last table: intervals in words, nothing nested."""
    words = {name: _interval(value) if isinstance(value, list) else value for name, value in found.items()}
    return {name: value for name, value in words.items() if not isinstance(value, dict)}
