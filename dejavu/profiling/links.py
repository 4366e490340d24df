"""Measure transfers between two ranks of this machine, for a few sizes, in both directions at once.

`python -m dejavu.profiling.links` runs one of the two ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dejavu.runtime.process import claim_device, die_with_parent, go_first, named_parent, rank_environment
from dejavu.runtime.process.failures import LaunchError, what_failed
from dejavu.timing.repeats import repeat_together
from dejavu.timing.spread import spread

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

SIZES_BYTES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20)
TIMEOUT_SECONDS = 300.0
WARMUP_REPEATS = 5
REPEATS = 30


def measure_link(device_type: str) -> Iterator[Measurement]:
    """Measure one transfer between two devices of this machine for each of `SIZES_BYTES`; yield database rows.

    Raises:
        LaunchError: the two ranks failed.
    """
    # These imports take seconds, which ranks need not wait for.
    from dejavu.cost.collectives.transfer import EXCHANGE
    from dejavu.profiles import Measurement, host_fingerprint

    words = ["--nproc-per-node=2", "--standalone", "--local-addr=localhost", "-m", "dejavu.profiling.links"]
    done = subprocess.run(
        [sys.executable, "-m", "dejavu.launch.agent", *words],
        env=rank_environment() | named_parent(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise LaunchError(what_failed("measuring transfers between two ranks", done.stderr))
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield Measurement(
                kind="transfer",
                subject=EXCHANGE,
                name="send and receive at once",
                device_type=device_type,
                peer_device_type=device_type,
                dtype="float32",
                num_ranks=2,
                host_fingerprint=host_fingerprint(),
                torch_version=torch.__version__,
                source="measured",
                how="sent and received at once, as 1F1B does, median",
                measured_at=datetime.now(UTC),
                **json.loads(line),
            )


def _main() -> None:
    die_with_parent(signal.SIGKILL)
    rank = int(os.environ["RANK"])
    device = claim_device(rank)
    if device.type == "cpu":
        go_first()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for size in SIZES_BYTES:
        exchange = _exchange(size, rank, device)
        for _ in range(WARMUP_REPEATS):
            exchange()
        seconds, share = repeat_together(exchange, device, repeats=REPEATS, slowest=False)
        if rank == 0:
            print(json.dumps({"size_bytes": size, "disturbed_share": share, **spread(seconds)}), flush=True)
    dist.destroy_process_group()


def _exchange(size_bytes: int, rank: int, device: torch.device) -> Callable[[], None]:
    sent, received = (torch.zeros(size_bytes // 4, device=device) for _ in range(2))

    def exchange() -> None:
        both = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return exchange


if __name__ == "__main__":
    _main()
