"""Ctrl-C in each phase of a run (fault 32): exit 130, what is kept, the line that goes on, and nothing left."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from benchmarks._processes import processes_of
from dejavu.launch.training_lock import holder_in
from flows.endings import INTERRUPTED
from tests.test_flow import Watched, client_of, command, needs_two_cores, runs_of
from tests.test_flow import project as project  # a fixture
from tests.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.integration, needs_two_cores]
MEASURED_BEFORE = True  # but for the run that is interrupted while it measures
PHASES = {  # what the log says when it has begun
    "starting": "starting Prefect's server",
    "measuring": "measuring ",
    "searching": "for flow 'plan'",
    "trials": "trial ",
    "training": "step 20 of",
}
IN_EVERY_TEST_RUN = ("searching",)  # the others end the same way; of training, also how it goes on
SETTINGS = {"num_steps": 2000, "compare": False, "trials": {"count": 0}}
CHANGED = {  # what no other run has measured, and trials where these are interrupted
    "measuring": {"sequence_length": 48},
    "trials": {"trials": {"count": 3, "steps": 4, "default_draws": 0}},
}


def check_ended(project: Path, log: str) -> None:
    """Nothing is left: no process, no lock, no run that is called running; and nothing is shown but sentences."""
    stop = time.monotonic() + 30  # far less than its steps would take: what goes on is no end
    while processes_of(project) and time.monotonic() < stop:
        time.sleep(0.1)
    assert not processes_of(project)
    assert holder_in(project) is None
    assert "Traceback" not in log, log
    assert not list((project / ".dejavu" / "prefect").glob("temporary-*.db*"))


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase in IN_EVERY_TEST_RUN else pytest.mark.slow) for phase in PHASES]
)
def test_an_interrupt_says_what_is_kept_and_how_to_go_on(project: Path, phase: str) -> None:
    with Watched(project, **(SETTINGS | CHANGED.get(phase, {}))) as run:
        run.wait_for(PHASES[phase])
        run.interrupt()
        assert run.process.wait(timeout=PATIENCE_SECONDS) == INTERRUPTED, run.log.read_text()
    log = run.log.read_text()
    assert log.count("interrupted; what was measured, tried and saved is kept") == 1, log
    check_ended(project, log)
    last = log.strip().splitlines()[-1]
    if phase != "training":
        assert last == "the same command goes on from there"
    else:
        parents, children = runs_of(project)
        assert (parents[0].info.status, children["training"].info.status) == ("KILLED", "KILLED")
        assert re.fullmatch(r"to resume the training: dejavu run .*--workload \S+ --resume \.dejavu/runs/\S+", last)
        run.workload.write_text(run.workload.read_text().replace('"num_steps": 2000', '"num_steps": 80'))
        for said in ("continues from step", "is complete: 80 steps are trained"):  # the first time, and once more
            again = command(project, *shlex.split(last.partition(": ")[2]))
            assert again.returncode == 0, again.stdout + again.stderr
            assert said in again.stdout + again.stderr


@pytest.mark.slow
def test_a_run_that_is_interrupted_after_its_last_step_gets_its_page_when_it_is_resumed(project: Path) -> None:
    before = set(project.glob(".dejavu/runs/*/result.json"))
    with Watched(project, **SETTINGS | {"num_steps": 12}) as run:
        run.poll(lambda: set(project.glob(".dejavu/runs/*/result.json")) > before, PATIENCE_SECONDS, "its result")
        run.interrupt()
        assert run.process.wait(timeout=PATIENCE_SECONDS) == INTERRUPTED, run.log.read_text()
    log = run.log.read_text()
    check_ended(project, log)
    line = log.strip().splitlines()[-1]
    assert line.startswith("the training is complete; to make its page and summary: dejavu run ")
    again = command(project, *shlex.split(line.partition(": ")[2]))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "is complete; what its run did not record is recorded now" in again.stderr, again.stderr
    assert "report.html" in again.stdout and "remembered" in again.stderr
    parents, children = runs_of(project)
    assert [run.info.status for run in parents[:2]] == ["FINISHED", "KILLED"]
    assert len(client_of(project).get_metric_history(children["training"].info.run_id, "loss")) == 12
    assert (
        parents[0].data.metrics["measured_step_seconds"] == children["training"].data.metrics["measured_step_seconds"]
    )
    last = command(project, "dejavu", "run", "--resume", "last")
    assert "is complete: 12 steps are trained" in last.stdout and "Nothing was started" in last.stdout


@pytest.mark.parametrize("phase", ["starting", pytest.param("training", marks=pytest.mark.slow)])
def test_a_second_interrupt_ends_at_once(project: Path, phase: str) -> None:
    with Watched(project, **SETTINGS) as run:
        run.wait_for(PHASES[phase])
        run.interrupt()
        time.sleep(0.05)  # else the kernel makes one of both
        run.interrupt()
        assert run.process.wait(timeout=PATIENCE_SECONDS) == INTERRUPTED, run.log.read_text()
    check_ended(project, run.log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "phases",
    [("searching",), ("searching", "training")],
    ids=["a plan's", "a training's, twice"],
)
def test_a_run_goes_on_when_its_own_server_is_killed(project: Path, phases: tuple[str, ...]) -> None:
    """It is started again on the same socket and database; what was asked meanwhile waits."""
    fields = {"num_steps": 400, "compare": False, "trials": {"count": 0}}
    trains = "training" in phases
    with Watched(project, *([] if trains else ["--no-train"]), **fields) as run:
        for phase in phases:  # the tests before have measured all
            run.wait_for(PHASES[phase])
            (server,) = run.children("flows.temporary_server")
            server.kill()
        assert run.process.wait(timeout=PATIENCE_SECONDS) == 0, run.log.read_text()
    log = run.log.read_text()
    assert log.count("Prefect's server has ended (-9) and is started again") == len(phases), log
    check_ended(project, log)
    parents, children = runs_of(project)
    assert parents[0].info.status == "FINISHED"
    assert not trains or children["training"].info.status == "FINISHED"
