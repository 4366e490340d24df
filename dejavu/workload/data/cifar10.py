"""CIFAR-10 (Krizhevsky, 2009) in its binary form: 60,000 photographs of 32 × 32 pixels, of ten kinds of things."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.workload.data._base import Batch, ExampleShape, Part, Stored, split_rows

NUM_CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)  # channels, height, width: the order in which a record has its pixels
RECORD_BYTES = 1 + 3 * 32 * 32  # the label, then the pixels
UNPACKED = "cifar-10-batches-bin"  # the folder that the published archive unpacks to
_BRIGHTEST = 255.0  # a pixel's largest value
# Of the 50,000 training images, for red, green and blue, with pixels scaled to 0–1.
_MEAN = np.array([0.4914, 0.4822, 0.4465], dtype=np.float32).reshape(3, 1, 1)
_DEVIATION = np.array([0.2470, 0.2435, 0.2616], dtype=np.float32).reshape(3, 1, 1)


@dataclass(frozen=True)
class Cifar10(Stored):
    """Images, normalized by the data's mean and deviation per channel.

    The test images are those of test_batch.bin; where a share is held out, that share of the training images instead.

    Attributes:
        folder: has data_batch_1.bin to data_batch_5.bin (fewer will do) and test_batch.bin, or the folder
            cifar-10-batches-bin with them. The files are mapped, not read into memory.
    """

    folder: Path

    @property
    def shape(self) -> ExampleShape:
        return ExampleShape(IMAGE_SHAPE, torch.float32, (), NUM_CLASSES)

    @property
    def content_hash(self) -> str:
        return _read(self.folder).content_hash

    def parts(self) -> tuple[Part, Part]:
        files = _read(self.folder)
        train, held_out = split_rows(len(files.train), self.held_out, self.split_seed)
        of_their_own = Part(len(files.test), files.test.take)
        test = Part.of_rows(held_out, files.train.take) if self.held_out else of_their_own
        return Part.of_rows(train, files.train.take), test


@dataclass(frozen=True, eq=False)
class _Records:
    """The records of several files, one after the other; each file is (records, bytes of a record)."""

    files: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(len(file) for file in self.files)

    def take(self, rows: np.ndarray) -> Batch:
        ends = np.cumsum([len(file) for file in self.files])
        file_of = np.searchsorted(ends, rows, side="right")
        # Counted from their file's end: a negative number, by which numpy finds the same record.
        records = np.stack([self.files[i][row] for i, row in zip(file_of, rows - ends[file_of], strict=True)])
        pixels = records[:, 1:].reshape(-1, *IMAGE_SHAPE).astype(np.float32) / np.float32(_BRIGHTEST)
        return torch.from_numpy((pixels - _MEAN) / _DEVIATION), torch.from_numpy(records[:, 0].astype(np.int64))


@dataclass(frozen=True, eq=False)
class _Files:
    train: _Records
    test: _Records

    @cached_property
    def content_hash(self) -> str:
        """Hash all bytes, 150 MB: only once."""
        content = hashlib.sha256(f"{len(self.train)} to train on, {len(self.test)} to test on".encode())
        for file in (*self.train.files, *self.test.files):
            content.update(file.data)
        return content.hexdigest()[:16]


@cache
def _read(folder: Path) -> _Files:
    if (folder / UNPACKED).is_dir():
        folder /= UNPACKED
    train, test = sorted(folder.glob("data_batch_*.bin")), sorted(folder.glob("test_batch.bin"))
    if not train:
        raise InputError(
            f"{folder} has no data_batch_*.bin; wanted the files of CIFAR-10's binary version, data_batch_1.bin to "
            "data_batch_5.bin and test_batch.bin",
            ("images",),
        )
    return _Files(_Records(tuple(map(_map, train))), _Records(tuple(map(_map, test))))


def _map(path: Path) -> np.ndarray:
    """Map the records of one file, (records, bytes of a record), without reading them into memory.

    Raises:
        InputError: they are no records of CIFAR-10.
    """
    size_bytes = path.stat().st_size
    if size_bytes == 0 or size_bytes % RECORD_BYTES:
        raise InputError(
            f"{path} has {size_bytes:,} bytes; wanted a multiple of {RECORD_BYTES:,}, one label and "
            f"{RECORD_BYTES - 1:,} pixels for each image",
            ("images",),
        )
    records = np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).reshape(-1, RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= NUM_CLASSES)
    if len(wrong):
        raise InputError(
            f"{path}: the label of record {wrong[0]} (counted from 0) is {records[wrong[0], 0]}; "
            f"wanted 0 to {NUM_CLASSES - 1}",
            ("images",),
        )
    return records
