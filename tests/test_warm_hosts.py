"""Which hosts count as lost: silent ones, not busy ones."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dejavu.launch.rendezvous import Host, match_workers
from dejavu.launch.warm import WarmHosts, hosts
from dejavu.launch.warm.board import Board, End, Seat, Stop
from dejavu.migration import launching
from dejavu.runtime.process.failures import LaunchError
from tests.waiting import PATIENCE_SECONDS


@dataclass
class Acting:
    """A host without ranks, that answers late, and falls silent when it is told to end its ranks, if at all."""

    answer_seconds: float
    falls_silent: bool = False
    address: str = "127.0.0.1"
    ends: threading.Event = field(default_factory=threading.Event)
    silent: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, environment: Mapping[str, str], log: Path) -> Acting:
        (said,) = environment.values()
        for act in (self.beat, self.serve):
            self.threads.append(threading.Thread(target=act, args=(Seat(**json.loads(said)),)))
            self.threads[-1].start()
        return self

    def poll(self) -> int | None:
        return None

    def end(self) -> None:
        self.ends.set()

    def beat(self, seat: Seat) -> None:
        board, beat = Board(TCPStore(seat.launcher, seat.port, is_master=False), seat.token), 0
        while not self.ends.wait(0.02):
            if not self.silent.is_set():
                board.write(f"beat/{seat.badge}", beat := beat + 1)

    def serve(self, seat: Seat) -> None:
        board, number = Board(TCPStore(seat.launcher, seat.port, is_master=False), seat.token), seat.first_order
        board.write(f"ready/{seat.badge}", "http://127.0.0.1:1")
        while not self.ends.wait(0.01):
            if (order := board.ordered(number)) is None:
                continue
            if isinstance(order, Stop):
                if self.falls_silent:
                    self.silent.set()
                self.ends.wait(self.answer_seconds)
            board.write(f"done/{number}/{seat.badge}", [])
            number += 1
            if isinstance(order, End):
                return


HOSTS = ("alpha", "beta", "gamma", "10.0.0.4")


def some_workers(rng: random.Random) -> dict[str, tuple[str, str, str]]:
    """Workers by their address: what they are called, where they are, and what that machine is called."""
    places = [("10.0.0.1", "alpha"), ("10.0.0.2", "beta"), ("10.0.0.3", "gamma"), ("10.0.0.4", "delta")]
    chosen = [rng.choice(places) for _ in range(rng.randrange(6))]
    called = [rng.choice([*HOSTS, f"tls://{k}", str(k)]) for k in range(len(chosen))]
    return {f"tls://{host}:{k}": (called[k], host, machine) for k, (host, machine) in enumerate(chosen)}


@pytest.mark.parametrize("seed", range(40))
def test_every_host_gets_a_worker_of_its_own_by_one_rule(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a training starts on, and those that come while it runs: by name, address or machine."""
    rng = random.Random(seed)
    workers = some_workers(rng)
    about = {worker: {"name": name, "host": host} for worker, (name, host, _) in workers.items()}
    matched = match_workers(HOSTS, about, {worker: machine for worker, (*_, machine) in workers.items()})
    assert len(set(matched.values())) == len(matched)
    for host in HOSTS:
        free = [worker for worker, names in workers.items() if host in names and worker not in matched.values()]
        assert host in matched or not free
        assert host not in matched or host in workers[matched[host]]

    asked: list[list[str]] = []

    class Client:
        def run(self, what: Any, *arguments: Any, workers: list[str]) -> dict[str, Any]:
            asked.append(workers)
            return {worker: machines[worker] for worker in workers}

    def look(client: Any, name: str, worker: str, address: str, folder: Path, gpu_memory: bool) -> Host:
        if name in odd:
            raise LaunchError("no network interface has the address")
        return Host(name, address, worker, "eth0", 0, 1, (), 1, sees_folder=True)

    machines = {worker: machine for worker, (*_, machine) in workers.items()}
    odd, running = set(rng.sample(HOSTS, 1)), set(rng.sample(HOSTS, 2))
    monkeypatch.setattr(launching, "workers_of", lambda client: about)
    monkeypatch.setattr(launching, "look_at_host", look)
    devices = [SimpleNamespace(host=host) for host in HOSTS for _ in range(2)]
    problem = SimpleNamespace(cluster=SimpleNamespace(devices=lambda: devices))
    reach: Any = launching._Reach(
        problem,
        SimpleNamespace(names=running),
        Client(),
        SimpleNamespace(folder=tmp_path),  # type: ignore[arg-type]
    )
    for _ in range(3):
        assert set(reach.come()) == set(matched) - running - odd
    assert asked == ([list(workers)] if workers else []), "a worker is asked once what its machine is called"


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmHosts]:
    monkeypatch.setattr(hosts, "ROLL_CALL_SECONDS", 0.4)
    monkeypatch.setattr(hosts, "SILENT_SECONDS", 0.8)
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 3.0)
    warm = WarmHosts(tmp_path)
    yield warm
    warm.close()


def ended(acting: Mapping[str, Acting]) -> None:
    for host in acting.values():
        host.end()
        for thread in host.threads:
            thread.join()


def test_a_busy_host_is_waited_for_and_a_silent_one_is_lost(warm: WarmHosts) -> None:
    acting = {"quick": Acting(0.0), "busy": Acting(1.2), "gone": Acting(60.0, falls_silent=True), "stuck": Acting(60.0)}
    warm.add(acting)
    try:
        assert warm.wait(acting, 10) == set(acting)
        assert set(warm.stop()) == {"quick", "busy"}, "a heart that beats does not help who never answers"
        assert warm.names == warm.alive() == {"quick", "busy"}
        assert set(warm.stop()) == {"quick", "busy"}
    finally:
        ended(acting)


def test_time_in_which_the_launcher_did_not_look_is_no_silence(warm: WarmHosts) -> None:
    """As where the machine of the launcher and its hosts stood still."""
    acting = {"here": Acting(0.0)}
    warm.add(acting)
    try:
        assert warm.wait(acting, 10) == {"here"}
        acting["here"].silent.set()
        time.sleep(1.0)
        assert warm.alive() == {"here"}, "the first look after a pause says little"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while warm.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not warm.alive()
    finally:
        ended(acting)
