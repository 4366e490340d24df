"""Measure on this machine what the database lacks: layers, transfers, passes, operators, collectives.

Only what is missing is measured, and rows are saved as they come, so interrupted profiling continues where it stopped.
What was measured while other work ran is measured again when the machine is quiet. Rows that were shipped, or measured
on another machine of the same kind, serve predictions, but a device that is here is measured here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from dejavu.cluster import Cluster, this_machine
from dejavu.cluster.islands import Island
from dejavu.cluster.this_machine import VISIBLE, gpus_by_type
from dejavu.cost.collectives.transfer import EXCHANGE, links_inside_nodes
from dejavu.cost.kernels.calibration import calibration_kernels
from dejavu.cost.sources.measured import Measured, subject_of
from dejavu.foundation.registry import Family, named
from dejavu.foundation.units import plural
from dejavu.graphs.graph import Graph
from dejavu.graphs.kernels import kernel_of
from dejavu.profiles import Measurement, ProfileDatabase, host_fingerprint
from dejavu.profiles.collective import COLLECTIVES
from dejavu.profiles.kernel import Kernel
from dejavu.profiling.collectives import SIZES_BYTES, collective_of, measure_collectives, whole_bytes
from dejavu.profiling.kernels import can_measure, measure_kernels
from dejavu.profiling.launches import measure_launches
from dejavu.profiling.layer_passes import DIRECTIONS
from dejavu.profiling.layers import Conditions, measure_layers
from dejavu.profiling.links import measure_link
from dejavu.profiling.measuring import least_samples
from dejavu.profiling.pass_overhead import measure_passes
from dejavu.timing.interference import are_quiet
from dejavu.workload import Workload

KEPT_EVERY_SECONDS = 10.0
T = TypeVar("T")
Measure = Callable[[Callable[[str], None]], Iterator[Measurement]]
Progress = Callable[[str, int, int], None]  # the current item, how many are done, the total


@dataclass(frozen=True)
class MeasureResult:
    """What was measured now, and what was known before.

    Attributes:
        num_new, num_known: measurements: layers (all passes are one), pairs of devices, operators, collective sizes.
        not_here: device types of the cluster that this machine does not have; their costs are predicted.
        num_disturbed: measurements taken while other work ran, and never yet without.
    """

    num_new: int
    num_known: int
    not_here: tuple[str, ...]
    num_disturbed: int = 0

    def __str__(self) -> str:
        absent = f"; not on this machine, so predicted: {', '.join(self.not_here)}" if self.not_here else ""
        beside = f"; {self.num_disturbed} in all were taken while other work ran" if self.num_disturbed else ""
        return f"déjà vu: {plural(self.num_known, 'measurement')} reused, {self.num_new} measured now{beside}{absent}"


@dataclass(frozen=True)
class Profiler:
    """Measures what has to be known about those of the cluster's devices that this machine has.

    Attributes:
        again: also measure what is already known.
    """

    graph: Graph
    workload: Workload
    cluster: Cluster
    database: ProfileDatabase
    again: bool = False

    def run(
        self,
        kinds: Collection[str] = ("layers", "transfers", "passes"),
        progress: Progress = lambda name, done, total: None,
    ) -> MeasureResult:
        """Measure what is missing of these `KINDS`.

        Raises:
            InputError: an unknown kind.
            MeasureError, LaunchError: a measuring process failed.
        """
        tasks_of = {kind: named(KINDS, kind) for kind in kinds}
        here = this_machine()
        counts = {
            name: min(count, here.device_counts[name])
            for name, count in self.cluster.device_counts.items()
            if name in here.device_types
        }
        wanted = [(kind, name, count) for name, count in counts.items() for kind in kinds]
        tasks = [tasks_of[kind](self, name, count) for kind, name, count in wanted]
        total, done = sum(task.num_missing for task in tasks), 0

        def step(name: str) -> None:
            nonlocal done
            progress(name, done, total)
            done += 1

        for (_, name, _), task in zip(wanted, tasks, strict=True):
            if not task.num_missing:
                continue
            before = self._findings()
            with _gpus_of(name):
                self._keep(task.measure(step))
                # Other work may have delayed one size of a series, which its neighbours then contradict.
                if task.is_series and self._findings() - before:
                    self._keep(task.measure(lambda name: None))
        absent = tuple(name for name in self.cluster.device_types if name not in here.device_types)
        disturbed = sum(tasks_of[kind](self, name, count).num_disturbed for kind, name, count in wanted)
        return MeasureResult(total, sum(task.num_known for task in tasks), absent, disturbed)

    @cached_property
    def _is_quiet(self) -> bool:
        """Whether the machine is quiet now, so that disturbed measurements can be repeated; checked only if needed."""
        return are_quiet(len(os.sched_getaffinity(0)), self._least_sample_seconds)

    @property
    def _least_sample_seconds(self) -> float:
        return least_samples(self._own).get(host_fingerprint(), math.inf)

    @property
    def _own(self) -> ProfileDatabase:
        return replace(self.database, with_shipped=False)

    def _findings(self) -> set[str]:
        return {finding.what for finding in self._own.check()}

    def _keep(self, rows: Iterator[Measurement]) -> None:
        """Append rows as they come, in files of some seconds' work each; an interruption loses none of them."""
        kept: list[Measurement] = []
        last, least = time.monotonic(), self._least_sample_seconds
        try:
            for row in rows:
                if row.kind == "probe" and row.seconds >= least:
                    continue
                kept.append(row)
                if time.monotonic() - last > KEPT_EVERY_SECONDS:
                    self.database.append(kept)
                    kept, last = [], time.monotonic()
        finally:
            self.database.append(kept)

    def _layers(self, device_type: str, num_devices: int) -> ProfilingTask:
        known = Measured(self._own, self.workload.optimizer, host=host_fingerprint())
        device = self.cluster.device_types[device_type]
        layers = {layer.signature: layer for layer in self.graph.layers}
        missing = [
            signature
            for signature, layer in layers.items()
            if self.again or any(known.estimate(layer, way, self.graph, device) is None for way in DIRECTIONS)
        ]
        rows = known.rows(device_type, self.graph.dtype)
        disturbed = [
            signature
            for signature in layers
            if any(
                (
                    row := rows.get(
                        (subject_of(signature, way, self.workload.optimizer), way, self.graph.microbatch_size)
                    )
                )
                and row.is_disturbed
                for way in DIRECTIONS
            )
        ]
        wanted = self._with_disturbed(missing, disturbed)
        return ProfilingTask(
            len(wanted),
            len(layers) - len(wanted),
            lambda step: measure_layers(
                self.workload,
                self.graph,
                wanted,
                device_type,
                Conditions(num_devices, least_sample_seconds=self._least_sample_seconds),
                progress=step,
            ),
            len(disturbed),
        )

    def _with_disturbed(self, missing: Sequence[T], disturbed: Sequence[T]) -> list[T]:
        """Return what is missing, and what was disturbed if the machine is quiet now."""
        again = [one for one in disturbed if one not in missing]
        return [*missing, *again] if again and self._is_quiet else [*missing]

    def _transfers(self, device_type: str, num_devices: int) -> ProfilingTask:
        def measure(step: Callable[[str], None]) -> Iterator[Measurement]:
            step(f"transfers between two of {device_type}")
            yield from measure_link(device_type, self._least_sample_seconds)

        links = links_inside_nodes(self.cluster, Island(device_type), Island(device_type))
        if num_devices < 2 or not any(
            link.assumed for link in links
        ):  # the cluster file's value takes precedence over a measurement
            return ProfilingTask(0, 0, measure)
        return self._all_or_nothing("transfer", EXCHANGE, device_type, measure)

    def _all_or_nothing(self, kind: str, subject: str, device_type: str, measure: Measure) -> ProfilingTask:
        """Make the task of rows that count as one measurement: of a link, or of pass overhead."""
        rows = self._own.latest(kind=kind, device_type=device_type, host_fingerprint=host_fingerprint())
        rows = [row for row in rows if not subject or row.subject == subject]
        disturbed = [kind] if any(row.is_disturbed for row in rows) else []
        missing: list[str] = [] if rows and not self.again else [kind]
        wanted = self._with_disturbed(missing, disturbed)
        return ProfilingTask(len(wanted), 1 - len(wanted), measure, len(disturbed), is_series=True)

    def _passes(self, device_type: str, num_devices: int) -> ProfilingTask:
        """Make the task that measures what no layer shows: the runtime on CPU cores, the host of GPUs."""

        def measure(step: Callable[[str], None]) -> Iterator[Measurement]:
            step(f"passes and messages on {device_type}")
            yield from measure_passes(device_type, self._least_sample_seconds)

        def measure_host(step: Callable[[str], None]) -> Iterator[Measurement]:
            step(f"launches on {device_type}")
            yield from measure_launches(device_type)

        if self.cluster.kind != "cpu":
            return self._all_or_nothing("launch", "", device_type, measure_host)
        if num_devices < 2:
            return ProfilingTask(0, 0, measure)
        return self._all_or_nothing("pass", "", device_type, measure)

    def _operators(self, device_type: str, num_devices: int) -> ProfilingTask:
        found = [*calibration_kernels(self.cluster.device_types[device_type]), *kernels_of(self.graph)]
        kernels = {kernel.subject: kernel for kernel in found if can_measure(kernel)}
        known = set() if self.again else self._own_subjects("operator", device_type) & kernels.keys()
        missing = [kernel for subject, kernel in kernels.items() if subject not in known]
        return ProfilingTask(
            len(missing), len(known), lambda step: measure_kernels(missing, device_type, progress=step)
        )

    def _collectives(self, device_type: str, num_devices: int) -> ProfilingTask:
        if num_devices < 2:
            return ProfilingTask(0, 0, lambda step: iter(()))
        known = set() if self.again else self._own_collectives(device_type, _group_sizes(num_devices))
        rows = self._own.latest(kind="collective", device_type=device_type, host_fingerprint=host_fingerprint())
        disturbed = [row.subject for row in rows if row.is_disturbed]
        known -= set(self._with_disturbed([], disturbed))
        missing = [
            (name, ranks)
            for ranks in _group_sizes(num_devices)
            for name in COLLECTIVES
            if (name != "send_recv" or ranks == 2) and collective_of(name, ranks, ranks).subject not in known
        ]
        wanted = sum(len(COLLECTIVES) - (ranks != 2) for ranks in _group_sizes(num_devices))

        def measure(step: Callable[[str], None]) -> Iterator[Measurement]:
            for ranks in sorted({ranks for _, ranks in missing}):
                names = [name for name, among in missing if among == ranks]
                known_least = self._least_sample_seconds
                yield from measure_collectives(
                    names, ranks, device_type, progress=step, least_sample_seconds=known_least
                )

        size = len(SIZES_BYTES)
        known_sizes = size * (wanted - len(missing))
        return ProfilingTask(size * len(missing), known_sizes, measure, len(disturbed), is_series=True)

    def _own_collectives(self, device_type: str, group_sizes: Sequence[int]) -> set[str]:
        """Return the collectives that were measured on this machine itself at each of the sizes."""
        rows = self._own.read(kind="collective", device_type=device_type, host_fingerprint=host_fingerprint())
        sizes: dict[str, set[int]] = {}
        for subject, size in zip(rows["subject"].to_pylist(), rows["size_bytes"].to_pylist(), strict=True):
            sizes.setdefault(subject, set()).add(size)
        found = set()
        for ranks in group_sizes:
            wanted = {whole_bytes(size, ranks) for size in SIZES_BYTES}
            subjects = {collective_of(name, ranks, ranks).subject for name in COLLECTIVES}
            found |= {subject for subject in subjects if wanted <= sizes.get(subject, set())}
        return found

    def _own_subjects(self, kind: str, device_type: str) -> set[str]:
        """Return what of this kind was measured on this machine itself."""
        rows = self._own.read(kind=kind, device_type=device_type, host_fingerprint=host_fingerprint())
        return set(rows["subject"].to_pylist())


