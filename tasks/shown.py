"""What Prefect's page shows of a run beside its log: progress, the table of plans, and the link to MLflow's page."""

from __future__ import annotations

import logging
import os
import time
from contextvars import copy_context
from dataclasses import replace
from threading import Thread
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from dejavu.cluster import Cluster
from dejavu.cost.rates import Rates, rates
from dejavu.foundation.units import format_bound, format_seconds
from dejavu.graphs.graph import Graph
from dejavu.planning import Choice
from dejavu.planning.sentences import name_of, scope, short
from dejavu.runtime.job import TrainingJob
from dejavu.timing.pace import Pace, in_words
from dejavu.track import Tracker
from tasks.events import tell

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


class TrainingProgress:
    """How fast a training goes: told to listeners with each step, and for people as the end of a line.

    Args:
        graph: the model at the job's microbatch size.
    """

    def __init__(self, job: TrainingJob, graph: Graph, cluster: Cluster) -> None:
        self._job, self._pace = job, Pace(job.last_step)
        self._of_a_second = rates(job.workload, graph, cluster, job.binding.plan, 1.0)  # with steps of that length

    def add(self, step: int, loss: float) -> None:
        """Take in a step that is done."""
        self._pace.add(step)
        found = self._rates
        tell(
            "training",
            step=step + 1,
            of=self._job.last_step,
            loss=loss,
            samples_per_second=found and found.samples_per_second,
            tokens_per_second=found and found.tokens_per_second,
            model_flops_utilization_percent=100.0 * found.utilization if found and found.utilization else None,
            left_seconds=self._pace.left_seconds,
        )

    @property
    def _rates(self) -> Rates | None:
        """The rates at today's pace; None: it is not known yet."""
        seconds, one = self._pace.step_seconds, self._of_a_second
        if not seconds:
            return None
        tokens, share = (None if x is None else x / seconds for x in (one.tokens_per_second, one.utilization))
        return replace(
            one, samples_per_second=one.samples_per_second / seconds, tokens_per_second=tokens, utilization=share
        )

    def __str__(self) -> str:
        """Write `, 11,400 tokens/s, MFU 41.2%, 35 s left`; nothing where the pace is not known yet."""
        found, left = self._rates, self._pace.left_seconds
        if found is None or left is None:
            return ""
        said = [f"{short(found.samples_per_second)} samples/s"]
        if found.tokens_per_second is not None:
            said = [f"{short(found.tokens_per_second)} tokens/s"]
        if found.utilization is not None:
            said.append(f"MFU {found.utilization:.1%}")
        if left > 0:
            said.append(f"{in_words(left)} left")
        return f", {', '.join(said)}"


def show_choice(choice: Choice) -> None:
    """Show every search's plan beside the baselines', the fastest first, and what was proved."""
    rows = [(shown, row) for row in choice.considered if (shown := row.shown) is not None]
    table = [
        {
            "search": name_of(row),
            "microbatches": row.num_microbatches,
            "schedule": shown.plan.schedule_name,
            "stages": len(shown.plan.stages),
            "devices": shown.num_devices,
            "step": format_seconds(shown.step_seconds) if shown.fits else "does not fit",
            "chosen": "yes" if shown.plan == choice.plan else "",
        }
        for shown, row in sorted(rows, key=lambda one: (not one[0].fits, one[0].step_seconds))
    ]
    bound = choice.simulated_lower_bound_seconds
    proved = (
        f"; proved: no plan{scope(choice)} is simulated below {format_bound(bound, choice.simulated_seconds)}"
        if bound > 0
        else ""
    )
    create_table_artifact(table, key="plans", description=f"Steps are predicted by simulation{proved}.")


def show_tracked(run: Tracker) -> None:
    """Link to the run's page in MLflow, where `dejavu up` serves one."""
    url, page = os.environ.get(MLFLOW_URL), run.page
    if url and page:
        create_link_artifact(
            f"{url}/{page}", key="mlflow", link_text="the run in MLflow", description="figures, artifacts, report"
        )
