"""The measured comparison of a plan with a baseline: which device each rank is on, and what is said of a failure."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dejavu.launch import comparison
from dejavu.launch.comparison import ROUNDS, Contestant, measure_gain
from dejavu.runtime import process
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.process.failures import LaunchError
from tests.conftest import TINY
from tests.launching import job_of, runtime_processes


def shuffled(job: TrainingJob, rng: random.Random, num_devices: int) -> TrainingJob:
    """The same plan on other devices of the machine."""
    devices = rng.sample(range(num_devices), len(job.binding.placements))
    placements = [
        replace(one, device=replace(one.device, index=index))
        for one, index in zip(job.binding.placements, devices, strict=True)
    ]
    return replace(job, binding=replace(job.binding, placements=tuple(placements)))


@pytest.mark.parametrize("seed", range(6))
def test_each_rank_is_on_its_own_device_in_every_turn(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine's GPUs may differ, and the two plans use them in another order."""
    rng = random.Random(seed)
    cuts: list[tuple[int, ...]] = [(), (2,), (1, 3)]
    jobs = [shuffled(job_of(TINY, tmp_path, rng.choice(cuts)), rng, 4) for _ in range(2)]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([job.to_dict() for job in jobs]))
    turns: list[tuple[int, Any]] = []

    def claim(index: int) -> tuple[int, set[int]]:
        asked = index, os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(asked[1])})  # as a rank on CPUs is pinned
        return asked

    def turn(job: TrainingJob, rank: int, device: Any) -> list[float]:
        turns.append((job.binding.placements[rank].device.index, device))
        return [1.0]

    for name in ("_join", "_meet"):
        monkeypatch.setattr(comparison, name, lambda *_: None)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda: None)
    monkeypatch.setattr(process, "die_with_parent", lambda number: None)
    monkeypatch.setattr(process, "claim_device", claim)
    monkeypatch.setattr(comparison, "_turn", turn)
    cores = os.sched_getaffinity(0)
    try:
        for rank in range(max(len(job.binding.placements) for job in jobs)):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            comparison._rank(path)
            os.sched_setaffinity(0, cores)
    finally:
        os.sched_setaffinity(0, cores)
    assert len(turns) == ROUNDS * sum(len(job.binding.placements) for job in jobs)
    assert all(device == (wanted, cores) for wanted, device in turns), "of all cores, not of the turn's before"


def test_a_comparison_that_takes_too_long_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "TIMEOUT_SECONDS", 0.0)
    one = Contestant(TINY, job_of(TINY, tmp_path).binding)
    with pytest.raises(LaunchError, match=r"could not be compared \(not done after 0 s\)") as caught:
        measure_gain(one, one, "baseline", tmp_path)
    assert "None" not in str(caught.value).splitlines()[0]
    assert not list(tmp_path.iterdir()) and not runtime_processes()
