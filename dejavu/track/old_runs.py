"""Delete MLflow's older runs from a project's own database, with their artifacts, as `mlflow gc` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.units import plural
from dejavu.track.database import EXPERIMENT, upgrade_database
from dejavu.track.server import PARENT_TAG

MODELS_TAG = "mlflow.modelVersions"  # of a run whose artifacts a registered model is
RUNS_AT_ONCE = 200  # on one command line


def delete_old_runs(project: Path, keep: int, *, dry_run: bool = False) -> int:
    """Delete all flow runs but the newest `keep`, with the runs of their parts and of parts of these; return how many.

    Runs that are running stay, and so do those that a registered model came from, until its version is deleted.

    Args:
        dry_run: delete nothing, only count.

    Raises:
        DejavuError: MLflow could not delete them, or the database is of a newer MLflow, or none.
    """
    database = project.resolve() / "mlflow.db"
    if not database.exists():
        return 0
    upgrade_database(database)
    client = MlflowClient(f"sqlite:///{database}")
    old = _old_runs(client, keep)
    for run in [] if dry_run else old:
        client.delete_run(run.info.run_id)
    for start in range(0, 0 if dry_run else len(old), RUNS_AT_ONCE):
        _erase(database, [run.info.run_id for run in old[start : start + RUNS_AT_ONCE]])
    return len(old)


def _old_runs(client: MlflowClient, keep: int) -> list[Run]:
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
    old = (family for first, family in families.items() if first not in kept)
    origins = _origins(client)
    return [run for family in old if not any(_is_needed(run, origins) for run in family) for run in family]


def _is_needed(run: Run, origins: set[str]) -> bool:
    return run.info.status == "RUNNING" or MODELS_TAG in run.data.tags or run.info.run_id in origins


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
