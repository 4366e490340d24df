"""Every schedule, with trials and without, planned, trained and resumed: each ends in a page and a table (fault 28).

A campaign of a quarter of an hour; tests/test_report.py makes the pages of all schedules from records in seconds.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dejavu.plans.schedule import SCHEDULES
from tests.test_flow import ONE_SIZE, command, needs_two_cores, write_workload
from tests.test_flow import project as project  # a fixture

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs_two_cores]
TRIALS = {"trials": {"count": 3, "steps": 4, "default_draws": 0}, "none": {"count": 0}}


def page_of(project: Path, *words: str | Path) -> str:
    """Run the command and return the text of its page; its table was printed."""
    done = command(project, "dejavu", "run", *ONE_SIZE, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step, predicted" in done.stdout and "Traceback" not in done.stderr
    (path,) = re.findall(r"^report: (\S+)$", done.stdout, re.MULTILINE)
    return Path(path).read_text()


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_ends_in_a_page_and_a_table(project: Path, schedule: str, trials: str) -> None:
    said = {"schedule": schedule, "compare": False, "trials": TRIALS[trials]}
    workload = write_workload(project, **said)
    assert schedule in page_of(project, "--no-train", "--workload", workload)
    assert schedule in page_of(project, "--workload", workload)
    jobs = (project / ".dejavu" / "runs").glob("*/job.json")
    newest = max(jobs, key=lambda path: path.stat().st_mtime_ns).parent.relative_to(project)
    longer = write_workload(project, **said, num_steps=24)
    assert schedule in page_of(project, "--workload", longer, "--resume", newest)
