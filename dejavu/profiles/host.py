"""Stable names of this machine and its devices."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from dejavu.foundation.hashing import stable_hash


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
    # The driver's own files first: they need no torch, so every process gets the same answer. Asking torch creates a
    # CUDA context of hundreds of MiB, so it is asked only where there is one already.
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if cards:
        return [line.split(":", 1)[1].strip() for card in cards for line in card.read_text().splitlines()[:1]]
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
