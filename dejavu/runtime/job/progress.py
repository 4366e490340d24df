"""A training's file of progress: a line for each step, and a second one where it was evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Evaluation(NamedTuple):
    """The loss on what is held out, after a step."""

    step: int
    loss: float


def parse_progress(line: bytes) -> tuple[int, float] | None:
    """Parse step and loss of one line of progress; None: its rank was killed while writing it, or it has no new step.

    After a power failure there may be anything in it.

    A line with `held_out_loss` comes after the step's own, and repeats its loss for readers that know no other.
    """
    row = _parsed(line)
    return None if row is None or "held_out_loss" in row else (row["step"], row["loss"])


def parse_evaluation(line: bytes) -> Evaluation | None:
    """Parse the loss on what is held out, if that is what the line of progress tells."""
    row = _parsed(line)
    return None if row is None or "held_out_loss" not in row else Evaluation(row["step"], row["held_out_loss"])


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"step", "loss"} <= set(row) else None


def read_losses(progress: Path) -> dict[int, float]:
    """Return the loss of each step that a file of progress has; of steps from which the training went back, none."""
    return _read(progress).losses


def last_losses(progress: Path, first_step: int) -> tuple[int, tuple[float, ...]]:
    """Return the losses of all steps up to the last, and the first of these steps.

    It is the training's own first step, unless lines are lost: then the one after the last step that is not known.
    """
    found = read_losses(progress)
    begin = end = max(found, default=first_step - 1) + 1
    while begin - 1 in found:
        begin -= 1
    return begin if found else first_step, tuple(found[step] for step in range(begin, end))


def read_evaluations(progress: Path) -> tuple[Evaluation, ...]:
    """Return the losses on what is held out, in the order of their steps; likewise."""
    found = _read(progress).evaluations
    return tuple(found[step] for step in sorted(found))


def read_left_out(progress: Path) -> tuple[int, ...]:
    """Return the steps whose gradients overflowed in float16, in order; likewise."""
    return tuple(sorted(_read(progress).left_out))


class _Read(NamedTuple):
    """What a file of progress has of the steps from which the training did not go back."""

    losses: dict[int, float]
    evaluations: dict[int, Evaluation]
    left_out: set[int]

    def before(self, step: int) -> _Read:
        return _Read(
            {k: loss for k, loss in self.losses.items() if k < step},
            {k: one for k, one in self.evaluations.items() if k < step},
            {k for k in self.left_out if k < step},
        )


def _read(progress: Path) -> _Read:
    found, last = _Read({}, {}, set()), -1
    for line in _lines(progress):
        if row := parse_progress(line):
            step, loss = row
            if step <= last:  # it went on from a checkpoint before: perhaps not as far, or evaluated elsewhere
                found = found.before(step)
            found.losses[step], last = loss, step
            if (_parsed(line) or {}).get("left_out"):
                found.left_out.add(step)
        elif evaluation := parse_evaluation(line):
            found.evaluations[evaluation.step] = evaluation
    return found


def _lines(progress: Path) -> list[bytes]:
    return progress.read_bytes().splitlines() if progress.is_file() else []
