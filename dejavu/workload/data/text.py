"""Characters (bytes) of real text, to be continued by a language model."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.workload.data._base import ExampleShape, hash_of
from dejavu.workload.data._windows import Windows

NUM_BYTES = 256
LIBRARY = "Python's standard library"
_MOST_BYTES = 8 * 2**20  # enough for any run of the small models here; larger texts are truncated


@dataclass(frozen=True)
class Text(Windows):
    """Windows of a text, byte by byte; the target is the same window one byte later.

    Attributes:
        path: a file, or a folder whose *.txt, *.md and *.py files are joined in the order of their names;
            None: the modules of Python's standard library on this machine.
    """

    path: Path | None = None
    unit = "bytes"

    @property
    def shape(self) -> ExampleShape:
        return ExampleShape((self.sequence_length,), torch.int64, (self.sequence_length,), NUM_BYTES)

    @property
    def content_hash(self) -> str:
        return _read(self.path)[1]

    def sequence(self) -> np.ndarray:
        return _read(self.path)[0]

    @property
    def told(self) -> str:
        return f"the text of {self.path or LIBRARY}"


@cache
def _read(path: Path | None) -> tuple[np.ndarray, str]:
    """Return the text and its hash."""
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in {".txt", ".md", ".py"} and file.is_file())
    elif path.is_file():
        files = [path]
    else:  # a device or a pipe, which may never end
        raise InputError(f"{path} is neither a file nor a folder; wanted one of them", ("text",))
    joined = bytearray()
    for file in files:
        try:
            with file.open("rb") as opened:
                joined += opened.read(_MOST_BYTES - len(joined))
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or error}", ("text",)) from error
        if len(joined) >= _MOST_BYTES:
            break
    if not joined:
        wanted = "a file that is not empty" if files else "a file, or a folder with .txt, .md or .py files"
        raise InputError(f"no text was found in {path or LIBRARY}; wanted {wanted}", ("text",))
    text = bytes(joined)
    return np.frombuffer(text, dtype=np.uint8), hash_of(text)
