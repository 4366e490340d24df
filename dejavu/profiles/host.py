"""Stable names of this machine and its devices."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from dejavu.foundation.hashing import stable_hash

DRIVER_SECONDS = 20.0  # it may have to wake the cards


def host_fingerprint() -> str:
    """Return a short name for this machine's hardware: equal machines share it, and restarts keep it."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return stable_hash(
        {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(memory_bytes / 2**30),  # the kernel's own share moves the last digits
            "machine": platform.machine(),
            "gpus": gpu_names(),
        }
    )


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def gpu_names() -> list[str]:
    """List the NVIDIA GPUs of this machine, without importing torch or starting CUDA."""
    # The driver's own files first; containers may lack them. Neither way depends on what this process has done, so
    # every process gets the same answer: torch would have to create a CUDA context of hundreds of MiB.
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if cards:
        return [line.split(":", 1)[1].strip() for card in cards for line in card.read_text().splitlines()[:1]]
    return list(_named_by_the_driver())


@cache
def _named_by_the_driver() -> tuple[str, ...]:
    asked = asked_driver("name")
    return tuple(asked.splitlines()) if asked else ()


def asked_driver(what: str) -> str | None:
    """Return what `nvidia-smi` says of each GPU, a line each, as `name` or `driver_version`; None: it is not here."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=DRIVER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
