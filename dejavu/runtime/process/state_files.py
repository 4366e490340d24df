"""An optimizer's state on a node's disks: tensors in mapped files, which the system reads and writes as they are used.

What was written lately stays in the node's memory as long as there is room (the page cache); the system takes it back
when others need it.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import torch

from dejavu.foundation.errors import DejavuError


class DiskError(DejavuError):
    """The node's disks cannot take the state."""


class StateFiles:
    """Makes tensors in files of a folder. A file has no name once it is mapped: it goes with its process, however.

    Args:
        folder: on this node's disks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.used_bytes = folder, 0

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor in a file of its own.

        Raises:
            DiskError: there is no such folder, or it has no room.
        """
        size_bytes = max(1, math.prod(shape) * dtype.itemsize)
        try:
            file, name = tempfile.mkstemp(prefix="state-", dir=self.folder)
        except OSError as error:
            raise DiskError(f"the optimizer's state cannot be kept in {self.folder}: {error.strerror}") from error
        try:
            # Taken now: of a mapped file that gets no room later the process dies without a word (SIGBUS).
            os.posix_fallocate(file, 0, size_bytes)
            stored = torch.UntypedStorage.from_file(name, True, size_bytes)
        except OSError as error:
            raise DiskError(
                f"the optimizer's state cannot be kept in {self.folder}: {error.strerror} for {size_bytes:,} bytes, "
                f"after the {self.used_bytes:,} that this rank has there"
            ) from error
        finally:
            os.close(file)
            Path(name).unlink()
        self.used_bytes += size_bytes
        made: torch.Tensor = torch.empty(0, dtype=dtype).set_(stored, 0, shape)  # type: ignore[call-overload]
        return made
