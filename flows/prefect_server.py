"""Prefect's server, whose transactions on an SQLite file wait for each other (`python -P prefect_server.py server …`).

Prefect begins its transactions DEFERRED. One that has read and then writes fails at once with "database is locked" if
another has written in between, however long the busy timeout is: what it has read is out of date
(https://www.sqlite.org/isolation.html). The server then drops what it was told, a run's heartbeat for one, after a
traceback in its log. IMMEDIATE takes the lock for writing at the beginning, and waits for it up to that timeout.

A project's own folder `flows` may be in the place of this package, so this is run as a file and imports nothing of it.
"""

from __future__ import annotations

from typing import Any


def begin_immediately() -> None:
    """Make transactions on SQLite take the lock for writing when they begin; call it before a server starts."""
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration

    def begin(self: AioSqliteConfiguration, conn: Any) -> None:
        if SQLITE_BEGIN_MODE.get() is not None:  # sessions that only read begin no transaction
            conn.exec_driver_sql("BEGIN IMMEDIATE")

    AioSqliteConfiguration.begin_sqlite_stmt = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    begin_immediately()
    from prefect.cli import app

    app()
