"""What Prefect's page shows of a run beside its log: progress, the table of plans, and the link to MLflow's page."""

from __future__ import annotations

import logging
import os
import time
from contextvars import copy_context
from threading import Thread
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from dejavu.foundation.units import format_seconds
from dejavu.planning import Choice
from dejavu.planning.sentences import NAMES
from dejavu.track import Tracker

MLFLOW_URL = "DEJAVU_MLFLOW_URL"  # `dejavu up` sets it for its worker
log = logging.getLogger("dejavu.tasks")
EVERY_SECONDS = 2.0  # between two updates: each is a request to the server


class Progress:
    """A bar on the run's page; call it with how much is done.

    It is sent by threads of its own, one at a time, so that a server that is slow or away holds up nothing, and which
    the end of the process does not wait for.
    """

    def __init__(self, key: str, what: str) -> None:
        self._key, self._what = key, what
        self._artifact: UUID | None = None
        self._told_seconds = -EVERY_SECONDS
        self._sending: Thread | None = None

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        is_free = self._sending is None or not self._sending.is_alive()
        if is_free and now - self._told_seconds >= EVERY_SECONDS:
            self._told_seconds = now
            self._start(100.0 * done / total if total else 0.0)

    def end(self) -> None:
        """Fill the bar, if there is one."""
        if self._sending is not None:
            self._start(100.0)

    def _start(self, percent: float) -> None:
        words = (self._send, percent, self._sending)
        # A pool's threads are not daemons: one that an interrupt finds starting would be waited for without end.
        self._sending = Thread(target=copy_context().run, args=words, name=f"progress-{self._key}", daemon=True)
        self._sending.start()

    def _send(self, percent: float, after: Thread | None) -> None:
        if after is not None:
            after.join()
        try:
            if self._artifact is None:
                made: Any = create_progress_artifact(percent, key=self._key, description=self._what)
                self._artifact = made
            else:
                update_progress_artifact(self._artifact, percent)
        except Exception as error:  # a bar is no reason for a training to fail
            log.debug("no progress is shown: %s", error)


def show_choice(choice: Choice) -> None:
    """Show every search's plan beside the baselines', the fastest first, and what was proved."""
    rows = [(shown, row) for row in choice.considered if (shown := row.shown) is not None]
    table = [
        {
            "search": NAMES.get(row.search, row.search),
            "microbatches": row.num_microbatches,
            "schedule": shown.plan.schedule,
            "stages": len(shown.plan.stages),
            "devices": shown.num_devices,
            "step": format_seconds(shown.step_seconds) if shown.fits else "does not fit",
            "chosen": "yes" if shown.plan == choice.plan else "",
        }
        for shown, row in sorted(rows, key=lambda one: (not one[0].fits, one[0].step_seconds))
    ]
    bound = choice.simulated_lower_bound_seconds
    proved = f"; proved: no allowed plan is simulated below {format_seconds(bound)}" if bound > 0 else ""
    create_table_artifact(table, key="plans", description=f"Steps are predicted by simulation{proved}.")


def show_tracked(run: Tracker) -> None:
    """Link to the run's page in MLflow, where `dejavu up` serves one."""
    url, page = os.environ.get(MLFLOW_URL), run.page
    if url and page:
        create_link_artifact(
            f"{url}/{page}", key="mlflow", link_text="the run in MLflow", description="figures, artifacts, report"
        )
