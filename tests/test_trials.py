"""Trials on a real Dask cluster of processes: durable, never run twice, and not lost with a worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import distributed
import psutil
import pytest
import torch
from torch import nn

from dejavu.data.text import _read
from dejavu.init import Draw, proposer_named
from dejavu.trials import TrialError, TrialResult, TrialSpec, best, local_client, run_trials
from dejavu.workload import OptimizerSettings, Workload

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[distributed.Client]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with local_client(2, tmp_path_factory.mktemp("dask")) as client:
        yield client
    left = [
        p for p in psutil.Process().children(recursive=True) if p.pid not in before and "spawn_main" in str(p.cmdline())
    ]
    assert not left


def specs_of(workload: Workload, count: int, steps: int = 3) -> list[TrialSpec]:
    draws = proposer_named(workload.trials.proposer).propose(count, seed=workload.seed)
    return [TrialSpec(workload, draw, steps) for draw in draws]


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this layer always breaks")


def breaking() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 8), Breaks())


def attempts(folder: Path) -> int:
    return len(list(folder.glob("*.attempt-*")))


def test_every_trial_runs_once_and_the_best_is_the_lowest(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    seen: list[TrialResult] = []
    results = run_trials(client, specs_of(tiny, 6), tmp_path, on_result=seen.append)
    assert [result.draw for result in results] == [spec.draw for spec in specs_of(tiny, 6)]
    assert all(result.attempts == 1 and len(result.losses) == 3 and not result.remembered for result in results)
    assert attempts(tmp_path) == 6 and len(seen) == 6
    assert best(results).score == min(result.score for result in results)
    again = run_trials(client, specs_of(tiny, 6), tmp_path)
    assert all(result.remembered for result in again)
    assert [result.losses for result in again] == [result.losses for result in results]
    assert attempts(tmp_path) == 6


def test_calls_that_follow_at_once_read_what_the_last_one_kept(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    """The scheduler may still know an earlier call's tasks; their results must not pass for this call's."""
    run_trials(client, specs_of(tiny, 2), tmp_path)
    for _ in range(20):
        assert all(result.remembered for result in run_trials(client, specs_of(tiny, 2), tmp_path))
    assert attempts(tmp_path) == 2


def test_the_same_trial_asked_twice_runs_once(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    (spec,) = specs_of(tiny, 1)
    first, second = run_trials(client, [spec, spec], tmp_path)
    assert first == second and attempts(tmp_path) == 1


def test_a_lost_state_is_trained_again(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    (first,) = run_trials(client, specs_of(tiny, 1), tmp_path)
    Path(first.state).unlink()
    (again,) = run_trials(client, specs_of(tiny, 1), tmp_path)
    assert not again.remembered and Path(again.state).exists() and again.losses == first.losses


def test_the_answer_does_not_depend_on_the_workers(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    many = run_trials(client, specs_of(tiny, 4), tmp_path / "two")
    with local_client(1, tmp_path / "dask") as single:
        one = run_trials(single, specs_of(tiny, 4), tmp_path / "one")
    assert [result.losses for result in many] == [result.losses for result in one]
    assert best(many).draw == best(one).draw


def test_a_killed_worker_s_trial_runs_again_once_and_the_others_once(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    specs = specs_of(tiny, 8, steps=150)
    killed: list[int] = []

    def kill(result: TrialResult) -> None:
        if killed:
            return
        stop = time.monotonic() + 60
        while attempts(tmp_path) < 3 and time.monotonic() < stop:  # until both workers are in the middle of a trial
            time.sleep(0.01)
        busy = {address: keys for address, keys in client.processing().items() if keys}
        pids = client.run(os.getpid, workers=list(busy)[:1], on_error="ignore")
        killed.extend(pids.values())
        os.kill(killed[0], signal.SIGKILL)

    results = run_trials(client, specs, tmp_path, on_result=kill)
    assert len(killed) == 1
    assert len(results) == 8 and not any(result.failure for result in results)
    assert sorted(result.attempts for result in results) == [*[1] * 7, 2]
    assert attempts(tmp_path) == 9


def test_a_diverging_trial_fails_alone(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    wild = tiny.model_copy(update={"optimizer": OptimizerSettings(name="sgd", learning_rate=1e30)})
    specs = [TrialSpec(wild, Draw("normal", 1.0, 0), 6), TrialSpec(tiny, Draw(), 3)]
    results = run_trials(client, specs, tmp_path)
    assert "the loss was" in results[0].failure and results[0].state == ""
    assert best(results) == results[1]
    with pytest.raises(TrialError, match="none of 1 trials gave a finite loss; the first: the loss was"):
        best(results[:1])


def test_a_trial_that_raises_is_told_and_the_others_go_on(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    broken = tiny.model_copy(update={"model": "tests.test_trials:breaking", "model_options": {}})
    results = run_trials(client, [TrialSpec(broken, Draw(), 3), TrialSpec(tiny, Draw(), 3)], tmp_path)
    assert "RuntimeError: this layer always breaks" in results[0].failure
    assert results[0].attempts == 3
    assert results[1].failure == ""


def test_a_deadline_is_hit_and_never_a_hang(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    with pytest.raises(TrialError, match=r"of 2 trials were done when the deadline of 0\.5 s passed"):
        run_trials(client, specs_of(tiny, 2, steps=5000), tmp_path, deadline_seconds=0.5)
    stop = time.monotonic() + 60
    while any(client.processing().values()) and time.monotonic() < stop:
        time.sleep(0.2)


def test_workers_import_neither_prefect_nor_mlflow(client: distributed.Client) -> None:
    def loaded() -> list[str]:
        import sys

        return [name for name in ("prefect", "mlflow", "flows", "tasks") if name in sys.modules]

    assert all(names == [] for names in client.run(loaded).values())


def test_dask_s_environment_stays_in_dask(client: distributed.Client, tmp_path: Path) -> None:
    def trims() -> bool:
        return "MALLOC_TRIM_THRESHOLD_" in os.environ

    assert not any(client.run(trims).values())
    before = dict(os.environ)
    with local_client(1, tmp_path):
        pass
    assert dict(os.environ) == before


def test_the_key_is_of_all_that_decides_and_nothing_else(tiny: Workload, tmp_path: Path) -> None:
    spec = TrialSpec(tiny, Draw(), 3)
    longer = tiny.model_copy(update={"num_steps": 99})
    assert TrialSpec(longer, Draw(), 3).key == spec.key
    others = [
        TrialSpec(tiny, Draw(seed=1), 3),
        TrialSpec(tiny, Draw(), 4),
        TrialSpec(tiny.model_copy(update={"batch_size": 16}), Draw(), 3),
    ]
    text = tmp_path / "text.txt"
    for content in ("a" * 500, "b" * 500):
        text.write_text(content)
        _read.cache_clear()
        others.append(TrialSpec(tiny.model_copy(update={"text": text}), Draw(), 3))
        keys = {spec.key, *(other.key for other in others[:3]), others[-1].key}
        assert len(keys) == 5
    (tmp_path / "copy.txt").write_text("b" * 500)
    copy = TrialSpec(tiny.model_copy(update={"text": tmp_path / "copy.txt"}), Draw(), 3)
    assert copy.key == others[-1].key  # what it is called does not matter
