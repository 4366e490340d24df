"""What `dejavu up` left running: the record of it, and the file that makes `prefect` talk to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx

from dejavu.foundation.errors import DejavuError
from flows import server_settings
from flows.prefect_api import connect
from flows.processes import RecordedProcess
from flows.server_settings import LOOPBACK

SERVICES = ("mlflow", "prefect", "worker")
TOML_MARK = "# Written by `dejavu up`, removed by `dejavu down`"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Services:
    """The running services of one project, as kept in `.dejavu/services.json`.

    Attributes:
        token: the value of DEJAVU_SERVICES in the environment of all their processes.
        processes: in the order in which they were started.
        host: the address that Prefect listens on; MLflow's is loopback.
        needs: names of the variables of `server_settings.SECRETS` that they were started with.
        deployed: the hash of the prefect.yaml that was deployed; empty: none yet.
    """

    project: str
    token: str
    prefect_port: int
    mlflow_port: int
    processes: tuple[RecordedProcess, ...] = ()
    host: str = LOOPBACK
    needs: tuple[str, ...] = ()
    deployed: str = ""

    @property
    def prefect_url(self) -> str:
        return f"http://{self.host}:{self.prefect_port}"

    @property
    def prefect_api_url(self) -> str:
        return f"{self.prefect_url}/api"

    @property
    def mlflow_url(self) -> str:
        return f"http://{LOOPBACK}:{self.mlflow_port}"

    def api(self) -> httpx.Client:
        """Open a connection to Prefect's server.

        Raises:
            InputError: it wants a password, and the environment has none.
        """
        return connect(self.prefect_api_url, server_settings.headers(self.needs))

    @property
    def mlflow_page(self) -> str:
        """MLflow's experiments in its mode for model training; without being told, a browser gets that for GenAI."""
        return f"{self.mlflow_url}/#/experiments?workflowType=machine_learning"

    @property
    def health_urls(self) -> tuple[str, str]:
        return f"{self.prefect_api_url}/health", f"{self.mlflow_url}/health"

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of services that should run and do not."""
        alive = {process.name for process in self.processes if process.find()}
        return tuple(name for name in SERVICES if name not in alive)

    @property
    def answers(self) -> bool:
        """Whether both servers answer."""
        return all(map(answers_at, self.health_urls))

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of services that do not run, or run and do not answer."""
        silent = {
            name for name, url in zip(("prefect", "mlflow"), self.health_urls, strict=True) if not answers_at(url)
        }
        return tuple(name for name in SERVICES if name in silent or name in self.dead)

    def with_process(self, process: RecordedProcess) -> Services:
        others = [one for one in self.processes if one.name != process.name]
        return replace(self, processes=(*others, process))


def recorded(project: Path) -> Services | None:
    """Return what `up` recorded, whether or not it still runs; of a copied folder the services are the other one's."""
    try:
        content = json.loads(record_path(project).read_text())
        processes = tuple(RecordedProcess(**one) for one in content["processes"])
        found = Services(**content | {"processes": processes, "needs": tuple(content.get("needs", ()))})
        return None if _is_copied(project, found) else found
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DejavuError(
            f"{record_path(project)} is not a record of services ({error}); end what it names, then delete it"
        ) from error


def _is_copied(project: Path, found: Services) -> bool:
    """Return whether the folder that these services are of is where it was, and has the same record of its own."""
    own, other = record_path(project), record_path(Path(found.project))
    return other.is_file() and not other.samefile(own) and json.loads(other.read_text())["token"] == found.token


def status(project: Path) -> Services | None:
    """Return the services, if all their processes run."""
    found = recorded(project)
    return found if found and not found.dead else None


def record(services: Services) -> None:
    """Write what runs, so that the next command finds it."""
    _write_atomically(record_path(Path(services.project)), json.dumps(asdict(services), indent=2) + "\n")


def answers_at(url: str) -> bool:
    """Return whether a server answers there."""
    try:
        return httpx.get(url, timeout=10, trust_env=False).is_success  # no proxy for loopback
    except httpx.HTTPError:
        return False


def draws_runs_at(mlflow_url: str) -> bool:
    """Return whether MLflow's server answers what its page of a run asks first, if only that it does not know it.

    At each such query it imports its tables of users, though nobody has to log in. A request that maps the other tables
    while the first import is half done fails, and so do all that ask for models, and the page of every run with them,
    until the server ends (MLflow 3.17). So it is asked once before anybody else can ask.
    """
    try:
        httpx.post(f"{mlflow_url}/graphql", json={"query": "{__typename}"}, timeout=60, trust_env=False)
    except httpx.HTTPError:
        return False
    return True


def write_toml(project: Path, services: Services, say: Say) -> None:
    """Write `prefect.toml`, so that `prefect …` in this folder talks to this server, whatever the user's profile."""
    path = project / "prefect.toml"
    home = project / ".dejavu" / "prefect"
    if path.exists() and not is_ours(path):
        say(f"{path} is not ours and is left as it is; for `prefect …` set PREFECT_API_URL={services.prefect_api_url}")
        return
    lines = [
        f"{TOML_MARK}: `prefect` typed in this folder talks to the server of this project.",
        f"home = {_toml_text(home)}",
        f"profiles_path = {_toml_text(home / 'profiles.toml')}",
        "",
        "[api]",
        f"url = {json.dumps(services.prefect_api_url)}",
        "",
        "[server]",
        "analytics_enabled = false",
    ]
    _write_atomically(path, "\n".join(lines) + "\n")


def _toml_text(path: Path) -> str:
    """Return a basic string of TOML, which takes JSON's escapes but for pairs of surrogates; not as it is, DEL."""
    return json.dumps(str(path), ensure_ascii=False).replace("\x7f", "\\u007f")


def is_ours(path: Path) -> bool:
    """Return whether a prefect.toml is one that `dejavu up` wrote."""
    return path.is_file() and path.read_text(errors="replace").startswith(TOML_MARK)


def record_path(project: Path) -> Path:
    """Return where a project keeps the record of its services."""
    return project.resolve() / ".dejavu" / "services.json"


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
