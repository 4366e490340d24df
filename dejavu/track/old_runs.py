"""Delete MLflow's older runs from a project's own database, with their artifacts, as `mlflow gc` does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.units import plural
from dejavu.track.database import EXPERIMENT, upgrade_database
from dejavu.track.server import PARENT_TAG

MODELS_TAG = "mlflow.modelVersions"  # of a run whose artifacts a registered model is
RUNS_AT_ONCE = 200  # on one command line


@dataclass(frozen=True)
class OldRuns:
    """What became of MLflow's older runs.

    Attributes:
        erased: how many, those of parts among them.
        of_models: how many flow runs stay since registered models came from them.
        running: how many stay since they run.
    """

    erased: int
    of_models: int = 0
    running: int = 0

    def __str__(self) -> str:
        of_models, running = plural(self.of_models, "older run"), plural(self.running, "older run")
        kept = [f"{of_models} that registered models came from, until their versions are deleted"] * bool(
            self.of_models
        )
        kept += [f"{running} that may still run"] * bool(self.running)
        return f"{self.erased} of MLflow's runs{'; kept: ' if kept else ''}{', '.join(kept)}"


def delete_old_runs(project: Path, keep: int, *, dry_run: bool = False) -> OldRuns:
    """Delete all flow runs but the newest `keep`, with the runs of their parts and of parts of these.

    Runs that are running stay, and so do those that a registered model came from, until its version is deleted.

    Args:
        dry_run: delete nothing, only count.

    Raises:
        DejavuError: MLflow could not delete them, or the database is of a newer MLflow, or none.
    """
    database = project.resolve() / "mlflow.db"
    if not database.exists():
        return OldRuns(0)
    upgrade_database(database)
    client = MlflowClient(f"sqlite:///{database}")
    families, origins = _old_families(client, keep), _origins(client)
    running = [any(run.info.status == "RUNNING" for run in family) for family in families]
    of_models = [any(_has_model(run, origins) for run in family) for family in families]
    stays = [runs or has_model for runs, has_model in zip(running, of_models, strict=True)]
    old = [run for family, needed in zip(families, stays, strict=True) if not needed for run in family]
    for run in [] if dry_run else old:
        client.delete_run(run.info.run_id)
    for start in range(0, 0 if dry_run else len(old), RUNS_AT_ONCE):
        _erase(database, [run.info.run_id for run in old[start : start + RUNS_AT_ONCE]])
    return OldRuns(len(old), sum(of_models), sum(stays) - sum(of_models))


def _old_families(client: MlflowClient, keep: int) -> list[list[Run]]:
    """Return each flow run but the newest `keep`, with the runs of its parts and of parts of these."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return []
    found: list[Run] = []
    token: str | None = None
    while token != "":
        page = client.search_runs(
            [experiment.experiment_id], order_by=["attributes.start_time DESC"], max_results=1000, page_token=token
        )
        found, token = [*found, *page], page.token or ""
    kept = {run.info.run_id for run in [run for run in found if PARENT_TAG not in run.data.tags][:keep]}
    above = {run.info.run_id: run.data.tags.get(PARENT_TAG, "") for run in found}
    families: dict[str, list[Run]] = {}
    for run in found:
        first = run.info.run_id
        while above.get(first):  # a trial is a part of the trials, which are a part of the flow
            first = above[first]
        families.setdefault(first, []).append(run)
    return [family for first, family in families.items() if first not in kept]


def _has_model(run: Run, origins: set[str]) -> bool:
    return MODELS_TAG in run.data.tags or run.info.run_id in origins


def _origins(client: MlflowClient) -> set[str]:
    """Return the ids of the runs that registered models came from; their files are not among these runs' artifacts."""
    found: set[str] = set()
    token: str | None = None
    while token != "":
        page = client.search_model_versions(page_token=token)
        found, token = found | {version.run_id for version in page if version.run_id}, page.token or ""
    return found


def _erase(database: Path, run_ids: list[str]) -> None:
    """Erase runs that are marked as deleted: MLflow offers that only as a command."""
    words = ["gc", "--backend-store-uri", f"sqlite:///{database}", "--run-ids", ",".join(run_ids)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{database}"}
    done = subprocess.run([sys.executable, "-m", "mlflow", *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise DejavuError(
            f"`mlflow gc` could not erase {plural(len(run_ids), 'run')}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
