"""MLflow's SQLite file: made once, upgraded after a copy was kept, and refused where it is of a newer MLflow.

MLflow itself migrates a new file in every process that opens it, and two at once corrupt it; of an older file it only
says that somebody should upgrade it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from dejavu.foundation.errors import DejavuError

EXPERIMENT = "dejavu"
ARTIFACTS = "mlartifacts"  # the folder, beside a project's own database
LOCK_SECONDS = 60.0  # a fresh database takes a few seconds to make

log = logging.getLogger("dejavu.track")


# Where MLflow's tables have the places of artifacts, those of registered models among them.
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


class DatabaseError(DejavuError):
    """MLflow's database is of a version that this MLflow cannot use."""


@contextmanager
def alone_with(database: Path) -> Iterator[None]:
    """Lock a database while it may have to be created or upgraded, and upgrade it if it is older.

    Raises:
        DatabaseError: a newer MLflow wrote it, or it could not be upgraded.
        sqlite3.Error: it is no database, or it cannot be written.
    """
    # It logs every table that it creates, and a traceback of what `dejavu.track` says in a sentence.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    database.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if _only_read(database) else FileLock(f"{database}.lock", timeout=LOCK_SECONDS):
        # MLflow retries for minutes if the file is no database or cannot be written; SQLite fails at once.
        with closing(sqlite3.connect(database)) as connection:
            found = _schema(connection)
        if found is not None:
            _upgrade(database, found)
            _follow(database)
        yield


def _only_read(database: Path) -> bool:
    """Return whether a database is where this user can write no file: it is neither made nor upgraded, but read."""
    return database.exists() and not os.access(database.parent, os.W_OK)


def upgrade_database(database: Path) -> None:
    """Upgrade a database, if it is older, before somebody else opens it.

    Raises:
        DatabaseError: a newer MLflow wrote it, it could not be upgraded, it is no database, or somebody else makes it.
    """
    try:
        with alone_with(database):
            pass
    except sqlite3.Error as error:
        raise DatabaseError(f"{database} cannot be opened: {error}; wanted MLflow's database, or no file") from error
    except Timeout:
        raise DatabaseError(
            f"{database}.lock: another process has held it for {LOCK_SECONDS:g} s; wait for it, or end it"
        ) from None


def local_path(uri: str) -> Path | None:
    """Return the folder of a `file:` URI; None: it is on a server."""
    return Path(unquote(urlsplit(uri).path)) if uri.startswith("file:") else None


def artifacts_of(project: Path) -> str:
    """Return where the artifacts of a project's own database are, as MLflow has it."""
    return (project.resolve() / ARTIFACTS).as_uri()


def move_artifacts(database: Path, old: str, new: str) -> None:
    """Let a database's records point to the artifacts where they are now; MLflow itself keeps whole paths."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in _PLACES:
            if any(column == row[1] for row in connection.execute(f"PRAGMA table_info({table})")):  # not in older ones
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?",
                    (new, len(old) + 1, len(old) + 1, f"{old}/"),
                )


def _follow(database: Path) -> None:
    """Let records follow a project's folder that was moved or copied: its artifacts are beside its database.

    A database that several projects share stays as it is: the first one's artifacts are where they were.
    """
    here = artifacts_of(database.parent)
    with closing(sqlite3.connect(database)) as connection:
        row = connection.execute("SELECT artifact_location FROM experiments WHERE name = ?", (EXPERIMENT,)).fetchone()
        before = local_path(row[0]) if row and row[0] else None
        if before is None or row[0] == here or before.name != ARTIFACTS:
            return
        known = [run for (run,) in connection.execute("SELECT run_uuid FROM runs")]
    came_along = any((database.parent / ARTIFACTS / run).is_dir() for run in known)
    is_moved = not before.parent.is_dir() or (came_along and not before.is_dir())
    is_copied = came_along and (before.parent / database.name).is_file()
    if is_moved or is_copied:
        move_artifacts(database, row[0], here)


def _schema(connection: sqlite3.Connection) -> str | None:
    """Return the revision of a database's schema; None: it has none yet."""
    if connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchone() is None:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return row[0] if row else None


def _upgrade(database: Path, found: str) -> None:
    """Upgrade a database of an older MLflow, after copying it."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the first import of mlflow
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError
    from mlflow.store.db import utils

    script = ScriptDirectory.from_config(utils._get_alembic_config(""))
    (newest,) = script.get_heads()
    if found == newest:
        return
    try:
        script.get_revision(found)
    except CommandError:
        from mlflow.version import VERSION

        raise DatabaseError(
            f"{database} has schema {found}, which MLflow {VERSION} does not know; wanted {newest} or an older one: "
            "install the MLflow that wrote it, or move the file away"
        ) from None
    copy = database.with_name(f"{database.name}.before-{newest}")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    log.warning(
        "%s is of an older MLflow (schema %s) and is upgraded to %s; %s is a copy", database, found, newest, copy
    )
    from sqlalchemy import create_engine

    engine = create_engine(f"sqlite:///{database}")
    try:
        utils._upgrade_db(engine)
    except Exception as error:
        raise DatabaseError(
            f"{database} has schema {found} and could not be upgraded to {newest} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); {copy} is a copy of it as it was"
        ) from error
    finally:
        engine.dispose()
