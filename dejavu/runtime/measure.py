"""Measuring layers on a device that is present, in a process of its own, as one training rank would run them.

A process pinned to one core (or one GPU) with one compute thread runs each distinct layer forward, backward and
through the optimizer, and prints one JSON line for each figure. Companions do the same on the other cores meanwhile,
because in a pipeline they are busy too and share caches and memory. On a CPU processor time counts, so what other
programs take of the core does not; passes that had to wait for them, or beside which the core itself was slow, count
only where there are too few others (`quiet`), and each row says how many of these are in it. A layer beside which the
core was slow nearly all the while is measured again after all others.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from dejavu.data import dataset_of
from dejavu.errors import DejavuError
from dejavu.graph import DTYPES, Graph, capture
from dejavu.models import layers_of, model_of
from dejavu.runtime.failures import what_failed
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process import claim_device, die_with_parent, named_parent, rank_environment
from dejavu.runtime.quiet import DISTURBED, TURNS, Quiet, Timed, counted, undisturbed
from dejavu.runtime.split_backward import backward_input, backward_weight
from dejavu.runtime.timing import mean_spread, spread
from dejavu.schedule import PARTS
from dejavu.workload import Workload

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

DIRECTIONS = ("forward", "backward", "optimizer")
WARMUP_REPEATS = 2
LEAST_REPEATS = 5
MOST_REPEATS = 50
IN_FLIGHT = 4  # microbatches
LOOP = "loop"  # subject of the rows of kind `probe`
WAIT_SECONDS = 20e-6  # less is what reading two clocks takes, or an interrupt
LEAST_SECONDS = 1e-9  # the clock's own resolution: what does nothing still takes more than zero
SECONDS_PER_LAYER = 1.2  # of this process's own processor time
MOST_SECONDS_PER_LAYER = 4.0  # on the clock, while there is less than that or fewer repeats than the least are steady


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
    least_look_seconds: float = math.inf,
    progress: Callable[[str], None] = lambda name: None,
    on_start: Callable[[int, int], None] = lambda number, process: None,
) -> Iterator[Measurement]:
    """Forward, backward and optimizer seconds of the layers with these signatures, as rows of the database.

    On a CPU the last row is of kind `probe`: the fastest look at the core.

    Args:
        num_busy: how many devices work at once, the measured one among them; where they are more than the cores of a
            machine without GPUs, they share these.
        in_slices: the device computes and pauses in turn (a CPU quota): a pass as short as a pause holds one or none,
            so only the mean of many on the clock tells what they take.
        least_look_seconds: the fastest look at a core of this host that is known.
        on_start: called with the number and process id of each that works; 0 is the measured one.

    Raises:
        MeasureError: the measuring process failed.
    """
    # Seconds of imports, which the measuring processes need not wait for.
    from dejavu.cost.measured import subject_of
    from dejavu.cost.work import Work
    from dejavu.profiles import Measurement, host_fingerprint

    average = "mean" if in_slices else "median"
    job = {
        "workload": workload.model_dump(mode="json"),
        "kind": graph.kind,
        "signatures": list(signatures),
        "average": average,
        "least_look_seconds": least_look_seconds,
        "is_alone": num_busy <= len(os.sched_getaffinity(0)),
    }
    companions = [_start({**job, "core": core, "until_ended": True}) for core in range(1, num_busy)]
    # A pipe that nobody reads would stop a process that warns much.
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below, with the process that writes it)
    child = _start({**job, "core": 0, "until_ended": False}, errors)
    layers = {layer.signature: layer for layer in graph.layers}
    begun: set[str] = set()
    try:
        for number, process in enumerate((child, *companions)):
            on_start(number, process.pid)
        assert child.stdout is not None
        for line in child.stdout:
            row = json.loads(line)
            if "look_seconds" in row:
                yield probe_row(device_type, row["look_seconds"])
                continue
            signature, direction = row.pop("signature"), row["direction"]
            layer = layers[signature]
            if direction == DIRECTIONS[0] and signature not in begun:
                progress(layer.name)
                begun.add(signature)
            work = Work.of([layer], direction, workload.dtype, workload.optimizer)
            yield Measurement(
                kind="layer",
                subject=subject_of(signature, direction, workload.optimizer),
                name=layer.name,
                device_type=device_type,
                dtype=workload.dtype,
                microbatch_size=workload.microbatch_size,
                flops=work.flops or None,
                extra=json.dumps({"family": layer.family, **work.to_dict()}),
                host_fingerprint=host_fingerprint(),
                torch_version=torch.__version__,
                source="measured",
                how=f"one pinned thread, {num_busy} devices busy, {IN_FLIGHT} microbatches in flight, "
                f"{average}{'' if in_slices or graph.kind != 'cpu' else ' of processor seconds'}",
                measured_at=datetime.now(UTC),
                **row,
            )
        if child.wait():
            errors.seek(0)
            raise MeasureError(what_failed(f"measuring layers on {device_type}", errors.read()))
    finally:
        for process in (child, *companions):
            process.kill()
            process.communicate()
        errors.close()


def probe_row(device_type: str, look_seconds: float) -> Measurement:
    """The fastest look at a core (`dejavu.runtime.quiet`) as a row: by it later ones see what disturbs them."""
    from dejavu.profiles import Measurement, host_fingerprint

    return Measurement(
        kind="probe",
        subject=LOOP,
        name="a loop of plain Python",
        device_type=device_type,
        dtype="int64",
        seconds=look_seconds,
        repeats=TURNS,
        host_fingerprint=host_fingerprint(),
        torch_version=torch.__version__,
        source="measured",
        how="processor seconds, the fastest of all looks beside a measurement",
        measured_at=datetime.now(UTC),
    )


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
    device = claim_device(job["core"])
    for row in _figures(job, device):
        print(json.dumps(row), flush=True)


def _figures(job: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Of each layer and pass, as it is known; again at the end where the core was slow beside the layer all the while.

    The last row is the fastest look.
    """
    workload = Workload.model_validate(job["workload"])
    layers = _Layers(workload, capture(workload, job["kind"]), device)
    figures_of = {"median": spread, "mean": mean_spread}[job["average"]]
    quiet = Quiet(job["least_look_seconds"]) if device.type == "cpu" and job["average"] == "median" else None
    wanted, is_again = list(job["signatures"]), False
    while wanted:
        looks: dict[str, float] = {}
        for signature, work in layers.of(wanted):
            passes, looks[signature] = _time_layer(work, workload, quiet, is_alone=job["is_alone"])
            for direction, timings in passes.items():
                chosen = counted(timings, LEAST_REPEATS)
                figures = figures_of([timings[k].seconds for k in chosen.places])
                share = chosen.disturbed_share if quiet else None
                yield {"signature": signature, "direction": direction, "disturbed_share": share, **figures}
        if not job["until_ended"]:
            # By now faster looks may be known than when the layer was measured.
            wanted = [name for name in wanted if quiet and quiet.slowdown(looks[name]) > DISTURBED and not is_again]
            is_again = True
    if quiet:
        yield {"look_seconds": quiet.least_seconds}


