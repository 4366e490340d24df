"""A rank takes a snapshot of its state after a step, beside its next one.

At most one is being written, and the next begins when that is complete. A rank is at most one step ahead of another,
because each step goes through all of them: so while one still writes step n, none has done more than step n + 1, and of
the last three that every rank keeps at least one is complete everywhere. Where there is no room for one, that is said,
and the training goes on without it: a change then goes back further, at worst to the last checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from dejavu.runtime.snapshots.files import Taken, begin, copied, packed, write
from dejavu.runtime.snapshots.memory import Memory
from dejavu.runtime.snapshots.serving import leave_copy
from dejavu.runtime.state import State, gather_state


def is_due(step: int, every_steps: int) -> bool:
    """Return whether ranks take a snapshot when so many steps have been trained, counted from step 0."""
    return every_steps > 0 and step % every_steps == 0


class SnapshotKeeper:
    """Keeps the last snapshots of one rank in its host's memory and, where that is wanted, in a neighbour's.

    Args:
        modules: the rank's stages.
        warn: told once that a snapshot could not be written, and why.
    """

    def __init__(
        self,
        memory: Memory,
        attempt: int,
        rank: int,
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        warn: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._memory, self._attempt, self._rank = memory, attempt, rank
        self._modules, self._optimizer = list(modules), optimizer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        self._warn, self._has_warned = warn, False
        self._copied = Event()
        self._copied.set()
        # Weights and moments change in the optimizer's step only, so they may be copied until then.
        optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def take(self, step: int) -> None:
        """Begin a snapshot, if it is time for one.

        Args:
            step: how many steps have been trained.
        """
        if not is_due(step, self._memory.every_steps):
            return
        self._join()
        taken = Taken(self._attempt, step, self._rank)
        try:
            begin(taken.path(Path(self._memory.folder)))
        except OSError as error:
            self._say(taken, error)
            return
        state: State = {}
        for module in self._modules:
            changing = {f"model.{name}" for name, _ in module.named_buffers()}  # in the next forward pass
            gathered = gather_state(module, self._optimizer)
            state |= {name: one.clone() if name in changing else one for name, one in gathered.items()}
        self._copied.clear()
        self._writing = self._pool.submit(self._keep, taken, state)

    def _keep(self, taken: Taken, state: State) -> None:
        try:
            own, shards = copied(state)
        finally:
            self._copied.set()
        content = packed(own, shards)
        try:
            write(taken.path(Path(self._memory.folder)), content)
        except OSError as error:
            self._say(taken, error, len(content))
        host = self._memory.copies.get(self._rank)
        if host is not None:
            with suppress(OSError):  # that host is lost, which is not for this one to say
                leave_copy(self._memory.urls[host], self._memory.token, taken, content)

    def _say(self, taken: Taken, error: OSError, size_bytes: int | None = None) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        folder = Path(self._memory.folder)
        room = f" with {shutil.disk_usage(folder).free:,} bytes free" if folder.is_dir() else ""
        wanted = "" if size_bytes is None else f" of {size_bytes:,} bytes"
        self._warn(
            f"rank {self._rank} on {self._memory.host} could not write its snapshot{wanted} after step {taken.step} to "
            f"{folder}{room}: {error.strerror or error}. The training goes on, and a change of its cluster goes back "
            "further, at worst to the last checkpoint; wanted more room there, or `replan: {snapshot_every: 0}`"
        )

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _wait_for_copy(self) -> None:
        self._copied.wait()

    def close(self) -> None:
        """Complete the last snapshot, also where the rank itself failed."""
        self._pool.shutdown(wait=True)

    def __enter__(self) -> SnapshotKeeper:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
