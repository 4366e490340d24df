"""What runs on a worker: one trial, continued from its longest kept state; its result is a file.

A trial's files are `<key>.json`, `<key>.safetensors` and `<key>.attempt-1` …, where a key ends in the number of steps.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import distributed
import psutil
import torch

from dejavu.foundation.processes.files import naming
from dejavu.foundation.units import plural
from dejavu.init import Draw
from dejavu.runtime.single import probe, train_single
from dejavu.trials.halving import unsafe
from dejavu.trials.spec import TrialError, split_key
from dejavu.workload import Workload

RESULT, STATE, ATTEMPT = ".json", ".safetensors", ".attempt-"
ONE_AT_A_TIME = threading.Lock()  # torch's random state and number of threads are per process
GPU_ERROR = "CUDA error"  # how torch's messages begin where a kernel failed; the process's CUDA context is then lost
NO_MEMORY = "can't allocate memory"  # torch's words on the CPU, in a plain RuntimeError


@dataclass(frozen=True)
class Kept:
    """A trial as stored in its file.

    Attributes:
        losses: from step 0; finite.
        call: the only call that this result is valid for; empty: all. A failure by accident may not happen again.
    """

    losses: list[float] = field(default_factory=list)
    first_gradient_norm: float | None = None
    attempts: int = 0
    seconds: float = 0.0
    failure: str = ""
    call: str = ""


def run_trial(
    key: str, draw: str, workload: str, others: tuple[int, ...], *, folder: str, call: str, needs_state: bool
) -> dict[str, Any]:
    """Run a trial, or read its result if some worker has finished it before.

    Args:
        draw, workload: as JSON: a worker needs none of our classes to receive them.
        others: the other numbers of steps for which results of the same trial are kept, the most first.
        call: names the caller's search.
        needs_state: a result whose state is gone is not enough.

    Raises:
        TrialError: there was not enough memory, or the task was cancelled.
    """
    here = Path(folder)
    if found := remembered_trial(key, others, folder=here, call=call, needs_state=needs_state):
        return found
    with ONE_AT_A_TIME:
        attempt = _count_attempt(here, key)
        kept = _run(_workload(workload), Draw(**json.loads(draw)), here, key, others, attempt, call)
    return _plain(here, key, kept, remembered=False)


def remembered_trial(
    key: str, others: Sequence[int], *, folder: Path, call: str, needs_state: bool
) -> dict[str, Any] | None:
    """Read what `run_trial` would return without running anything; None: it would have to run."""
    kept = _known(folder, key, others, call)
    if kept is None or (needs_state and not kept.failure and not (folder / f"{key}{STATE}").exists()):
        return None
    return _plain(folder, key, kept, remembered=True)


def trained_before(folder: Path, key: str, others: Sequence[int]) -> Kept:
    """Return the longest result of the same trial with fewer steps, of an earlier rung; empty where there is none."""
    trial, steps = split_key(key)
    found = [_read(folder / f"{trial}-{own}{RESULT}") for own in others if 0 < own < steps]
    return max((kept for kept in found if kept), key=lambda kept: len(kept.losses), default=Kept())


def _plain(folder: Path, key: str, kept: Kept, *, remembered: bool) -> dict[str, Any]:
    state = folder / f"{key}{STATE}"
    return {"key": key, "state": str(state) if state.exists() else "", "remembered": remembered, **asdict(kept)}


@lru_cache(maxsize=8)
def _workload(text: str) -> Workload:
    return Workload.model_validate_json(text)


def _known(folder: Path, key: str, others: Sequence[int], call: str) -> Kept | None:
    """Return what is known from a run of at least as many steps, or a shorter one that failed; None: nothing."""
    trial, steps = split_key(key)
    least = max(1, steps)  # a probe of the first batch gives a loss too
    for own in (steps, *others):
        kept = _read(folder / f"{trial}-{own}{RESULT}")
        if kept is None or kept.call not in ("", call):
            continue
        if len(kept.losses) >= least:
            return replace(kept, losses=kept.losses[:least], failure="")
        if kept.failure:
            return kept
    return None


def _read(path: Path) -> Kept | None:
    try:
        return Kept(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # truncated by a power cut: as if the trial had not run
        return None


def _write(path: Path, kept: Kept) -> None:
    """Write atomically, without fsync: a trial that is lost to a power cut runs again."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            aside.write_text(json.dumps(asdict(kept)))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _count_attempt(folder: Path, key: str) -> int:
    """Count this attempt and return their number; a file each, so that a killed worker's attempt counts too."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        try:
            os.close(os.open(folder / f"{key}{ATTEMPT}{attempt}", os.O_CREAT | os.O_EXCL))
            return attempt
        except FileExistsError:
            attempt += 1


def _run(
    workload: Workload, draw: Draw, folder: Path, key: str, others: Sequence[int], attempt: int, call: str
) -> Kept:
    """Train from the longest kept state of the same trial, and keep the result in its place.

    After a GPU error this process can no longer use the GPU: the failure is written for the task's next run to read,
    and the process ends; its nanny starts another.
    """
    trial, steps = split_key(key)
    shorter = {own: folder / f"{trial}-{own}{STATE}" for own in others if own < steps}
    before, start = _longest(shorter)
    started, losses = time.perf_counter(), list(before.losses)
    norms, is_cancelled = [before.first_gradient_norm], _cancellation()

    def on_first(loss: float, gradient_norm: float) -> None:
        norms.append(gradient_norm if math.isfinite(gradient_norm) else None)
        if why := unsafe(loss, gradient_norm):
            raise FloatingPointError(why)

    def on_loss(loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss was {loss} after {plural(len(losses) + 1, 'step')}")
        losses.append(loss)
        if is_cancelled():
            raise TrialError(f"cancelled after {plural(len(losses), 'step')}")

    def keep(failure: str = "", only_call: str = "") -> Kept:
        seconds = before.seconds + time.perf_counter() - started
        kept = Kept(losses, norms[-1], max(before.attempts, attempt), seconds, failure, only_call)
        _write(folder / f"{key}{RESULT}", kept)
        return kept

    try:
        if steps:
            train_single(
                workload,
                draw,
                range(len(losses), steps),
                start_from=start,
                save_to=folder / f"{key}{STATE}",
                on_loss=on_loss,
                on_first=on_first,
            )
        else:
            loss, gradient_norm = probe(workload, draw)
            on_first(loss, gradient_norm)
            losses.append(loss)
    except FloatingPointError as error:
        return keep(str(error))
    except Exception as error:
        if _spoils_the_process(error) and _has_nanny():
            keep(f"{type(error).__name__}: {error}", call)
            os._exit(1)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error):
            raise TrialError(f"out of memory: {error or 'no size was said'}; {_free_memory()}") from None
        raise
    kept = keep()
    for path in shorter.values():
        path.unlink(missing_ok=True)
    return kept


def _longest(states: dict[int, Path]) -> tuple[Kept, Path | None]:
    """Return the longest of these states, by their steps, with its result."""
    for steps, state in sorted(states.items(), reverse=True):
        kept = _read(state.with_suffix(RESULT)) if state.exists() else None
        if kept and not kept.failure and len(kept.losses) == steps:
            return kept, state
    return Kept(), None


def _spoils_the_process(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and GPU_ERROR in str(error))


def _cancellation() -> Callable[[], bool]:
    """Return a check whether this thread's task was cancelled; Dask itself would let it run to its end."""
    try:
        worker = distributed.get_worker()
    except ValueError:  # this is no worker
        return lambda: False
    name = worker.get_current_task()

    def is_cancelled() -> bool:
        task = worker.state.tasks.get(name)
        return task is None or task.state == "cancelled"

    return is_cancelled


def tasks_held(names: Sequence[str], dask_worker: distributed.Worker) -> list[str]:
    """Return those of these tasks that a worker still holds; a cancelled one is held until its thread returns."""
    return [name for name in names if name in dask_worker.state.tasks]


def _has_nanny() -> bool:
    try:
        return distributed.get_worker().nanny is not None
    except ValueError:  # this is no worker
        return False


def _free_memory() -> str:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return f"{free_bytes:,} of the GPU's {total_bytes:,} bytes are free without it"
    memory = psutil.virtual_memory()
    return f"{memory.available:,} of this machine's {memory.total:,} bytes are free without it"