@contextmanager
def _gpus_of(device_type: str) -> Iterator[None]:
    """Let processes that are started meanwhile see this machine's GPUs of one type alone, where it has several types.

    They measure on the first ones that they see.
    """
    gpus, before = gpus_by_type(), os.environ.get(VISIBLE)
    if len(gpus) < 2:
        yield
        return
    os.environ[VISIBLE] = ",".join(gpus[device_type])
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


@dataclass(frozen=True)
class ProfilingTask:
    """One kind of measurement on one type of device.

    Attributes:
        num_missing: measurements to take now, including disturbed ones if the machine is quiet.
        measure: calls its argument before each measurement.
        num_disturbed: measurements that were only ever taken while other work ran.
        is_series: seconds of one thing at several sizes, which bound each other.
    """

    num_missing: int
    num_known: int
    measure: Measure
    num_disturbed: int = 0
    is_series: bool = False


KINDS: Family[Callable[[Profiler, str, int], ProfilingTask]] = Family(
    "kind of measurement",
    {
        "layers": Profiler._layers,
        "transfers": Profiler._transfers,
        "passes": Profiler._passes,
        "operators": Profiler._operators,
        "collectives": Profiler._collectives,
    },
)


def kernels_of(graph: Graph) -> Iterator[Kernel]:
    """Yield the kernels of a graph's operators, also those that cannot be measured alone."""
    for layer in graph.layers:
        for operator in layer.operators:
            kernel = kernel_of(operator)
            if kernel is not None:
                yield kernel


def _group_sizes(num_devices: int) -> list[int]:
    """Return 2, 4, 8 … and all."""
    powers = [2**k for k in range(1, num_devices.bit_length()) if 2**k <= num_devices]
    return sorted({*powers, num_devices})
