"""`dejavu status` in words and as JSON."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from dejavu.foundation.units import format_seconds, in_microbatches, plural
from dejavu.launch.running import Status, Training
from dejavu.timing.pace import in_words

QUIET_SECONDS = 60.0  # without a step for so long, or ten steps' time, that is said


def status_lines(status: Status, now: float | None = None) -> list[str]:
    """Say what runs in the folder, how far it is, and where; else what the last training was.

    Args:
        now: seconds since the epoch.
    """
    now, holder, found = time.time() if now is None else now, status.holder, status.training
    if holder is not None and found is not None and status.is_training:
        where = "" if _is_here(status) else f" on {holder.host}"
        first = f"{holder.what} is training since {_clock(holder.since_seconds)} (pid {holder.pid}{where})"
        return [first, _progress(found), *_silence(found, now), *_place(found)]
    lines = []
    if holder is not None and status.has_trained:
        lines.append(f"{holder} has trained, and records it")
    elif holder is not None and holder.is_upkeep:
        lines.append(f"{holder} {holder.does}; no training runs in this folder")
    elif holder is not None and holder.training:  # what it trains cannot be read
        lines.append(f"{holder} trains")
    elif holder is not None:
        lines.append(f"{holder} measures, plans or tries initializations; its training has not begun")
    else:
        lines.append("no training runs in this folder")
    if found is None:
        return [
            *lines,
            f"the last: {status.unread}" if status.unread else "none is kept here; `dejavu run` starts one",
        ]
    later = [f"a later one: {status.unread}"] if status.unread else []
    resumes = f"`dejavu run --resume {_relative(found.folder)}` continues it"
    has_ended = found.ended or found.stopped
    if holder is None and not has_ended and found.loss is not None and not _is_silent(found, now):
        # Ranks that `dejavu launch` or a torchrun line has started hold no folder.
        since = in_words(max(now - found.last_seconds, 0.0))
        last = f"the last, {found.job.workload.model}, was heard of {since} ago: it runs if `dejavu launch` started it"
        return [
            "no `dejavu run` trains in this folder",
            f"{last}, else {resumes}",
            _progress(found),
            *_place(found),
            *later,
        ]
    how = "completed" if found.ended and found.done >= found.of else "ended before its last step"
    how, resume = f"{how} at {_clock(found.last_seconds)}", "" if found.ended else f"; {resumes}"
    if found.failure is not None and not found.ended:
        how = f"failed at {_clock(found.last_seconds)}: {found.failure}"
        resume = "" if found.diverged else f"; when that is mended, {resumes}"
    lines.append(f"the last, {found.job.workload.model}, {how}{resume}")
    return [*lines, _progress(found, left=False), *_place(found), *later]


def _is_here(status: Status) -> bool:
    import socket

    return status.holder is None or status.holder.host == socket.gethostname()


def _progress(found: Training, *, left: bool = True) -> str:
    said = [f"step {found.done:,} of {found.of:,}"]
    if found.loss is not None:
        said.append(f"loss {found.loss:.4f}")
    if found.per_second is not None:
        said.append(f"{found.per_second[0]:,.{0 if found.per_second[0] >= 100 else 1}f} {found.per_second[1]}/s")
    if found.step_seconds is not None:
        said.append(f"{format_seconds(found.step_seconds)} a step")
    if left and found.left_seconds is not None:
        said.append(f"{in_words(found.left_seconds)} left")
    if found.checkpoint is not None:
        said.append(f"last checkpoint at step {found.checkpoint:,}")
    return ", ".join(said)


def _silence(found: Training, now: float) -> list[str]:
    if not _is_silent(found, now):
        return []
    return [
        f"nothing was heard of it for {in_words(now - found.last_seconds)}: see {_relative(found.folder)}/ranks*.log"
    ]


def _is_silent(found: Training, now: float) -> bool:
    return now - found.last_seconds > max(QUIET_SECONDS, 10 * (found.step_seconds or 0.0))


def _place(found: Training) -> list[str]:
    plan = found.job.binding.plan
    ranks = ", ".join(f"{plural(count, 'rank')} on {host}" for host, count in found.ranks_by_host.items())
    stages, microbatches = (
        plural(len(plan.stages), "stage"),
        in_microbatches(plan.num_microbatches, found.job.workload.accumulate),
    )
    return [f"plan: {plan.schedule_name}, {stages}, {microbatches}; {ranks}", f"folder: {_relative(found.folder)}"]


def status_to_dict(status: Status) -> dict[str, Any]:
    """Return the same for programs: seconds and counts by name."""
    holder, found = status.holder, status.training
    prepares = holder is not None and not holder.is_upkeep
    state = "training" if status.is_training else "preparing" if prepares else "idle"
    return {
        "state": state,
        "holder": holder and {"what": holder.what, "pid": holder.pid, "host": holder.host},
        "since": holder and holder.since_seconds,
        "training": found
        and {
            "folder": str(found.folder),
            "model": found.job.workload.model,
            "step": found.done,
            "of": found.of,
            "loss": found.loss,
            "step_seconds": found.step_seconds,
            "per_second": found.per_second and found.per_second[0],
            "per_second_of": found.per_second and found.per_second[1],
            "left_seconds": found.left_seconds if status.is_training else None,
            "checkpoint_step": found.checkpoint,
            "last_heard": found.last_seconds,
            "ended": found.ended,
            "failure": found.failure,
            "schedule": found.job.binding.plan.schedule_name,
            "stages": len(found.job.binding.plan.stages),
            "microbatches": found.job.binding.plan.num_microbatches,
            "ranks_by_host": found.ranks_by_host,
        },
        "unread": status.unread,
    }


def _clock(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds)
    return f"{when:%H:%M:%S}" if when.date() == datetime.now().date() else f"{when:%Y-%m-%d %H:%M}"


def _relative(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)
