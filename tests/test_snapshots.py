"""Snapshots in memory: what is written is read under any cut, from this host or another, and partial ones never."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

from dejavu.launch.warm import agent
from dejavu.migration.training import ChangingTraining
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.snapshots import Memory, MemoryServer, Part, SnapshotKeeper, Start, Taken, inventory, read_start
from dejavu.runtime.snapshots.files import (
    KEPT,
    Shard,
    begin,
    forget,
    is_writing,
    packed,
    read_layers,
    whole,
    write,
)
from dejavu.runtime.snapshots.serving import TOKEN as TOKEN_HEADER
from dejavu.runtime.snapshots.serving import fetch, leave_copy
from dejavu.runtime.state import CheckpointError, State, gather_state
from dejavu.workload import OptimizerSettings, Workload
from dejavu.workload.training_settings import ReplanSettings
from tests.waiting import PATIENCE_SECONDS

TOKEN = "known"


def state_of(*layers: str) -> State:
    generator = torch.Generator().manual_seed(len(layers))
    return {f"model.{layer}.weight": torch.randn(3, 4, generator=generator) for layer in layers}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Another host's memory, and where it is served."""
    server = MemoryServer(tmp_path / "there", "127.0.0.1", TOKEN)
    yield tmp_path / "there", server.url
    server.close()


@pytest.mark.parametrize("first", [1, 10**8 - 4, 10**8 - 2])
def test_the_last_snapshots_are_kept_and_a_partial_one_is_none(first: int, tmp_path: Path) -> None:
    """Also where names get another digit."""
    for step in range(first, first + 5):
        write(Taken(0, step, 1).path(tmp_path), packed(state_of("a"), {}))
    write(Taken(1, 9, 0).path(tmp_path), packed(state_of("a"), {}))
    assert not is_writing(tmp_path)
    begin(Taken(0, first + 5, 1).path(tmp_path))
    assert is_writing(tmp_path)
    kept = [Taken(0, step, 1) for step in range(first + 5 - KEPT, first + 5)]
    assert inventory(tmp_path) == [*kept, Taken(1, 9, 0)]
    forget(tmp_path, {1})
    assert inventory(tmp_path) == [Taken(1, 9, 0)]


def test_a_rank_reads_its_layers_from_here_and_from_another_host(tmp_path: Path, served: tuple[Path, str]) -> None:
    there, url = served
    here = tmp_path / "here"
    left, right = state_of("a", "b"), state_of("b2", "c")
    write(Taken(0, 7, 0).path(here), packed(left, {}))
    write(Taken(0, 7, 1).path(there), packed(right, {}))
    start = Start(0, 7, (Part(("a", "b"), ((0, "here"),)), Part(("b2", "c"), ((5, "gone"), (1, "there")))))
    memory = Memory(str(here), "here", {"there": url, "gone": "http://127.0.0.1:9"}, TOKEN, start=start)
    found = read_start(memory, start, {"b", "b2"}, rank=0)
    assert set(found) == {"model.b.weight", "model.b2.weight"}
    assert torch.equal(found["model.b.weight"], left["model.b.weight"])
    assert torch.equal(found["model.b2.weight"], right["model.b2.weight"])
    with pytest.raises(CheckpointError, match="no host has the snapshot of x after step 7 of attempt 0: gone: "):
        read_start(memory, Start(0, 7, (Part(("x",), ((0, "gone"),)),)), {"x"}, rank=0)
    assert Memory.from_environment() is None


@pytest.mark.parametrize("first_step", [0, 5])
@pytest.mark.parametrize("every", [1, 4, 10])
def test_a_plan_is_improved_where_a_snapshot_is_just_complete(every: int, first_step: int, tmp_path: Path) -> None:
    """Steps are counted from 0, also where trials made the first ones."""
    module = nn.Linear(2, 2)
    workload = Workload(replan=ReplanSettings(action="migrate", snapshot_every=every))
    memory = Memory(str(tmp_path), "here", {}, TOKEN, every_steps=every)
    optimizer = make_optimizer(OptimizerSettings(), module.parameters())
    job, saved = SimpleNamespace(workload=workload, first_step=first_step), set[int]()
    with SnapshotKeeper(memory, 0, 0, [module], optimizer) as keeper:
        for done in range(first_step + 1, first_step + 21):
            keeper.take(done)
            if ChangingTraining._is_saved(SimpleNamespace(job=job, _done=done)):  # type: ignore[arg-type]
                saved.add(done)
    assert saved == {done for done in range(first_step + 1, first_step + 21) if done % every == 0}
    assert {taken.step for taken in inventory(tmp_path)} == set(sorted(saved)[-KEPT:])


