"""Measure transfers between two ranks of this machine, for a few sizes, in both directions at once.

`python -m dejavu.profiling.links` runs one of the two ranks.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dejavu.profiling.measuring import figures_of_ranks, measured_here
from dejavu.runtime.process import claim_device, die_with_parent, go_first
from dejavu.runtime.process.group import join_group, to_receive, to_send
from dejavu.timing.repeats import repeat_together
from dejavu.timing.spread import spread

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

SIZES_BYTES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20)
WARMUP_REPEATS = 5
REPEATS = 30


def measure_link(device_type: str, least_sample_seconds: float = math.inf) -> Iterator[Measurement]:
    """Measure one transfer between two devices of this machine for each of `SIZES_BYTES`; yield database rows.

    Args:
        least_sample_seconds: the fastest known sample of a core of this host.

    Raises:
        LaunchError: the two ranks failed.
    """
    from dejavu.cost.collectives.transfer import EXCHANGE  # seconds of imports, which ranks need not wait for

    module, measured = "dejavu.profiling.links", "transfers between two ranks"
    for figures in figures_of_ranks(module, 2, measured, least_sample_seconds):
        yield measured_here(
            kind="transfer",
            subject=EXCHANGE,
            name="send and receive at once",
            device_type=device_type,
            peer_device_type=device_type,
            dtype="float32",
            num_ranks=2,
            how="sent and received at once, as 1F1B does, median",
            **figures,
        )


def _main() -> None:
    die_with_parent(signal.SIGKILL)
    rank = int(os.environ["RANK"])
    device = claim_device(rank)
    if device.type == "cpu":
        go_first()
    join_group(device)
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
        arriving = to_receive(received)
        both = [dist.P2POp(dist.isend, to_send(sent), 1 - rank), dist.P2POp(dist.irecv, arriving, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if arriving is not received:
            received.copy_(arriving)

    return exchange


if __name__ == "__main__":
    _main()
