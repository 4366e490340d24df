"""What ranks read: the examples that each needs and no others, at once or beside the step before, always the same."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.report.summary import saved, waited_for_data
from dejavu.runtime.batches import Reader, ahead
from dejavu.runtime.batches.held_out import HeldOut
from dejavu.runtime.job import Saved, TrainingResult, Waited
from dejavu.runtime.job.saving import FAILURE_SECONDS, FEWEST_STEPS, SHARE, Saving, steps_between
from dejavu.runtime.single import train_single
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload
from dejavu.workload.data import dataset_of

TOLERANCE = 1e-5


def own(factory: str, **options: Any) -> Workload:
    return Workload(
        model="mlp",
        model_options={"num_blocks": 4, "width": 8},
        data="examples",
        examples={"factory": f"tests.own_data:{factory}", "options": options, "num_classes": 3},  # type: ignore[arg-type]
        batch_size=12,
        num_microbatches=2,
        num_steps=6,
        checkpoint_every=6,
        optimizer=OptimizerSettings(learning_rate=1e-3, clip_norm=1.0),
        trials=TrialSettings(count=0),
    )


@pytest.fixture(params=[-1.0, math.inf], ids=["beside the step before", "at once"])
def share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """From which share of a step on a thread reads: any, or none."""
    monkeypatch.setattr(ahead, "LONG_SHARE", request.param)
    monkeypatch.setattr(ahead, "LONG_SECONDS", -1.0)
    return float(request.param)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "reads-ahead":
            thread.join(60)
            assert not thread.is_alive()


WORKLOADS = {
    "by number": own("rows"),
    "one after the other": own("flow"),
    "text": Workload(batch_size=12, sequence_length=8, num_microbatches=2),
    "synthetic": Workload(
        data="synthetic", synthetic=SyntheticSettings(num_classes=9), batch_size=12, num_microbatches=2
    ),
    "digits": Workload(data="digits", model="mlp", batch_size=12, num_microbatches=2, held_out=0.2),
}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("rows", [None, [3, 4, 5, 9, 10, 11], []], ids=["all", "a replica's", "none"])
def test_every_way_to_read_gives_the_step_s_own_examples(name: str, rows: list[int] | None, share: float) -> None:
    workload = WORKLOADS[name]
    places = None if rows is None else np.array(rows, np.int64)
    reader, data = Reader(workload, range(3, 12), places), dataset_of(workload)
    steps = []
    for step, inputs, targets in reader:
        wanted = data.batch(step, 12, seed=workload.seed)
        if rows is not None:
            wanted = tuple(part[rows] for part in wanted)
        assert (len(inputs) == 0) if rows == [] else all(map(torch.equal, (inputs, targets), wanted))
        reader.stepped()
        steps.append(step)
    assert steps == list(range(3, 12))
    assert reader.waited is not None and reader.waited.ahead == (share < 0)


def test_what_fails_beside_a_step_is_told_where_it_is_wanted(share: float) -> None:
    seen = []
    with pytest.raises(InputError, match=r"broken\[\d+\]"):
        reader = Reader(own("broken"), range(100))
        for step, _, _ in reader:
            seen.append(step)
            reader.stepped()
    again = []
    for step in range(100):
        try:
            dataset_of(own("broken")).batch(step, 12, seed=0)
        except InputError:
            break
        again.append(step)
    assert seen == again


def test_a_training_that_stops_leaves_no_thread(share: float) -> None:
    def stop(loss: float) -> None:
        losses.append(loss)
        if len(losses) == 5:
            raise RuntimeError("enough")

    losses: list[float] = []
    with pytest.raises(RuntimeError, match="enough"):
        train_single(own("rows"), Draw(), range(50), on_loss=stop)


def test_losses_do_not_depend_on_how_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, found = own("rows", seconds=1e-4), []
    monkeypatch.setattr(ahead, "LONG_SECONDS", -1.0)
    for share in (-1.0, math.inf, 0.02):
        monkeypatch.setattr(ahead, "LONG_SHARE", share)
        found.append(train_single(workload, Draw(), range(6)))
    assert found[0] == found[1] == found[2]


@pytest.mark.integration
def test_replicas_read_their_own_examples_and_stages_between_none(tmp_path: Path) -> None:
    workload = own("logged", count=10_000, folder=str(tmp_path / "read"))
    workload = workload.model_copy(update={"batch_size": 24, "num_microbatches": 4})
    (tmp_path / "read").mkdir()
    binding = by_hand("1f1b", (0, 1, 3, 5), [one_device(3), one_device(), one_device()], 4)
    job = replace(job_of(workload, binding, 6), folder=str(tmp_path / "run"))
    result = launch(job)
    read = [Counter(path.read_text().split()) for path in (tmp_path / "read").glob("*.txt")]
    steps = np.stack([numbers(workload, step) for step in range(6)]).reshape(6, 4, 3, 2)  # microbatch, replica, example
    for places in (steps[:, :, 0], steps[:, :, 1], steps[:, :, 2], steps):  # the first stage's replicas, and the last
        wanted = Counter(map(str, places.ravel()))
        exactly = [one for one in read if not wanted - one and set(one - wanted) <= {"0"}]  # 0 for the shape, too
        assert len(exactly) == 1
    assert result.losses == pytest.approx(train_single(job.workload, job.draw, range(6)), abs=TOLERANCE)
    assert len(result.waited_for_data) == 5
    assert len(result.saved) == 5 and {one.checkpoints for one in result.saved} == {1}
    assert all(0 < one.share < 1 and one.seconds > 0 for one in result.saved)
    again = TrainingResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert (again.waited_for_data, again.saved) == (result.waited_for_data, result.saved)


def numbers(workload: Workload, step: int) -> np.ndarray:
    """The examples of a step's batch: each says which it is."""
    inputs, _ = dataset_of(workload).batch(step, workload.batch_size, seed=workload.seed)
    return inputs[:, 0].long().numpy()


