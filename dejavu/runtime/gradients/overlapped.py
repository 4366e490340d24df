"""Sum the gradients of a stage's replicas while its last backward pass still computes, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dejavu.runtime.replicas import sum_gradients
from dejavu.runtime.state import local_of

MOST_BYTES = 25 * 2**20  # of a bucket, as of DistributedDataParallel's
LEAST_BYTES = 2**20  # smaller messages only add latency
BUCKETS = 8  # of a stage whose gradients are small


class OverlappedSum:
    """Sums gradients over a group, each bucket as soon as its last gradient is there.

    A bucket holds weights that follow each other backward through the layers; its sum begins when those of all earlier
    buckets have begun, so that every rank of the group begins them in one order. A rank's first step finds out which
    weights have gradients, and sums at its end.

    Source: the buckets of torch's DistributedDataParallel ([Li et al. 2020](https://arxiv.org/abs/2006.15704), section
    3.2.3), for the last backward pass of a pipeline's step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._weights = [one for one in reversed(list(module.parameters())) if one.requires_grad]
        self._group, self._device = group, device
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._missing: list[int] | None = None  # gradients that each bucket waits for; None: not in the last pass
        self._sent: list[tuple[list[torch.Tensor], torch.Tensor, dist.Work]] = []
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self.arrived)

    def begin(self) -> None:
        """Take note that the last backward pass of the step begins."""
        self._missing = [len(bucket) for bucket in self._buckets]

    def send_rest(self) -> None:
        """Begin the sums of all buckets that have not begun: their gradients are what they are."""
        self._missing = None
        new = [one for one in self._weights if one not in self._bucket_of and one.grad is not None]
        self._put_in_buckets([one for one in new if not self._is_elsewhere(one)])
        while len(self._sent) < len(self._buckets):
            self._send()

    def wait(self) -> None:
        """Put the sums in the gradients' place; sum those in the host's memory, which have no room on the device."""
        for gradients, flat, work in self._sent:
            work.wait()
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self._sent.clear()
        sum_gradients(filter(self._is_elsewhere, self._weights), self._group, self._device)

    def _is_elsewhere(self, weight: nn.Parameter) -> bool:
        return weight.grad is not None and local_of(weight.grad).device.type != self._device.type

    def arrived(self, weight: nn.Parameter) -> None:
        """Take note that a weight's gradient is complete, if this is the last pass."""
        if self._missing is None or (number := self._bucket_of.get(weight)) is None:
            return
        self._missing[number] -= 1
        while (next_one := len(self._sent)) < len(self._buckets) and self._missing[next_one] == 0:
            self._send()

    def _send(self) -> None:
        gradients = [local_of(one.grad) for one in self._buckets[len(self._sent)] if one.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._sent.append((gradients, flat, work))

    def _put_in_buckets(self, weights: Sequence[nn.Parameter]) -> None:
        sizes = {one: _num_bytes(one) for one in weights}
        most = min(max(sum(sizes.values()) / BUCKETS, LEAST_BYTES), MOST_BYTES)
        filled = float("inf")
        for weight in weights:
            if filled + sizes[weight] > most or self._buckets[-1][0].dtype != weight.dtype:
                self._buckets.append([])
                filled = 0.0
            filled += sizes[weight]
            self._buckets[-1].append(weight)
            self._bucket_of[weight] = len(self._buckets) - 1


def _num_bytes(weight: nn.Parameter) -> int:
    local = local_of(weight)
    return local.numel() * local.element_size()
