"""Dask clients: of a running scheduler, or of a cluster of processes on this machine that ends with its block."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import dask
import distributed
import torch
from distributed.system import MEMORY_LIMIT
from distributed.utils import get_mp_context

from dejavu.cluster.this_machine import VISIBLE, visible_gpus
from dejavu.foundation.dask_workers import check_encrypted, workers_of
from dejavu.trials.spec import MOST_ATTEMPTS, TrialError

CONNECT_SECONDS = 20.0
LOOPBACK = "127.0.0.1"
GPU = "GPU"  # the resource that a worker offers for each GPU of its own
# Imports of a trial, which take seconds: Python's forkserver, a process that starts with the first worker and ends with
# this process, imports them once, and workers are its forks. Torch's optimizers import the last at their first step.
PRELOADED = ("dejavu.trials.worker", "torch._dynamo")


@contextmanager
def client_of(address: str) -> Iterator[distributed.Client]:
    """Connect to a running scheduler, whose workers are on the cluster's hosts.

    Certificates are those of Dask's own configuration (`distributed.comm.tls`).

    Raises:
        InputError: it or one of its workers is on another host, and not encrypted.
        TrialError: no scheduler answers there.
    """
    check_encrypted(address)
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise TrialError(f"no Dask scheduler answers at {address}: {error}") from error
    except TypeError as error:  # distributed's, where TLS has no certificates
        raise TrialError(
            f"Dask at {address} wants certificates: {error}; wanted distributed.comm.tls in Dask's configuration, as "
            "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY"
        ) from error
    with client:
        for worker in workers_of(client):
            check_encrypted(worker)
        yield client


@contextmanager
def local_client(num_workers: int, folder: Path, *, gpus: bool = False) -> Iterator[distributed.Client]:
    """Start a Dask cluster of processes on this machine's loopback, and its client; both end with the block.

    Dask's own default makes workers give freed memory back at once (MALLOC_TRIM_THRESHOLD_), which made training
    1.5 × slower here, and writes that into this process's environment, where later children find it. Both are undone.

    Args:
        gpus: each worker sees only one GPU, and offers it as a resource.

    Raises:
        TrialError: there are fewer GPUs than workers, or workers do not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "distributed.nanny.pre-spawn-environ": {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1},
        "distributed.scheduler.allowed-failures": MOST_ATTEMPTS - 1,
        # A nanny restarts its worker, which takes a while on a busy machine; Dask would give up on it after 15 s.
        "distributed.deploy.lost-worker-timeout": "1 day",
        "distributed.worker.profile.enabled": False,  # it interrupts a training 100 times a second to sample its stack
        "distributed.worker.multiprocessing-method": "forkserver",
    }
    scheduler = {"cls": distributed.Scheduler, "options": {"host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0"}}
    workers = dict(enumerate(_workers(num_workers, folder, gpus)))
    environment = dict(os.environ)
    with dask.config.set(settings):
        get_mp_context().set_forkserver_preload(list(PRELOADED))  # Dask sets its own list only once, without these
        _start_forkserver()
        with (
            _cluster(workers, scheduler) as cluster,
            distributed.Client(cluster) as client,
        ):
            try:
                yield client
            finally:
                for name in os.environ.keys() - environment.keys():
                    del os.environ[name]
                os.environ.update(environment)


def _cluster(workers: dict[int, dict[str, Any]], scheduler: dict[str, Any]) -> distributed.SpecCluster:
    """Start the processes; all of them again, where one of them was killed before it was ready."""
    for _ in range(MOST_ATTEMPTS):
        try:
            return distributed.SpecCluster(workers, scheduler, silence_logs="CRITICAL")
        except RuntimeError as error:  # distributed's, which has closed what it had started
            why = error
    raise TrialError(f"the workers on this machine do not start, after {MOST_ATTEMPTS} attempts: {why}") from why


def _start_forkserver() -> None:
    """Start Python's forkserver, if it does not run yet, so that it and its forks ignore interrupts and SIGHUP.

    A Ctrl-C in a terminal reaches them, too, and each would print where it was: this process ends them. So does a
    closed terminal's SIGHUP, which would end the process that counts their semaphores, and print that they are missing.
    """
    if threading.current_thread() is not threading.main_thread():  # only there may Python say what a signal does
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _workers(num_workers: int, folder: Path, gpus: bool) -> list[dict[str, Any]]:
    """Return the arguments of each worker's nanny; a nanny restarts its process on the same GPU."""
    options = {
        "host": LOOPBACK,
        "nthreads": 1,
        "memory_limit": MEMORY_LIMIT // max(1, num_workers),
        "local_directory": str(folder),
        "silence_logs": "CRITICAL",
    }
    if not gpus:
        return [{"cls": distributed.Nanny, "options": options} for _ in range(num_workers)]
    visible = visible_gpus(torch.cuda.device_count())
    if num_workers > len(visible):
        raise TrialError(f"{num_workers} workers want a GPU each; this machine shows {len(visible)}")
    return [
        {
            "cls": distributed.Nanny,
            "options": {**options, "resources": {GPU: 1}, "env": {VISIBLE: gpu}},
        }
        for gpu in visible[:num_workers]
    ]
