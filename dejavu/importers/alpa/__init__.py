"""Alpa's profile of a cluster, `prof_database.pkl`, or the same as one tidy Parquet file.

Sizes are in elements of the full tensor: what an all_gather puts together, what a reduce_scatter takes.

What is no measurement is left out and counted: products or messages that do nothing (one rank, or so few elements that
a rank gets none), those that failed (inf), and times that Alpa replaced: it let no size be slower per element than the
next smaller one, so such a time is a multiple of its neighbour's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError
from dejavu.importers._base import BadRow, Batch, Importer, counted, option
from dejavu.importers.alpa.files import COLUMNS, FLAGS, WANTED, clusters_of, parquet_pieces, pickle_pieces
from dejavu.importers.cells import flag_texts, flags_of, not_flags, numbers_of, whole
from dejavu.importers.kernel_rows import kernel_columns, moved_bytes
from dejavu.importers.sources import files_of
from dejavu.profiles.collective import COLLECTIVES, Collective
from dejavu.profiles.kernel import Kernel

OF_ANOTHER = "of another cluster"
DEVICE = "V100-SXM2-16GB"  # of the p3.16xlarge nodes that Alpa was evaluated on (Zheng et al., OSDI 2022, section 8)

_DTYPES = {"f16": ("float16", 2), "f32": ("float32", 4), "bf16": ("bfloat16", 2), "f64": ("float64", 8)}
_GROUPS = re.compile(r"\(\s*(?:\(\s*\d+(?:\s*,\s*\d+)*\s*,?\s*\)\s*,?\s*)*\)")


@dataclass(frozen=True, kw_only=True)
class Alpa(Importer):
    """Collectives and matrix products on V100-class nodes, as Alpa profiled them.

    The pickle is read without running anything in it; see `restricted_pickle`. The devices are V100-SXM2-16GB, as in
    Alpa's own file, unless `--device` or the cluster's name says otherwise. A file may have the profiles of several
    clusters, whose rows would look like repeats of each other: one is taken at a time. See
    [Zheng et al., OSDI 2022](https://arxiv.org/abs/2201.12023).
    """

    name: ClassVar[str] = "alpa"
    published: ClassVar[datetime] = datetime(2022, 7, 11, tzinfo=UTC)  # the first day of OSDI 2022

    cluster: str | None = option("whose points are imported, where the file has those of several clusters")

    def files(self, path: Path) -> list[Path]:
        return files_of(path, ("prof_database.pkl",), WANTED)

    def batches(self, file: Path) -> Iterator[Batch]:
        cluster = self._chosen(file)
        pieces = parquet_pieces(file) if file.suffix == ".parquet" else pickle_pieces(file)
        device = self.devices.knowing({cluster: DEVICE}).resolve(cluster)  # devices have no name but their cluster's
        for start, frame in pieces:
            yield self._batch(file, start, frame, device, frame["cluster"].to_numpy() != cluster)

    def _chosen(self, file: Path) -> str:
        """Return the cluster whose points are taken. Raises InputError where several are there and none was named."""
        found = clusters_of(file)
        named = f"the {'cluster' if len(found) == 1 else 'clusters'} {', '.join(map(repr, found))}"
        if self.cluster is None and len(found) > 1:
            raise InputError(f"{file} has {named}; name one with --cluster, and its device with --device")
        if self.cluster is not None and found and self.cluster not in found:
            raise InputError(f"{file} has no cluster {self.cluster!r}; it has {named}")
        return self.cluster or "".join(found)

    def _batch(self, path: Path, start: int, frame: pd.DataFrame, device: str, others: NDArray[np.bool_]) -> Batch:
        problems = np.full(len(frame), None, dtype=object)
        flag_texts("seconds", frame["seconds"], problems)
        for flag in FLAGS:
            for row, problem in not_flags(flag, frame[flag].fillna(False)).items():  # one that is missing is not set
                problems[row] = problems[row] or problem
        problems[others] = None
        sound = np.array([problem is None for problem in problems], dtype=bool) & ~others
        flags = {flag: sound & (flags_of(frame[flag]) == 1) for flag in FLAGS}
        failed = flags["failed"]
        noop = flags["is_noop"] & ~failed
        clamped = flags["is_monotone_clamped"] & ~failed & ~noop
        content: list[Kernel | Collective | None] = []
        for row, entry in enumerate(frame.loc[:, list(COLUMNS)].itertuples(index=False, name=None)):
            thing: Kernel | Collective | None = None
            if sound[row] and not (failed[row] or noop[row] or clamped[row]):
                try:
                    thing = _thing(*entry)
                except ValueError as error:
                    problems[row] = str(error)
            content.append(thing)
        used = np.array([thing is not None for thing in content], dtype=bool)
        products = np.array([isinstance(thing, Kernel) for thing in content], dtype=bool)
        kernels = [thing for thing in content if isinstance(thing, Kernel)]
        collectives = [thing for thing in content if isinstance(thing, Collective)]
        tables = [
            self._products(frame[products], kernels, device),
            self._collectives(frame[used & ~products], collectives, device),
        ]
        return Batch(
            file=path,
            table=pa.concat_tables(tables),
            positions=start + np.concatenate([np.flatnonzero(products), np.flatnonzero(used & ~products)]),
            num_read=len(frame),
            time_name="seconds",
            time_seconds=1.0,
            place_word="point",
            moved_bytes=np.concatenate([moved_bytes(kernels), np.full(len(collectives), np.nan)]),
            skipped=counted(
                [
                    (OF_ANOTHER, others),
                    ("nothing to do or send", noop),
                    ("failed in Alpa", failed),
                    ("not measured: Alpa raised it from the next smaller size", clamped),
                ]
            ),
            bad=tuple(
                BadRow(f"{path}: point {start + row}", problem) for row, problem in enumerate(problems) if problem
            ),
        )

    def _products(self, frame: pd.DataFrame, kernels: list[Kernel], device: str) -> pa.Table:
        columns = kernel_columns(kernels)
        seconds = numbers_of(frame["seconds"])
        how = "Alpa: n × n × n product, timed in XLA"
        return self.table(len(kernels), **columns, device_type=device, seconds=seconds, repeats=1, how=how)

    def _collectives(self, frame: pd.DataFrame, collectives: list[Collective], device: str) -> pa.Table:
        dtypes = [_DTYPES[dtype] for dtype in frame["dtype"]]
        elements = frame["size_elements"].to_numpy(np.int64)
        return self.table(
            len(collectives),
            kind="collective",
            subject=[collective.subject for collective in collectives],
            name=[collective.name for collective in collectives],
            device_type=device,
            dtype=[name for name, _ in dtypes],
            num_ranks=[collective.num_ranks for collective in collectives],
            size_bytes=elements * np.array([size for _, size in dtypes], dtype=np.int64),
            seconds=numbers_of(frame["seconds"]),
            repeats=1,
            how="Alpa: all groups at once, timed in XLA",
            extra=[collective.to_json() for collective in collectives],
        )


def _thing(
    nodes: Any, devices_per_node: Any, operation: str, groups: str, dtype: str, elements: Any, _: Any, flop: Any
) -> Kernel | Collective:
    """Return what a point measured. Raises ValueError where it is unknown."""
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; wanted one of {', '.join(_DTYPES)}")
    if operation == "dot":
        return _product(flop, *_DTYPES[dtype])
    if operation not in COLLECTIVES:
        raise ValueError(f"unknown operator {operation!r}; wanted dot or one of {', '.join(COLLECTIVES)}")
    whole("size_elements", elements, least=0, most=2**60)
    mesh = whole("mesh_nodes", nodes), whole("mesh_gpus_per_node", devices_per_node)
    return _collective(operation, groups, *mesh)


@lru_cache(maxsize=4096)
def _product(flop: Any, dtype: str, item_bytes: int) -> Kernel:
    n = round((flop / 2) ** (1 / 3)) if isinstance(flop, int | float) and math.isfinite(flop) and flop > 0 else 0
    if n < 1 or 2 * n**3 != flop:
        raise ValueError(f"flop of a product is {flop!r:.80}; wanted 2n³ for some n ≥ 1")
    read, written = 2.0 * n * n * item_bytes, 1.0 * n * n * item_bytes
    return Kernel(
        family="matmul", name="mm", dtype=dtype, m=n, n=n, k=n, flops=flop, read_bytes=read, written_bytes=written
    )


@lru_cache(maxsize=4096)
def _collective(operation: str, groups: str, nodes: int, devices_per_node: int) -> Collective:
    return Collective(
        name=operation, replica_groups=_groups(groups), mesh_nodes=nodes, devices_per_node=devices_per_node
    )


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """`((0, 1), (2, 3))`; read by a pattern, not by Python's parser."""
    if not _GROUPS.fullmatch(text):
        raise ValueError(f"replica_groups is {text[:80]!r}; wanted tuples of ranks like ((0, 1), (2, 3))")
    groups = re.findall(r"\(([\d\s,]+)\)", text)
    return tuple(tuple(int(rank) for rank in re.findall(r"\d+", group)) for group in groups)
