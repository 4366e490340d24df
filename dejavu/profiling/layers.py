"""Measure layers on a device that is present, in a process of its own, as one training rank would run them.

Companions do the same on the other cores meanwhile, because in a pipeline those are busy too and share caches and
memory bandwidth. The process runs `profiling.layer_passes`; here its output becomes rows of the database.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from dejavu.cost.sources.measured import subject_of
from dejavu.cost.work import Work
from dejavu.foundation.errors import DejavuError
from dejavu.graphs.graph import Graph, Layer
from dejavu.plans.schedule import PARTS
from dejavu.profiles import Measurement
from dejavu.profiling.layer_passes import DIRECTIONS, IN_FLIGHT, MOST_COPIES
from dejavu.profiling.measuring import measured_here
from dejavu.runtime.process import named_parent, rank_environment
from dejavu.runtime.process.failures import what_failed
from dejavu.timing.interference import TURNS
from dejavu.workload import Workload

LOOP = "loop"  # subject of the rows of kind `probe`


class MeasureError(DejavuError):
    """A layer that could not be measured; the message names it."""


@dataclass(frozen=True)
class Conditions:
    """Under which layers are measured.

    Attributes:
        num_busy: how many devices work at once, including the measured one; where they are more than the cores of a
            machine without GPUs, they share these.
        in_slices: the device computes and pauses in turn (a CPU quota): a pass as short as a pause contains one or
            none, so only the mean wall-clock time of many is right.
        least_sample_seconds: the fastest known sample of a core of this host.
    """

    num_busy: int = 1
    in_slices: bool = False
    least_sample_seconds: float = math.inf

    @property
    def average(self) -> str:
        """Return which average of the repeats counts."""
        return "mean" if self.in_slices else "median"


@dataclass(frozen=True)
class Asked:
    """Layers of one model that are to be measured.

    Attributes:
        signatures: of its layers; each is measured once.
    """

    workload: Workload
    graph: Graph
    signatures: Sequence[str]


def measure_layers(
    workload: Workload,
    graph: Graph,
    signatures: Sequence[str],
    device_type: str,
    conditions: Conditions = Conditions(),
    *,
    progress: Callable[[str], None] = lambda name: None,
    on_start: Callable[[int, int], None] = lambda number, process: None,
) -> Iterator[Measurement]:
    """Measure layers of one model, as `measure_layers_of` does those of several."""
    asked = [Asked(workload, graph, signatures)]
    return measure_layers_of(asked, device_type, conditions, progress=progress, on_start=on_start)


def measure_layers_of(
    asked: Sequence[Asked],
    device_type: str,
    conditions: Conditions = Conditions(),
    *,
    progress: Callable[[str], None] = lambda name: None,
    on_start: Callable[[int, int], None] = lambda number, process: None,
) -> Iterator[Measurement]:
    """Measure forward, backward and optimizer seconds of layers in one process; yield database rows.

    On a CPU the last row is of kind `probe`: the fastest sample of the core.

    Args:
        asked: models of one kind of device, one after the other.
        on_start: called with the number and process id of each process; 0 is the measured one.

    Raises:
        MeasureError: the measuring process failed.
    """
    num_busy = conditions.num_busy
    job = {
        "models": [
            {
                "workload": one.workload.model_dump(mode="json"),
                "kind": one.graph.kind,
                "signatures": list(one.signatures),
            }
            for one in asked
        ],
        "average": conditions.average,
        "least_sample_seconds": conditions.least_sample_seconds,
        "is_alone": num_busy <= len(os.sched_getaffinity(0)),
    }
    companions = [_start({**job, "core": core, "until_ended": True}) for core in range(1, num_busy)]
    # A file, not a pipe: a pipe that nobody reads blocks a process that prints many warnings.
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below, with the process that writes it)
    child = _start({**job, "core": 0, "until_ended": False}, errors)
    layers = [{layer.signature: layer for layer in one.graph.layers} for one in asked]
    begun: set[tuple[int, str]] = set()
    try:
        for number, process in enumerate((child, *companions)):
            on_start(number, process.pid)
        assert child.stdout is not None
        for line in child.stdout:
            row = json.loads(line)
            if "sample_seconds" in row:
                yield probe_row(device_type, row["sample_seconds"])
                continue
            place = row.pop("model"), row.pop("signature")
            layer = layers[place[0]][place[1]]
            if row["direction"] == DIRECTIONS[0] and place not in begun:
                progress(layer.name)
                begun.add(place)
            yield _layer_row(asked[place[0]], layer, device_type, row, conditions)
        if child.wait():
            errors.seek(0)
            raise MeasureError(what_failed(f"measuring layers on {device_type}", errors.read()))
    finally:
        for process in (child, *companions):
            process.kill()
            process.communicate()
        errors.close()


def _layer_row(
    asked: Asked, layer: Layer, device_type: str, figures: dict[str, Any], conditions: Conditions
) -> Measurement:
    """Make the row of one pass."""
    workload, direction = asked.workload, figures["direction"]
    how = f"one pinned thread, {conditions.num_busy} devices busy, {IN_FLIGHT} microbatches in flight, "
    how += f"up to {MOST_COPIES} copies in turn, " if asked.graph.kind == "cpu" else ""
    how += conditions.average
    if asked.graph.kind == "cpu" and not conditions.in_slices:
        how += " of processor seconds"
    how += ", compiled" if workload.compile else ""
    work = Work.of([layer], direction, workload.dtype, workload.optimizer)
    return measured_here(
        kind="layer",
        subject=subject_of(layer.signature, direction, workload.optimizer),
        name=layer.name,
        device_type=device_type,
        dtype=workload.dtype,
        microbatch_size=workload.microbatch_size,
        flops=None if direction in PARTS else work.flops or None,  # unknown for a part
        extra=json.dumps({"family": layer.family, **work.to_dict()}),
        how=how,
        **figures,
    )


def probe_row(device_type: str, sample_seconds: float) -> Measurement:
    """Make a row of the fastest sample of a core (`timing.interference`): later runs detect interference by it."""
    return measured_here(
        kind="probe",
        subject=LOOP,
        name="a loop of plain Python",
        device_type=device_type,
        dtype="int64",
        seconds=sample_seconds,
        repeats=TURNS,
        how="processor seconds, the fastest of all looks beside a measurement",
    )


def _start(job: dict[str, Any], errors: IO[str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dejavu.profiling.layer_passes", json.dumps(job)],
        stdout=subprocess.PIPE if errors else subprocess.DEVNULL,
        stderr=errors or subprocess.DEVNULL,
        text=True,
        env={**rank_environment(), **named_parent()},
    )
