"""Trying N initializations in parallel on a Dask client by successive halving; the only package that knows Dask.

A trial is a few numbers, its result is a file whose name is a hash of its settings. A finished trial is never run
again, although Dask reruns a finished task when the worker that held its result dies.
"""

from __future__ import annotations

from dejavu.trials.bought import Bought, Standing
from dejavu.trials.clients import CONNECT_SECONDS, client_of, local_client
from dejavu.trials.halving import rungs
from dejavu.trials.job_queue import JobError, Jobs, check_queue, searching_client, started_jobs
from dejavu.trials.reference import remembered_reference, what_other_parts_change, what_replicas_do_apart
from dejavu.trials.running import best, probe_draws, run_trials
from dejavu.trials.search import Rung, Trials, most_draws, remembered_search, search_initialization
from dejavu.trials.spec import TrialError, TrialResult, TrialSpec

__all__ = [
    "CONNECT_SECONDS",
    "Bought",
    "JobError",
    "Jobs",
    "Rung",
    "Standing",
    "TrialError",
    "TrialResult",
    "TrialSpec",
    "Trials",
    "best",
    "check_queue",
    "client_of",
    "local_client",
    "most_draws",
    "probe_draws",
    "remembered_reference",
    "remembered_search",
    "run_trials",
    "rungs",
    "search_initialization",
    "searching_client",
    "started_jobs",
    "what_other_parts_change",
    "what_replicas_do_apart",
]
