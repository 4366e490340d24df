"""What a reader should know first: a few sentences, each with what it rests on."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from dejavu.foundation.units import format_bound, format_gap, format_seconds
from dejavu.planning.sentences import what_was_gained
from dejavu.report.data import ReportData


class Basis(StrEnum):
    """What a sentence rests on."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    PROVED = "proved"


class Statement(NamedTuple):
    basis: Basis
    text: str


def verdict(run: ReportData) -> tuple[Statement, ...]:
    """Return the step, the gain over the best baseline, and what is proved about all other plans."""
    return (_step(run), _gain(run), *_proved(run))


def _step(run: ReportData) -> Statement:
    predicted = format_seconds(run.predicted_step_seconds)
    if run.training is None or run.training.step_seconds is None or run.step_error is None:
        why = "nothing was trained" if run.training is None else "no step was measured"
        return Statement(Basis.PREDICTED, f"A step is predicted to take {predicted}; {why} in this run.")
    measured, times = format_seconds(run.training.step_seconds), run.training.step_times
    how = f" ({times})" if times is not None else ""
    less = "less" if run.step_error < 0 else "more"
    return Statement(
        Basis.MEASURED, f"A step takes {measured}{how}; predicted were {predicted}, {abs(run.step_error):.1%} {less}."
    )


def _gain(run: ReportData) -> Statement:
    if run.comparison is None:
        return Statement(Basis.PREDICTED, what_was_gained(run.choice))
    is_sure = not run.comparison.low_gain <= 1.0 <= run.comparison.high_gain
    return Statement(Basis.MEASURED, f"The plan is {run.comparison}{'' if is_sure else ': no sure difference'}.")


def _proved(run: ReportData) -> tuple[Statement, ...]:
    if run.gap is None:
        return ()
    seconds = f"is simulated below {format_bound(run.lower_bound_seconds, run.simulation.step_seconds)}; this one at"
    here = format_seconds(run.simulation.step_seconds)
    return (Statement(Basis.PROVED, f"No plan{run.within} {seconds} {here}: a gap of {format_gap(run.gap)}."),)
