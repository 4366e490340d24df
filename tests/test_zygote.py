"""Ranks that are forked behave as those that a command starts: their parent, their session, their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dejavu.launch.zygote import module_of
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[1]
AGENT = """
import json, os, signal, subprocess, sys
from dejavu.runtime.process import named_parent
from dejavu.launch.zygote import Zygote

os.environ.update(named_parent())
os.environ["NUMBER"] = "none"

def start(zygote, number, how, module="tests.forked"):
    environment = {**os.environ, "NUMBER": str(number)}
    environment.pop("INHERITED")
    return zygote.fork([sys.executable, "-u", "-m", module, how], environment)

found = {"pid": os.getpid(), "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler}
"""


def agent(what: str) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """What ranks said, what their agent found, and what was said of errors."""
    done = subprocess.run(
        [sys.executable, "-c", f"{AGENT}{what}\nprint(json.dumps(found))"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=ROOT,
        env={**os.environ, "INHERITED": "yes", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    *ranks, found = map(json.loads, done.stdout.splitlines())
    return ranks, found, done.stderr


@pytest.mark.integration
def test_a_fork_is_the_agent_s_own_child_and_ends_as_a_command_would() -> None:
    ranks, found, errors = agent(
        """
zygote = Zygote("tests.forked")
found["codes"] = [start(zygote, number, how).wait(60) for number, how in enumerate(("0", "3", "fail", "die"))]
last = start(zygote, 4, "sleep")
found["before"] = last.poll()
try:
    last.wait(0.1)
except subprocess.TimeoutExpired:
    found["timeout"] = True
zygote.end()
found["outlives"] = last.poll()
os.killpg(last.pid, 15)
found["last"] = last.wait(60)
"""
    )
    assert found["codes"] == [0, 3, 1, -9] and found["last"] == -15
    assert found["before"] is None and found["timeout"] and found["outlives"] is None
    assert [rank["number"] for rank in ranks][:4] == list("0123")
    for rank in ranks:
        assert (rank["parent"], rank["inherited"]) == (found["pid"], None)
        assert rank["leads"] and rank["interrupts"] == found["interrupts"]
    assert errors.count("ValueError: as told") == 1


@pytest.mark.integration
def test_what_cannot_be_forked_is_left_to_its_command() -> None:
    """Another command; a module that cannot be imported; one that starts a thread."""
    _, found, errors = agent(
        """
for module, wanted in (("tests.forked", "tests.launching"), ("tests.absent", "tests.absent"), ("pyarrow", "pyarrow")):
    zygote = Zygote(module)
    found[module] = [start(zygote, number, "0", wanted) is None for number in range(2)]
    zygote.end()
"""
    )
    assert all(found[module] == [True, True] for module in ("tests.forked", "tests.absent", "pyarrow"))
    assert "No module named 'tests.absent'" in errors


@pytest.mark.integration
def test_what_is_prepared_once_is_there_in_every_rank(tmp_path: Path) -> None:
    """What fails is told, and left to the ranks."""
    ranks, found, errors = agent(
        f"""
zygote = Zygote("tests.forked")
zygote.prepare("tests.forked", {str(tmp_path)!r})
zygote.prepare("tests.absent", "")
found["codes"] = [start(zygote, number, "0").wait(60) for number in range(2)]
zygote.end()
zygote.prepare("tests.forked", "after its end")
"""
    )
    assert found["codes"] == [0, 0]
    assert [rank["prepared"] for rank in ranks] == [str(tmp_path)] * 2
    assert "No module named 'tests.absent'" in errors


@pytest.mark.integration
def test_a_fork_that_cannot_use_cuda_becomes_the_command() -> None:
    """Nothing of the zygote's is left in it; its parent, session and exit code are those of a fork."""
    ranks, found, _ = agent(
        """
zygote = Zygote("tests.forked")
zygote.prepare("tests.forked", "cuda")
found["codes"] = [start(zygote, number, how).wait(60) for number, how in enumerate(("0", "3"))]
zygote.end()
"""
    )
    assert found["codes"] == [0, 3]
    for number, rank in enumerate(ranks):
        assert (rank["prepared"], rank["inherited"], rank["number"]) == (None, None, str(number))
        assert rank["parent"] == found["pid"] and rank["leads"]


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["agent.py", "--nproc-per-node=2", "-m", "package.module", "-m"], "package.module"),
        (["agent.py", "script.py"], None),
        (["agent.py", "-m"], None),
    ],
)
def test_torchrun_s_words_say_which_module_ranks_run(words: list[str], module: str | None) -> None:
    assert module_of(words) == module
