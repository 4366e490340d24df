"""Trials as tasks on a Dask client: one deadline for all, no silent hang, no trial lost with a worker."""

from __future__ import annotations

import itertools
import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import distributed

from dejavu.foundation.dask_workers import workers_of
from dejavu.foundation.errors import DejavuError
from dejavu.init import Draw, Probe
from dejavu.trials.clients import CONNECT_SECONDS, GPU
from dejavu.trials.halving import running_loss
from dejavu.trials.spec import MOST_ATTEMPTS, Keys, TrialError, TrialResult, TrialSpec, split_key
from dejavu.trials.worker import ATTEMPT, RESULT, run_trial, tasks_held, trained_before
from dejavu.workload import Workload

DEADLINE_SECONDS = 3600.0
GATHER_SECONDS = 0.05  # results that arrive within this time are fetched together
SETTLE_SECONDS = 30.0  # the longest wait for cancelled trials to finish their current step
Resources = Mapping[str, float]
OnResult = Callable[[TrialResult], None]


class Asked(NamedTuple):
    """A trial that is running."""

    spec: TrialSpec
    key: str
    needs_state: bool
    future: distributed.Future[Any]


class Ended(NamedTuple):
    """A trial that has ended, successfully or not."""

    spec: TrialSpec
    key: str
    result: TrialResult


class Source(ABC):
    """Where results of trials come from: workers that run them (`Pool`), or files of earlier runs (`KeptTrials`).

    Attributes:
        folder: where the files of trials are.
        num_slots: how many trials can run at once.
    """

    folder: Path
    keys: Keys
    num_slots: int

    @property
    @abstractmethod
    def num_running(self) -> int:
        """How many trials were submitted and have not ended."""

    @abstractmethod
    def submit(self, specs: Sequence[TrialSpec], *, needs_state: bool = False) -> None:
        """Submit these trials to be run, or read; `needs_state`: a result without its state is not enough."""

    @abstractmethod
    def wait(self) -> list[Ended]:
        """Return the trials that ended since the last call, at least one."""

    @abstractmethod
    def cancel(self, specs: Sequence[TrialSpec]) -> None:
        """Stop those of these trials that still run, after their current step; `wait` never returns them."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until cancelled trials have stopped, so that they write no more files and use no more time."""

    def run(
        self, specs: Sequence[TrialSpec], *, needs_state: bool = False, on_result: OnResult = lambda result: None
    ) -> list[TrialResult]:
        """Run all of these, in their order; duplicates run once."""
        wanted = {self.keys.of(spec): spec for spec in specs}
        results: dict[str, TrialResult] = {}
        self.submit(list(wanted.values()), needs_state=needs_state)
        while not wanted.keys() <= results.keys():
            for _, key, result in self.wait():
                results[key] = result
                on_result(result)
        return [results[self.keys.of(spec)] for spec in specs]


