"""What the servers of `dejavu up` take from the caller's environment: a password, and databases other than files.

A secret goes on into the environment of the processes that need it, and nowhere else: no file, no command line, no
log. `.dejavu/services.json` keeps the names of the variables alone.
"""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from dejavu.foundation.errors import InputError

LOOPBACK = "127.0.0.1"
AUTH, CLIENT_AUTH = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
PREFECT_DATABASE, MLFLOW_DATABASE = "DEJAVU_PREFECT_DATABASE_URL", "DEJAVU_MLFLOW_DATABASE_URL"
SECRETS = (AUTH, PREFECT_DATABASE, MLFLOW_DATABASE)
POSTGRES = "postgresql"


def check_host(host: str) -> str:
    """Check the address that Prefect is to listen on, and return it.

    MLflow has no password of ours, so it stays on loopback whatever is asked for here.

    Raises:
        InputError: it is no IPv4 address of one interface, or not loopback and there is no password.
    """
    try:
        address = ipaddress.IPv4Address(LOOPBACK if host == "localhost" else host)
    except ValueError:
        raise InputError(f"--host {host}: wanted an IPv4 address of this machine, as {LOOPBACK}") from None
    if address.is_unspecified:
        raise InputError(f"--host {host} is every network of this machine; wanted the address of one")
    if not address.is_loopback and not os.environ.get(AUTH):
        raise InputError(
            f"--host {host}: others could start runs, which run code on this machine. Wanted {AUTH}=user:password in "
            "the environment"
        )
    return str(address)


def given() -> tuple[str, ...]:
    """Return the names of those of `SECRETS` that are set.

    Raises:
        InputError: a database is not Postgres, or its URL has characters that no URL has.
    """
    for name in (PREFECT_DATABASE, MLFLOW_DATABASE):
        # The URL itself is not repeated: it has a password. Python's own errors repeat it.
        try:
            scheme = urlsplit(os.environ.get(name, "")).scheme
        except ValueError:
            raise InputError(
                f"{name} has a character that no URL has, as [ in a password; wanted {POSTGRES}://user:password@host:port/"
                "database, with %5B for [, and so for each such character"
            ) from None
        if os.environ.get(name) and scheme != POSTGRES:
            raise InputError(f"{name} starts with {scheme!r}; wanted {POSTGRES}://user:password@host:port/database")
    return tuple(name for name in SECRETS if os.environ.get(name))


def check_given(names: Collection[str]) -> None:
    """Check that what running services were started with is there to start a part of them again.

    Raises:
        InputError: a variable is not set.
    """
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise InputError(
            f"these services were started with {missing[0]} in the environment, which is not set; wanted the same again"
        )


def prefect_server(names: Collection[str]) -> dict[str, str]:
    """Return the settings of Prefect's server alone; without a database it has a file in its home."""
    settings = {AUTH: os.environ[AUTH]} if AUTH in names else {}
    if PREFECT_DATABASE in names:
        url = urlsplit(os.environ[PREFECT_DATABASE])._replace(scheme=f"{POSTGRES}+asyncpg")
        settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = url.geturl()
    return settings


def mlflow_server(names: Collection[str], project: Path) -> dict[str, str]:
    """Return the settings of MLflow's server alone."""
    file = f"sqlite:///{project / 'mlflow.db'}"
    return {"MLFLOW_BACKEND_STORE_URI": os.environ[MLFLOW_DATABASE] if MLFLOW_DATABASE in names else file}


def clients(names: Collection[str], mlflow_url: str) -> dict[str, str]:
    """Return the settings of what talks to the servers: the worker, its runs, and `dejavu run`."""
    password = {CLIENT_AUTH: found} if AUTH in names and (found := _password()) else {}
    return password | records(names, mlflow_url)


def records(names: Collection[str], mlflow_url: str) -> dict[str, str]:
    """Return the settings of what reads records, too: they are in mlflow.db itself, which takes no server, or there."""
    return {"MLFLOW_TRACKING_URI": mlflow_url} if MLFLOW_DATABASE in names else {}


def headers(names: Collection[str]) -> dict[str, str]:
    """Return the headers with which Prefect's server lets a request in.

    Raises:
        InputError: it wants a password, and the environment has none.
    """
    if AUTH not in names:
        return {}
    password = _password()
    if not password:
        raise InputError(f"this project's Prefect wants a password; wanted {CLIENT_AUTH} in the environment")
    return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}


def _password() -> str | None:
    return os.environ.get(AUTH) or os.environ.get(CLIENT_AUTH)
