"""What all measuring shares: ranks that print figures as lines of JSON, and the row that such figures become.

Imported by the processes that measure too, so what they need not wait for is imported where it is used.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from dejavu.runtime.process import named_parent, rank_environment
from dejavu.runtime.process.failures import LaunchError, what_failed
from dejavu.timing.interference import telling

if TYPE_CHECKING:
    from dejavu.profiles import Measurement, ProfileDatabase

TIMEOUT_SECONDS = 300.0


def figures_of_ranks(
    module: str, num_ranks: int, measured: str, least_sample_seconds: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Run the module as ranks of this machine and yield what the first one prints, a line of JSON each.

    Args:
        measured: what is measured, for the error's sentence.
        least_sample_seconds: the fastest known sample of a core of this host.

    Raises:
        LaunchError: the ranks failed.
    """
    words = [f"--nproc-per-node={num_ranks}", "--standalone", "--local-addr=localhost", "-m", module]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dejavu.launch.agent", *words],
            env=rank_environment() | named_parent() | telling(least_sample_seconds),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise too_late(measured, TIMEOUT_SECONDS) from None
    if done.returncode:
        raise LaunchError(what_failed(f"measuring {measured}", done.stderr))
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def too_late(measured: str, seconds: float) -> LaunchError:
    """Return the error of ranks that did not end within these seconds, and were ended."""
    return LaunchError(
        f"measuring {measured} did not end within {seconds:g} s; it was ended; try again when less runs here"
    )


def measured_here(**fields: Any) -> Measurement:
    """Make a row of what was measured on this machine now; the fields as in `Measurement`."""
    from dejavu.profiles import Measurement, host_fingerprint  # half a second

    return Measurement(
        host_fingerprint=host_fingerprint(),
        torch_version=torch.__version__,
        source="measured",
        measured_at=datetime.now(UTC),
        **fields,
    )


def least_samples(database: ProfileDatabase) -> dict[str, float]:
    """Return the fastest look at a core (`timing.interference`) that is known of each kind of host, by fingerprint."""
    found, rows = dict[str, float](), database.read(kind="probe")
    for host, seconds in zip(rows["host_fingerprint"].to_pylist(), rows["seconds"].to_pylist(), strict=True):
        found[host] = min(seconds, found.get(host, seconds))
    return found
