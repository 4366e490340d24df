"""Windows of one long sequence, to be continued by a language model."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.workload.data._base import Batch, Part, Stored, split_rows

# A sequence is held out in blocks: many, so that both parts are of the same kinds of text; few, so that each is long.
NUM_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class Windows(Stored):
    """Windows of a sequence of whole numbers; the target is the same window one place later.

    Whole blocks of 1/64 of the sequence are held out. No window spans both parts, so nothing tested on was trained on.

    Attributes:
        sequence_length: numbers in one example.
    """

    sequence_length: int = 128
    unit: ClassVar[str]  # what one number is, in the plural

    @abstractmethod
    def sequence(self) -> np.ndarray:
        """Return the whole sequence, perhaps as a mapping of a file."""

    @property
    @abstractmethod
    def told(self) -> str:
        """What the sequence is, for messages."""

    @property
    def where(self) -> tuple[str, ...]:
        """The field of the workload that says where the sequence is, for errors."""
        return (type(self).__name__.lower(),)

    def parts(self) -> tuple[Part, Part]:
        sequence = self.sequence()
        if len(sequence) <= self.sequence_length:
            raise InputError(
                f"{self.told} has {len(sequence):,} {self.unit}; wanted more than the sequence_length of "
                f"{self.sequence_length:,}",
                self.where,
            )
        train, test = split_rows(NUM_BLOCKS, self.held_out, self.split_seed)
        return self._part(sequence, _runs(len(sequence), train)), self._part(sequence, _runs(len(sequence), test))

    def windows(self, sequence: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the windows that begin there, one longer than an example."""
        found: np.ndarray = sequence[starts[:, None] + np.arange(self.sequence_length + 1)]
        return found

    def _part(self, sequence: np.ndarray, runs: np.ndarray) -> Part:
        """Return all windows inside one of these ranges, (range, begin and end)."""
        length = self.sequence_length
        ends = np.cumsum(np.maximum(runs[:, 1] - runs[:, 0] - length, 0))  # of each run's windows, all counted on

        def take(places: np.ndarray) -> Batch:
            run = np.searchsorted(ends, places, side="right")
            starts = runs[run, 1] - length - (ends[run] - places)
            windows = torch.from_numpy(self.windows(sequence, starts).astype(np.int64))
            return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

        return Part(int(ends[-1]) if len(ends) else 0, take)


def _runs(length: int, blocks: np.ndarray) -> np.ndarray:
    """Return begin and end of each range of adjacent blocks; `blocks` ascend."""
    bounds = np.arange(NUM_BLOCKS + 1) * length // NUM_BLOCKS
    first = blocks[np.diff(blocks, prepend=-2) > 1]
    last = blocks[np.diff(blocks, append=NUM_BLOCKS + 1) > 1]
    return np.stack([bounds[first], bounds[last + 1]], axis=1)
