"""One thread for torch's tensor operations, which are too small here to be worth handing out to several."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()
_users, _before = 0, 1  # how many blocks are open, and the setting from before the first


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes in one thread inside the block; after the last of several open blocks as before the first.

    The gradient search's tensors are some thousands of numbers: more threads wait for each other longer than they
    compute, on a busy machine many times longer.
    """
    global _users, _before
    with _LOCK:
        if _users == 0:
            _before = torch.get_num_threads()
        _users += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                torch.set_num_threads(_before)
