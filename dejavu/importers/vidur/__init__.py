"""vidur's profiles: the operators of a transformer's block in fp16, and all_reduce and send_recv.

Of the operators the matrix products, norms, activations and the residual's addition become kernels. The embedding and
the rotation of queries and keys do not: the files do not say what they read. Nor do the additions of models whose kind
of MLP the file does not tell, because some of them add three tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa

from dejavu.importers import sources
from dejavu.importers._base import BadRow, Batch, Importer, counted
from dejavu.importers.cells import flag_texts, numbers_of, whole
from dejavu.importers.kernel_rows import devices_of, kernel_columns, moved_bytes
from dejavu.importers.vidur.files import (
    FILE_NAMES,
    NORMS,
    OPERATORS,
    PRODUCTS,
    WANTED,
    columns_of,
    compute_frames,
    holds_collectives,
    network_frames,
)
from dejavu.profiles.collective import COLLECTIVES, Collective
from dejavu.profiles.kernel import Kernel

# vidur/profiling/README.md: pairs are Azure's NC96ads_A100_v4 (PCIe cards); its operators are of either kind of A100.
# Of pairs of H100 it does not say which; they are taken for the PCIe cards that pairs are made of.
USUAL_DEVICES = {
    **dict.fromkeys(("a100", "a100_dgx", "a100_nvlink"), "A100-SXM4-80GB"),
    **dict.fromkeys(("a100_pairwise_nvlink", "a100_pair_nvlink"), "A100-PCIE-80GB"),
    **dict.fromkeys(("h100", "h100_dgx", "h100_nvlink"), "H100-SXM5-80GB"),
    **dict.fromkeys(("h100_pairwise_nvlink", "h100_pair_nvlink"), "H100-PCIE-80GB"),
    **dict.fromkeys(("a40", "a40_pairwise_nvlink", "a40_pair_nvlink"), "A40"),
}
_OPERATOR_RUNS, _COLLECTIVE_RUNS = 20, 3  # ACTIVE_STEPS of its mlp_wrapper.py and collectives_wrapper.py
_TIME = "the median in ms"
_ITEM_BYTES = 2  # float16


@dataclass(frozen=True, kw_only=True)
class Vidur(Importer):
    """Operators and collectives that vidur's simulator of LLM serving is made of, on A100, A40 and H100.

    A row's shapes are those of one device, so its `tensor_parallel` is 1. Collectives count ranks over the devices
    that took part, node by node. See [Agrawal et al., MLSys 2024](https://arxiv.org/abs/2405.05465).
    """

    name: ClassVar[str] = "vidur"
    published: ClassVar[datetime] = datetime(2024, 5, 13, tzinfo=UTC)  # the first day of MLSys 2024

    def files(self, path: Path) -> list[Path]:
        return sources.files_of(path, FILE_NAMES, WANTED)

    def batches(self, file: Path) -> Iterator[Batch]:
        found = columns_of(file)
        if holds_collectives(found):
            for frame in network_frames(file, found):
                yield self._collectives(file, frame)
        else:
            for frame in compute_frames(file, found):
                yield self._operators(file, frame)

    def _operators(self, path: Path, frame: pd.DataFrame) -> Batch:
        entries = zip(*(frame[column].tolist() for column in ("op", "M", "N", "K", "gated")), strict=True)
        things, devices, problems = self._things(frame, [(_kernel, entry) for entry in entries])
        used = np.array([isinstance(thing, Kernel) for thing in things], dtype=bool)
        kernels = [thing for thing in things if isinstance(thing, Kernel)]
        table = self.table(
            len(kernels),
            **kernel_columns(kernels),
            device_type=devices[used],
            seconds=_seconds(frame[used]),
            repeats=_OPERATOR_RUNS,
            how="vidur: median on the device, inside a transformer's block",
        )
        sound = np.array([problem is None for problem in problems], dtype=bool)
        untold = counted([("operators whose work the file does not tell", sound & ~used)])
        return _batch(path, frame, table, used, problems, skipped=untold, moved_bytes=moved_bytes(kernels))

    def _collectives(self, path: Path, frame: pd.DataFrame) -> Batch:
        columns = ("collective", "num_workers", "devices_per_node", "size")
        entries = zip(*(frame[column].tolist() for column in columns), strict=True)
        things, devices, problems = self._things(frame, [(_collective, entry) for entry in entries])
        used = np.array([isinstance(thing, Collective) for thing in things], dtype=bool)
        collectives = [thing for thing in things if isinstance(thing, Collective)]
        table = self.table(
            len(collectives),
            kind="collective",
            subject=[collective.subject for collective in collectives],
            name=[collective.name for collective in collectives],
            device_type=devices[used],
            dtype="float16",
            num_ranks=[collective.num_ranks for collective in collectives],
            size_bytes=frame.loc[used, "size"].to_numpy(np.int64),
            seconds=_seconds(frame[used]),
            repeats=_COLLECTIVE_RUNS,
            how="vidur: median of the NCCL kernel's time on rank 0",
            extra=[collective.to_json() for collective in collectives],
        )
        return _batch(path, frame, table, used, problems)

    def _things(self, frame: pd.DataFrame, calls: list[tuple[Any, tuple[Any, ...]]]) -> tuple[list[Any], Any, Any]:
        """Return what each row measured (None: unknown), on which device, and what is wrong with it."""
        problems = np.full(len(frame), None, dtype=object)
        if "problem" in frame:
            problems[:] = [problem or None for problem in frame["problem"]]
        flag_texts(_TIME, frame["ms"], problems)
        names = self.devices.knowing(USUAL_DEVICES)
        devices = devices_of(names, frame["device"].to_numpy(dtype=object), problems)
        things: list[Any] = []
        for row, (make, entry) in enumerate(calls):
            thing = None
            if problems[row] is None:
                try:
                    thing = make(*(None if part != part else part for part in entry))  # NaN is missing
                except ValueError as error:
                    problems[row] = str(error)
            things.append(thing)
        return things, devices, problems


def _batch(path: Path, frame: pd.DataFrame, table: pa.Table, used: Any, problems: Any, **more: Any) -> Batch:
    rows = frame["row"].to_numpy(np.int64)
    return Batch(
        file=path,
        table=table,
        positions=rows[used],
        num_read=len(frame),
        time_name=_TIME,
        time_seconds=1e-3,
        bad=tuple(BadRow(f"{path}: row {row}", bad) for row, bad in zip(rows, problems, strict=True) if bad),
        **more,
    )


def _seconds(frame: pd.DataFrame) -> Any:
    return numbers_of(frame["ms"]) / 1e3


@lru_cache(maxsize=100_000)
def _kernel(operation: str, tokens: Any, reduced: Any, width: Any, gated: bool | None) -> Kernel | None:
    """Return an operator's kernel; None where the file does not tell its work. Raises ValueError if not vidur's."""
    if operation not in OPERATORS:
        raise ValueError(f"unknown operator {operation!r}; wanted one of {', '.join(OPERATORS)}")
    m, n = whole("the tokens M", tokens), whole("the width K", width)
    if operation in PRODUCTS:
        k = whole("the reduced width N", reduced)
        read, written, flops = m * k + k * n, m * n, 2 * m * n * k
        return _float16("matmul", "mm", m, n, k, flops=flops, read=read, written=written)
    if operation in NORMS:
        # Its models with a gated MLP have RMS norms, the other one (phi-2) has layer norms.
        name, flops = ("rms_norm", 4 * m * n) if gated else ("layer_norm", 6 * m * n)
        return _float16("normalization", name, m, n, 1, flops=flops, read=m * n + n, written=m * n)
    if operation == "mlp_act" and gated is not None:
        name, inputs = ("silu_and_mul", 2) if gated else ("gelu", 1)
        return _float16("elementwise", name, m * n, 1, 1, flops=inputs * m * n, read=inputs * m * n, written=m * n)
    if operation == "add" and gated:
        return _float16("elementwise", "add", m * n, 1, 1, flops=m * n, read=2 * m * n, written=m * n)
    return None


def _float16(family: str, name: str, m: int, n: int, k: int, *, flops: int, read: int, written: int) -> Kernel:
    """`read` and `written` in elements."""
    return Kernel(
        family=family,
        name=name,
        dtype="float16",
        m=m,
        n=n,
        k=k,
        flops=float(flops),
        read_bytes=float(read * _ITEM_BYTES),
        written_bytes=float(written * _ITEM_BYTES),
    )


@lru_cache(maxsize=100_000)
def _collective(operation: str, num_workers: Any, devices_per_node: Any, size: Any) -> Collective:
    whole("size", size)
    if operation not in COLLECTIVES:
        raise ValueError(f"unknown collective {operation!r}; wanted one of {', '.join(COLLECTIVES)}")
    workers, each = whole("num_workers", num_workers), whole("devices_per_node", devices_per_node)
    if workers % each:
        raise ValueError(f"{workers} workers on nodes of {each}; wanted a multiple")
    ranks = (tuple(range(workers)),)
    return Collective(name=operation, replica_groups=ranks, mesh_nodes=workers // each, devices_per_node=each)
