"""Characters (bytes) of real text, to be continued by a language model."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.workload.data._base import Batch, ExampleShape, Part, Stored, hash_of, split_rows

NUM_BYTES = 256
LIBRARY = "Python's standard library"
_MOST_BYTES = 8 * 2**20  # enough for any run of the small models here; larger texts are truncated
# A text is held out in blocks: many, so that both parts are of the same kinds of text; few, so that each is long.
NUM_BLOCKS = 64


@dataclass(frozen=True)
class Text(Stored):
    """Windows of a text, byte by byte; the target is the same window one byte later.

    Whole blocks of 1/64 of the text are held out. No window spans both parts, so no test byte was ever trained on.

    Attributes:
        path: a file, or a folder whose *.txt, *.md and *.py files are joined in the order of their names;
            None: the modules of Python's standard library on this machine.
        sequence_length: bytes in one example.
    """

    path: Path | None = None
    sequence_length: int = 128

    @property
    def shape(self) -> ExampleShape:
        return ExampleShape((self.sequence_length,), torch.int64, (self.sequence_length,), NUM_BYTES)

    @property
    def content_hash(self) -> str:
        return _read(self.path)[1]

    def parts(self) -> tuple[Part, Part]:
        text, _ = _read(self.path)
        if len(text) <= self.sequence_length:
            raise InputError(
                f"the text of {self.path or LIBRARY} has {len(text)} bytes; wanted more than the sequence_length of "
                f"{self.sequence_length}",
                ("text",),
            )
        train, test = split_rows(NUM_BLOCKS, self.held_out, self.split_seed)
        return self._windows(text, _runs(len(text), train)), self._windows(text, _runs(len(text), test))

    def _windows(self, text: np.ndarray, runs: np.ndarray) -> Part:
        """Return all windows inside one of these ranges of bytes, (range, begin and end)."""
        length = self.sequence_length
        ends = np.cumsum(np.maximum(runs[:, 1] - runs[:, 0] - length, 0))  # of each run's windows, all counted on

        def take(places: np.ndarray) -> Batch:
            run = np.searchsorted(ends, places, side="right")
            starts = runs[run, 1] - length - (ends[run] - places)
            windows = torch.from_numpy(text[starts[:, None] + np.arange(length + 1)]).long()
            return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

        return Part(int(ends[-1]) if len(ends) else 0, take)


def _runs(num_bytes: int, blocks: np.ndarray) -> np.ndarray:
    """Return begin and end of each range of adjacent blocks; `blocks` ascend."""
    bounds = np.arange(NUM_BLOCKS + 1) * num_bytes // NUM_BLOCKS
    first = blocks[np.diff(blocks, prepend=-2) > 1]
    last = blocks[np.diff(blocks, append=NUM_BLOCKS + 1) > 1]
    return np.stack([bounds[first], bounds[last + 1]], axis=1)


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
        raise InputError(f"no text was found in {path or LIBRARY}; wanted a file, or .txt .md .py files", ("text",))
    text = bytes(joined)
    return np.frombuffer(text, dtype=np.uint8), hash_of(text)
