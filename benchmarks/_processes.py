"""Processes that belong to a folder: what a benchmark or a test must not leave behind."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return every process, but this one, that works in the folder or was told its path."""
    found = []
    for process in psutil.process_iter():
        try:
            told = str(folder) in " ".join(process.cmdline()) or Path(process.cwd()) == folder
            if told and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
