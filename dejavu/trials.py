"""N initializations tried at once on a Dask client; the only file that knows Dask.

A trial is a few numbers, its result is a file under a key that is a hash of its settings, and a finished trial is
never run again: Dask runs a finished task anew when the worker that held its result dies.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dask
import distributed
import torch

from dejavu.data import dataset_of
from dejavu.errors import DejavuError
from dejavu.init import Draw, schemes
from dejavu.models import model_of, source_hash
from dejavu.profiles import stable_hash
from dejavu.runtime import optimizer, training
from dejavu.runtime.job import write_json
from dejavu.runtime.single import train_single
from dejavu.workload import Workload

MOST_ATTEMPTS = 3
CONNECT_SECONDS = 20.0
NUM_AVERAGED = 3  # a trial's score is the mean of its last losses: one batch is noise
_CODE = (schemes, training, optimizer)  # what else decides the losses: other code, other results


class TrialError(DejavuError):
    """The trials could not be run, or none of them gave a usable model."""


@dataclass(frozen=True)
class TrialSpec:
    """One trial: train the workload from this draw for its first `steps` steps."""

    workload: Workload
    draw: Draw
    steps: int

    @property
    def key(self) -> str:
        """The name of the result: a hash of all that decides it."""
        decides = self.workload.model_dump(mode="json", exclude={"trials", "num_steps", "checkpoint_every", "text"})
        code = [torch.__version__, model_of(self.workload).code, *map(source_hash, _CODE)]
        return stable_hash([code, dataset_of(self.workload).fingerprint, decides, asdict(self.draw), self.steps])


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial.

    Attributes:
        losses: of each step.
        score: mean of the last losses; infinite where the loss was not finite.
        state: the file with weights and optimizer after the last step; empty where the trial failed.
        attempts: how often it was begun.
        remembered: it had been run before, and was only read.
        failure: why there is no score; empty otherwise.
    """

    draw: Draw
    losses: tuple[float, ...]
    score: float
    state: str
    attempts: int
    seconds: float
    remembered: bool = False
    failure: str = ""


@contextmanager
def client_of(address: str) -> Iterator[distributed.Client | None]:
    """A client of a running scheduler, whose workers reach the cluster's hosts; none where no address is given.

    Raises:
        TrialError: no scheduler answers there.
    """
    if not address:
        yield None
        return
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise TrialError(f"no Dask scheduler answers at {address}: {error}") from error
    with client:
        yield client


@contextmanager
def local_client(num_workers: int, folder: Path) -> Iterator[distributed.Client]:
    """A Dask cluster of processes on this machine's loopback, and its client; both end with the block.

    Dask's own default makes workers give freed memory back at once (MALLOC_TRIM_THRESHOLD_), which made training
    1.5 × slower here, and writes that into this process's environment, where later children find it. Neither is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    with (
        dask.config.set(
            {
                "distributed.nanny.pre-spawn-environ": {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1},
                "distributed.scheduler.allowed-failures": MOST_ATTEMPTS - 1,
            }
        ),
        distributed.LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            local_directory=str(folder),
            silence_logs="CRITICAL",
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        try:
            yield client
        finally:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)


def run_trials(
    client: distributed.Client,
    specs: Sequence[TrialSpec],
    folder: Path,
    *,
    deadline_seconds: float = 3600.0,
    on_result: Callable[[TrialResult], None] = lambda result: None,
) -> list[TrialResult]:
    """All trials, in the order of `specs`; their results stay in `folder` and are not computed again.

    Raises:
        TrialError: there is no worker, or the deadline passed; finished trials are kept.
    """
    if not client.scheduler_info(n_workers=-1)["workers"]:
        raise TrialError("the Dask cluster has no workers; wanted at least one")
    this_call = uuid.uuid4().hex[:8]  # an earlier call's tasks of the same trials may not yet be forgotten
    wanted = {f"trial-{spec.key}-{this_call}": spec for spec in specs}
    futures = [
        client.submit(_run_trial, _plain(spec), str(folder), key=name, retries=MOST_ATTEMPTS - 1)
        for name, spec in wanted.items()
    ]
    results: dict[str, TrialResult] = {}
    try:
        for future in distributed.as_completed(futures, timeout=deadline_seconds, raise_errors=False):
            spec = wanted[future.key]
            result = results[spec.key] = _result(spec, future, folder)
            on_result(result)
    except TimeoutError as error:
        raise TrialError(
            f"{len(results)} of {len(futures)} trials were done when the deadline of {deadline_seconds:g} s passed; "
            f"their results are kept in {folder}"
        ) from error
    finally:
        client.cancel(futures, force=True)
    return [results[spec.key] for spec in specs]


def best(results: Sequence[TrialResult]) -> TrialResult:
    """The trial with the lowest score; of equals the first.

    Raises:
        TrialError: none has a finite score.
    """
    usable = [result for result in results if math.isfinite(result.score)]
    if not usable:
        why = results[0].failure if results else "there were none"
        raise TrialError(f"none of {len(results)} trials gave a finite loss; the first: {why}")
    return min(usable, key=lambda result: result.score)


def _plain(spec: TrialSpec) -> dict[str, Any]:
    """The spec as plain values: a worker needs none of our classes to receive it."""
    return {
        "workload": spec.workload.model_dump(mode="json"),
        "draw": asdict(spec.draw),
        "steps": spec.steps,
    }


def _run_trial(plain: dict[str, Any], folder: str) -> dict[str, Any]:
    """On a worker: run a trial, or read its result if some worker has finished it before."""
    spec = TrialSpec(Workload.model_validate(plain["workload"]), Draw(**plain["draw"]), plain["steps"])
    path = Path(folder) / f"{spec.key}.json"
    if path.exists():
        known = json.loads(path.read_text())
        if known["failure"] or Path(known["state"]).exists():
            return {**known, "remembered": True}
    attempts = _count_attempt(Path(folder), spec.key)
    state, started = Path(folder) / f"{spec.key}.safetensors", time.perf_counter()
    losses: list[float] = []
    failure = ""

    def on_loss(loss: float) -> None:
        losses.append(loss)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss was {loss} after {len(losses)} steps")

    try:
        train_single(spec.workload, spec.draw, range(spec.steps), save_to=state, on_loss=on_loss)
    except FloatingPointError as error:
        failure = str(error)
    last = losses[-NUM_AVERAGED:]
    result = {
        "losses": [loss for loss in losses if math.isfinite(loss)],
        "score": None if failure else sum(last) / len(last),
        "state": "" if failure else str(state),
        "attempts": attempts,
        "seconds": time.perf_counter() - started,
        "failure": failure,
    }
    write_json(path, result)
    return result


def _count_attempt(folder: Path, key: str) -> int:
    """How often this trial has now been begun; a file each, so that a killed worker's attempt counts too."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        try:
            os.close(os.open(folder / f"{key}.attempt-{attempt}", os.O_CREAT | os.O_EXCL))
            return attempt
        except FileExistsError:
            attempt += 1


def _result(spec: TrialSpec, future: distributed.Future, folder: Path) -> TrialResult:
    if future.status != "finished":
        error = future.exception()
        attempts = len(list(folder.glob(f"{spec.key}.attempt-*")))
        why = f"{type(error).__name__}: {error}"
        return TrialResult(spec.draw, (), math.inf, "", attempts, 0.0, failure=why)
    plain = future.result()
    score = plain.pop("score")
    return TrialResult(
        draw=spec.draw,
        **{**plain, "losses": tuple(plain["losses"]), "score": math.inf if score is None else score},
    )
