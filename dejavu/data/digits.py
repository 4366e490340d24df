"""scikit-learn's handwritten digits: 1,797 real images of 8 × 8 pixels that come with the library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from dejavu.data._base import Dataset, ExampleShape

_BRIGHTEST = 16.0  # a pixel's largest value in the data set


@dataclass(frozen=True)
class Digits(Dataset):
    """Images scaled to 0–1, drawn with replacement."""

    @property
    def shape(self) -> ExampleShape:
        return ExampleShape((1, 8, 8), torch.float32, (), 10)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(_read()[0].tobytes()).hexdigest()[:16]

    def batch(self, step: int, batch_size: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = _read()
        rows = np.random.default_rng((seed, step)).integers(0, len(images), size=batch_size)
        return torch.from_numpy(images[rows]), torch.from_numpy(labels[rows])


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # half a second to import, and only these data need it

    images, labels = load_digits(return_X_y=True)
    return (images / _BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)
