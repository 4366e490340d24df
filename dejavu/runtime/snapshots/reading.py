"""A rank reads its layers from the snapshots of an earlier attempt, whatever the plans of the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from dejavu.runtime.snapshots.files import Shard, Taken, read_layers, whole
from dejavu.runtime.snapshots.memory import Memory, Part, Start
from dejavu.runtime.snapshots.serving import fetch
from dejavu.runtime.state import CheckpointError, State


def read_start(memory: Memory, start: Start, layers: Collection[str], rank: int) -> State:
    """Read what these layers need: from this host's memory where it is there, else from another host's.

    Args:
        rank: which of several hosts is asked first depends on it, so that not all ask the same.

    Raises:
        CheckpointError: nobody has it.
    """
    found = (_read(memory, start, part, wanted, rank) for part in start.parts if (wanted := {*part.layers} & {*layers}))
    return whole(found)


def _read(
    memory: Memory, start: Start, part: Part, layers: Collection[str], rank: int
) -> tuple[State, Mapping[str, Shard]]:
    here = [source for source in part.sources if source[1] == memory.host]
    there = [source for source in part.sources if source[1] != memory.host]
    turn = rank % max(1, len(there))
    said: list[str] = []
    for of_rank, host in (*here, *there[turn:], *there[:turn]):
        taken = Taken(start.attempt, start.step, of_rank)
        try:
            if host == memory.host:
                return read_layers(taken.path(Path(memory.folder)), layers)
            return fetch(memory.urls[host], memory.token, taken, layers)
        except OSError as error:
            said.append(f"{host}: {error}")
    raise CheckpointError(
        f"no host has the snapshot of {', '.join(sorted(layers))} after step {start.step} of attempt {start.attempt}: "
        f"{'; '.join(said) or 'none was named'}"
    )
