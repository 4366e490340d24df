"""Kernels as columns of the database, shared by the importers of single kernels.

Convention: `kind` is operator, `subject` is `Kernel.subject`, `extra` is `Kernel.to_json()` and nothing else, `name` is
`<family> <name>`, there is no direction (a kernel is the same work in either pass), and `tensor_parallel` is 1: shapes
are those of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError
from dejavu.importers.devices import DeviceNames
from dejavu.profiles.kernel import Kernel

_REMEMBERED_KERNELS = 200_000  # devices are measured with the same shapes: some 100 MB save most of the hashing


def kernel_columns(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return the columns that follow from each row's kernel."""
    known = [_known(kernel) for kernel in kernels]
    return {
        "kind": "operator",
        "subject": [subject for subject, _ in known],
        "name": [f"{kernel.family} {kernel.name}" for kernel in kernels],
        "dtype": [kernel.dtype for kernel in kernels],
        "flops": [kernel.flops for kernel in kernels],
        "extra": [text for _, text in known],
    }


def moved_bytes(kernels: Sequence[Kernel]) -> NDArray[np.float64]:
    """Return what each reads and writes at least."""
    return np.array([kernel.read_bytes + kernel.written_bytes for kernel in kernels], dtype=np.float64)


@lru_cache(maxsize=_REMEMBERED_KERNELS)
def _known(kernel: Kernel) -> tuple[str, str]:
    return kernel.subject, kernel.to_json()


def devices_of(names: DeviceNames, found: NDArray[np.object_], problems: NDArray[np.object_]) -> NDArray[np.object_]:
    """Return the catalogue's name for each row; where there is none, record that in `problems`."""
    resolved = np.full(len(found), None, dtype=object)
    for device in dict.fromkeys(found.tolist()):
        rows = found == device
        try:
            resolved[rows] = names.resolve(device)
        except InputError as error:
            problems[rows] = str(error)
    return resolved