class _Work(NamedTuple):
    """A layer with what comes to it in a training.

    Attributes:
        loss: behind the last layer.
        splits: every second repeat runs the backward pass in its two parts, as torch's runtime does.
    """

    module: torch.nn.Module
    x: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    targets: torch.Tensor
    splits: bool


_Ends = list[tuple[torch.Tensor, torch.Tensor]]  # what came into a layer and what came out of it, by microbatch


class _Layers:
    """The layers of a model, one at a time."""

    def __init__(self, workload: Workload, graph: Graph, device: torch.device) -> None:
        self.workload, self.graph, self.device = workload, graph, device
        self.builders, self.loss = layers_of(workload), model_of(workload).loss

    def of(self, signatures: Sequence[str]) -> Iterator[tuple[str, _Work]]:
        """Those with these signatures, each once."""
        wanted, dtype = set(signatures), DTYPES[self.workload.dtype]
        inputs, targets = dataset_of(self.workload).batch(0, self.workload.microbatch_size, seed=self.workload.seed)
        x = inputs.to(self.device, dtype) if inputs.is_floating_point() else inputs.to(self.device)
        for position, (layer, builder) in enumerate(zip(self.graph.layers, self.builders, strict=True)):
            if layer.signature in wanted:
                wanted.discard(layer.signature)
                loss = self.loss if position == len(self.builders) - 1 else None
                module = builder.build().to(self.device, dtype)
                yield layer.signature, _Work(module, x, loss, targets.to(self.device), position > 0)
            x = torch.randn(layer.output_shape, dtype=dtype, device=self.device)


