"""Record when each pass of each microbatch ran on this rank; cheap enough to be always on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import median
from typing import Any, NamedTuple

import torch

from dejavu.plans.schedule import Pass

KEPT_STEPS = 1000  # most recent ones, for medians


class Timed(NamedTuple):
    """One pass of one microbatch through one stage, in seconds since this step began."""

    stage: int
    direction: Pass
    microbatch: int
    start_seconds: float
    stop_seconds: float

    def later(self, seconds: float) -> Timed:
        return self._replace(start_seconds=self.start_seconds + seconds, stop_seconds=self.stop_seconds + seconds)


class Span(NamedTuple):
    """Gradients summed over replicas, or the optimizer, once in a step; in seconds since this step began."""

    start_seconds: float
    stop_seconds: float

    def later(self, seconds: float) -> Span:
        return Span(self.start_seconds + seconds, self.stop_seconds + seconds)


class Clock:
    """Times passes by wrapping the methods of torch's stages, and what a rank does once a step likewise.

    On a GPU it records events on the stream, read once per step, so that timing never synchronizes. On a CPU the
    medians are CPU seconds: ranks that share a core do not count each other's work.

    Args:
        slices: of each sequence, which pass one after the other and are numbered through as microbatches are; medians
            are of whole microbatches.
    """

    def __init__(self, device: torch.device, *, slices: int = 1) -> None:
        self._on_gpu, self._slices = device.type == "cuda", slices
        self._open: list[tuple[int, Pass, int, Any, Any, float]] = []
        self._once: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._steps: deque[dict[tuple[int, Pass], list[float]]] = deque(maxlen=KEPT_STEPS)
        self.last_step: list[Timed] = []
        self.began_seconds = 0.0  # on this host's clock

    def watch(self, stage: Any) -> None:
        """Time every pass of a torch stage from now on; its `first_microbatch` is that of the schedule's run."""
        stage.forward_one_chunk = self._timed(stage.forward_one_chunk, lambda options: Pass.FORWARD, stage)
        stage.backward_one_chunk = self._timed(
            stage.backward_one_chunk,
            lambda options: Pass.BACKWARD if options.get("full_backward", True) else Pass.BACKWARD_INPUT,
            stage,
        )
        stage.backward_weight_one_chunk = self._timed(
            stage.backward_weight_one_chunk, lambda options: Pass.BACKWARD_WEIGHT, stage
        )
        stage.perform_reduce_grad = self.watch_once(stage.perform_reduce_grad)
        stage.finish_gradients = self.watch_once(stage.finish_gradients)

    def watch_once(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, timed as what a rank does once a step."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = self._now()
            result = inner(*arguments, **options)
            self._once.append((start, self._now()))
            return result

        return timed

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Time every step of the optimizer from now on."""
        optimizer.step = self.watch_once(optimizer.step)  # type: ignore[method-assign]

    def watch_loss(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the same loss, timed; its time belongs to the forward pass that it ends."""

        def timed(*arguments: Any) -> torch.Tensor:
            busy = time.thread_time()
            result = loss(*arguments)
            stage, direction, microbatch, start, _, seconds = self._open[-1]
            whole = seconds + time.thread_time() - busy
            self._open[-1] = (stage, direction, microbatch, start, self._now(), whole)
            return result

        return timed

    def begin_step(self) -> None:
        self._open.clear()
        self._once.clear()
        self.began_seconds = time.perf_counter()
        self._began = self._now()

    def end_step(self) -> None:
        """Add up this step's passes; the device has to have finished them."""
        self.last_step, by_microbatch = [], dict[tuple[int, Pass], dict[int, float]]()
        for stage, direction, microbatch, start, stop, processor_seconds in self._open:
            timed = Timed(stage, direction, microbatch, self._since(self._began, start), self._since(self._began, stop))
            self.last_step.append(timed)
            seconds = timed.stop_seconds - timed.start_seconds if self._on_gpu else processor_seconds
            known, number = by_microbatch.setdefault((stage, direction), {}), microbatch // self._slices
            known[number] = known.get(number, 0.0) + seconds
        self._steps.append({key: list(known.values()) for key, known in by_microbatch.items()})

    @property
    def last_step_once(self) -> list[Span]:
        """When this rank, in the step that was begun last, summed gradients and ran its optimizer."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [Span(self._since(self._began, start), self._since(self._began, stop)) for start, stop in self._once]

    def keep(self, steps: Collection[int]) -> None:
        """Keep only these of the steps so far, numbered from 0: a first step also sets things up."""
        self._steps = deque((step for k, step in enumerate(self._steps) if k in steps), maxlen=KEPT_STEPS)

    def median_seconds(self, stage: int, direction: Pass) -> float:
        """Return a pass's median seconds on the device, for one microbatch; 0.0 where the stage never ran it."""
        return median([one for step in self._steps for one in step.get((stage, direction), ())] or [0.0])

    def _timed(self, inner: Callable[..., Any], pass_of: Callable[[dict[str, Any]], Pass], stage: Any) -> Any:
        def timed(microbatch: int, *arguments: Any, **options: Any) -> Any:
            start, busy = self._now(), time.thread_time()
            result = inner(microbatch, *arguments, **options)
            stop, took = self._now(), time.thread_time() - busy
            self._open.append((stage.number, pass_of(options), stage.first_microbatch + microbatch, start, stop, took))
            return result

        return timed

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, began: Any, at: Any) -> float:
        seconds: float = began.elapsed_time(at) / 1e3 if self._on_gpu else at - began
        return seconds
