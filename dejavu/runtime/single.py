"""Training in one process: what a trial does, and what a pipeline's losses are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from dejavu.init import Draw
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.state import read_trial, restore_state, save_trial
from dejavu.runtime.training import WholeModel, build_layers, train
from dejavu.workload import Workload


def train_single(
    workload: Workload,
    draw: Draw,
    steps: range,
    *,
    start_from: Path | None = None,
    save_to: Path | None = None,
    on_loss: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """The losses of these steps in this process, one compute thread, as one rank would compute.

    Args:
        start_from: a trial's state; None: the draw's weights.
        save_to: where the state after the last step goes.
        on_loss: called after each step; may raise to stop.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module = build_layers(workload, draw, device)
        optimizer = make_optimizer(workload.optimizer, module.parameters())
        if start_from:
            restore_state(module, optimizer, read_trial(start_from, {name for name, _ in module.named_children()}))
        losses: list[float] = []

        def on_step(step: int, loss: float | None, seconds: float, once_seconds: float) -> None:
            assert loss is not None
            losses.append(loss)
            on_loss(loss)

        train(WholeModel(module, workload), optimizer, workload, steps, device=device, on_step=on_step)
        if save_to:
            save_trial(save_to, module, optimizer)
        return losses
    finally:
        torch.set_num_threads(threads)


NUM_COMPARED = 3  # steps; later ones only repeat what the first ones show


def reference_difference(job: TrainingJob, result: TrainingResult) -> float:
    """The largest difference between a training's first losses and those of a single process from the same state."""
    steps = range(job.first_step, min(job.first_step + NUM_COMPARED, job.last_step))
    start = Path(job.start_from) if job.start_from else None
    expected = train_single(job.workload, job.draw, steps, start_from=start)
    differences = [abs(a - b) for a, b in zip(expected, result.losses, strict=False)]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)
