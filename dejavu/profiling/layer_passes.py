"""The process that measures layers: forward, backward and optimizer step of each, as in one rank of a training.

It is pinned to one core (or one GPU), has one compute thread, and prints one JSON line for each measurement;
`profiling.layers` starts it. On a CPU a short layer has copies that take turns with it, as the layers of a stage do:
alone it would find its weights in the cache. There CPU time is measured, so other programs' share of the core does
not count; passes that had to wait for other programs, or during which the core itself was slow, count only where there
are too few others (`quiet`), and each row says how many of them are in it. A layer during which the core was slow
nearly all the time is measured again after all others. It imports nothing that prices or stores: that would take
seconds.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from dejavu.foundation.tracing.dtypes import to_dtype
from dejavu.graphs.autocast import computing_in
from dejavu.graphs.capture import capture
from dejavu.graphs.compiling import compile_layers
from dejavu.graphs.graph import DTYPES, Graph, Layer
from dejavu.graphs.in_parts.split_backward import backward_input, backward_weight, own_tensor
from dejavu.plans.schedule import PARTS
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process import claim_device, die_with_parent, go_first
from dejavu.runtime.process.gradients import gradient_norm
from dejavu.timing.interference import DISTURBED, InterferenceProbe, TimedWork, counted, undisturbed
from dejavu.timing.spread import mean_spread, spread
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, layers_of, model_of

DIRECTIONS = ("forward", "backward", "optimizer")
WARMUP_REPEATS = 2
LEAST_REPEATS = 5
MOST_REPEATS = 50
IN_FLIGHT = 4  # microbatches
MOST_COPIES = 4  # of a layer on a CPU: a stage of a small GPT has as many blocks
WAIT_SECONDS = 20e-6  # anything shorter is reading two clocks, or an interrupt
LEAST_SECONDS = 1e-9  # the clock's resolution: a layer that does nothing still takes more than zero
SECONDS_PER_LAYER = 1.2  # of this process's own CPU time
MOST_SECONDS_PER_LAYER = 4.0  # on the clock, while there is less than that or fewer repeats than the least are steady


def _main(job: dict[str, Any]) -> None:
    """Run the measuring process: print one line of JSON for each measurement; a companion runs until it is killed."""
    die_with_parent(signal.SIGKILL)
    device = claim_device(job["core"])
    if device.type == "cpu":
        go_first()
    for row in _figures(job, device):
        print(json.dumps(row), flush=True)


def _figures(job: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each model's layers and passes as each is measured; with a slow core all the time again at last.

    The last row is the fastest sample of the core.
    """
    models = [_model(one, device) for one in job["models"]]
    figures_of = {"median": spread, "mean": mean_spread}[job["average"]]
    probe = (
        InterferenceProbe(job["least_sample_seconds"]) if device.type == "cpu" and job["average"] == "median" else None
    )
    wanted, is_again = [list(one["signatures"]) for one in job["models"]], False
    while any(wanted):
        looks: list[dict[str, float]] = [{} for _ in models]
        for number, layers in enumerate(models):
            for signature, work in layers.of(wanted[number]):
                passes, looks[number][signature] = _time_layer(work, layers.workload, probe, is_alone=job["is_alone"])
                for direction, timings in passes.items():
                    chosen = counted(timings, LEAST_REPEATS)
                    figures = figures_of([timings[k].seconds for k in chosen.places])
                    share = chosen.disturbed_share if probe else None
                    about = {"model": number, "signature": signature, "direction": direction}
                    yield {**about, "disturbed_share": share, **figures}
        if not job["until_ended"]:
            # By now faster samples may be known than when the layer was measured.
            wanted = [
                [name for name, look in own.items() if probe and probe.slowdown(look) > DISTURBED and not is_again]
                for own in looks
            ]
            is_again = True
    if probe:
        yield {"sample_seconds": probe.least_seconds}


def _model(asked: dict[str, Any], device: torch.device) -> _Layers:
    workload = Workload.model_validate(asked["workload"])
    return _Layers(workload, capture(workload, asked["kind"]), device)


class _Work(NamedTuple):
    """A layer with its inputs in a training.

    Attributes:
        modules: the layer, and its copies.
        loss: applied to the last layer's output.
        splits: every second repeat runs the backward pass in its two parts, as torch's runtime does.
        build: makes a copy; None where the layer is measured alone.
        passes_gradient: it has a backward pass; else no gradient comes back to it, nor to any layer before.
    """

    modules: tuple[torch.nn.Module, ...]
    x: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    targets: torch.Tensor
    splits: bool
    build: Callable[[], torch.nn.Module] | None
    passes_gradient: bool = True

    def with_copies(self, repeat_seconds: float) -> _Work:
        """Return the same with as many copies as let the fewest repeats fit into a layer's time.

        Args:
            repeat_seconds: of a repeat of the layer alone.
        """
        num = min(int(SECONDS_PER_LAYER / (LEAST_REPEATS * repeat_seconds)), MOST_COPIES)
        copies = tuple(self.build() for _ in range(1, num)) if self.build else ()
        return self._replace(modules=self.modules + copies)


