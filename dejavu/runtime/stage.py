"""One rank's part of a pipeline: its layers as a torch stage under a torch schedule, with a clock on every pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from dejavu.models import model_of
from dejavu.plan import Plan
from dejavu.schedule import schedule_named
from dejavu.workload import Workload


class PipelinedStage:
    """The executor of one rank; the last stage has the loss."""

    def __init__(self, module: nn.Module, workload: Workload, plan: Plan, stage: int, device: torch.device) -> None:
        self.num_stages, self.num_microbatches = len(plan.stages), plan.num_microbatches
        self.stage = PipelineStage(module, stage, self.num_stages, device)
        self.forward_seconds = _clock(self.stage, "forward_one_chunk", device)
        self.backward_seconds = _clock(self.stage, "backward_one_chunk", device)
        make: Any = get_schedule_class(schedule_named(plan.schedule).torch_name)
        self.schedule = make(self.stage, n_microbatches=plan.num_microbatches, loss_fn=model_of(workload).loss)

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.stage.is_first else ()
        if not self.stage.is_last:
            self.schedule.step(*arguments, return_outputs=False)
            return None
        self.schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        return float(torch.stack(losses).mean())

    def forget_times(self) -> None:
        """Start the clocks anew: the first step also sets torch's stages up."""
        self.forward_seconds.clear()
        self.backward_seconds.clear()

    def medians(self) -> tuple[float, float]:
        """Median seconds of one microbatch, forward and backward."""
        return median(self.forward_seconds), median(self.backward_seconds)


def _clock(stage: PipelineStage, method: str, device: torch.device) -> list[float]:
    """Wrap a method of this one stage so that the seconds of each call are listed."""
    seconds: list[float] = []
    inner: Callable[..., Any] = getattr(stage, method)

    def timed(*arguments: Any, **options: Any) -> Any:
        _wait(device)
        started = time.perf_counter()
        result = inner(*arguments, **options)
        _wait(device)
        seconds.append(time.perf_counter() - started)
        return result

    setattr(stage, method, timed)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
