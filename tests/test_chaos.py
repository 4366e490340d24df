"""The campaign of random faults: the same seed strikes alike, and whatever is left or lost is found."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.chaos import campaign
from benchmarks.chaos.campaign import Project, check_end, check_kept, check_left, check_losses, rounds
from benchmarks.chaos.faults import FAULTS, PHASES


def test_the_same_seed_strikes_alike_and_every_fault_comes() -> None:
    first, again, other = (list(islice(rounds(random.Random(seed)), 2 * len(FAULTS))) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(name for name, _ in first) == sorted([*FAULTS, *FAULTS])
    assert all(phase in FAULTS[name].phases for name, phase in first)
    assert {phase for fault in FAULTS.values() for phase in fault.phases} == set(PHASES)


@pytest.mark.integration
def test_what_is_left_or_lost_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "ENDING_SECONDS", 0.5)
    where, fault = Project(tmp_path, None, losses=[2.0, 1.0]), FAULTS["a rank is killed"]
    check_end(where, fault, 0, "step 400 of 400")
    check_kept(where, 0, {})
    assert where.wrong == []
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=tmp_path)
    check_left(where)
    assert where.wrong[0].startswith(f"left: {sleeper.pid} ") and sleeper.wait() != 0
    where.wrong = []
    check_end(where, fault, 1, "Traceback (most recent call last):\n  File ...\nOSError: no\n")
    assert where.wrong == ["exit 1: OSError: no", "a traceback: ['OSError: no']"]
    where.wrong = []
    check_kept(where, 3, {tmp_path / "run": 40})
    assert where.wrong == ["3 of 3 rows are lost", f"{tmp_path}/run: step None, before it was 40"]
    where.wrong = []
    for losses in ([2.0, 1.0], [2.0, 1.1], [2.0]):
        (tmp_path / "result.json").write_text(json.dumps({"losses": losses}))
        check_losses(where, tmp_path)
    assert len(where.wrong) == 2 and "1.1 and not 1.0" in where.wrong[0] and "has 1 losses" in where.wrong[1]
