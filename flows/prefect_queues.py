"""What Prefect sends in the background, logs and events: sent to the end, or forgotten.

Prefect empties both queues when the interpreter exits, without a limit. Where the server has gone by then it tries for
7 s to send each event, and complains of each.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys

SEND_SECONDS = 5.0
END_SECONDS = 1.0  # a server that does not answer is not waited for: with it their connections end


def send_what_is_queued() -> bool:
    """Wait for it, but not for long; whether all was sent."""
    if "prefect" not in sys.modules:
        return True
    from prefect.events.worker import EventsWorker

    drained = EventsWorker.drain_all(timeout=SEND_SECONDS)  # that of logs, too: they are in one list
    assert isinstance(drained, tuple), "this thread has no loop of its own"
    return not drained[1]


def forget_what_is_queued() -> None:
    """Send no more of it; Prefect neither waits for it at exit nor complains."""
    if "prefect" not in sys.modules:
        return
    from prefect._internal.concurrency import services

    loops = {one._loop for one in services._active_services if one._loop is not None and one._loop.is_running()}
    logging.getLogger("prefect._internal.concurrency").addFilter(_none)  # it would say how many are left
    ending = [asyncio.run_coroutine_threadsafe(_end_services(), loop) for loop in loops]
    concurrent.futures.wait(ending, timeout=END_SECONDS)


async def _end_services() -> None:
    """In their loop. A service that was told to stop knows its own task no more, so they are told by what they run."""
    own = [task for task in asyncio.all_tasks() if _name(task) == "_QueueServiceBase._run"]
    for task in own:
        task.cancel()
    await asyncio.gather(*own, return_exceptions=True)


def _name(task: asyncio.Task[object]) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


def _none(record: logging.LogRecord) -> bool:
    return False
