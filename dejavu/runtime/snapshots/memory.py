"""Where the ranks of one attempt keep their snapshots, and which snapshots they start from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

MEMORY = "DEJAVU_MEMORY"  # in a rank's environment


@dataclass(frozen=True)
class Part:
    """Some layers' state, or one shard of it, and the ranks that had it.

    Attributes:
        layers: by name.
        sources: (rank of the earlier attempt, a host that has that rank's snapshot); any of them will do.
    """

    layers: tuple[str, ...]
    sources: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Start:
    """The snapshots that an attempt starts from.

    Attributes:
        attempt: the earlier attempt that took them.
        step: how many steps had been trained.
        parts: together the whole model.
    """

    attempt: int
    step: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Memory:
    """What a rank needs to know about snapshots.

    Attributes:
        folder: of this host, on a file system in memory.
        host: this one's name.
        urls: by host: where its memory is served.
        token: what the servers want to be told.
        every_steps: steps between two snapshots.
        copies: by rank: the host that keeps a copy of its snapshots; absent where no copy is needed.
        start: None: from a checkpoint, or from the beginning.
    """

    folder: str
    host: str
    urls: Mapping[str, str]
    token: str
    every_steps: int = 1
    copies: Mapping[int, str] = field(default_factory=dict)
    start: Start | None = None

    def to_environment(self) -> dict[str, str]:
        return {MEMORY: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Memory | None:
        """Read what the host's agent gave this rank; None: this launch keeps no snapshots."""
        if MEMORY not in os.environ:
            return None
        data = json.loads(os.environ[MEMORY])
        start = data.pop("start")
        copies = {int(rank): host for rank, host in data.pop("copies").items()}
        return cls(**data, copies=copies, start=start and start_of(start))


def start_of(data: Mapping[str, object]) -> Start:
    """Read what `asdict` made of a `Start`."""
    parts = (
        Part(tuple(row["layers"]), tuple((int(rank), str(host)) for rank, host in row["sources"]))
        for row in data["parts"]  # type: ignore[attr-defined]
    )
    return Start(int(data["attempt"]), int(data["step"]), tuple(parts))  # type: ignore[call-overload]
