"""Importing without looking for garbage: nearly half of the time that a process needs to start and end.

Imports of torch make about a million objects and no garbage. Python looks through all of them again and again while
they are made, in every full collection later on, and once more when the process ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What is made in this block lives as long as the process, unless nothing refers to it any more.

    For a process's first imports; behind the block collections are on or off as before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