class Pool(Source):
    """Trials in flight on a client. Leaving the block stops running trials; results stay in the folder.

    Args:
        deadline_seconds: from now, for everything that will be submitted.
        resources: what a worker must offer to each trial; None: a GPU where some worker offers one, else nothing.

    Raises:
        TrialError: there is no worker, or none that offers the resources.
    """

    def __init__(
        self, client: distributed.Client, folder: Path, deadline_seconds: float, resources: Resources | None = None
    ) -> None:
        self.client, self.folder, self.keys = client, folder, Keys()
        self.deadline_seconds, self._deadline = deadline_seconds, time.monotonic() + deadline_seconds
        self.resources, self.num_slots, self.memory_bytes = _offered(client, resources)
        self._call = uuid.uuid4().hex[:8]  # Dask may still know an earlier call's tasks of the same trials
        self._numbers = itertools.count()
        self._kept = kept_steps(folder)
        self._attempts_before = attempts_of(folder)  # earlier calls' failures are no reason to give a trial up now
        self._asked: dict[str, Asked] = {}
        self._cancelled: set[str] = set()
        self._done = distributed.as_completed((), client.loop, raise_errors=False, timeout=deadline_seconds)
        self._num_ended = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked and self.client.status == "running":
            self.client.cancel([asked.future for asked in self._asked.values()], force=True)

    @property
    def num_running(self) -> int:
        return len(self._asked)

    def submit(self, specs: Sequence[TrialSpec], *, needs_state: bool = False) -> None:
        if not specs:
            return
        keys = [self.keys.of(spec) for spec in specs]
        names = [f"trial-{key}-{self._call}-{next(self._numbers)}" for key in keys]
        futures = self.client.map(
            run_trial,
            keys,
            [json.dumps(asdict(spec.draw)) for spec in specs],
            [spec.workload.model_dump_json() for spec in specs],
            [other_steps(self._kept, key) for key in keys],
            key=names,
            folder=str(self.folder),
            call=self._call,
            needs_state=needs_state,
            retries=MOST_ATTEMPTS - 1,
            resources=dict(self.resources) or None,
        )
        for name, spec, key, future in zip(names, specs, keys, futures, strict=True):
            self._asked[name] = Asked(spec, key, needs_state, future)
        self._done.update(futures)

    def wait(self) -> list[Ended]:
        """Return the trials that ended since the last call, at least one.

        Raises:
            TrialError: the deadline passed, or the scheduler was lost; finished trials are kept.
        """
        ended: list[Ended] = []
        while not ended:
            futures, plain = self._next_batch()
            for future in futures:
                asked = self._asked.pop(str(future.key))
                if result := self._result(asked, plain.get(asked.key)):
                    ended.append(Ended(asked.spec, asked.key, result))
                    trial, steps = split_key(asked.key)
                    self._kept.setdefault(trial, set()).add(steps)
                else:  # queued on workers that other trials killed, or its worker died before reporting
                    self.submit([asked.spec], needs_state=asked.needs_state)
        self._num_ended += len(ended)
        return ended

    def cancel(self, specs: Sequence[TrialSpec]) -> None:
        keys = {self.keys.of(spec) for spec in specs}
        names = [name for name, asked in self._asked.items() if asked.key in keys]
        if names:
            self.client.cancel([self._asked.pop(name).future for name in names], force=True)
            self._cancelled.update(names)

    def settle(self) -> None:
        """Wait until cancelled trials have stopped.

        At worst a stray file stays, of a step longer than `SETTLE_SECONDS` or of a worker that does not respond.
        """
        until = min(self._deadline, time.monotonic() + SETTLE_SECONDS)
        ask = partial(self.client.run, tasks_held, sorted(self._cancelled), on_error="ignore", asynchronous=True)
        while self._cancelled and (left_seconds := until - time.monotonic()) > 0:
            try:
                held = self.client.sync(ask, callback_timeout=left_seconds)
            except (TimeoutError, OSError):
                return
            self._cancelled &= {name for names in held.values() for name in names}
            if self._cancelled:
                time.sleep(GATHER_SECONDS)

    def _next_batch(self) -> tuple[list[distributed.Future[Any]], dict[str, dict[str, Any]]]:
        """Return the tasks that ended, and the results of the successful ones by trial key, fetched all at once."""
        try:
            batch = self._done.next_batch()
            if self.num_running > 2 * self.num_slots:  # no worker idles until these results are handled
                time.sleep(GATHER_SECONDS)
                batch += self._done.next_batch(block=False)
            futures = [future for future in batch if future.key in self._asked]  # without cancelled ones
            good = [future for future in futures if future.status == "finished"]
            gather = partial(self.client.gather, good, errors="skip", asynchronous=True)
            left_seconds = max(0.0, self._deadline - time.monotonic())
            returned = self.client.sync(gather, callback_timeout=left_seconds) if good else []
        except TimeoutError:
            raise self._stopped(f"when the deadline of {self.deadline_seconds:g} s passed") from None
        except OSError as error:
            raise self._stopped(f"when the Dask scheduler was lost ({error})") from error
        if self.client.status != "running" or any(future.status == "cancelled" for future in futures):
            raise self._stopped("when the Dask scheduler was lost")
        return futures, {plain["key"]: plain for plain in returned}

    def _stopped(self, when: str) -> TrialError:
        total = self._num_ended + len(self._asked)
        return TrialError(
            f"{self._num_ended} of {total} trials were done {when}; their results are kept in {self.folder}"
        )

    def _result(self, asked: Asked, plain: Mapping[str, Any] | None) -> TrialResult | None:
        """Return the trial's result; None: it has to be submitted again."""
        draw = asked.spec.draw
        if plain is not None:
            return result_of(draw, plain)
        if asked.future.status != "error":
            return None
        error = asked.future.exception()
        why = str(error) if isinstance(error, DejavuError) else f"{type(error).__name__}: {error}"
        attempts = len(list(self.folder.glob(f"{asked.key}{ATTEMPT}*")))
        if isinstance(error, distributed.KilledWorker):
            own = attempts - self._attempts_before[asked.key]
            if own < MOST_ATTEMPTS:
                return None
            why = (
                f"its worker died in each of {own} attempts, perhaps because it needs more memory than there is; "
                f"a worker may take {self.memory_bytes:,} bytes"
            )
        before = trained_before(self.folder, asked.key, other_steps(self._kept, asked.key))
        losses, norm = tuple(before.losses), before.first_gradient_norm
        return TrialResult(draw, losses, math.inf, "", attempts, before.seconds, failure=why, first_gradient_norm=norm)


