"""What `dejavu run` prints: for people, for people who want to be left alone (`--quiet`), for programs (`--json`)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from dejavu.foundation.errors import was_interrupted
from dejavu.foundation.processes.files import finite
from flows.endings import how_interrupted

if TYPE_CHECKING:
    from flows.full import Outcome

CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"  # Prefect's own setting, read when it is imported


def be_quiet() -> None:
    """Let nothing but warnings and errors of this process reach the terminal; call it before Prefect is imported."""
    os.environ[CONSOLE_LEVEL] = "WARNING"


@contextmanager
def printed_as_json() -> Iterator[None]:
    """Print each event as a line of JSON on standard output; a failure is the last, and ends the command as before."""
    from tasks.events import heard_by

    with heard_by(_print):
        try:
            yield
        except BaseException as error:
            interrupted = was_interrupted(error)
            said, kind = (how_interrupted(), KeyboardInterrupt) if interrupted else (str(error), type(error))
            _print({"event": "failed", "time": round(time.time(), 3), "error": said, "type": kind.__name__})
            raise


def say_end(outcome: Outcome, *, as_json: bool) -> None:
    """Print what a run came to: its summary, or its last event."""
    from dejavu.report import WIDTH_COLUMNS, page_in, summary_table, where_to_look

    found, page = outcome.report, page_in(outcome.artifacts)
    if not as_json:
        from rich.console import Console

        Console(width=WIDTH_COLUMNS).print(summary_table(found))
        for line in where_to_look(outcome.artifacts, outcome.tracking_uri):
            typer.echo(line)
        return
    training = found.training
    _print(
        {
            "event": "end",
            "time": round(time.time(), 3),
            "predicted_step_seconds": found.predicted_step_seconds,
            "predicted_step_seconds_range": list(found.step_range),
            "measured_step_seconds": training.step_seconds if training is not None else None,
            "simulated_gap_percent": None if found.gap is None else 100.0 * found.gap,
            "steps": found.num_trained_steps,
            "loss": found.losses[-1] if found.losses else None,
            "checkpoint": training.final_checkpoint if training is not None else None,
            "report": str(page) if page else None,
            "mlflow": outcome.tracking_uri,
        }
    )


def say_complete(sentence: str, *, as_json: bool) -> None:
    """Say that there was nothing left to do."""
    if as_json:
        _print({"event": "end", "time": round(time.time(), 3), "message": sentence})
    else:
        typer.echo(sentence)


def _print(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(finite(event), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()  # a program waits for each line
