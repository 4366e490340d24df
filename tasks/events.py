"""What happens in a run, for programs that listen (`dejavu run --json`): records of a logger of their own.

Flows and tasks run in threads of Prefect's, and in the order that it decides; a logger reaches whoever listens from all
of them, and costs nothing where nobody does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LOGGER = logging.Logger("events")  # of no hierarchy: Prefect's setup takes the handlers of loggers that it knows
Event = dict[str, Any]


def tell(event: str, **fields: Any) -> None:
    """Tell listeners that something happened.

    Args:
        fields: what JSON can write; seconds, bytes and counts, by name.
    """
    if _LOGGER.handlers:
        _LOGGER.warning(event, extra={"event": {"event": event, "time": round(time.time(), 3), **fields}})


@contextmanager
def heard_by(listener: Callable[[Event], None]) -> Iterator[None]:
    """Call the listener with each event until the end; one at a time, from any thread."""
    handler = _Handler(listener)
    _LOGGER.addHandler(handler)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)


class _Handler(logging.Handler):
    def __init__(self, listener: Callable[[Event], None]) -> None:
        super().__init__()
        self._listener = listener

    def emit(self, record: logging.LogRecord) -> None:
        self._listener(record.__dict__["event"])
