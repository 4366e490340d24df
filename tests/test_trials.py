"""Trials on a real Dask cluster of processes: durable, never run twice, and not lost with a worker."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import distributed
import psutil
import pytest
import torch
from torch import nn

from dejavu.init import Draw
from dejavu.runtime.single import probe, train_single
from dejavu.runtime.state import CheckpointError, save_trial
from dejavu.trials import (
    Rung,
    TrialError,
    TrialResult,
    Trials,
    TrialSpec,
    best,
    client_of,
    clients,
    local_client,
    probe_draws,
    remembered_search,
    run_trials,
    running,
    search_initialization,
)
from dejavu.trials.bought import is_default
from dejavu.trials.halving import LEAST_RUNG_STEPS, running_loss
from dejavu.trials.spec import MOST_ATTEMPTS, Keys, split_key
from dejavu.workload import (
    GradientSettings,
    OptimizerSettings,
    ReplanSettings,
    SyntheticSettings,
    TrialSettings,
    Workload,
)
from dejavu.workload.data.text import _read
from tests.conftest import some
from tests.launching import dask_workers
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[distributed.Client]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with local_client(2, tmp_path_factory.mktemp("dask")) as client:
        yield client
    left = dask_workers(psutil.Process().children(recursive=True))
    assert not [process for process in left if process.pid not in before]


def specs_of(workload: Workload, count: int, steps: int = 3) -> list[TrialSpec]:
    return [TrialSpec(workload, Draw(seed=seed), steps) for seed in range(count)]


def of_model(workload: Workload, name: str) -> Workload:
    return workload.model_copy(update={"model": f"tests.own_models:{name}", "model_options": {}})


def executing(dask_worker: distributed.Worker) -> tuple[int, list[str]]:
    """A worker's process, and the tasks whose threads are at work, wanted or not."""
    return os.getpid(), [str(name) for name in dask_worker.active_threads.values()]


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


def test_a_killed_worker_s_trial_runs_again_once_and_the_others_once(
    client: distributed.Client, rungs: Workload, tmp_path: Path
) -> None:
    """kill -9 in the middle of one trial of 16: 17 executions, and nothing else changes."""
    begun = tmp_path / "begun"
    begun.mkdir()
    options = {"folder": str(begun), "runs": 7, "steps": 40}
    specs = specs_of(of_model(rungs, "killing_once").model_copy(update={"model_options": options}), 16, steps=80)
    results = run_trials(client, specs, tmp_path / "killed")
    assert sorted(result.attempts for result in results) == [*[1] * 15, 2]
    assert attempts(tmp_path / "killed") == 17 == len(list(begun.iterdir()))
    quiet = run_trials(client, specs, tmp_path / "quiet")
    assert attempts(tmp_path / "quiet") == 16
    assert [result.losses for result in results] == [result.losses for result in quiet]
    assert best(results).draw == best(quiet).draw


