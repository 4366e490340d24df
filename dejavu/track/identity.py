"""Whose run it is: the process that writes it, and the user, the command and the commit that it came from."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from dejavu.foundation.processes.start import boot_id, start_seconds, started_at

KEY_TAG, HOST_TAG, PID_TAG, START_TAG = "dejavu.key", "dejavu.host", "dejavu.pid", "dejavu.process_start_seconds"
BOOT_TAG = "dejavu.boot"
GIT_SECONDS = 5.0  # a repository on a slow disk must not delay a run


def identity_tags() -> dict[str, str]:
    """Return tags that identify this process; a pid alone is reused."""
    return {
        HOST_TAG: socket.gethostname(),
        PID_TAG: str(os.getpid()),
        START_TAG: f"{start_seconds(psutil.Process()):.2f}",
        BOOT_TAG: boot_id(),
    }


def has_ended(pid: int, seconds: float, boot: str = "") -> bool:
    """Return whether this host's process of that pid, started so long after that boot of the machine, is gone."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or not started_at(process, seconds, boot)
    except psutil.NoSuchProcess:
        return True


def source_tags(project: Path) -> dict[str, str]:
    """Return the tags that MLflow shows as user, source and version; of git only where there is a repository."""
    command = " ".join(["dejavu" if "__main__" in sys.argv[0] else Path(sys.argv[0]).name, *sys.argv[1:]])
    tags = {"mlflow.user": _user(), "mlflow.source.type": "LOCAL", "mlflow.source.name": command}
    commit = _git(project, "rev-parse", "HEAD")
    if commit:
        changed = _git(project, "status", "--porcelain", "--untracked-files=no")
        tags |= {"mlflow.source.git.commit": commit, "mlflow.source.git.dirty": str(bool(changed))}
    return tags


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())


def _git(project: Path, *words: str) -> str:
    """Return what git says of the project; empty where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(project), *words],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
