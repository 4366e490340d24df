"""Many runs in a row and at once (issue 14): none fails, no database is locked, nothing grows and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.orchestration.overhead import covered, seconds_by_kind
from benchmarks.orchestration.soak import soak
from flows.endings import without_waiting_for_heartbeats
from tests.test_flow import needs_two_cores
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[1]
MOST_GROWTH_BYTES = 8 * 2**20  # of all servers together, for each run: SQLite's page caches fill, and have a limit
TWO_THAT_READ_AND_WRITE = """
import asyncio, sys
from sqlalchemy import text
from prefect.server.database.configurations import AioSqliteConfiguration
from flows.prefect_server import begin_immediately

if sys.argv[2] == "immediately":
    begin_immediately()
database = AioSqliteConfiguration(f"sqlite+aiosqlite:///{sys.argv[1]}")

async def add(wait):
    async with await database.session(await database.engine()) as session:
        async with database.begin_transaction(session):
            (count,) = (await session.execute(text("SELECT count FROM kept"))).one()
            await asyncio.sleep(wait)
            await session.execute(text("UPDATE kept SET count = :count"), {"count": count + 1})

async def main():
    async with (await database.engine()).begin() as connection:
        await connection.execute(text("CREATE TABLE kept (count INTEGER)"))
        await connection.execute(text("INSERT INTO kept VALUES (0)"))
    await asyncio.gather(add(0.5), add(1.0))
    async with (await database.engine()).connect() as connection:
        print((await connection.execute(text("SELECT count FROM kept"))).scalar())

asyncio.run(main())
"""


def test_seconds_are_counted_once() -> None:
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    found = seconds_by_kind([("search", 1, 4), ("measure", 0, 2), ("search", 3, 5), ("report", 0, 9), ("train", 8, 9)])
    assert found == {"measuring": 2, "searching": 3, "trying": 0, "training": 1, "comparing": 0}


@pytest.mark.parametrize("begin", ["immediately", "as Prefect does"])
def test_transactions_of_prefect_s_server_that_read_and_then_write_wait_for_each_other(
    begin: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", TWO_THAT_READ_AND_WRITE, str(tmp_path / "kept.db"), begin]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    if begin == "immediately":
        assert done.stdout.strip() == "2", done.stderr
    else:  # or else our own beginning is no longer needed
        assert "database is locked" in done.stderr


def test_heartbeats_of_prefect_can_still_be_left_alone() -> None:
    """By the name and the option that this version of Prefect has for it."""
    from inspect import signature

    from prefect import flow_engine

    assert "join_on_exit" in signature(flow_engine._send_heartbeats).parameters
    without_waiting_for_heartbeats()
    without_waiting_for_heartbeats()
    assert flow_engine._send_heartbeats.keywords == {"join_on_exit": False}


@pytest.mark.integration
@pytest.mark.slow
@needs_two_cores
def test_twenty_runs_in_a_row_and_four_at_once() -> None:
    found = soak(repeats=0, in_a_row=20, at_once=4)
    assert len(found.states) == 28 and found.failed == 0, found.states
    assert found.locked_messages == 0
    assert found.left == []
    assert found.growth_bytes_per_run is not None and found.growth_bytes_per_run < MOST_GROWTH_BYTES, found.rows
