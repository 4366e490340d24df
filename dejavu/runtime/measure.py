"""Measuring layers on a device that is present, in a process of its own, as one training rank would run them.

A process pinned to one core (or one GPU) with one compute thread runs each distinct layer forward, backward and
through the optimizer, and prints one JSON line for each figure. Companions do the same on the other cores meanwhile,
because in a pipeline they are busy too and share caches and memory.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from dejavu.cost.measured import subject_of
from dejavu.cost.passes import PARTS
from dejavu.data import dataset_of
from dejavu.errors import DejavuError
from dejavu.graph import DTYPES, Graph, capture
from dejavu.models import layers_of, model_of
from dejavu.profiles import Measurement, host_fingerprint
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process import claim_device, die_with_parent, named_parent, rank_environment
from dejavu.runtime.timing import mean_spread, spread
from dejavu.workload import Workload

DIRECTIONS = ("forward", "backward", "optimizer")
WARMUP_REPEATS = 2
LEAST_REPEATS = 5
MOST_REPEATS = 50
IN_FLIGHT = 4  # microbatches
LEAST_SECONDS = 1e-9  # the clock's own resolution: what does nothing still takes more than zero
SECONDS_PER_LAYER = 1.2


class MeasureError(DejavuError):
    """A layer that could not be measured; the message names it."""


def measure_layers(
    workload: Workload,
    graph: Graph,
    signatures: Sequence[str],
    device_type: str,
    *,
    num_busy: int = 1,
    in_slices: bool = False,
    progress: Callable[[str], None] = lambda name: None,
    on_start: Callable[[int, int], None] = lambda number, process: None,
) -> Iterator[Measurement]:
    """Forward, backward and optimizer seconds of the layers with these signatures, as rows of the database.

    Args:
        num_busy: how many cores work at once, the measured one among them.
        in_slices: the device computes and pauses in turn (a CPU quota): a pass as short as a pause holds one or none,
            so only the mean of many tells what they take.
        on_start: called with the number and process id of each that works; 0 is the measured one.

    Raises:
        MeasureError: the measuring process failed.
    """
    average = "mean" if in_slices else "median"
    job = {
        "workload": workload.model_dump(mode="json"),
        "kind": graph.kind,
        "signatures": list(signatures),
        "average": average,
    }
    companions = [_start({**job, "core": core, "until_ended": True}) for core in range(1, num_busy)]
    # A pipe that nobody reads would stop a process that warns much.
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below, with the process that writes it)
    child = _start({**job, "core": 0, "until_ended": False}, errors)
    names = {layer.signature: layer.name for layer in graph.layers}
    flops = {(layer.signature, way): layer.flops(way) for layer in graph.layers for way in ("forward", "backward")}
    families = {layer.signature: layer.family for layer in graph.layers}
    try:
        for number, process in enumerate((child, *companions)):
            on_start(number, process.pid)
        assert child.stdout is not None
        for line in child.stdout:
            row = json.loads(line)
            signature, direction = row.pop("signature"), row["direction"]
            if direction == DIRECTIONS[0]:
                progress(names[signature])
            yield Measurement(
                kind="layer",
                subject=subject_of(signature, direction, workload.optimizer),
                name=names[signature],
                device_type=device_type,
                dtype=workload.dtype,
                microbatch_size=workload.microbatch_size,
                flops=flops.get((signature, direction)),
                extra=json.dumps({"family": families[signature]}),
                host_fingerprint=host_fingerprint(),
                torch_version=torch.__version__,
                source="measured",
                how=f"one pinned thread, {num_busy} devices busy, {IN_FLIGHT} microbatches in flight, {average}",
                measured_at=datetime.now(UTC),
                **row,
            )
        if child.wait():
            errors.seek(0)
            raise MeasureError(f"measuring layers on {device_type} failed:\n{errors.read()[-2000:]}")
    finally:
        for process in (child, *companions):
            process.kill()
            process.communicate()
        errors.close()


def _start(job: dict[str, Any], errors: IO[str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dejavu.runtime.measure", json.dumps(job)],
        stdout=subprocess.PIPE if errors else subprocess.DEVNULL,
        stderr=errors or subprocess.DEVNULL,
        text=True,
        env={**rank_environment(), **named_parent()},
    )


def _main(job: dict[str, Any]) -> None:
    """The measuring process: one line of JSON for each figure; a companion goes on until it is ended."""
    die_with_parent(signal.SIGKILL)
    workload = Workload.model_validate(job["workload"])
    device = claim_device(job["core"])
    graph, builders, model = capture(workload, job["kind"]), layers_of(workload), model_of(workload)
    dataset = dataset_of(workload)
    figures_of = {"median": spread, "mean": mean_spread}[job["average"]]
    while True:
        wanted = set(job["signatures"])
        inputs, targets = dataset.batch(0, workload.microbatch_size, seed=workload.seed)
        dtype = DTYPES[workload.dtype]
        x = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
        for position, (layer, builder) in enumerate(zip(graph.layers, builders, strict=True)):
            last = position == len(builders) - 1
            if layer.signature in wanted:
                wanted.discard(layer.signature)
                module = builder.build().to(device, dtype)
                loss = model.loss if last else None
                passes = _time_layer(module, x, loss, targets.to(device), workload, splits=position > 0)
                for direction, seconds in passes.items():
                    figures = {"signature": layer.signature, "direction": direction, **figures_of(seconds)}
                    print(json.dumps(figures), flush=True)
            x = torch.randn(layer.output_shape, dtype=dtype, device=device)
        if not job["until_ended"]:
            break


def _time_layer(
    module: torch.nn.Module,
    x: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
    targets: torch.Tensor,
    workload: Workload,
    *,
    splits: bool,
) -> dict[str, list[float]]:
    """Seconds of every pass; gradients accumulate, as they do over the microbatches of a step.

    With `splits` every second repeat runs the backward pass in its two parts, as torch's runtime does.

    Several microbatches go forward before the first goes backward, as under every schedule: one at a time would find
    its activations still in the cache and be some per cent too fast.
    """
    x = x.detach()
    parameters = list(module.parameters())
    optimizer = make_optimizer(workload.optimizer, parameters) if parameters else None
    splits = splits and x.is_floating_point() and bool(parameters)
    seconds: dict[str, list[float]] = {direction: [] for direction in (*DIRECTIONS, *(PARTS if splits else ()))}
    started = time.perf_counter()
    for repeat in range(WARMUP_REPEATS + MOST_REPEATS):
        if repeat >= WARMUP_REPEATS + LEAST_REPEATS and time.perf_counter() - started > SECONDS_PER_LAYER:
            break
        if repeat == WARMUP_REPEATS:
            for times in seconds.values():
                times.clear()
        ends = []
        for _ in range(IN_FLIGHT):
            fresh = x.clone().requires_grad_(x.is_floating_point())
            with _timed(seconds["forward"]):
                output = module(fresh)
                ends.append((fresh, loss(output, targets) if loss else output))
        for fresh, end in ends:
            if splits and repeat % 2:
                _backward_in_parts(fresh, end, parameters, seconds)
                continue
            arriving = torch.ones_like(end)
            with _timed(seconds["backward"]):
                if end.requires_grad:
                    torch.autograd.backward(end, arriving)
        with _timed(seconds["optimizer"]):
            if optimizer:
                optimizer.step()
    return seconds


def _backward_in_parts(
    x: torch.Tensor, end: torch.Tensor, parameters: list[torch.nn.Parameter], seconds: dict[str, list[float]]
) -> None:
    arriving = [torch.ones_like(end)]
    with _timed(seconds["backward_input"]):
        _, groups = stage_backward_input([end], arriving, [x], iter(parameters))
    with _timed(seconds["backward_weight"]):
        stage_backward_weight(iter(parameters), groups)


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    started = _now()
    yield
    seconds.append(max(_now() - started, LEAST_SECONDS))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
