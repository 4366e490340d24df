"""What the launcher orders and what its agents answer: JSON in the launcher's store (torch's `TCPStore`)."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

from dejavu.runtime.snapshots import Start
from dejavu.runtime.snapshots.memory import start_of

SEAT = "DEJAVU_SEAT"  # in an agent's environment


@dataclass(frozen=True)
class Seat:
    """What an agent knows when it starts.

    Attributes:
        host: its name in the plan; `address`: by which other hosts reach it.
        badge: this agent's alone: a host that was lost and came again has another.
        first_order: the number of the first order that is for it.
        launcher, port: of the store.
        token: for the hosts' memories.
        folder: the job's.
        stall_seconds: a rank without progress for so long counts as stuck.
    """

    host: str
    address: str
    badge: str
    first_order: int
    launcher: str
    port: int
    token: str
    folder: str
    stall_seconds: float

    def to_environment(self) -> dict[str, str]:
        return {SEAT: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Seat:
        return cls(**json.loads(os.environ[SEAT]))


@dataclass(frozen=True)
class Run:
    """The order to run an attempt.

    Attributes:
        job: the path of its file.
        ranks: by host: each rank's number in the world, and its stages.
        urls: by host: where its memory is served.
        every_steps: steps between two snapshots; 0: none.
        copies: by rank: the host that keeps copies of its snapshots.
        start: the snapshots to start from; None: the last checkpoint, or the beginning.
    """

    attempt: int
    job: str
    ranks: Mapping[str, tuple[tuple[int, tuple[int, ...]], ...]]
    urls: Mapping[str, str]
    every_steps: int
    copies: Mapping[int, str] = field(default_factory=dict)
    start: Start | None = None

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.ranks.values()))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        ranks = {
            host: tuple((rank, tuple(stages)) for rank, stages in rows) for host, rows in data.pop("ranks").items()
        }
        copies = {int(rank): host for rank, host in data.pop("copies").items()}
        start = data.pop("start")
        return cls(**data, ranks=ranks, copies=copies, start=start and start_of(start))


@dataclass(frozen=True)
class Stop:
    """The order to end all ranks of the attempt, and to say which snapshots there are."""


@dataclass(frozen=True)
class End:
    """The order to end ranks and agent."""


@dataclass(frozen=True)
class Probe:
    """The order to one host to try its links to others.

    Attributes:
        urls: of the others' memories, by host.
    """

    host: str
    urls: Mapping[str, str]


Order = Run | Stop | End | Probe
_ORDERS: dict[str, Any] = {
    "run": Run.from_dict,
    "stop": lambda data: Stop(),
    "end": lambda data: End(),
    "probe": lambda data: Probe(**data),
}


class Board:
    """Orders and answers in a store; every method takes about 0.1 ms.

    Whoever reaches the store can write there, as with torchrun's. So orders, which start processes, are signed.

    Args:
        token: known to the launcher and its agents.
    """

    def __init__(self, store: Store, token: str) -> None:
        self.store, self._token = store, token.encode()

    def write(self, key: str, value: object) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Return what is there; None: nothing yet."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def order(self, number: int, order: Order) -> None:
        text = json.dumps([type(order).__name__.lower(), asdict(order)])
        self.write(f"order/{number}", [text, self._signature(number, text)])

    def ordered(self, number: int) -> Order | None:
        """Return an order; None: there is none yet.

        Raises:
            RuntimeError: somebody else wrote it.
        """
        found = self.read(f"order/{number}")
        if found is None:
            return None
        text, signature = found
        if not hmac.compare_digest(signature, self._signature(number, text)):
            raise RuntimeError(f"order {number} is not signed by the launcher")
        name, data = json.loads(text)
        answer: Order = _ORDERS[name](data)
        return answer

    def _signature(self, number: int, text: str) -> str:
        return hmac.new(self._token, f"{number} {text}".encode(), "sha256").hexdigest()
