"""The interface of data sets: a step's batch depends on its number alone, so that a resumed run sees the same data."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch

from dejavu.foundation.errors import InputError

Batch = tuple[torch.Tensor, torch.Tensor]

# Spawn keys: streams of random numbers apart from each other and from that of every step.
_SPLIT_STREAM, _TEST_STREAM = 0, 1


@dataclass(frozen=True)
class ExampleShape:
    """The shape of one example, without the batch: a model's input and its loss's target.

    Attributes:
        input_shape, input_dtype: of one example.
        target_shape: of one example's targets, integer classes.
        num_classes: how many values an input token (text) or a target (images) can take.
    """

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    target_shape: tuple[int, ...]
    num_classes: int

    @property
    def length(self) -> int:
        """How many positions an input has: its first dimension. One where it is a single number."""
        return self.input_shape[0] if self.input_shape else 1


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """Examples, addressed by step: no iterator, no state to save.

    Attributes:
        held_out: share of the examples that no step trains on.
        split_seed: decides which ones.
    """

    held_out: float = field(default=0.0, repr=False)  # repr: what describes the examples leaves their parts out
    split_seed: int = field(default=0, repr=False)

    @property
    @abstractmethod
    def shape(self) -> ExampleShape:
        """The shape of one example."""

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """A hash of the examples, independent of their file's name."""

    @property
    def fingerprint(self) -> str:
        """A hash of the examples and of which are held out."""
        if not self.held_out:
            return self.content_hash
        return hash_of(f"{self.content_hash} held_out={self.held_out!r} seed={self.split_seed}".encode())

    @abstractmethod
    def batch(self, step: int, batch_size: int, *, seed: int) -> Batch:
        """Return inputs and targets of one step, deterministically.

        Raises:
            InputError: `held_out` leaves nothing to train on, or nothing to test on.
        """

    def part_of_batch(self, step: int, batch_size: int, rows: np.ndarray, *, seed: int) -> Batch:
        """Return only these examples of a step's batch, by their places in it; others need not be read."""
        inputs, targets = self.batch(step, batch_size, seed=seed)
        return inputs[rows], targets[rows]

    def check(self, batch_size: int) -> None:  # noqa: B027  # most data have no end
        """Check that there are enough examples for a step.

        Raises:
            InputError: there are not.
        """

    @abstractmethod
    def test_batch(self, count: int, *, seed: int) -> Batch:
        """Return so many distinct examples that no step trains on; all of them where there are fewer.

        Raises:
            InputError: there is none: `held_out` is 0, and the data have no test part of their own.
        """


@dataclass(frozen=True)
class Part:
    """Examples to train on, or to test on.

    Attributes:
        take: the examples at these places (whole numbers below `num_examples`).
    """

    num_examples: int
    take: Callable[[np.ndarray], Batch]

    @classmethod
    def of_rows(cls, rows: np.ndarray, take: Callable[[np.ndarray], Batch]) -> Part:
        """Make a part of some rows of a table; `take` gives any row of it."""
        return cls(len(rows), lambda places: take(rows[places]))


@dataclass(frozen=True)
class Stored(Dataset):
    """A limited number of examples. Steps draw with replacement, tests without."""

    @abstractmethod
    def parts(self) -> tuple[Part, Part]:
        """Return the training part and the test part; the latter is empty where nothing is held out."""

    def check(self, batch_size: int) -> None:
        train, _ = self._usable_parts
        if train.num_examples < batch_size:
            raise InputError(
                f"there are {train.num_examples:,} examples to train on, and a step takes {batch_size:,}; wanted a "
                "batch_size of no more, or more data",
                ("batch_size",),
            )

    def batch(self, step: int, batch_size: int, *, seed: int) -> Batch:
        return self.part_of_batch(step, batch_size, np.arange(batch_size), seed=seed)

    def part_of_batch(self, step: int, batch_size: int, rows: np.ndarray, *, seed: int) -> Batch:
        train, _ = self._usable_parts
        return train.take(np.random.default_rng((seed, step)).integers(0, train.num_examples, size=batch_size)[rows])

    def test_batch(self, count: int, *, seed: int) -> Batch:
        _, test = self._usable_parts
        if not test.num_examples:
            raise nothing_held_out()
        return test.take(stream_of_tests(seed).choice(test.num_examples, min(count, test.num_examples), replace=False))

    @cached_property  # otherwise a text's windows would be counted for every batch
    def _usable_parts(self) -> tuple[Part, Part]:
        train, test = self.parts()
        if self.held_out and not (train.num_examples and test.num_examples):
            raise InputError(
                f"held_out {self.held_out:g} leaves {train.num_examples:,} examples to train on and "
                f"{test.num_examples:,} to test on; wanted at least one of each",
                ("held_out",),
            )
        return train, test


@lru_cache(maxsize=64)  # splits: a permutation of 50,000 rows takes milliseconds, as much as a small model's step
def split_rows(num_rows: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and those held out, each in ascending order; none are held out for share 0."""
    order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_SPLIT_STREAM,))).permutation(num_rows)
    num_held_out = round(share * num_rows)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])


def stream_of_tests(seed: int) -> np.random.Generator:
    """Return the random stream that chooses or generates test examples."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_TEST_STREAM,)))


def nothing_held_out() -> InputError:
    """Return the error for test examples where there are none."""
    return InputError(
        "held_out is 0 and the data have no test part of their own; wanted a share of the examples, as 0.1",
        ("held_out",),
    )


def hash_of(content: bytes) -> str:
    """Hash the content to 16 hex digits."""
    return hashlib.sha256(content).hexdigest()[:16]
