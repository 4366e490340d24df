"""Garbage among a rank's gradients: what is not finite ends the attempt, what is suddenly far too large is said.

A fault of a device may leave the loss as it is: it was computed before. One pass over the gradients in each step, which
the optimizer reads anyway, sees it before a checkpoint is made of what it does to the weights.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.distributed.tensor import DTensor

USUAL_STEPS = 50  # the last ones, whose median norm is the usual one
LEAST_STEPS = 5  # before that, nothing is usual yet: the first steps of a training have the largest gradients
SUDDEN = 1000.0  # times the usual norm; spikes of trainings that went on to recover stay far below


@dataclass
class GradientWatch:
    """The norms of the gradients of one rank's stages, step by step.

    Attributes:
        rank: the pipeline rank, and `host` where it is: for people.
        arrived_finite: whether what a stage received from the one downstream of it, in this step, is finite.
        warnings: the file that gets a line for each sudden jump.
        garbage: what is not finite, for an error; empty: nothing. A rank that was sent garbage says nothing of it in
            that step, so that the one it came from is the first to fail.
        was_sent: what garbage this rank was sent; empty: none.
    """

    rank: int
    host: str
    modules: Mapping[int, nn.Module]
    arrived_finite: Callable[[int], bool]
    warnings: Path
    garbage: str = ""
    was_sent: str = ""
    _norms: dict[int, deque[float]] = field(default_factory=dict)

    def look(self, step: int) -> None:
        """Look at the gradients of a step: after its backward passes, before they are clipped or used."""
        self.garbage = self.was_sent
        for stage, module in self.modules.items():
            norm = gradient_norm(module.parameters())
            if math.isfinite(norm):
                self._compare(step, stage, norm)
            elif self.arrived_finite(stage):
                self.garbage = self.garbage or f"the gradient of stage {stage} in step {step + 1} is {norm}"
            else:
                self.was_sent = f"the gradient that stage {stage} received in step {step + 1} is {norm}"

    def _compare(self, step: int, stage: int, norm: float) -> None:
        norms = self._norms.setdefault(stage, deque(maxlen=USUAL_STEPS))
        usual = median(norms) if len(norms) >= LEAST_STEPS else math.inf
        if norm > SUDDEN * usual > 0:
            said = (
                f"step {step + 1}: the gradient of stage {stage} (rank {self.rank} on {self.host}) has the norm "
                f"{norm:.3g}, {norm / usual:.3g} times the usual {usual:.3g}; its device may be faulty"
            )
            print(said, file=sys.stderr, flush=True)
            with self.warnings.open("a") as file:  # a line at once, also where another rank writes
                file.write(f"{said}\n")
        norms.append(norm)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm of this process's part of the gradients; 0: there are none. Never infinite for finite ones."""
    parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    for dtype in (torch.float32, torch.float64):  # squares of large numbers may overflow in the first only
        norms = [torch.linalg.vector_norm(part, dtype=dtype) for part in parts if part.numel()]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if math.isfinite(norm):
            break
    return norm


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