def _time_layer(
    work: _Work, workload: Workload, quiet: Quiet | None, *, is_alone: bool = True
) -> tuple[dict[str, list[Timed]], float]:
    """Every pass of every repeat after the first ones, and the median look beside the steady ones.

    Gradients accumulate, as they do over the microbatches of a step.

    Args:
        quiet: None: waiting is part of what is measured, or nobody can tell.
        is_alone: no companion shares the core; waiting for one is no disturbance.
    """
    parameters = list(work.module.parameters())
    optimizer = make_optimizer(workload.optimizer, parameters) if parameters else None
    splits = work.splits and work.x.is_floating_point() and bool(parameters)
    repeats: list[dict[str, list[_Clocks]]] = []
    stretches, looks = list[float](), list[float]()
    for number in range(WARMUP_REPEATS):
        _repeat(work, parameters, optimizer, in_parts=splits and number % 2 == 1)
    if quiet:
        quiet.look()
    started = before = _Clocks.now()
    while not _are_enough(looks, before.since(started), quiet):
        repeats.append(_repeat(work, parameters, optimizer, in_parts=splits and len(repeats) % 2 == 1))
        looks.append(quiet.look() if quiet else 0.0)
        now = _Clocks.now()
        stretches.append(now.since(before).stretch if is_alone else 1.0)
        before = now
    slowdowns = _slowdowns(looks, quiet)
    passes = {
        direction: [
            _timed(took, stretch * took.stretch if is_alone else 1.0, slowdown, quiet)
            for repeat, stretch, slowdown in zip(repeats, stretches, slowdowns, strict=True)
            for took in repeat.get(direction, ())
        ]
        for direction in (*DIRECTIONS, *(PARTS if splits else ()))
    }
    return passes, median(looks[k] for k in undisturbed(slowdowns, LEAST_REPEATS))


def _timed(took: _Clocks, stretch: float, slowdown: float, quiet: Quiet | None) -> Timed:
    """One pass. A wait anywhere in its repeat counts as well as one in itself: behind it caches are cold."""
    if quiet is None:
        return Timed(max(took.seconds, LEAST_SECONDS))
    return Timed(max(took.processor_seconds, LEAST_SECONDS), stretch, slowdown)


def _are_enough(looks: Sequence[float], took: _Clocks, quiet: Quiet | None) -> bool:
    if len(looks) < LEAST_REPEATS:
        return False
    if took.seconds > MOST_SECONDS_PER_LAYER:
        return True
    steady = len(undisturbed(_slowdowns(looks, quiet)))
    own_seconds = took.processor_seconds if quiet else took.seconds
    return steady >= LEAST_REPEATS and (len(looks) >= MOST_REPEATS or own_seconds > SECONDS_PER_LAYER)


def _slowdowns(looks: Sequence[float], quiet: Quiet | None) -> list[float]:
    return [quiet.slowdown(seconds) if quiet else 1.0 for seconds in looks]


class _Clocks(NamedTuple):
    """The clock's seconds and this process's processor seconds, which on its one core are all of its threads'."""

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


def _repeat(
    work: _Work, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, *, in_parts: bool
) -> dict[str, list[_Clocks]]:
    """What each pass takes.

    Several microbatches go forward before the first goes backward, as under every schedule: one at a time would find
    its activations still in the cache and be some per cent too fast. So it is with the two parts of a backward pass.
    """
    seconds: dict[str, list[_Clocks]] = {direction: [] for direction in (*DIRECTIONS, *PARTS)}
    ends = []
    for _ in range(IN_FLIGHT):
        fresh = work.x.clone().requires_grad_(work.x.is_floating_point())
        with _timing(seconds["forward"]):
            output = work.module(fresh)
            ends.append((fresh, work.loss(output, work.targets) if work.loss else output))
    (_backward_in_parts if in_parts else _backward)(work, ends, parameters, seconds)
    with _timing(seconds["optimizer"]):
        if optimizer:
            optimizer.step()
    return seconds


def _backward(
    work: _Work, ends: _Ends, parameters: list[torch.nn.Parameter], seconds: dict[str, list[_Clocks]]
) -> None:
    for _, end in ends:
        arriving = torch.ones_like(end)
        with _timing(seconds["backward"]):
            if end.requires_grad:
                torch.autograd.backward(end, arriving)


def _backward_in_parts(
    work: _Work, ends: _Ends, parameters: list[torch.nn.Parameter], seconds: dict[str, list[_Clocks]]
) -> None:
    waiting = []
    for x, end in ends:
        arriving = [torch.ones_like(end)]
        with _timing(seconds["backward_input"]):
            _, groups = backward_input([end], arriving, [x], parameters)
        waiting.append(groups)
    for groups in waiting:
        with _timing(seconds["backward_weight"]):
            backward_weight(parameters, groups)


@contextmanager
def _timing(found: list[_Clocks]) -> Iterator[None]:
    started = _Clocks.now()
    yield
    found.append(_Clocks.now().since(started))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