def test_only_waiting_that_matters_is_told() -> None:
    result = TrainingResult(0, (1.0,), 1.0, (), 0, None, "")
    assert result.waits_for_data is None
    little, much = Waited(1e-4, 0.019, False), Waited(5e-3, 0.25, True)
    assert replace(result, waited_for_data=(little, little)).waits_for_data is None
    found = replace(result, waited_for_data=(little, much)).waits_for_data
    assert found == (1, much)
    said = "rank 1 waited 5 ms of each step for its examples, 25.0%, though they are read beside the step before"
    assert waited_for_data(*found) == said


def test_only_checkpoints_that_matter_are_told() -> None:
    result = TrainingResult(0, (1.0,), 1.0, (), 0, None, "")
    assert result.long_saved is None
    little, much, one = Saved(13, 1e-3, 0.019), Saved(13, 0.22, 0.55), Saved(1, 2.0, 0.25)
    assert replace(result, saved=(little, little)).long_saved is None
    assert replace(result, saved=(little, much, one)).long_saved == much
    told = "of the training's time, which no step's time above has in it"
    assert saved(much) == f"13 took 220 ms each, 55.0% {told}"
    assert saved(one) == f"one took 2 s, 25.0% {told}"


def test_checkpoints_are_timed_beside_what_is_between_them() -> None:
    saving = Saving(Workload(checkpoint_every=1), range(3))
    assert saving.told is None
    for done in (1, 2, 3):
        time.sleep(0.02)
        assert saving.is_due(done)
        with saving.after(done):
            time.sleep(0.02)
    found = saving.told
    assert found is not None and found.checkpoints == 3 and found.seconds >= 0.02
    assert 0 < found.share < 0.95  # each wait is at least as long as was asked for


@pytest.mark.parametrize("first", [0, 1, 7, 10, 30])
@pytest.mark.parametrize("every", [1, 4, 10, 25])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_checkpoints_that_were_asked_for_are_evaluated_wherever_the_training_begins(
    first: int, every: int, times: int
) -> None:
    """The trials' winner leaves some steps behind it; an attempt may go on from any step."""
    workload = Workload(
        num_steps=100, checkpoint_every=every * times, evaluate_every=every, held_out=0.1, trials=TrialSettings(count=0)
    )
    saving, held_out = Saving(workload, range(first, 100)), HeldOut(workload, 100, torch.device("cpu"))
    saved = [done for done in range(first + 1, 101) if saving.is_due(done)]
    assert saved == sorted({done for done in range(first + 1, 101) if done % (every * times) == 0} | {100})
    assert all(held_out.is_due(done - 1) for done in saved)


def test_checkpoints_take_little_of_the_time_and_lose_little_in_a_failure() -> None:
    """Rare ones are as far apart as loses least, of a failure every so many seconds, by any spacing that is tried."""
    M = FAILURE_SECONDS
    for checkpoint_seconds in np.geomspace(1e-3, 1e3, 30):
        for step_seconds in np.geomspace(1e-3, 1e2, 20):
            steps = steps_between(checkpoint_seconds, step_seconds)
            apart = steps * step_seconds
            lost = checkpoint_seconds / apart + apart / (2 * M)  # of the time: in writing, and half of what is between
            assert steps >= FEWEST_STEPS
            if steps == FEWEST_STEPS:
                continue
            if checkpoint_seconds / apart > SHARE:
                tried = np.geomspace(0.2, 5, 41) * apart
                assert lost <= (checkpoint_seconds / tried + tried / (2 * M)).min() + step_seconds / M
            else:
                assert (steps - 1) * step_seconds < checkpoint_seconds / SHARE


def test_a_rank_that_computes_while_it_reads_waits_less_than_it_reads() -> None:
    """Of the thread's own reading, what the step did not cover is what is counted."""
    reader = Reader(own("rows", seconds=2e-3), range(12))
    for _ in reader:
        time.sleep(0.05)
        reader.stepped()
    assert reader.waited is not None and reader.waited.ahead
