"""All warm hosts, as the launcher sees them: start their agents, order attempts, and call the roll when one failed."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

from dejavu.foundation.errors import InputError
from dejavu.launch.warm.board import Board, End, Order, Probe, Run, Seat, Stop
from dejavu.launch.watchdog import STALL_SECONDS
from dejavu.runtime.process import end_agent, named_parent, rank_environment
from dejavu.runtime.process.pace import Paced, read_pace
from dejavu.runtime.snapshots import Taken

SILENT_SECONDS = 10.0  # without a heartbeat, after which a host counts as lost
ROLL_CALL_SECONDS = 5.0  # the same, when some rank has failed
ANSWER_SECONDS = 60.0  # for a host with a heartbeat to end its ranks and answer: a busy one takes its time
LOOK_SECONDS = 0.5  # of the time between two looks at a heartbeat counts at most: this process may not have run
PROBE_SECONDS = 3.0  # for a host to try its links
END_SECONDS = 5.0
POLL_SECONDS = 0.01


class Agent(Protocol):
    """A running agent."""

    def poll(self) -> int | None:
        """Return its exit code; None: it runs, as far as is known."""

    def end(self) -> None:
        """End it, if it can still be reached."""


class StartsAgent(Protocol):
    """A way to reach a host.

    Attributes:
        address: of the host, as other hosts reach it.
    """

    @property
    def address(self) -> str: ...

    def start(self, environment: Mapping[str, str], log: Path) -> Agent:
        """Start the host's agent."""


@dataclass(frozen=True)
class LocalHost:
    """A host that is this machine, or a network namespace of it.

    Attributes:
        interface: the network interface that has the address.
        before: words that put a command on the host.
    """

    address: str = "127.0.0.1"
    interface: str = "lo"
    before: Sequence[str] = ()

    def start(self, environment: Mapping[str, str], log: Path) -> Agent:
        return _LocalAgent([*self.before, *AGENT], {**rank_environment(self.interface), **environment}, log)


AGENT = (sys.executable, "-m", "dejavu.launch.warm.agent")


class _LocalAgent:
    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                words, stdout=file, stderr=file, env={**environment, **named_parent()}, start_new_session=True
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        end_agent(self.process)


@dataclass
class _Heart:
    """The last heartbeat of a host, and how long no other was seen."""

    beat: object
    looked: float
    silent_seconds: float = 0.0

    def see(self, beat: object) -> None:
        now = time.monotonic()
        self.silent_seconds += min(now - self.looked, LOOK_SECONDS)
        self.looked = now
        if beat != self.beat:
            self.beat, self.silent_seconds = beat, 0.0


