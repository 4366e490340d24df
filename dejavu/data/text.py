"""Characters (bytes) of real text, to be continued by a language model."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from dejavu.data._base import Dataset, ExampleShape
from dejavu.errors import InputError

NUM_BYTES = 256
_MOST_BYTES = 8 * 2**20  # enough for any run of the small models here; larger texts are cut, not refused


@dataclass(frozen=True)
class Text(Dataset):
    """Windows of a text, byte by byte; the target is the same window one byte later.

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
    def fingerprint(self) -> str:
        return hashlib.sha256(_read(self.path).tobytes()).hexdigest()[:16]

    def batch(self, step: int, batch_size: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = _read(self.path)
        room = len(text) - self.sequence_length
        if room < 1:
            raise InputError(
                f"the text {self.path} has {len(text)} bytes; wanted more than {self.sequence_length}", ("text",)
            )
        starts = np.random.default_rng((seed, step)).integers(0, room, size=batch_size)
        windows = torch.from_numpy(np.stack([text[at : at + self.sequence_length + 1] for at in starts])).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@cache
def _read(path: Path | None) -> np.ndarray:
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in {".txt", ".md", ".py"})
    else:
        files = [path]
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= _MOST_BYTES:
            break
    if not text:
        raise InputError(
            f"no text was found in {path or 'the standard library'}; wanted a file, or .txt .md .py files", ("text",)
        )
    return np.frombuffer(bytes(text[:_MOST_BYTES]), dtype=np.uint8)
