"""Sum the gradients of a stage's replicas while its last backward pass still computes, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dejavu.runtime.replicas import WithGradients, sum_gradients
from dejavu.runtime.state import local_of

MOST_BYTES = 25 * 2**20  # of a bucket, as of DistributedDataParallel's
LEAST_BYTES = 2**20  # smaller messages only add latency
BUCKETS = 8  # of a stage whose gradients are small


class OverlappedSum:
    """Sums gradients over a group, each bucket as soon as its last gradient is there.

    A bucket holds weights that follow each other backward through the layers; its sum begins when those of all earlier
    buckets have begun, so that every rank of the group begins them in one order. A rank's first step finds out which
    weights have gradients, and sums at its end. From then on these gradients lie in their bucket one after the other,
    so that it is summed where it is.

    Source: the buckets of torch's DistributedDataParallel ([Li et al. 2020](https://arxiv.org/abs/2006.15704), section
    3.2.3), for the last backward pass of a pipeline's step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._weights = [one for one in reversed(list(module.parameters())) if one.requires_grad]
        self._group, self._device = group, device
        self._with_gradients = WithGradients(self._weights, group, device)
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._missing: list[int] | None = None  # gradients that each bucket waits for; None: not in the last pass
        self._sent: list[dist.Work] = []
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self.arrived)

    def begin(self) -> None:
        """Take note that the last backward pass of the step begins."""
        self._missing = [len(bucket.places) for bucket in self._buckets]

    def send_rest(self) -> None:
        """Begin the sums of all buckets that have not begun: their gradients are what they are."""
        self._missing = None
        self._send_all()  # before what ranks agree on: some have sent these already
        self._with_gradients.agree()
        new = [one for one in self._weights if one not in self._bucket_of and one.grad is not None]
        self._put_in_buckets([one for one in new if not self._is_elsewhere(one)])
        self._send_all()

    def wait(self) -> None:
        """Wait for the sums; sum those in the host's memory, which have no room on the device."""
        for work in self._sent:
            work.wait()
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

    def _send_all(self) -> None:
        while len(self._sent) < len(self._buckets):
            self._send()

    def _send(self) -> None:
        work = dist.all_reduce(self._buckets[len(self._sent)].filled(), group=self._group, async_op=True)
        assert work is not None
        self._sent.append(work)

    def _put_in_buckets(self, weights: Sequence[nn.Parameter]) -> None:
        sizes = {one: _gradient(one).nbytes for one in weights}
        most = min(max(sum(sizes.values()) / BUCKETS, LEAST_BYTES), MOST_BYTES)
        groups, filled = list[list[nn.Parameter]](), float("inf")
        for weight in weights:
            if filled + sizes[weight] > most or _gradient(groups[-1][0]).dtype != _gradient(weight).dtype:
                groups.append([])
                filled = 0.0
            filled += sizes[weight]
            groups[-1].append(weight)
            self._bucket_of[weight] = len(self._buckets) + len(groups) - 1
        self._buckets += [_Bucket(group) for group in groups]


class _Bucket:
    """Some weights' gradients, one after the other in one tensor.

    Attributes:
        places: each weight's part of it.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        gradients = [_gradient(one) for one in weights]
        self._flat = torch.cat([gradient.flatten() for gradient in gradients])
        parts = self._flat.split([gradient.numel() for gradient in gradients])
        pairs = zip(parts, gradients, strict=True)
        self.places = dict(zip(weights, [part.view_as(gradient) for part, gradient in pairs], strict=True))
        for weight in weights:
            self._place(weight)

    def filled(self) -> torch.Tensor:
        """Return it with all its gradients in it: who made one anew has it put back; one that is absent is zero."""
        for weight, part in self.places.items():
            if weight.grad is None:
                part.zero_()
            elif (gradient := _gradient(weight)).data_ptr() != part.data_ptr():
                part.copy_(gradient)
                self._place(weight)
        return self._flat

    def _place(self, weight: nn.Parameter) -> None:
        if isinstance(weight.grad, DTensor):
            weight.grad._local_tensor = self.places[weight]  # `from_local` would ask its group
        else:
            weight.grad = self.places[weight]


def _gradient(weight: nn.Parameter) -> torch.Tensor:
    assert weight.grad is not None
    return local_of(weight.grad)
