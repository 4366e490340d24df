"""The plan of a run beside every baseline and the best plan of every other search."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from dejavu.launch.comparison import Comparison
from dejavu.planning import BASELINES, Candidate, Choice, Considered
from dejavu.planning.sentences import NAMES


@dataclass(frozen=True, eq=False)
class Alternative:
    """A plan that could have been taken, or was.

    Attributes:
        plan: None where none fits; `failure` says why.
        is_trained: it is the plan of the run.
        measured_seconds: the median step where it was trained in turn with another; None: it was not.
    """

    name: str
    plan: Candidate | None
    is_trained: bool = False
    measured_seconds: float | None = None
    failure: str = ""


def alternatives(choice: Choice, bound: Candidate, comparison: Comparison | None) -> tuple[Alternative, ...]:
    """Return the plan of the run, every baseline, and the fastest plan of each other search.

    Args:
        bound: the plan of the run.
        comparison: if the baseline was faster in it, the plan of the run is the baseline's.
    """
    measured = (median(comparison.plan_seconds), median(comparison.baseline_seconds)) if comparison else (None, None)
    best = choice.best_baseline
    if comparison is not None and comparison.is_slower:
        rows = [
            Alternative(f"this run: the {comparison.baseline_name}", bound, True, measured[1]),
            Alternative("the planner's, measured to be slower", choice.chosen, False, measured[0]),
        ]
    else:
        rows = [Alternative("this run", bound, True, measured[0])]
    for name, row in choice.baselines.items():
        rows.append(_of(NAMES[name], row, measured[1] if row is best else None))
    others = dict.fromkeys(row.search for row in choice.considered if row.search not in BASELINES)
    for name in others:
        found = [row for row in choice.considered if row.search == name]
        rows.append(_of(f"found by {name}", min(found, key=_speed)))
    return tuple(rows)


def source_row(choice: Choice, comparison: Comparison | None) -> Considered:
    """Return the search's answer that the plan of the run came from."""
    if comparison is not None and comparison.is_slower and choice.best_baseline is not None:
        return choice.best_baseline
    return choice.origin


def _of(name: str, row: Considered, measured_seconds: float | None = None) -> Alternative:
    return Alternative(name, row.best, False, measured_seconds, row.failure)


def _speed(row: Considered) -> float:
    return row.best.step_seconds if row.best is not None else float("inf")
