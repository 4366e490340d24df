"""The optimizer of a workload, and the learning rate at any step, computed from the step's number alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dejavu.runtime.process.state_files import StateFiles
from dejavu.runtime.state import MASTER, StateOnHost, local_of, moment_like
from dejavu.workload import OptimizerSettings, Workload


class _WithMasters(torch.optim.Optimizer):
    """Mixin for a torch optimizer: step a float32 master of each weight, and copy it to the weight.

    The masters are part of the optimizer's state, so trials and checkpoints carry them. A missing master is made from
    the weight itself, cast to float32.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let torch step the masters in place of the weights, each with its weight's gradient and moments."""
        assert closure is None, "the training loop computes gradients itself"
        groups = [group["params"] for group in self.param_groups]
        master_of = {weight: self._master(weight) for weights in groups for weight in weights}
        for weight, master in master_of.items():
            master.grad = weight.grad
            if weight in self.state:
                self.state[master] = self.state.pop(weight)
        for group, weights in zip(self.param_groups, groups, strict=True):
            group["params"] = [master_of[weight] for weight in weights]
        super().step()
        for group, weights in zip(self.param_groups, groups, strict=True):
            group["params"] = weights
        for weight, master in master_of.items():
            self.state[weight] = {**self.state.pop(master, {}), MASTER: master.detach()}
            weight.copy_(master)

    def _master(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        # Kept out of the state while torch steps: torch creates its moments only where a state is empty.
        known = self.state[weight].pop(MASTER, None) if weight in self.state else None
        return torch.nn.Parameter(weight.detach().float() if known is None else known)


class _OnHost(StateOnHost):
    """Mixin for a torch optimizer: keep its state in the host's memory, and update the weights there.

    A few weights after the other, together no larger than the largest: their gradients and, unless they have masters,
    they themselves are copied to the host, torch steps these copies, and the new values are copied back (ZeRO-Offload,
    Ren et al., USENIX ATC 2021). A device's part of a split weight is stepped as a tensor of its own.
    """

    has_masters = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let torch step the weights' copies on the host, some at a time."""
        assert closure is None, "the training loop computes gradients itself"
        groups = [group["params"] for group in self.param_groups]
        most = max((local_of(weight).numel() for weights in groups for weight in weights), default=0)
        for group in self.param_groups:
            group["params"] = []
        for group, weights in zip(self.param_groups, groups, strict=True):
            for batch in _batches([weight for weight in weights if weight.grad is not None], most):
                self._update(group, batch)
        for group, weights in zip(self.param_groups, groups, strict=True):
            group["params"] = weights

    def _update(self, group: dict[str, Any], weights: list[torch.nn.Parameter]) -> None:
        held = [self.state.pop(weight, {}) for weight in weights]
        gradients = [_on_host(local_of(_placed_as(weight))) for weight in weights]
        values = [
            local_of(state[MASTER]) if MASTER in state else _on_host(local_of(weight.detach()))
            for weight, state in zip(weights, held, strict=True)
        ]
        own = local_of(weights[0])
        if own.is_cuda:  # the copies have only begun
            torch.cuda.current_stream(own.device).synchronize()
        copies = [torch.nn.Parameter(value.float() if self.has_masters else value) for value in values]
        for copy, gradient, state in zip(copies, gradients, held, strict=True):
            copy.grad = gradient
            known = {what: local_of(one) for what, one in state.items() if one is not None and what != MASTER}
            if known:  # torch makes its moments where a state is empty
                self.state[copy] = known
        group["params"] = copies
        super().step()
        group["params"] = []
        for weight, copy, state in zip(weights, copies, held, strict=True):
            self._take(weight, copy, state)

    def _take(self, weight: torch.nn.Parameter, copy: torch.nn.Parameter, held: dict[str, Any]) -> None:
        """Give a weight the value of its copy, and the state of it."""
        own, value, found = local_of(weight.detach()), copy.detach(), self.state.pop(copy, {})
        if self.has_masters:
            found[MASTER], value = value, _on_host(value.to(own.dtype), pinned=own.is_cuda)
        # torch steps what it knows in place, so that what is held has it, too.
        self.state[weight] = {
            what: self._as_held(one, weight) if held.get(what) is None else held[what] for what, one in found.items()
        }
        own.copy_(value, non_blocking=True)

    def _as_held(self, value: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return a fresh moment or master as the state holds it: split as its weight is, perhaps in a file."""
        if value.dim() == 0 or (self.files is None and not isinstance(weight, DTensor)):
            return value
        moment = moment_like(weight, value.dtype, self)
        local_of(moment).copy_(value)
        return moment


def _batches(weights: Iterable[torch.nn.Parameter], most: int) -> Iterator[list[torch.nn.Parameter]]:
    """Yield the weights in runs of at most so many numbers, or of one weight."""
    batch, count = list[torch.nn.Parameter](), 0
    for weight in weights:
        own = local_of(weight).numel()
        if batch and count + own > most:
            yield batch
            batch, count = [], 0
        batch.append(weight)
        count += own
    if batch:
        yield batch


def _on_host(tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
    """Copy it to the host's memory; from a GPU to page-locked memory, without waiting for it."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned or tensor.is_cuda)
    return there.copy_(tensor, non_blocking=True)


def _placed_as(weight: torch.nn.Parameter) -> torch.Tensor:
    """Return the weight's gradient, split as the weight is."""
    assert weight.grad is not None
    if not isinstance(weight.grad, DTensor):
        return weight.grad
    assert isinstance(weight, DTensor)
    return weight.grad.redistribute(placements=weight.placements)


class _AdamWWithMasters(_WithMasters, torch.optim.AdamW):
    pass


class _SGDWithMasters(_WithMasters, torch.optim.SGD):
    pass


class _AdamWOnHost(_OnHost, torch.optim.AdamW):
    pass


class _SGDOnHost(_OnHost, torch.optim.SGD):
    pass


class _AdamWWithMastersOnHost(_OnHost, torch.optim.AdamW):
    has_masters = True


class _SGDWithMastersOnHost(_OnHost, torch.optim.SGD):
    has_masters = True


# By name, whether there are masters, and whether the state is in the host's memory.
OPTIMIZERS: dict[tuple[str, bool, bool], type[torch.optim.Optimizer]] = {
    ("adamw", False, False): torch.optim.AdamW,
    ("adamw", True, False): _AdamWWithMasters,
    ("adamw", False, True): _AdamWOnHost,
    ("adamw", True, True): _AdamWWithMastersOnHost,
    ("sgd", False, False): torch.optim.SGD,
    ("sgd", True, False): _SGDWithMasters,
    ("sgd", False, True): _SGDOnHost,
    ("sgd", True, True): _SGDWithMastersOnHost,
}


def make_optimizer(
    settings: OptimizerSettings,
    parameters: Iterable[torch.nn.Parameter],
    *,
    on_host: bool = False,
    files: StateFiles | None = None,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Make a fresh torch optimizer with the workload's settings; for a stage without weights it does nothing.

    With `on_host` its state is in the host's memory, or in `files`, and the host updates the weights: of GPUs by
    torch's fused step, which goes over memory once; of CPUs as it would on the device, to the last bit. Weights that
    are in the host's memory themselves are updated where they are, with `fused` for GPUs that fetch them.

    Weights that are float32 masters themselves, as sharded ones are (ZeRO), are stepped as they are. With other master
    weights the gradients accumulate in float32 from now on. They are allocated at once, because torch's
    split backward pass adds to an existing gradient but stores the first one as it is, in the weight's own type.
    """
    given = [parameter for parameter in parameters if parameter.requires_grad]  # what is frozen does not decay either
    adds_masters = settings.master_weights and any(one.dtype != torch.float32 for one in given)
    if adds_masters:
        for parameter in given:
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter.data, dtype=torch.float32)
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        options["momentum"] = settings.momentum
    else:
        options |= {"betas": settings.betas, "eps": settings.epsilon}
    if len({type(parameter.data) for parameter in given}) > 1:  # torch's grouped step mixes no split and whole weights
        options["foreach"] = False
    if fused or ((on_host or files is not None) and any(parameter.is_cuda for parameter in given)):
        options |= {"fused": True, "foreach": False}
    groups: list[dict[str, Any]] = [{"params": given}]
    if settings.decayed == "matrices" and settings.weight_decay:
        whole, left_out = ([one for one in given if (one.dim() > 1) is many] for many in (True, False))
        groups = [{"params": whole}, {"params": left_out, "weight_decay": 0.0}]
    made = OPTIMIZERS[settings.name, adds_masters, on_host or files is not None](groups, **options)
    if isinstance(made, StateOnHost):
        made.files = files
    return made


def set_learning_rate(optimizer: torch.optim.Optimizer, workload: Workload, step: int) -> None:
    """Set the rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(workload, step)


def learning_rate(workload: Workload, step: int) -> float:
    """Return the rate of this step: a linear warm-up, then constant, or decaying to zero at the training's end."""
    settings = workload.optimizer
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    left = max(0.0, 1.0 - (step + 1 - settings.warmup_steps) / max(1, workload.num_steps - settings.warmup_steps))
    falls = {"constant": 1.0, "linear": min(1.0, left), "cosine": (1.0 - math.cos(math.pi * min(1.0, left))) / 2}
    return settings.learning_rate * warm * falls[settings.decay]