def test_without_snapshots_a_plan_is_improved_where_a_checkpoint_is_just_complete(tmp_path: Path) -> None:
    """However many there were: old ones are deleted, so there are no more of them."""
    workload = Workload(replan=ReplanSettings(action="migrate", snapshot_every=0))
    job = SimpleNamespace(workload=workload, checkpoints=tmp_path)
    training = SimpleNamespace(job=job, _done=0, _saved=[])
    for step in range(1, 9):
        (tmp_path / f"step-{step:08d}.partial").mkdir()
        assert not ChangingTraining._is_saved(training)  # type: ignore[arg-type]
        (tmp_path / f"step-{step:08d}.partial").rename(tmp_path / f"step-{step:08d}")
        (tmp_path / f"step-{step:08d}" / "COMPLETE.json").write_text("{}")
        if step > 2:
            shutil.rmtree(tmp_path / f"step-{step - 2:08d}")
        found = [ChangingTraining._is_saved(training) for _ in range(3)]  # type: ignore[arg-type]
        assert found == [True, False, False], step


def test_a_copy_whose_sender_is_killed_is_none(tmp_path: Path, served: tuple[Path, str]) -> None:
    """However much of it has arrived."""
    there, url = served
    taken, content = Taken(0, 3, 1), packed(state_of("a", "b"), {})
    place = urlsplit(url)
    for arrived in (0, 1, 8, len(content) // 2, len(content) - 1):
        with socket.create_connection((place.hostname or "", place.port or 0)) as sender:
            head = (
                f"PUT /0/3/1 HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {TOKEN}\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            sender.sendall(head.encode() + content[:arrived])
            sender.shutdown(socket.SHUT_WR)
            assert sender.recv(1000) == b""
        assert inventory(there) == []
    leave_copy(url, TOKEN, taken, content)
    assert inventory(there) == [taken]


def test_a_damaged_snapshot_is_read_from_another_host(tmp_path: Path, served: tuple[Path, str]) -> None:
    there, url = served
    here, own = tmp_path / "here", state_of("a")
    taken, content = Taken(0, 7, 0), packed(own, {})
    part, wanted = Part(("a",), ((0, "here"), (0, "there"))), {"a"}
    memory = Memory(str(here), "here", {"there": url}, TOKEN)
    start = Start(0, 7, (part,))
    write(taken.path(there), content)
    for length in (0, 8, len(content) - 1):
        write(taken.path(here), content[:length])
        assert torch.equal(read_start(memory, start, wanted, rank=0)["model.a.weight"], own["model.a.weight"])
    write(taken.path(there), content[:-1])
    with pytest.raises(CheckpointError, match=r"no host has the snapshot .*here: .* is damaged: .*there: "):
        read_start(memory, start, wanted, rank=0)


def test_shards_are_put_together(tmp_path: Path, served: tuple[Path, str]) -> None:
    _, url = served
    weight = torch.arange(10.0).reshape(5, 2)
    halves = [(weight[:3], (0, 0)), (weight[3:], (3, 0))]
    for rank, (half, offset) in enumerate(halves):
        content = packed({"model.a.weight": half.clone()}, {"model.a.weight": Shard((5, 2), offset)})
        leave_copy(url, TOKEN, Taken(2, 1, rank), content)
    pieces = [fetch(url, TOKEN, Taken(2, 1, rank), {"a"}) for rank in range(2)]
    assert torch.equal(whole(pieces)["model.a.weight"], weight)
    with pytest.raises(OSError, match="Forbidden"):
        fetch(url, "another", Taken(2, 1, 0), {"a"})
    with pytest.raises(OSError, match="Not Found"):
        fetch(url, TOKEN, Taken(2, 2, 0), {"a"})


@pytest.mark.parametrize("num_layers", [1, 40, 400])
def test_however_many_shards_a_rank_has_another_host_reads_them_all(
    num_layers: int, tmp_path: Path, served: tuple[Path, str]
) -> None:
    """Of some 700 tensors and more, a message's header with the shards' places was too long for Python's HTTP."""
    (there, url), taken = served, Taken(0, 1, 0)
    names = [f"{layer} café {k}" for k in range(num_layers) for layer in ("attention", "after")]
    state = {f"optimizer.{name}.weight.{what}": torch.full((1, 2), k) for k, name in enumerate(names) for what in "mv"}
    shards = {name: Shard((4, 2), (k % 4, 0)) for k, name in enumerate(state)}
    write(taken.path(there), packed(state, shards))
    for wanted in ([*names], names[::2], []):
        found = fetch(url, TOKEN, taken, set(wanted))
        here = read_layers(taken.path(there), set(wanted))
        assert found[1] == here[1] == {name: shard for name, shard in shards.items() if name in found[0]}
        assert found[0].keys() == here[0].keys() and len(found[0]) == 2 * len(wanted)
        assert all(torch.equal(found[0][name], one) for name, one in here[0].items())


def test_a_snapshot_is_of_its_step_though_training_goes_on(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a forward pass changes, and the copy on the other host."""
    there, url = served
    module = nn.Sequential()
    module.add_module("norm", nn.BatchNorm1d(4))
    optimizer = make_optimizer(OptimizerSettings(), module.parameters())
    memory = Memory(str(tmp_path / "here"), "here", {"there": url}, TOKEN, 2, {3: "there"})
    monkeypatch.setattr(os, "environ", {**os.environ, **memory.to_environment()})
    read = Memory.from_environment()
    assert read == memory
    states: dict[int, State] = {}
    with SnapshotKeeper(memory, 0, 3, [module], optimizer) as keeper:
        for step in range(1, 10):
            module(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            states[step] = {name: one.clone() for name, one in gather_state(module, optimizer).items()}
            keeper.take(step)
    for folder in (tmp_path / "here", there):
        assert inventory(folder) == [Taken(0, step, 3) for step in (4, 6, 8)]
        for step in (4, 6, 8):
            found, _ = read_layers(Taken(0, step, 3).path(folder), {"norm"})
            assert set(found) == set(states[step])
            assert all(torch.equal(found[name], one) for name, one in states[step].items())


NO_ROOM = """
import json, resource, sys
from pathlib import Path
import torch
from torch import nn
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.snapshots import Memory, SnapshotKeeper, inventory
from dejavu.workload import OptimizerSettings

folder, url, token = sys.argv[1:]
module = nn.Sequential()
module.add_module("layer", nn.Linear(100, 100))
optimizer = make_optimizer(OptimizerSettings(), module.parameters())
memory, told, kept = Memory(folder, "here", {"there": url}, token, 2, {1: "there"}), [], []
limit = resource.RLIM_INFINITY
with SnapshotKeeper(memory, 0, 1, [module], optimizer, told.append) as keeper:
    for step in range(1, 13):
        module(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        keeper.take(step)
        if step in (4, 8):  # what is under way is complete at the next that is due: there is no room for 6 and 8
            keeper._join()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if step == 4 else limit, limit))
print(json.dumps([told, [one.step for one in inventory(Path(folder))], [p.name for p in Path(folder).rglob(".*")]]))
"""


def test_a_memory_without_room_is_said_once_and_the_training_goes_on(tmp_path: Path, served: tuple[Path, str]) -> None:
    """It ended the rank in an OSError, and did so again after every restart."""
    there, url = served
    here = tmp_path / "here"
    words = [sys.executable, "-c", NO_ROOM, str(here), url, TOKEN]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (said,), steps, partial = json.loads(done.stdout)
    assert re.match(rf"rank 1 on here could not write its snapshot of [\d,]+ bytes after step 6 to {here} with", said)
    assert "File too large. The training goes on" in said and "snapshot_every: 0" in said
    assert steps == [4, 10, 12] and not partial
    assert [one.step for one in inventory(there)] == [8, 10, 12]  # the neighbour has room


def test_a_neighbour_without_room_keeps_no_copy_and_says_so(tmp_path: Path, served: tuple[Path, str]) -> None:
    there, url = served
    there.mkdir()
    (there / "attempt-0").touch()  # no folder can be made in its place
    with pytest.raises(OSError, match="507"):
        leave_copy(url, TOKEN, Taken(0, 1, 0), packed(state_of("a"), {}))
    leave_copy(url, TOKEN, Taken(1, 1, 0), packed(state_of("a"), {}))
    assert inventory(there) == [Taken(1, 1, 0)]


def test_the_memory_of_killed_agents_is_freed_and_that_of_others_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them may have had the number that this agent got: it is not there any more either."""
    monkeypatch.setattr(agent, "IN_MEMORY", tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    pids = (os.getppid(), ended.pid, os.getpid())
    for pid in pids:
        (tmp_path / f"dejavu-memory-{pid}" / "attempt-0").mkdir(parents=True)
    folder = agent._memory_folder()
    assert folder == tmp_path / f"dejavu-memory-{os.getpid()}" and not list(folder.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {f"dejavu-memory-{os.getppid()}", folder.name}
