"""Measure how fast the host launches work on a GPU: per unit of `dejavu.cost.sources.launches`, forward and backward.

Small layers, as a rank runs them in Python, keep a GPU waiting for its host; their time is the host's.
`python -m dejavu.profiling.launches` is the measuring process.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dejavu.profiling.measuring import figures_of_ranks, measured_here
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process import claim_device, die_with_parent
from dejavu.timing.spread import spread
from dejavu.workload import OptimizerSettings

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

WIDTH, ROWS, NUM_BLOCKS = 64, 16, 8
WARMUP_REPEATS, REPEATS = 3, 15
# Units of one block, as `dejavu.cost.sources.launches` counts them (a test holds them against it).
FORWARD_UNITS = 4.0 + 5.0 + 1.0 + 5.0 + 1.0  # normalization, product, GELU, product, addition
BACKWARD_UNITS = 4.0 + 2 * (2 * 3.0 + 1.0) + 1.6 + 1.6 + 6 * 1.0  # and the sum of two gradients, and six weights
WEIGHTS = 6


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def measure_launches(device_type: str) -> Iterator[Measurement]:
    """Measure the host of one of this machine's GPUs.

    Raises:
        LaunchError: the measuring process failed.
    """
    for figures in figures_of_ranks("dejavu.profiling.launches", 1, "how fast the host launches"):
        subject = figures.pop("subject")
        yield measured_here(
            kind="launch",
            subject=subject,
            name=f"what the host takes for a launch, {subject}",
            device_type=device_type,
            dtype="float32",
            how="layers that do little, for each unit of their launches",
            **figures,
        )


def launches(device: torch.device) -> dict[str, list[float]]:
    """Return seconds of a unit forward and backward, and of a weight in AdamW's step, one of each repeat."""
    model = blocks().to(device)
    optimizer = make_optimizer(OptimizerSettings(), list(model.parameters()))
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for repeat in range(WARMUP_REPEATS + REPEATS):
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        gradient = torch.ones(ROWS, WIDTH, device=device)
        forward, end = _timed(partial(model, x), device)
        backward, _ = _timed(partial(torch.autograd.backward, end, gradient), device)
        step, _ = _timed(optimizer.step, device)
        if repeat >= WARMUP_REPEATS:
            found["forward"].append(forward / (NUM_BLOCKS * FORWARD_UNITS))
            found["backward"].append(backward / (NUM_BLOCKS * BACKWARD_UNITS))
            found["optimizer"].append(step / (NUM_BLOCKS * WEIGHTS))
    return found


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def _main() -> None:
    die_with_parent(signal.SIGKILL)
    for subject, seconds in launches(claim_device(0)).items():
        print(json.dumps({"subject": subject, **spread(seconds)}), flush=True)


if __name__ == "__main__":
    _main()