class _End(NamedTuple):
    """What came into a layer and what came out of it, of one microbatch."""

    x: torch.Tensor
    output: torch.Tensor
    module: torch.nn.Module


class _Layers:
    """The layers of a model, one at a time."""

    def __init__(self, workload: Workload, graph: Graph, device: torch.device) -> None:
        self.workload, self.graph, self.device = workload, graph, device
        self.builders, self.loss = layers_of(workload), model_of(workload).loss

    def of(self, signatures: Sequence[str]) -> Iterator[tuple[str, _Work]]:
        """Yield the layers with these signatures, each once."""
        wanted, dtype = set(signatures), DTYPES[self.workload.dtype]
        inputs, targets = dataset_of(self.workload).batch(0, self.workload.microbatch_size, seed=self.workload.seed)
        x = inputs.to(self.device, dtype) if inputs.is_floating_point() else inputs.to(self.device)
        for position, (layer, builder) in enumerate(zip(self.graph.layers, self.builders, strict=True)):
            if layer.signature in wanted:
                wanted.discard(layer.signature)
                loss = self.loss if position == len(self.builders) - 1 else None
                build = partial(self._built, builder, layer)
                splits = position > 0 and not layer.is_compiled and layer.has_backward
                copies = build if self.device.type == "cpu" and not layer.is_compiled else None
                yield (
                    layer.signature,
                    _Work((build(),), x, loss, targets.to(self.device), splits, copies, layer.has_backward),
                )
            x = torch.randn(layer.output_shape, dtype=dtype, device=self.device)

    def _built(self, builder: LayerBuilder, layer: Layer) -> torch.nn.Module:
        built = builder.build().to(self.device)
        to_dtype(built, DTYPES[self.workload.dtype])
        if not layer.has_backward:
            built.requires_grad_(False)
        if layer.is_compiled:
            compile_layers(nn.ModuleList([built]))
        return computing_in(built, self.workload.autocast)


def _time_layer(
    work: _Work, workload: Workload, probe: InterferenceProbe | None, *, is_alone: bool = True
) -> tuple[dict[str, list[TimedWork]], float]:
    """Time every pass of every repeat after the warm-up; also return the median sample of the steady repeats.

    Gradients accumulate, as they do over the microbatches of a step.

    Args:
        probe: None: waiting is part of what is measured, or cannot be detected.
        is_alone: no companion shares the core; waiting for one is no disturbance.
    """
    work = work.with_copies(_repeat_seconds(work, workload))
    optimizer = _optimizer(work, workload)
    splits = work.splits and work.x.is_floating_point() and optimizer is not None
    repeats: list[dict[str, list[_Clocks]]] = []
    stretches, looks = list[float](), list[float]()
    for number in range(WARMUP_REPEATS):
        _repeat(work, optimizer, in_parts=splits and number % 2 == 1)
    if probe:
        probe.sample()
    started = before = _Clocks.now()
    while not _are_enough(looks, before.since(started), probe):
        repeats.append(_repeat(work, optimizer, in_parts=splits and len(repeats) % 2 == 1))
        looks.append(probe.sample() if probe else 0.0)
        now = _Clocks.now()
        stretches.append(now.since(before).stretch if is_alone else 1.0)
        before = now
    slowdowns = _slowdowns(looks, probe)
    passes = {
        direction: [
            _timed(took, stretch * took.stretch if is_alone else 1.0, slowdown, probe)
            for repeat, stretch, slowdown in zip(repeats, stretches, slowdowns, strict=True)
            for took in repeat.get(direction, ())
        ]
        for direction in (*DIRECTIONS, *(PARTS if splits else ()))
    }
    return passes, median(looks[k] for k in undisturbed(slowdowns, LEAST_REPEATS))


def _repeat_seconds(work: _Work, workload: Workload) -> float:
    """Return what a repeat takes: the second one, or the first where that is too long for any copy."""
    if work.build is None:
        return math.inf
    optimizer, seconds = _optimizer(work, workload), 0.0
    for _ in range(WARMUP_REPEATS):
        took = _repeat(work, optimizer, in_parts=False)
        seconds = sum(max(one.seconds, LEAST_SECONDS) for passes in took.values() for one in passes)
        if seconds > SECONDS_PER_LAYER / LEAST_REPEATS:
            break
    return seconds


def _optimizer(work: _Work, workload: Workload) -> torch.optim.Optimizer | None:
    parameters = [one for module in work.modules for one in module.parameters() if one.requires_grad]
    return make_optimizer(workload.optimizer, parameters) if parameters else None


def _timed(took: _Clocks, stretch: float, slowdown: float, probe: InterferenceProbe | None) -> TimedWork:
    """Record one pass. A wait anywhere in its repeat counts like one in the pass: after it the caches are cold."""
    if probe is None:
        return TimedWork(max(took.seconds, LEAST_SECONDS))
    return TimedWork(max(took.processor_seconds, LEAST_SECONDS), stretch, slowdown)


