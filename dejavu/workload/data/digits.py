"""scikit-learn's handwritten digits: 1,797 real images of 8 × 8 pixels that come with the library."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from dejavu.workload.data._base import Batch, ExampleShape, Part, Stored, hash_of, split_rows

_BRIGHTEST = 16.0  # a pixel's largest value in the data set


@dataclass(frozen=True)
class Digits(Stored):
    """Images scaled to 0–1."""

    @property
    def shape(self) -> ExampleShape:
        return ExampleShape((1, 8, 8), torch.float32, (), 10)

    @property
    def content_hash(self) -> str:
        return _hash()

    def parts(self) -> tuple[Part, Part]:
        train, test = split_rows(len(_read()[0]), self.held_out, self.split_seed)
        return Part.of_rows(train, _take), Part.of_rows(test, _take)


def _take(rows: np.ndarray) -> Batch:
    images, labels = _read()
    return torch.from_numpy(images[rows]), torch.from_numpy(labels[rows])


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Read the file that `sklearn.datasets.load_digits` reads, without the second that importing scikit-learn takes."""
    found = find_spec("sklearn")
    assert found is not None and found.submodule_search_locations
    with gzip.open(Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    images, labels = rows[:, :-1], rows[:, -1]
    return (images / _BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


@cache
def _hash() -> str:
    return hash_of(_read()[0].tobytes())
