"""Measure collectives among ranks on this machine, or on any hosts that torchrun connects.

`python -m dejavu.profiling.collectives` runs one rank. On several hosts, with the database on rank 0's:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        -m dejavu.profiling.collectives --device-type A100-SXM4-80GB --database profiles_db
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dejavu.profiles.collective import COLLECTIVES, Collective
from dejavu.profiling.measuring import measured_here, too_late
from dejavu.runtime.process import PARENT, claim_device, die_with_parent, go_first, named_parent, rank_environment
from dejavu.runtime.process.failures import LaunchError, what_failed
from dejavu.runtime.process.group import join_group
from dejavu.timing.interference import telling
from dejavu.timing.repeats import repeat_together
from dejavu.timing.spread import spread

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

SIZES_BYTES = tuple(4**k for k in range(5, 14))  # 1 KiB to 64 MiB, of the whole tensor
WARMUP_REPEATS = 3
LEAST_REPEATS, MOST_REPEATS = 5, 40
SECONDS_PER_SIZE = 1.0
TIMEOUT_SECONDS = 600.0


def collective_of(name: str, num_ranks: int, devices_per_node: int) -> Collective:
    """Return the collective over one group of all ranks, as it is measured here."""
    ranks = (0, 1) if name == "send_recv" else tuple(range(num_ranks))
    return Collective(
        name=name,
        replica_groups=(ranks,),
        mesh_nodes=-(-num_ranks // devices_per_node),
        devices_per_node=devices_per_node,
    )


def whole_bytes(size_bytes: int, num_ranks: int) -> int:
    """Return the bytes of the float32 tensor that is measured for a size: each rank has an equal part of it."""
    return 4 * num_ranks * max(size_bytes // 4 // num_ranks, 1)


def measure_collectives(
    names: Sequence[str],
    num_ranks: int,
    device_type: str,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    progress: Callable[[str], None] = lambda name: None,
    least_sample_seconds: float = math.inf,
) -> Iterator[Measurement]:
    """Measure each collective at each size among `num_ranks` devices of this machine; yield rows of the database.

    Args:
        least_sample_seconds: the fastest known sample of a core of this host.

    Raises:
        LaunchError: the ranks failed.
    """
    words = [f"--nproc-per-node={num_ranks}", "--standalone", "--local-addr=localhost"]
    words += ["-m", "dejavu.profiling.collectives", "--device-type", device_type]
    words += ["--names", ",".join(names), "--sizes", ",".join(map(str, sizes_bytes))]
    # A file, not a pipe: a pipe that nobody reads blocks ranks that print many warnings.
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below, with the process that writes it)
    process = subprocess.Popen(
        [sys.executable, "-m", "dejavu.launch.agent", *words],
        env=rank_environment() | named_parent() | telling(least_sample_seconds),
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                row = _row(json.loads(line), device_type)
                progress(f"{row.name} of {row.size_bytes:,} bytes among {row.num_ranks}")
                yield row
        try:
            process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise too_late(f"collectives among {num_ranks} ranks", TIMEOUT_SECONDS) from None
        if process.returncode:
            errors.seek(0)
            raise LaunchError(what_failed(f"measuring collectives among {num_ranks} ranks", errors.read()))
    finally:
        process.terminate()
        process.communicate()
        errors.close()


def _row(figures: dict[str, Any], device_type: str) -> Measurement:
    collective = Collective.from_json(figures.pop("name"), json.dumps(figures.pop("collective")))
    return measured_here(
        kind="collective",
        subject=collective.subject,
        name=collective.name,
        device_type=device_type,
        dtype="float32",
        num_ranks=collective.num_ranks,
        how="one group of all ranks, the slowest rank's time, median",
        extra=collective.to_json(),
        **figures,
    )


def _main(settings: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints a line of JSON for each measurement, or appends them to the database."""
    if os.environ.get(PARENT):
        die_with_parent(signal.SIGKILL)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = claim_device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cpu":
        go_first()
    join_group(device)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    rows = []
    for name in settings.names.split(","):
        collective = collective_of(name, world, per_node)
        for size_bytes in map(int, settings.sizes.split(",")):
            elements = whole_bytes(size_bytes, world) // 4
            seconds, share = _time(_work(name, elements, rank, world, device), device)
            figures = {
                "name": name,
                "size_bytes": elements * 4,
                "collective": json.loads(collective.to_json()),
                "disturbed_share": share,
                **spread(seconds),
            }
            if rank == 0:
                print(json.dumps(figures), flush=True)
                rows.append(figures)
    if rank == 0 and settings.database:
        from dejavu.profiles import ProfileDatabase

        measured = [_row(row, settings.device_type) for row in rows]
        print(
            f"{ProfileDatabase(settings.database).append(measured)} rows added to {settings.database}", file=sys.stderr
        )
    dist.destroy_process_group()


def _work(name: str, elements: int, rank: int, world: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs a collective once; sizes are of the whole tensor (`dejavu.profiles.collective`)."""
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // world, device=device)
    other = torch.zeros_like(whole)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole)
    if rank == 0:
        return lambda: dist.send(whole, 1)
    return (lambda: dist.recv(whole, 0)) if rank == 1 else (lambda: None)


def _time(work: Callable[[], object], device: torch.device) -> tuple[list[float], float | None]:
    """Return the measured repeats' seconds on the slowest rank: a collective is over when all ranks have it."""
    for _ in range(WARMUP_REPEATS):
        work()
    dist.barrier()
    before = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    once = torch.tensor([time.perf_counter() - before], device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)  # so that all ranks repeat equally often
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(SECONDS_PER_SIZE / float(once))))
    return repeat_together(work, device, repeats=repeats, before_each=dist.barrier)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One rank of a measurement of collectives.")
    parser.add_argument("--device-type", required=True, help="as in the catalogue or cluster.yaml")
    parser.add_argument("--names", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES_BYTES)), help="bytes of the whole tensor")
    parser.add_argument("--database", type=Path, help="rank 0 adds the rows here; without it they are only printed")
    _main(parser.parse_args())