_AS_IT_IS = ("state", "attempts", "seconds", "remembered", "failure", "first_gradient_norm")


def result_of(draw: Draw, plain: Mapping[str, Any]) -> TrialResult:
    """Convert what `run_trial` returned to a result."""
    return TrialResult(
        draw=draw,
        losses=tuple(plain["losses"]),
        score=math.inf if plain["failure"] else running_loss(plain["losses"]),
        **{name: plain[name] for name in _AS_IT_IS},
    )


def other_steps(kept: Mapping[str, set[int]], key: str) -> tuple[int, ...]:
    """Return the other numbers of steps for which the same trial has results, the most first."""
    trial, steps = split_key(key)
    return tuple(sorted(kept.get(trial, set()) - {steps}, reverse=True))


def kept_steps(folder: Path) -> dict[str, set[int]]:
    """Return the numbers of steps of each trial's results in a folder."""
    kept: dict[str, set[int]] = {}
    for path in folder.glob(f"*-*{RESULT}"):
        if path.stem.rpartition("-")[2].isdigit():
            trial, steps = split_key(path.stem)
            kept.setdefault(trial, set()).add(steps)
    return kept


def attempts_of(folder: Path) -> Counter[str]:
    """Return how often each trial in a folder was begun, by its key."""
    return Counter(path.name.rpartition(ATTEMPT)[0] for path in folder.glob(f"*{ATTEMPT}*"))


def _offered(client: distributed.Client, resources: Resources | None) -> tuple[Resources, int, int]:
    """Return a trial's resources, how many workers can run one (each one at a time), and a worker's memory."""
    try:  # on a busy machine they may just be restarting
        client.wait_for_workers(1, timeout=CONNECT_SECONDS)
    except TimeoutError:
        raise TrialError(
            f"the Dask cluster has had no workers for {CONNECT_SECONDS:g} s; wanted at least one"
        ) from None
    workers = list(workers_of(client).values())
    if resources is None:
        resources = {GPU: 1} if any(worker["resources"].get(GPU, 0) >= 1 for worker in workers) else {}
    room = sum(all(worker["resources"].get(name, 0) >= much for name, much in resources.items()) for worker in workers)
    if not room:
        found = {name: much for worker in workers for name, much in worker["resources"].items()}
        raise TrialError(
            f"no Dask worker offers {_words(resources)}, which each trial needs; "
            f"{len(workers)} workers offer {_words(found)}"
        )
    return resources, room, min(worker["memory_limit"] for worker in workers)


def _words(resources: Resources) -> str:
    return ", ".join(f"{name} {much:g}" for name, much in resources.items()) or "nothing"


def run_trials(
    client: distributed.Client,
    specs: Sequence[TrialSpec],
    folder: Path,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    resources: Resources | None = None,
    on_result: OnResult = lambda result: None,
) -> list[TrialResult]:
    """Run all trials to their own last step, in the order of `specs`; results are kept in `folder` and reused.

    Args:
        resources: what a worker must offer to each trial; None: a GPU where some worker offers one, else nothing.

    Raises:
        TrialError: no worker, or none with the resources; the deadline passed; the scheduler was lost.
    """
    with Pool(client, folder, deadline_seconds, resources) as pool:
        return pool.run(specs, needs_state=True, on_result=on_result)


def probe_draws(
    client: distributed.Client,
    workload: Workload,
    draws: Sequence[Draw],
    folder: Path,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> list[Probe]:
    """Return loss and gradient norm of each draw on the first batch; infinite where it cannot be trained.

    Raises:
        TrialError: as `run_trials`.
    """
    with Pool(client, folder, deadline_seconds) as pool:
        return probes(pool, workload, draws)


def probes(pool: Source, workload: Workload, draws: Sequence[Draw]) -> list[Probe]:
    """Run `probe_draws` on a pool."""
    results = pool.run([TrialSpec(workload, draw, 0) for draw in draws])
    return [
        Probe(result.draw, math.inf, math.inf)
        if result.failure or result.first_gradient_norm is None
        else Probe(result.draw, result.losses[0], result.first_gradient_norm)
        for result in results
    ]


def best(results: Sequence[TrialResult]) -> TrialResult:
    """Return the trial with the lowest score; the first of equals.

    Raises:
        TrialError: none has a finite score.
    """
    usable = [result for result in results if math.isfinite(result.score)]
    if not usable:
        why = results[0].failure if results else "there were none"
        raise TrialError(f"none of {len(results)} trials succeeded; the first: {why}")
    return min(usable, key=lambda result: result.score)
