"""Copies of checkpoints by fsspec: complete or not there, and a training on another host goes on from them.

Its in-memory file system stands for an object store, and a folder for one that hosts share; S3 itself is not tried.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.runtime.job import TrainingJob, resumed
from dejavu.runtime.job import copies as copying
from dejavu.runtime.job.copies import Copier, check_copies, copy_training, fetch
from dejavu.runtime.single import build_layers
from dejavu.runtime.state import MARKER, checkpoint_step, complete_checkpoints, gather_state, save_checkpoint
from tests.conftest import TINY
from tests.launching import job_of, largest_difference

URL = "memory://bucket/runs"


@pytest.fixture
def store() -> Iterator[Any]:
    """An empty object store."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TrainingJob]:
    """A training's job, and the group of this process alone, by which checkpoints are written."""
    found = job_of(TINY.model_copy(update={"checkpoints": URL}), tmp_path / "here" / "run1")
    found.write()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


def save(job: TrainingJob, *steps: int, held_out: Mapping[int, float] = MappingProxyType({})) -> None:
    layers = build_layers(job.workload, Draw(), torch.device("cpu"))
    for step in steps:
        state = gather_state(layers, torch.optim.SGD(layers.parameters(), 0.1))
        save_checkpoint(job.checkpoints, step, state, held_out.get(step))
    lines = (json.dumps({"step": k, "loss": 4.0}) + "\n" for k in range(max(0, max(steps) - 20), max(steps)))
    job.progress_path.write_text("".join(lines))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_fetched_is_what_was_copied(store: Any, job: TrainingJob, tmp_path: Path) -> None:
    save(job, 3, 6)
    copy_training(job, f"{URL}/run1")
    found = fetch(f"{URL}/run1", tmp_path / "there")
    assert found == tmp_path / "there" / "run1"
    expected = {name: part for name, part in content(Path(job.folder)).items() if "step-00000003" not in name}
    assert content(found) == expected, "the last checkpoint, and what is beside it"
    assert fetch(f"{URL}/run1", tmp_path / "there") == found, "once more changes nothing"
    assert content(found) == expected
    save(job, 9)
    copy_training(job, f"{URL}/run1")
    steps = sorted(name.rpartition("/")[2] for name in store.ls("/bucket/runs/run1/checkpoints", detail=False))
    assert steps == ["step-00000006", "step-00000009"], "as many as are kept here"
    fetch(f"{URL}/run1", tmp_path / "there")
    assert [checkpoint_step(path) for path in complete_checkpoints(found / "checkpoints")] == [6, 9]


@pytest.mark.parametrize("best", [3, 6, 9, 12])
def test_the_best_checkpoint_goes_along_and_stays(best: int, store: Any, job: TrainingJob, tmp_path: Path) -> None:
    """What is not fetched would be deleted there when the training goes on here."""
    losses = {step: 2.0 + (step != best) for step in (3, 6, 9, 12)}
    save(job, 3, 6, 9, held_out=losses)
    copy_training(job, f"{URL}/run1")
    found = fetch(f"{URL}/run1", tmp_path / "there")
    kept = {checkpoint_step(path) for path in complete_checkpoints(found / "checkpoints")}
    assert kept == {9} | ({best} if best < 9 else {3} if best > 9 else set())
    there = replace(job, folder=str(found))
    save(there, 12, held_out=losses)
    copy_training(there, f"{URL}/run1")
    names = store.ls("/bucket/runs/run1/checkpoints", detail=False)
    copied = {int(name.rpartition("-")[2]) for name in names}
    assert copied == {checkpoint_step(path) for path in complete_checkpoints(there.checkpoints)} == {9, 12, best}


