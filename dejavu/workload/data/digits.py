"""scikit-learn's handwritten digits: 1,797 real images of 8 × 8 pixels that come with the library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
    from sklearn.datasets import load_digits  # half a second to import, and only these data need it

    images, labels = load_digits(return_X_y=True)
    return (images / _BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


@cache
def _hash() -> str:
    return hash_of(_read()[0].tobytes())
