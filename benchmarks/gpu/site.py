"""The device that is measured: what it is, how two ranks use it, and what it lacks, in words that say what to do."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks.gpu.questions import NUM_RANKS
from dejavu.cluster import Cluster, DeviceType, this_machine
from dejavu.foundation.errors import DejavuError
from dejavu.profiles import host_fingerprint
from dejavu.profiles.host import asked_driver
from dejavu.runtime.process.group import SHARE_GPUS, backend_of


class NoDeviceError(DejavuError):
    """There is nothing to measure here; the message says what is missing and what to install."""


@dataclass(frozen=True)
class Site:
    """Where the campaign runs.

    Attributes:
        cluster: the machine as the plans see it: as many devices as ranks, though they may be one.
        num_devices: that are really here.
        backend: what carries messages, and `why`.
    """

    cluster: Cluster
    device: DeviceType
    num_devices: int
    backend: str
    why: str
    is_rehearsal: bool

    @classmethod
    def here(cls, *, rehearsal: bool) -> Site:
        """Look at this machine, and set for every process started from now on whether ranks share a GPU.

        Raises:
            NoDeviceError: no GPU that torch can use, and no rehearsal.
        """
        if not rehearsal:
            check_cuda()
        elif torch.cuda.is_available():
            raise NoDeviceError("a rehearsal is for machines without a GPU, and torch sees one: leave --rehearse out")
        machine = this_machine()
        name, count = next(iter(machine.device_counts.items()))
        shares = rehearsal or count < NUM_RANKS
        os.environ[SHARE_GPUS] = str(int(shares))
        (group,) = machine.groups
        cluster = replace(machine, groups=(replace(group, devices=((name, NUM_RANKS),)),))
        cluster = replace(cluster, device_types={name: machine.device_types[name]})
        backend = backend_of(torch.device("cpu" if rehearsal else "cuda"))
        return cls(cluster, machine.device_types[name], count, backend, _why(rehearsal, count), rehearsal)

    @property
    def places(self) -> list[int]:
        """The device of each pipeline rank: ranks of one device take turns in it."""
        return [rank % self.num_devices for rank in range(NUM_RANKS)]

    def provenance(self) -> dict[str, Any]:
        """Return what a reader of its figures has to know of this machine and its software."""
        on_gpu = not self.is_rehearsal
        return {
            "device_type": self.device.name,
            "device": torch.cuda.get_device_name(0) if on_gpu else "a CPU core: rehearsal, no figure is of a GPU",
            "devices": self.num_devices,
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(0))) if on_gpu else None,
            "driver": asked_driver("driver_version"),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if on_gpu else None,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu and torch.version.cuda else None,
            "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "host_fingerprint": host_fingerprint(),
            "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "backend": self.backend,
            "why_this_backend": self.why,
            "rehearsal": self.is_rehearsal,
        }


def check_cuda() -> None:
    """Check that torch can use a GPU here.

    Raises:
        NoDeviceError: it cannot.
    """
    if torch.cuda.is_available():
        return
    cards = asked_driver("name")
    has = f"the driver sees {cards.splitlines()[0]}" if cards else "the driver sees none (nvidia-smi found no GPU)"
    if torch.version.cuda is None and torch.version.hip is None:
        raise NoDeviceError(
            f"torch {torch.__version__} is built without CUDA, and {has}; wanted a build with it: "
            f"`pip install torch=={torch.__version__.split('+')[0]} --index-url "
            "https://download.pytorch.org/whl/cu130`, into the environment that runs this (make gpu GPU_PYTHON=…); "
            "without a GPU, rehearse: make gpu-rehearsal"
        )
    raise NoDeviceError(
        f"torch {torch.__version__} is built with CUDA {torch.version.cuda or torch.version.hip}, and can use no GPU: "
        f"{has}; wanted one, with a driver that this CUDA accepts, visible in CUDA_VISIBLE_DEVICES="
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}; without one, rehearse: make gpu-rehearsal"
    )


def _why(rehearsal: bool, count: int) -> str:
    if rehearsal:
        return "rehearsal on CPU cores; messages take the way through the host's memory that ranks on one GPU need"
    if count < NUM_RANKS:
        return (
            f"{NUM_RANKS} ranks share the one GPU, which NCCL refuses; gloo's messages pass through the host's memory"
        )
    return f"each of {NUM_RANKS} ranks has a GPU of its own"