class WarmHosts:
    """Hosts with warm agents, from when they are added until they are lost or this is closed.

    Args:
        folder: the job's, which every host sees.
        address: of this machine, as hosts reach it.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", stall_seconds: float = STALL_SECONDS) -> None:
        self._folder, self._address, self._stall_seconds = folder, address, stall_seconds
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._token = secrets.token_hex(16)
        self._board = Board(self._store, self._token)
        self._orders = self._count = 0
        self._agents: dict[str, Agent] = {}
        self._badges: dict[str, str] = {}
        self._hearts: dict[str, _Heart] = {}
        self.urls: dict[str, str] = {}  # of the memories of hosts that are ready

    def add(self, hosts: Mapping[str, StartsAgent]) -> None:
        """Start agents, which are ready seconds later."""
        for name, host in hosts.items():
            if name in self._agents:
                raise InputError(f"host {name!r} has an agent already; wanted another host")
            self._count += 1
            self._badges[name] = f"{name}-{self._count}"
            seat = Seat(
                host=name,
                address=host.address,
                badge=self._badges[name],
                first_order=self._orders,
                launcher=self._address,
                port=self._store.port,
                token=self._token,
                folder=str(self._folder),
                stall_seconds=self._stall_seconds,
            )
            self._agents[name] = host.start(seat.to_environment(), self._folder / f"ranks-{name}.log")

    @property
    def names(self) -> set[str]:
        """The hosts that have an agent, ready or not."""
        return set(self._agents)

    def wait(self, hosts: Iterable[str], seconds: float) -> set[str]:
        """Wait for these hosts to be ready; return those that are."""
        wanted, deadline = set(hosts), time.monotonic() + seconds
        while wanted - self.ready() and time.monotonic() < deadline and wanted & self.alive():
            time.sleep(POLL_SECONDS)
        return wanted & self.ready()

    def ready(self) -> set[str]:
        """Return the hosts whose agents are ready to run ranks."""
        for name in self._agents:
            if name not in self.urls and (url := self._board.read(f"ready/{self._badges[name]}")):
                self.urls[name] = url
        return self.alive() & set(self.urls)

    def alive(self) -> set[str]:
        """Return the hosts whose agents have not ended and, once ready, are not silent."""
        return {
            name
            for name, agent in self._agents.items()
            if agent.poll() is None and (name not in self.urls or self._silent_seconds(name) <= SILENT_SECONDS)
        }

    def _silent_seconds(self, name: str) -> float:
        """Return how long a host that was ready has been silent."""
        heart = self._hearts.setdefault(name, _Heart(None, time.monotonic()))
        heart.see(self._board.read(f"beat/{self._badges[name]}"))
        return heart.silent_seconds

    def run(self, run: Run) -> None:
        """Start an attempt."""
        self._order(run)

    def ended(self, attempt: int, ranks: Iterable[int]) -> dict[int, int]:
        """Return the exit codes of the attempt's ranks that have ended."""
        found = {rank: self._board.read(f"ended/{attempt}/{rank}") for rank in ranks}
        return {rank: code for rank, code in found.items() if code is not None}

    def pace(self, attempt: int, ranks: Sequence[int]) -> dict[int, Paced]:
        """Return the last step that each rank has reported."""
        return read_pace(self._store, attempt, ranks)

    def try_links(self) -> dict[str, dict[str, float]]:
        """Measure a message to each host from each other: one host at a time, while the training goes on."""
        found: dict[str, dict[str, float]] = {}
        for name in sorted(self.ready()):
            others = {other: url for other, url in self.urls.items() if other != name}
            number, deadline = self._order(Probe(name, others)), time.monotonic() + PROBE_SECONDS
            while time.monotonic() < deadline and name in self.alive():
                if (answer := self._board.read(f"done/{number}/{self._badges[name]}")) is not None:
                    found[name] = answer
                    break
                time.sleep(POLL_SECONDS)
        return found

    def stop(self) -> dict[str, frozenset[Taken]]:
        """End all ranks; return each host's snapshots. A host that is absent is lost: silent, or without an answer."""
        number = self._order(Stop())
        found: dict[str, frozenset[Taken]] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            for name in self.ready() - set(found):
                if (answer := self._board.read(f"done/{number}/{self._badges[name]}")) is not None:
                    found[name] = frozenset(Taken(*row) for row in answer)
            if all(self._silent_seconds(name) > ROLL_CALL_SECONDS for name in self.ready() - set(found)):
                break
            time.sleep(POLL_SECONDS / 2)
        self.drop(set(self.urls) - set(found))
        return found

    def drop(self, hosts: Iterable[str]) -> None:
        """Give these hosts up."""
        for name in hosts:
            self.urls.pop(name, None)
            self._hearts.pop(name, None)
            agent = self._agents.pop(name, None)
            if agent is not None and agent.poll() is None:  # it may take its time, or never answer
                threading.Thread(target=agent.end, name=f"end {name}", daemon=True).start()

    def close(self) -> None:
        """End all agents and their ranks."""
        number, deadline = self._order(End()), time.monotonic() + END_SECONDS
        with suppress(RuntimeError):
            while time.monotonic() < deadline and any(agent.poll() is None for agent in self._agents.values()):
                if all(self._board.read(f"done/{number}/{self._badges[name]}") is not None for name in self.ready()):
                    break
                time.sleep(POLL_SECONDS)
        for agent in self._agents.values():
            agent.end()

    def _order(self, order: Order) -> int:
        number, self._orders = self._orders, self._orders + 1
        self._board.order(number, order)
        return number