def _are_enough(looks: Sequence[float], took: _Clocks, probe: InterferenceProbe | None) -> bool:
    if len(looks) < LEAST_REPEATS:
        return False
    if took.seconds > MOST_SECONDS_PER_LAYER:
        return True
    steady = len(undisturbed(_slowdowns(looks, probe)))
    own_seconds = took.processor_seconds if probe else took.seconds
    return steady >= LEAST_REPEATS and (len(looks) >= MOST_REPEATS or own_seconds > SECONDS_PER_LAYER)


def _slowdowns(looks: Sequence[float], probe: InterferenceProbe | None) -> list[float]:
    return [probe.slowdown(seconds) if probe else 1.0 for seconds in looks]


class _Clocks(NamedTuple):
    """Wall-clock seconds and this process's CPU seconds, which on its one core are those of all its threads."""

    seconds: float
    processor_seconds: float

    @property
    def stretch(self) -> float:
        waited = self.seconds - self.processor_seconds
        return self.seconds / max(self.processor_seconds, WAIT_SECONDS) if waited > WAIT_SECONDS else 1.0

    @classmethod
    def now(cls) -> _Clocks:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: _Clocks) -> _Clocks:
        return _Clocks(self.seconds - start.seconds, self.processor_seconds - start.processor_seconds)

    def read(self) -> _Clocks:
        return self

    def shared_by(self, num: int) -> _Clocks:
        """Return one of so many equal parts."""
        return _Clocks(self.seconds / num, self.processor_seconds / num)


class _OnStream(NamedTuple):
    """Two events on a GPU's stream: the passes of a repeat follow each other without a gap, as in a training.

    What lies between is the GPU's own time, or the host's where that launches more slowly than the GPU works.
    """

    start: torch.cuda.Event
    stop: torch.cuda.Event

    def read(self) -> _Clocks:
        """Wait for the GPU, and return its seconds."""
        self.stop.synchronize()
        return _Clocks(self.start.elapsed_time(self.stop) / 1e3, 0.0)


_Taken = dict[str, list[_Clocks | _OnStream]]  # by pass


def _repeat(work: _Work, optimizer: torch.optim.Optimizer | None, *, in_parts: bool) -> dict[str, list[_Clocks]]:
    """Time each pass of one repeat.

    Several microbatches go forward before the first goes backward, as under every schedule: one at a time would find
    its activations still in the cache and be some per cent too fast. The same holds for a backward pass in two parts,
    and for the weights of a layer that no other layers come between.
    """
    taken: _Taken = {direction: [] for direction in (*DIRECTIONS, *PARTS)}
    ends = list[_End]()
    for _ in range(IN_FLIGHT):
        of_microbatch = list[_End]()
        for module in work.modules:
            fresh = work.x.clone().requires_grad_(work.x.is_floating_point() and work.passes_gradient)
            with _timing(taken["forward"]):
                output = module(fresh)
                end = own_tensor(work.loss(output, work.targets) if work.loss else output)
            of_microbatch.append(_End(fresh, end, module))
        ends += reversed(of_microbatch)
    (_backward_in_parts if in_parts else _backward)(ends, taken)
    with _timing(taken["optimizer"]):
        if optimizer and work.x.device.type == "cpu":
            _step(optimizer)
        elif optimizer:
            optimizer.step()
    seconds = {direction: [one.read() for one in its] for direction, its in taken.items()}
    return {**seconds, "optimizer": [one.shared_by(len(work.modules)) for one in seconds["optimizer"]]}


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Do what a rank does once a step: look at the gradients, use them, clear them.

    On GPUs looking and clearing are in no prediction (8 bytes a weight, beside AdamW's 28), nor in what is measured.
    """
    gradient_norm(weight for group in optimizer.param_groups for weight in group["params"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _backward(ends: list[_End], taken: _Taken) -> None:
    for end in ends:
        arriving = torch.ones_like(end.output)
        with _timing(taken["backward"]):
            if end.output.requires_grad:
                torch.autograd.backward(end.output, arriving)


def _backward_in_parts(ends: list[_End], taken: _Taken) -> None:
    waiting = []
    for end in ends:
        parameters, arriving = list(end.module.parameters()), [torch.ones_like(end.output)]
        with _timing(taken["backward_input"]):
            _, groups = backward_input([end.output], arriving, [end.x], parameters)
        waiting.append((parameters, groups))
    for parameters, groups in waiting:
        with _timing(taken["backward_weight"]):
            backward_weight(parameters, groups)


@contextmanager
def _timing(found: list[_Clocks | _OnStream]) -> Iterator[None]:
    if torch.cuda.is_available():
        events = _OnStream(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        events.start.record()
        yield
        events.stop.record()
        found.append(events)
    else:
        started = _Clocks.now()
        yield
        found.append(_Clocks.now().since(started))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