@pytest.mark.parametrize("name", ["lab [a100]", "a*b", "a?b", "a{b,c}", "my runs", "grüße's"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_place_may_have_any_name_and_no_other_place_is_touched(
    kind: str, name: str, store: Any, job: TrainingJob, tmp_path: Path
) -> None:
    """To fsspec's `rm` a bracket or a star is a pattern: nothing was deleted in the one, and in others the other's."""
    place = f"memory://bucket/{name}" if kind == "memory" else f"file://{tmp_path}/{name}"
    other = place.replace("*", "x").replace("?", "y").replace("[a100]", "a").replace("{b,c}", "b")
    check_copies(place)
    save(job, 3, 6)
    for url in {place, other}:
        copy_training(job, f"{url}/run1")
    for step in (9, 12):
        save(job, step)
        copy_training(job, f"{place}/run1")

    def steps(url: str) -> list[int]:
        files, root = fsspec.core.url_to_fs(f"{url}/run1/checkpoints")
        return sorted(int(one.rpartition("-")[2]) for one in files.ls(root, detail=False))

    assert steps(place) == [9, 12] and (other == place or steps(other) == [3, 6])
    found = fetch(f"{place}/run1", tmp_path / "there")
    assert [checkpoint_step(path) for path in complete_checkpoints(found / "checkpoints")] == [12]


@pytest.mark.parametrize("there", ["step-00000006", "step-00000006.partial"])
@pytest.mark.parametrize("holds", [None, "__0_0.distcp", ".metadata"])
def test_what_an_earlier_fetch_or_a_killed_rank_left_is_in_nobody_s_way(
    there: str, holds: str | None, store: Any, job: TrainingJob, tmp_path: Path
) -> None:
    save(job, 6)
    copy_training(job, f"{URL}/run1")
    left = tmp_path / "there" / "run1" / "checkpoints" / there
    left.mkdir(parents=True)
    if holds is not None:
        (left / holds).write_bytes(b"half")
    found = fetch(f"{URL}/run1", tmp_path / "there")
    assert content(found) == content(Path(job.folder))


def test_a_copy_that_was_cut_off_is_none(store: Any, job: TrainingJob, tmp_path: Path) -> None:
    save(job, 3, 6)
    copy_training(job, f"{URL}/run1")
    store.rm_file(f"/bucket/runs/run1/checkpoints/step-00000006/{MARKER}")
    found = fetch(f"{URL}/run1", tmp_path / "there")
    assert [path.name for path in (found / "checkpoints").iterdir()] == ["step-00000003"]
    copy_training(job, f"{URL}/run1")
    assert fetch(f"{URL}/run1", tmp_path / "there2").joinpath("checkpoints", "step-00000006", MARKER).is_file()


def test_what_cannot_be_copied_is_a_warning_and_what_is_deleted_meanwhile_none(
    store: Any, job: TrainingJob, tmp_path: Path
) -> None:
    save(job, 3)
    (tmp_path / "file").write_text("in the way")
    warned: list[str] = []
    away = replace(job, workload=job.workload.model_copy(update={"checkpoints": f"file://{tmp_path}/file"}))
    for one in (away, job):
        copier = Copier(one, warned.append)
        copier.wake()
        copier.close()
    assert warned and all("the checkpoints are not copied to file://" in line for line in warned)
    assert store.exists(f"/bucket/runs/run1/checkpoints/step-00000003/{MARKER}")


def copied_steps(store: Any) -> list[int]:
    return sorted(int(name.rpartition("-")[2]) for name in store.ls("/bucket/runs/run1/checkpoints", detail=False))


@pytest.mark.parametrize("wakes", [True, False])
def test_what_came_while_a_slow_store_took_another_copy_is_copied_too(
    wakes: bool, store: Any, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training ends meanwhile: its last checkpoint and its result are what another host wants."""
    copies, begun, goes_on = copying.copy_training, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        copies(*arguments)
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(copying, "copy_training", slowly)
    monkeypatch.setattr(copying, "POLL_SECONDS", 0.01)
    save(job, 3)
    copier = Copier(job, pytest.fail)
    copier.wake()
    assert begun.wait(60)
    save(job, 6)
    if wakes:
        copier.wake()
    job.result_path.write_text("{}")
    copier.close(goes_on.set)
    assert copied_steps(store) == [3, 6]
    assert store.cat_file("/bucket/runs/run1/result.json") == b"{}"


@pytest.mark.parametrize("puts", range(4))
def test_a_checkpoint_that_is_deleted_while_it_is_copied_leaves_nothing_there(
    puts: int, store: Any, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow store, and a training that saves often."""
    save(job, 3)
    (first,) = complete_checkpoints(job.checkpoints)
    put, count = store.put_file, 0

    def put_file(here: str, there: str, **options: Any) -> None:
        nonlocal count
        if count == puts and first.exists():
            save(job, 6, 9)
        count += 1
        put(here, there, **options)

    monkeypatch.setattr(store, "put_file", put_file)
    copy_training(job, f"{URL}/run1")
    copy_training(job, f"{URL}/run1")
    assert not first.exists() or puts > 2, "it was deleted meanwhile"
    assert copied_steps(store) == [checkpoint_step(one) for one in complete_checkpoints(job.checkpoints)]


@pytest.mark.parametrize("first", [7, 99_999_997, 99_999_998, 99_999_999])
def test_the_newest_is_the_one_of_most_steps(first: int, store: Any, job: TrainingJob, tmp_path: Path) -> None:
    """From 10⁸ steps on a name has a digit more, and comes before shorter ones by the alphabet."""
    losses = dict.fromkeys(range(first, first + 4), 2.0)
    for step in range(first, first + 4):
        save(job, step, held_out=losses)
        assert [checkpoint_step(one) for one in complete_checkpoints(job.checkpoints)][-1] == step
    copy_training(job, f"{URL}/run1")
    kept = [checkpoint_step(one) for one in complete_checkpoints(job.checkpoints)]
    assert kept == copied_steps(store) == [first, first + 2, first + 3], "the last two, and the best"
    found = fetch(f"{URL}/run1", tmp_path / "there")
    assert [checkpoint_step(one) for one in complete_checkpoints(found / "checkpoints")] == [first, first + 3]
    save(replace(job, folder=str(found)), first + 5)
    assert fetch(f"{URL}/run1", tmp_path / "there") == found
    assert checkpoint_step(complete_checkpoints(found / "checkpoints")[-1]) == first + 5, "what is here is newer"


@pytest.mark.parametrize("left", [(), (4,), (3, 5, 6, 99_999_999, 100_000_000)])
def test_no_checkpoint_that_a_killed_attempt_began_is_left(left: tuple[int, ...], job: TrainingJob) -> None:
    """The next attempt may save after other steps: when a checkpoint is due follows from the clock."""
    for step in left:
        (job.checkpoints / f"step-{step:08d}.partial").mkdir(parents=True)
        (job.checkpoints / f"step-{step:08d}.partial" / "__0_0.distcp").write_bytes(b"half")
    save(job, 6)
    assert [path.name for path in job.checkpoints.iterdir()] == ["step-00000006"]


def test_urls_that_cannot_be_are_a_sentence(store: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    check_copies(URL)
    assert not store.ls("/bucket/runs")
    cases = [
        ("nowhere://x/y", "nowhere://x/y cannot be opened: .*"),
        (f"file://{tmp_path}/file/x", "cannot be written"),
    ]
    if find_spec("s3fs") is None:
        cases.append(("s3://bucket/runs", "s3://bucket/runs cannot be opened: .*with the library s3fs"))
    for url, said in cases:
        with pytest.raises(InputError, match=said):
            check_copies(url)
    for url, said in ((f"{URL}/absent", "has no training to resume"), ("memory://", "names no training")):
        with pytest.raises(InputError, match=said):
            fetch(url, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.integration
def test_a_training_goes_on_on_another_host_from_its_copies(tmp_path: Path) -> None:
    """Under another plan; of the first host's folder nothing is left."""
    shared = (tmp_path / "shared").as_uri()
    workload = TINY.model_copy(update={"checkpoints": shared, "num_steps": 6})
    first = launch(job_of(workload, tmp_path / "first" / "run1", (2,)))
    assert first.warnings == ()
    (tmp_path / "first").rename(tmp_path / "gone")
    found = fetch(f"{shared}/run1", tmp_path / "second")
    longer = TINY.model_copy(update={"num_steps": 9})
    result = launch(resumed(found, longer, job_of(longer, found, (1, 3)).binding))
    assert result.resumed_from_step == 6
    assert largest_difference(longer, [*first.losses, *result.losses[6:]]) < 1e-4
