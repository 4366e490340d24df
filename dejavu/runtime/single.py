"""Single-process training: what a trial does, and the reference for a pipeline's losses."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from dejavu.foundation.registry import named
from dejavu.graphs.graph import DTYPES
from dejavu.init import SCHEMES, Draw, calibrate
from dejavu.runtime.batches import HeldOut
from dejavu.runtime.gradients.scaling import FIRST_SCALE, LEAST_SCALE
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.state import read_trial, read_weights, restore_state, save_trial, start_from_pretrained
from dejavu.runtime.training import Layers, WholeModel, build_layers, tie_weights, train
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of

OnFirst = Callable[[float, float], None]


class _Watched(WholeModel):
    """Report the training's first loss and gradient norm, before any clipping and before the weights change.

    A step whose gradients overflow at the scale of its loss (`LossScale`) is left out, and says nothing of its weights:
    the norm is that of the first step that is made, which has the same weights.
    """

    def __init__(self, module: Layers, workload: Workload, on_first: OnFirst) -> None:
        super().__init__(module, workload)
        self.on_first = on_first
        self._scales = workload.autocast == "float16"
        self._first_loss: float | None = None
        self._is_told = False

    def __call__(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = super().__call__(step, inputs, targets)
        if step == 0:
            self._first_loss = loss
        if self._first_loss is not None and not self._is_told:
            norm = self.gradient_norm() / self.loss_scale
            is_left_out = self._scales and self.loss_scale > LEAST_SCALE and not math.isfinite(norm)
            if not is_left_out or not math.isfinite(self._first_loss):
                self._is_told = True
                self.on_first(self._first_loss, norm)
        return loss


def train_single(
    workload: Workload,
    draw: Draw,
    steps: range,
    *,
    start_from: Path | None = None,
    save_to: Path | None = None,
    on_loss: Callable[[float], None] = lambda loss: None,
    on_first: OnFirst = lambda loss, gradient_norm: None,
    on_evaluation: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train these steps in this process, with one compute thread as a rank would, and return the losses.

    Args:
        start_from: a trial's state; None: the saved weights that the workload names, else the draw's.
        save_to: where to save the state after the last step.
        on_loss: called after each step; may raise to stop.
        on_first: (loss of step 0, norm of all gradients of the first step that is made), before that step's update;
            may raise to stop.
        on_evaluation: (step, loss on what is held out), where the workload wants it; None: nothing is evaluated.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module = build_layers(workload, draw, device)
        optimizer = make_optimizer(workload.optimizer, module.parameters())
        if start_from:
            restore_state(module, optimizer, read_trial(start_from, {name for name, _ in module.named_children()}))
        elif workload.pretrained:
            start_from_pretrained(module, workload)
        elif named(SCHEMES, draw.scheme).calibrated:
            _calibrate(module, workload, draw, device)
        losses: list[float] = []

        def on_step(step: int, loss: float | None, seconds: float, per_step_seconds: float) -> None:
            assert loss is not None
            losses.append(loss)
            on_loss(loss)
            if on_evaluation is not None and held_out.is_due(step):
                found = held_out.loss(executor)
                assert found is not None
                on_evaluation(step, found)

        held_out = HeldOut(workload, steps.stop, device)
        executor = _Watched(module, workload, on_first)
        train(executor, optimizer, workload, steps, device=device, on_step=on_step)
        if save_to:
            save_trial(save_to, module, optimizer)
        return losses
    finally:
        torch.set_num_threads(threads)


def _calibrate(module: Layers, workload: Workload, draw: Draw, device: torch.device) -> None:
    """Rescale weights on the training's first batch, whatever steps come now: they depend on the draw alone."""
    inputs, _ = dataset_of(workload).batch(0, workload.batch_size, seed=workload.seed)
    calibrate(module, inputs.to(device, DTYPES[workload.dtype]) if inputs.is_floating_point() else inputs.to(device))
    tie_weights(dict(module.named_children()), layers_of(workload), draw)


def trained_module(job: TrainingJob, checkpoint: Path) -> tuple[nn.Module, torch.Tensor]:
    """Return the whole model with a checkpoint's weights, for use: in float32, on the CPU, without dropout.

    The layers follow each other under their own names, without what only a training needs (random streams,
    recomputation, autocast). Beside it an input of two examples.
    """
    layers = build_layers(job.workload, job.draw, torch.device("cpu"))
    layers.load_state_dict(read_weights(checkpoint))
    module = nn.Sequential(OrderedDict(layers.named_children())).float().eval()
    inputs, _ = dataset_of(job.workload).batch(0, 2, seed=job.workload.seed)
    return module, inputs


MOST_SCALES = 1 + round(math.log2(FIRST_SCALE / LEAST_SCALE))  # of a loss, each half of the one before


class _Probed(Exception):
    pass


def probe(workload: Workload, draw: Draw) -> tuple[float, float]:
    """Return loss and gradient norm of the training's first step, without taking it.

    Computing in float16 it may take several to find a scale at which gradients do not overflow.
    """
    found: list[tuple[float, float]] = []

    def on_first(loss: float, gradient_norm: float) -> None:
        found.append((loss, gradient_norm))
        raise _Probed

    with suppress(_Probed):
        train_single(workload, draw, range(MOST_SCALES), on_first=on_first)
    return found[0]


NUM_COMPARED = 3  # steps; later ones add no information


def compared_steps(job: TrainingJob) -> range:
    """Return the steps of a training whose losses are compared with single-process training."""
    return range(job.first_step, min(job.first_step + NUM_COMPARED, job.last_step))


def reference_losses(job: TrainingJob) -> list[float]:
    """Train the compared steps in this process, from the state that the job starts from."""
    start = Path(job.start_from) if job.start_from else None
    return train_single(job.workload, job.draw, compared_steps(job), start_from=start)


def largest_difference(expected: Sequence[float], result: TrainingResult) -> float | None:
    """Return the largest difference between a training's first losses and these; infinite where one is not finite.

    None where the training had no step, or its losses are lost: there is nothing to compare.
    """
    differences = [abs(a - b) for a, b in zip(expected, result.losses, strict=False)]
    return max((difference if math.isfinite(difference) else math.inf for difference in differences), default=None)
