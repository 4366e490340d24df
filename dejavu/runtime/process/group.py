"""The process group of ranks, and which way their messages go.

NCCL refuses two ranks on one GPU. Where `DEJAVU_SHARE_GPUS` is set, ranks beyond the GPUs share them, and gloo carries
what they say: its collectives take GPUs' tensors, its messages do not, so these pass through the host's memory. A step
is then no measure of a cluster, but every kernel, stream and schedule is the one of a training with a GPU for each.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

SHARE_GPUS = "DEJAVU_SHARE_GPUS"


def shares_gpus() -> bool:
    """Return whether ranks may share a GPU, on all hosts alike."""
    return os.environ.get(SHARE_GPUS, "") not in ("", "0")


def backend_of(device: torch.device) -> str:
    """Return the backend of a group of ranks on such devices."""
    return "nccl" if device.type == "cuda" and not shares_gpus() else "gloo"


def join_group(device: torch.device, **options: Any) -> None:
    """Join the group of all ranks, in which messages between some of them alone may then be sent.

    NCCL connects all ranks in the first collective. If the first thing said were a message between two stages, the
    others would never come to that.

    Args:
        options: of `torch.distributed.init_process_group`.
    """
    dist.init_process_group(backend_of(device), **options)
    if device.type == "cuda":
        dist.all_reduce(torch.zeros((), device=device))


def to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as it is sent: in the host's memory where ranks share GPUs.

    Of a view that conjugates or negates what is there, as torch makes them, the numbers themselves.
    """
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.cpu() if shares_gpus() else whole


def to_receive(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this tensor is received in: itself, or else a tensor that is copied to it when it has arrived.

    Where ranks share GPUs it is the latter on CPUs, too: so machines without a GPU rehearse it.
    """
    if shares_gpus():
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