def test_a_diverging_trial_fails_alone(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    wild = tiny.model_copy(update={"optimizer": OptimizerSettings(name="sgd", learning_rate=1e30)})
    specs = [TrialSpec(wild, Draw("normal", seed=0), 6), TrialSpec(tiny, Draw(), 3)]
    results = run_trials(client, specs, tmp_path)
    assert "the loss was" in results[0].failure and results[0].state == ""
    assert best(results) == results[1]
    with pytest.raises(TrialError, match="none of 1 trials succeeded; the first: the loss was"):
        best(results[:1])


def test_a_state_that_cannot_be_written_is_named(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    """The disk's fault is not called the loss's."""
    (spec,) = specs_of(tiny, 1)
    state = tmp_path / f"{Keys().of(spec)}.safetensors"
    state.mkdir()
    results = run_trials(client, [spec], tmp_path)
    with pytest.raises(TrialError) as raised:
        best(results)
    assert str(raised.value).startswith(f"none of 1 trials succeeded; the first: {state} was not saved: ")
    module = nn.Linear(64, 64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:  # what safetensors says of a full disk is no OSError
        with pytest.raises(CheckpointError, match=r"full\.safetensors was not saved: .*File too large"):
            save_trial(tmp_path / "full.safetensors", module, torch.optim.SGD(module.parameters()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*full.safetensors*"))


def test_a_trial_that_raises_is_told_and_the_others_go_on(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    broken = TrialSpec(of_model(tiny, "breaking"), Draw(), 3)
    results = run_trials(client, [broken, TrialSpec(tiny, Draw(), 3)], tmp_path)
    assert "RuntimeError: this layer always breaks" in results[0].failure
    assert results[0].attempts == 3
    assert results[1].failure == ""


def test_a_deadline_is_hit_and_never_a_hang(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    with pytest.raises(TrialError, match=r"of 2 trials were done when the deadline of 0\.5 s passed"):
        run_trials(client, specs_of(tiny, 2, steps=100_000), tmp_path, deadline_seconds=0.5)
    stop = time.monotonic() + 120  # far less than the steps would take: a trial that nobody wants any more stops
    while any(names for _, names in client.run(executing).values()):
        assert time.monotonic() < stop
        time.sleep(0.05)
    assert not list(tmp_path.glob("*.json"))


def test_a_worker_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    """Dask gives up the whole cluster then."""
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        """The first worker that appears: a fork of the forkserver, which is there first."""
        while not killed and not over.is_set():
            new = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
            for process in (one for one in new if one.ppid() != os.getpid()):
                process.kill()
                killed.append(process.pid)
                break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with local_client(1, tmp_path) as client:
            assert client.submit(os.getpid).result(timeout=PATIENCE_SECONDS) not in killed
    finally:
        over.set()
        killer.join()
    assert len(killed) == 1


@pytest.mark.parametrize(
    "modules",
    some([clients.PRELOADED, ("dejavu.runtime.worker",), ("benchmarks.pipeline.ranks",)], [clients.PRELOADED]),
    ids=["trials", "ranks", "ranks of many plans"],
)
def test_what_workers_are_forked_from_has_one_thread(modules: tuple[str, ...]) -> None:
    """A lock that another one holds would stay shut in a worker. Ranks start sooner without pyarrow, too."""
    code = f"import os, {', '.join(modules)}; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "1"


def test_workers_import_neither_prefect_nor_mlflow(client: distributed.Client) -> None:
    def loaded() -> list[str]:
        import sys

        return [name for name in ("prefect", "mlflow", "flows", "tasks") if name in sys.modules]

    assert all(names == [] for names in client.run(loaded).values())


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


WITHOUT_A_PLAN = {
    "slices": 4,
    "schedule": "gpipe",
    "both_ways": True,
    "gradients": GradientSettings(rule="median"),
    "checkpoint_every": 7,
    "compare": True,
    "trials": TrialSettings(count=3),
    "replan": ReplanSettings(action="plan"),
    "evaluate_every": 1,
    "evaluation_examples": 8,
    "compile": True,
    "checkpoints": "file:///nowhere/else",
}


@pytest.mark.parametrize("field", WITHOUT_A_PLAN)
def test_what_is_for_ranks_alone_changes_neither_losses_nor_keys(tiny: Workload, field: str) -> None:
    other = tiny.model_copy(update={field: WITHOUT_A_PLAN[field]})
    assert getattr(other, field) != getattr(tiny, field)
    assert TrialSpec(other, Draw(), 3).key == TrialSpec(tiny, Draw(), 3).key
    assert train_single(other, Draw(), range(2)) == train_single(tiny, Draw(), range(2))


def test_a_decaying_learning_rate_makes_the_length_count(tiny: Workload) -> None:
    falling = tiny.model_copy(update={"optimizer": OptimizerSettings(decay="linear")})
    longer = falling.model_copy(update={"num_steps": 99})
    assert TrialSpec(longer, Draw(), 3).key != TrialSpec(falling, Draw(), 3).key


# From rung to rung

SECOND, LAST = 3 * LEAST_RUNG_STEPS, 9 * LEAST_RUNG_STEPS


@pytest.fixture
def rungs(tiny: Workload) -> Workload:
    """Nine trials on the first rung, three or more on the second, one or more on the last."""
    small = {"model_options": {"num_blocks": 1, "width": 16, "num_heads": 1}, "sequence_length": 16, "batch_size": 4}
    settings = TrialSettings(count=9, steps=LAST)
    return tiny.model_copy(update={**small, "num_microbatches": 1, "num_steps": 20 * LAST, "trials": settings})


def test_a_trial_goes_on_from_where_it_stopped(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    parts = [run_trials(client, [TrialSpec(tiny, Draw(seed=1), steps)], tmp_path)[0] for steps in (3, 9, 14)]
    assert parts[2].losses == tuple(train_single(tiny, Draw(seed=1), range(14), save_to=tmp_path / "unbroken"))
    assert Path(parts[2].state).read_bytes() == (tmp_path / "unbroken").read_bytes()
    assert [part.losses for part in parts[:2]] == [parts[2].losses[:3], parts[2].losses[:9]]
    assert [str(path) for path in tmp_path.glob("*.safetensors")] == [parts[2].state]
    assert attempts(tmp_path) == 3 and parts[2].seconds >= parts[1].seconds >= parts[0].seconds


def test_no_step_is_trained_twice(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    """The losses of the first part are read from its file, here another's."""
    (first,) = run_trials(client, specs_of(tiny, 1), tmp_path)
    path = Path(first.state).with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "losses": [30.0, 20.0, 10.0]}))
    (longer,) = run_trials(client, specs_of(tiny, 1, steps=5), tmp_path)
    assert (
        longer.losses[:3] == (30.0, 20.0, 10.0) and longer.losses[3:] == tuple(train_single(tiny, Draw(), range(5)))[3:]
    )
    path.unlink()
    assert probe_draws(client, tiny, [Draw()], tmp_path)[0].loss == 30.0  # of the longer one
    assert attempts(tmp_path) == 2


def test_a_torn_result_is_as_if_it_were_not_there(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    (first,) = run_trials(client, specs_of(tiny, 1), tmp_path)
    Path(first.state).with_suffix(".json").write_text('{"losses": [1.0')
    (again,) = run_trials(client, specs_of(tiny, 1), tmp_path)
    assert again.losses == first.losses and not again.remembered and again.attempts == 2


def test_a_probe_is_the_first_step_without_the_step(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    clipped = tiny.model_copy(update={"optimizer": OptimizerSettings(clip_norm=1e-3)})
    draws = [Draw(seed=0), Draw("normal", 2.0, seed=1)]
    found = probe_draws(client, clipped, draws, tmp_path)
    results = run_trials(client, [TrialSpec(clipped, draw, 2) for draw in draws], tmp_path)
    for draw, one, result in zip(draws, found, results, strict=True):
        assert (one.loss, one.gradient_norm) == (result.losses[0], result.first_gradient_norm) == probe(clipped, draw)
        assert one.gradient_norm > 1e-3  # before the clipping
    (broken,) = probe_draws(client, of_model(tiny, "breaking"), draws[:1], tmp_path)
    assert broken.loss == broken.gradient_norm == float("inf")


def check(found: Trials, workload: Workload, folder: Path) -> None:
    """Check that a search did what it says."""
    last = found.rungs[-1]
    assert found.rungs[0].draws == tuple(result.draw for result in found.results)
    added = 0 if found.bought is None else len(found.results) - workload.trials.count
    assert len(found.results) == workload.trials.count + added
    assert all(is_default(draw) for draw in found.rungs[0].draws[workload.trials.count :])
    assert [rung.survivors for rung in found.rungs[:-1]] == [rung.draws for rung in found.rungs[1:]]
    assert last.survivors == (found.winner.draw,) and last.steps == found.winner.steps == workload.trial_steps
    assert found.winner.score == last.best_score == min(r.score for r in found.results if r.steps == last.steps)
    defaults = sum(map(is_default, found.rungs[0].draws))
    if found.bought is None:
        assert len(found.results) == 1
    else:
        assert len(found.bought.default_losses) == max(defaults, workload.trials.default_draws)
        assert (found.bought.winner, found.bought.steps) == (found.winner.draw, found.rungs[0].steps)
    for result in found.results:
        assert result.steps == max(rung.steps for rung in found.rungs if result.draw in rung.draws)
    assert found.total_steps >= sum(result.steps for result in found.results)
    assert [str(path) for path in folder.glob("*.safetensors")] == [found.winner.state]


def the_same(one: Trials, other: Trials) -> bool:
    """Whatever depends on the workload alone."""
    decided = [[(rung.steps, rung.draws, rung.survivors) for rung in found.rungs] for found in (one, other)]
    losses = [[(result.draw, result.losses) for result in found.results] for found in (one, other)]
    same = decided[0] == decided[1] and losses[0] == losses[1] and one.winner.draw == other.winner.draw
    return same and one.bought == other.bought


@contextmanager
def in_this_process(num_workers: int, num_threads: int = 1) -> Iterator[distributed.Client]:
    """A Dask cluster whose workers are threads of this process, so that no other has to import torch."""
    with (
        distributed.LocalCluster(
            n_workers=num_workers, threads_per_worker=num_threads, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_a_worker_of_many_threads_runs_one_trial_at_a_time(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    """The weights follow from torch's random state, which all threads of a process share."""
    specs = specs_of(tiny, 8, steps=3)
    alone = run_trials(client, specs, tmp_path / "alone")
    with in_this_process(1, num_threads=8) as threads:
        together = run_trials(threads, specs, tmp_path / "together")
    assert [result.losses for result in together] == [result.losses for result in alone]


def test_the_winner_does_not_depend_on_the_workers_or_their_order(
    client: distributed.Client, rungs: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Rung] = []
    first = search_initialization(client, rungs, tmp_path / "2", on_rung=told.append)
    check(first, rungs, tmp_path / "2")
    assert [rung.steps for rung in first.rungs] == [LEAST_RUNG_STEPS, SECOND, LAST] and tuple(told) == first.rungs
    assert first.winner.losses == tuple(train_single(rungs, first.winner.draw, range(LAST)))
    assert first.bought is not None and len(first.bought.default_losses) == rungs.trials.default_draws
    seeds = [rungs.seed, *range(rungs.seed + 9, rungs.seed + 11)]  # one is among the nine, others follow them
    defaults = [train_single(rungs, Draw(seed=seed), range(LEAST_RUNG_STEPS)) for seed in seeds]
    assert first.bought.default_losses == tuple(map(running_loss, defaults))
    assert first.bought.winner_loss == running_loss(first.winner.losses[:LEAST_RUNG_STEPS])
    for workers in (1, 3):
        with in_this_process(workers) as other:
            assert the_same(first, search_initialization(other, rungs, tmp_path / str(workers)))
    submit = running.Pool.submit

    def permuted(pool: running.Pool, specs: Sequence[TrialSpec], **options: bool) -> None:
        submit(pool, random.Random(len(specs)).sample(specs, len(specs)), **options)

    monkeypatch.setattr(running.Pool, "submit", permuted)
    assert the_same(first, search_initialization(client, rungs, tmp_path / "permuted"))


def test_idle_workers_go_ahead_and_the_complete_rung_decides(
    client: distributed.Client, rungs: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = search_initialization(client, rungs, tmp_path / "plain")
    offered = running._offered
    monkeypatch.setattr(running, "_offered", lambda *given: (offered(*given)[0], 6, 0))  # as if most workers idled
    found = search_initialization(client, rungs, tmp_path / "idle")
    assert the_same(plain, found)
    assert sum(rung.num_ahead for rung in found.rungs) > 0
    assert all(rung.num_confirmed <= rung.num_ahead for rung in found.rungs)
    assert found.total_steps >= plain.total_steps - LAST * sum(rung.num_ahead for rung in plain.rungs)


def test_a_stopped_search_goes_on_and_repeats_nothing(
    client: distributed.Client, rungs: Workload, tmp_path: Path
) -> None:
    whole = search_initialization(client, rungs, tmp_path / "whole")
    begun: dict[str, int] = {}
    for stop_after in (4, 11):
        seen: list[TrialResult] = []

        def on_result(result: TrialResult, seen: list[TrialResult] = seen, stop_after: int = stop_after) -> None:
            seen.append(result)
            if len(seen) == stop_after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            search_initialization(client, rungs, tmp_path / "stopped", on_result=on_result)
        while any(client.processing().values()):
            time.sleep(0.05)
        for path in (tmp_path / "stopped").glob("*.json"):
            begun.setdefault(path.stem, len(list(path.parent.glob(f"{path.stem}.attempt-*"))))
    assert len(begun) >= 11
    assert the_same(whole, search_initialization(client, rungs, tmp_path / "stopped"))
    for key, count in begun.items():
        assert len(list((tmp_path / "stopped").glob(f"{key}.attempt-*"))) == count
    for search in (partial(search_initialization, client), remembered_search):
        seconds: list[TrialResult] = []
        told: list[Rung] = []
        again = search(rungs, tmp_path / "stopped", on_result=seconds.append, on_rung=told.append)
        assert again is not None and the_same(whole, again) and tuple(told) == again.rungs
        check(again, rungs, tmp_path / "stopped")
        assert seconds and all(result.remembered for result in seconds)


def test_a_search_is_only_read_where_nothing_has_to_run(
    client: distributed.Client, rungs: Workload, tmp_path: Path
) -> None:
    """Whatever single file is gone, no worker's result is taken for granted, and nothing is told twice."""
    told: list[object] = []
    read = partial(remembered_search, rungs, tmp_path, on_result=told.append, on_rung=told.append)
    assert read() is None
    whole = search_initialization(client, rungs, tmp_path)
    only_once = [draw for draw in whole.rungs[0].draws if draw not in whole.rungs[1].draws]  # no longer result says it
    needed = [TrialSpec(rungs, whole.winner.draw, LAST), *(TrialSpec(rungs, d, LEAST_RUNG_STEPS) for d in only_once)]
    files = [Path(whole.winner.state), *(tmp_path / f"{spec.key}.json" for spec in needed)]
    for path in files:
        aside = path.rename(tmp_path / "aside")
        assert read() is None and told == []
        aside.rename(path)
    found = read()
    assert found is not None and the_same(whole, found) and len(told) > len(whole.rungs)


def test_a_winner_whose_state_is_gone_is_trained_again(
    client: distributed.Client, rungs: Workload, tmp_path: Path
) -> None:
    first = search_initialization(client, rungs, tmp_path)
    Path(first.winner.state).unlink()
    again = search_initialization(client, rungs, tmp_path)
    assert the_same(first, again) and again.winner.attempts == 2
    check(again, rungs, tmp_path)


@pytest.mark.parametrize("proposer", ["adaptive", "loss_and_gradient", "single"])
def test_proposers_of_several_batches_and_with_probes(
    client: distributed.Client, rungs: Workload, tmp_path: Path, proposer: str
) -> None:
    settings = TrialSettings(count=1 if proposer == "single" else 6, steps=SECOND, proposer=proposer)
    workload = rungs.model_copy(update={"trials": settings})
    found = search_initialization(client, workload, tmp_path)
    check(found, workload, tmp_path)
    probed = 24 if proposer == "loss_and_gradient" else 0
    assert len(list(tmp_path.glob("*-0.json"))) == probed
    assert found.total_steps >= probed + sum(result.steps for result in found.results)


def test_what_was_cancelled_is_waited_for_and_leaves_no_state(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    specs = specs_of(of_model(tiny, "slow"), 4, steps=2)
    with running.Pool(client, tmp_path, deadline_seconds=60) as pool:
        pool.submit(specs)
        while attempts(tmp_path) < 2:
            time.sleep(0.01)
        pool.cancel(specs)
        assert [names for _, names in client.run(executing).values() if names]  # in a step that takes its time
        pool.settle()
        assert not [names for _, names in client.run(executing).values() if names]
        assert not list(tmp_path.glob("*.safetensors")) and attempts(tmp_path) == 2
        pool.settle()  # at once


def test_where_all_that_went_on_diverge_the_next_best_follow(
    client: distributed.Client, rungs: Workload, tmp_path: Path
) -> None:
    """Results on disk decide, so a later divergence of the best can be written there."""
    first = search_initialization(client, rungs, tmp_path)
    for draw in first.rungs[1].draws:
        path = tmp_path / f"{TrialSpec(rungs, draw, SECOND).key}.json"
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({**kept, "losses": kept["losses"][:5], "failure": "the loss was nan after 6 steps"}))
        (tmp_path / f"{TrialSpec(rungs, draw, LAST).key}.json").unlink(missing_ok=True)
    found = search_initialization(client, rungs, tmp_path)
    assert found.winner.draw not in first.rungs[1].draws and found.winner.steps == LAST


# Bad input and faults


def test_all_diverging_is_said_with_the_first_reason(
    client: distributed.Client, rungs: Workload, tmp_path: Path
) -> None:
    wild = rungs.model_copy(update={"optimizer": OptimizerSettings(name="sgd", learning_rate=1e30)})
    with pytest.raises(TrialError, match="none of 11 trials succeeded; the first: the loss was"):
        search_initialization(client, wild, tmp_path)
    with pytest.raises(TrialError, match=r"none of 11 trials .* the gradient norm was 0 at step 0"):
        search_initialization(client, of_model(rungs, "dead"), tmp_path)
    none = rungs.model_copy(update={"trials": TrialSettings(count=0)})
    with pytest.raises(TrialError, match="wanted a count of at least 1, found 0"):
        search_initialization(client, none, tmp_path)


def test_a_hundred_times_more_trials_than_workers(client: distributed.Client, tmp_path: Path) -> None:
    shape = SyntheticSettings(num_classes=2, image_shape=(1, 2, 2))
    model = "tests.own_models:trivial"
    workload = Workload(
        model=model,
        data="synthetic",
        synthetic=shape,
        batch_size=1,
        num_microbatches=1,
        trials=TrialSettings(count=200),
    )
    found = search_initialization(client, of_model(workload, "trivial"), tmp_path)
    check(found, workload, tmp_path)
    assert len(found.results) == 200


def test_a_worker_without_the_resource_is_no_silent_wait_and_dask_s_environment_stays_in_dask(
    client: distributed.Client, tiny: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trims() -> bool:
        return "MALLOC_TRIM_THRESHOLD_" in os.environ

    before = dict(os.environ)
    with pytest.raises(TrialError, match=r"no Dask worker offers GPU 1, .* 2 workers offer nothing"):
        run_trials(client, specs_of(tiny, 1), tmp_path, resources={"GPU": 1})
    monkeypatch.setattr(clients, "visible_gpus", lambda count: ["5", "7"])
    with (
        pytest.raises(TrialError, match="3 workers want a GPU each; this machine shows 2"),
        local_client(3, tmp_path / "dask", gpus=True),
    ):
        pass
    with local_client(2, tmp_path / "dask", gpus=True) as two:
        seen = two.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
        assert sorted(seen.values()) == ["5", "7"]
        assert running._offered(two, None)[:2] == ({"GPU": 1}, 2)
        assert not any(result.failure for result in run_trials(two, specs_of(tiny, 3), tmp_path))
        assert not any(two.run(trims).values())
    assert dict(os.environ) == before


def test_a_cluster_without_workers_is_waited_for_and_then_said(
    tiny: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_this_process(0) as client:
        client.cluster.scale(1)  # type: ignore[union-attr]  # one that is only coming
        assert not run_trials(client, specs_of(tiny, 1), tmp_path)[0].failure
    monkeypatch.setattr(running, "CONNECT_SECONDS", 0.5)
    with (
        in_this_process(0) as client,
        pytest.raises(TrialError, match=r"has had no workers for 0\.5 s; wanted at least"),
    ):
        run_trials(client, specs_of(tiny, 1), tmp_path)


def test_a_gpu_error_does_not_poison_the_next_trial(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    before = set(client.run(os.getpid).values())
    specs = [TrialSpec(of_model(tiny, "gpu_breaking"), Draw(), 3), *specs_of(tiny, 3)]
    results = run_trials(client, specs, tmp_path)
    assert "AcceleratorError: CUDA error: an illegal memory access" in results[0].failure and results[0].attempts == 1
    assert not any(result.failure for result in results[1:])
    client.wait_for_workers(2, timeout=PATIENCE_SECONDS)
    assert len(before - set(client.run(os.getpid).values())) == 1
    assert run_trials(client, specs[:1], tmp_path)[0].attempts == 2  # it may have been the machine: another call tries
    client.wait_for_workers(2, timeout=PATIENCE_SECONDS)


def test_a_trial_out_of_memory_fails_alone(client: distributed.Client, tiny: Workload, tmp_path: Path) -> None:
    specs = [TrialSpec(of_model(tiny, name), Draw(), 3) for name in ("memory_breaking", "killing")]
    results = run_trials(client, [*specs, *specs_of(tiny, 6)], tmp_path)
    assert "out of memory" in results[0].failure and f"{4 * 2**50}" in results[0].failure
    assert "bytes are free" in results[0].failure and results[0].attempts == 3
    assert "died in each of 3 attempts" in results[1].failure and "a worker may take" in results[1].failure
    assert results[1].attempts == 3
    assert not any(result.failure for result in results[2:])
    client.wait_for_workers(2, timeout=PATIENCE_SECONDS)


class Died:
    """Stands for the future of a task whose workers died."""

    status = "error"

    def exception(self) -> BaseException:
        return distributed.KilledWorker("trial", SimpleNamespace(address="tcp://of.one"), MOST_ATTEMPTS - 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("rungs_before", [(), (5,), (5, 15)], ids=str)
@pytest.mark.parametrize("earlier_calls", [0, 1, MOST_ATTEMPTS, 7])
def test_a_trial_whose_workers_die_is_given_up_for_this_call_s_attempts_alone(
    client: distributed.Client, tiny: Workload, tmp_path: Path, earlier_calls: int, rungs_before: tuple[int, ...]
) -> None:
    """What earlier calls began is not counted, and what earlier rungs trained stays in its row."""
    spec = TrialSpec(tiny, Draw(), 45)
    trial, _ = split_key(spec.key)
    for steps in rungs_before:
        kept = {"losses": [3.0] * steps, "first_gradient_norm": 2.0, "attempts": 1, "seconds": float(steps)}
        (tmp_path / f"{trial}-{steps}.json").write_text(json.dumps(kept))
    for number in range(earlier_calls):
        (tmp_path / f"{spec.key}.attempt-{number + 1}").touch()
    with running.Pool(client, tmp_path, 60.0) as pool:
        asked = running.Asked(spec, spec.key, False, Died())  # type: ignore[arg-type]
        for own in range(MOST_ATTEMPTS):
            assert pool._result(asked, None) is None, f"given up after {own} attempts"
            (tmp_path / f"{spec.key}.attempt-{earlier_calls + own + 1}").touch()
        result = pool._result(asked, None)
    assert result is not None and f"died in each of {MOST_ATTEMPTS} attempts" in result.failure
    assert result.attempts == earlier_calls + MOST_ATTEMPTS and result.score == float("inf")
    assert result.steps == max(rungs_before, default=0) == result.seconds


def test_a_scheduler_that_dies_is_said_and_nothing_is_lost(
    client: distributed.Client, tiny: Workload, tmp_path: Path
) -> None:
    address_file = tmp_path / "scheduler.json"
    line = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    line += ["--scheduler-file", str(address_file), "--no-dashboard"]
    scheduler = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    line = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(address_file)]
    line += ["--nthreads", "1", "--no-dashboard", "--no-nanny"]
    line += ["--death-timeout", "20", "--local-directory", str(tmp_path / "dask")]
    worker = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    specs = specs_of(tiny, 6, steps=20)
    try:
        stop = time.monotonic() + PATIENCE_SECONDS
        while not address_file.exists() and time.monotonic() < stop:
            time.sleep(0.05)
        with client_of(json.loads(address_file.read_text())["address"]) as outer:
            outer.wait_for_workers(1, timeout=PATIENCE_SECONDS)
            seen: list[TrialResult] = []

            def on_result(result: TrialResult) -> None:
                seen.append(result)
                if len(seen) == 2:
                    scheduler.kill()

            with pytest.raises(TrialError, match="of 6 trials were done when the Dask scheduler was lost"):
                run_trials(outer, specs, tmp_path, on_result=on_result)
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    finished = {path.stem for path in tmp_path.glob("*.json")} & {spec.key for spec in specs}
    assert len(finished) >= 2
    results = run_trials(client, specs, tmp_path)
    assert {spec.key for spec, result in zip(specs, results, strict=True) if result.remembered} == finished
    assert not any(result.failure for result in results)
