"""Random examples of any shape, to plan for a model whose data is not here, or to check that it trains at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dejavu.workload.data._base import Batch, Dataset, ExampleShape, hash_of, nothing_held_out, stream_of_tests

# Low numbers come up more often, as words do: a model can learn at least that, so its loss falls.
_SKEW = 3


@dataclass(frozen=True)
class Synthetic(Dataset):
    """Tokens, the target being the next one, or images that are noise made brighter by their class.

    The data is infinite: any held-out share is a random stream of its own.

    Attributes:
        num_classes: values that a token can take, or classes of images.
        sequence_length: tokens in one example.
        image_shape: channels, height, width; None: tokens.
    """

    num_classes: int
    sequence_length: int = 128
    image_shape: tuple[int, int, int] | None = None

    @property
    def shape(self) -> ExampleShape:
        if self.image_shape:
            return ExampleShape(self.image_shape, torch.float32, (), self.num_classes)
        return ExampleShape((self.sequence_length,), torch.int64, (self.sequence_length,), self.num_classes)

    @property
    def content_hash(self) -> str:
        return hash_of(f"{self!r} skew={_SKEW}".encode())

    def batch(self, step: int, batch_size: int, *, seed: int) -> Batch:
        return self._drawn(np.random.default_rng((seed, step)), batch_size)

    def test_batch(self, count: int, *, seed: int) -> Batch:
        if not self.held_out:
            raise nothing_held_out()
        return self._drawn(stream_of_tests(seed), count)

    def _drawn(self, random: np.random.Generator, count: int) -> Batch:
        if self.image_shape:
            labels = random.integers(0, self.num_classes, size=count)
            images = random.standard_normal((count, *self.image_shape), dtype=np.float32)
            images += (labels / self.num_classes).astype(np.float32).reshape(-1, 1, 1, 1)
            return torch.from_numpy(images), torch.from_numpy(labels)
        uniform = random.random((count, self.sequence_length + 1))
        tokens = torch.from_numpy((self.num_classes * uniform**_SKEW).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
