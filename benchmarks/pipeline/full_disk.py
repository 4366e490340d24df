"""A small disk that can be filled: a tmpfs over a folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE_BYTES, BLOCK_BYTES = 64 * 2**20, 64 * 2**10


class Filler:
    """Fills the disk when called; `free` makes room again."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def __call__(self) -> None:
        with self._ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(BLOCK_BYTES))

    def free(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(folder: str, size_bytes: int = SIZE_BYTES) -> Iterator[Filler]:
    """The folder as a disk of its own.

    Raises:
        PermissionError: this process may not mount.
    """
    options = f"size={size_bytes}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "dejavu", folder], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"mount of a tmpfs: {done.stderr.strip()}")
    try:
        yield Filler(Path(folder))
    finally:
        subprocess.run(["umount", "-l", folder], check=True, capture_output=True)
