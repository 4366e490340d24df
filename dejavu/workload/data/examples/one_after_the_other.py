"""A torch IterableDataset: examples that have no numbers, only an order.

A step's batch is that of its number all the same: the stream is read in blocks, a block's order follows from the seed
and the block's number, and a step takes the next examples. A step that does not follow the one before, as the first
after a restart, makes the stream anew and reads on to its place; reading is all that costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from dejavu.foundation.errors import OWN_CODE, InputError
from dejavu.workload.data._base import Batch, Dataset, ExampleShape, hash_of, nothing_held_out
from dejavu.workload.data.examples.making import (
    FIELD,
    code_of,
    known,
    made_by,
    stacked,
)
from dejavu.workload.data_settings import ExamplesSettings

HELD_OUT_BLOCK = 1024  # so many consecutive examples at least are divided into those to train on and those held out
_SPLIT, _ORDER = 2, 3  # streams of random numbers, apart from those of other data


@dataclass(frozen=True)
class Stream(Dataset):
    """Examples of an IterableDataset, over and over; a share of every block is held out."""

    settings: ExamplesSettings
    _reading: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def shape(self) -> ExampleShape:
        return known(self.settings).shape

    @property
    def content_hash(self) -> str:
        return hash_of(f"{code_of(self.settings)} {self.settings!r}".encode())

    def batch(self, step: int, batch_size: int, *, seed: int) -> Batch:
        place = (step, batch_size, seed)
        if self._reading.get("place") != place:
            self._reading["stream"] = self._training(seed)
            for _ in islice(self._reading["stream"], step * batch_size):
                pass
        found = list(islice(self._reading["stream"], batch_size))
        self._reading["place"] = (step + 1, batch_size, seed)
        return stacked(found, self.shape)

    def test_batch(self, count: int, *, seed: int) -> Batch:
        if not self.held_out:
            raise nothing_held_out()
        held = (one for _, block in self._blocks() for one in block[0])
        found = list(islice(held, count))
        if not found:
            raise InputError(
                f"held_out {self.held_out:g} leaves no example of {self.settings.factory} to test on; wanted a larger "
                "share",
                ("held_out",),
            )
        return stacked(found, self.shape)

    def _training(self, seed: int) -> Iterator[tuple[str, Any]]:
        """Return the examples to train on in their order, without end."""
        turn = 0
        while True:
            any_there = False
            for number, (_, own) in self._blocks():
                order = np.random.default_rng((seed, _ORDER, turn, number)).permutation(len(own))
                shuffled = (own[k] for k in (order if self.settings.shuffled > 1 else range(len(own))))
                for one in shuffled:
                    any_there = True
                    yield one
            if not any_there:
                raise InputError(
                    f"{self.settings.factory} has no examples to train on; wanted at least one that is not held out",
                    FIELD,
                )
            turn += 1

    def _blocks(self) -> Iterator[tuple[int, tuple[list[Any], list[Any]]]]:
        """Return each block's number, its held-out examples, and those to train on; with what each is called."""
        size = max(self.settings.shuffled, HELD_OUT_BLOCK if self.held_out else 1)
        examples, number = self._named(), 0
        while block := list(islice(examples, size)):
            order = np.random.default_rng((self.split_seed, _SPLIT, number)).permutation(len(block))
            held = set(order[: round(self.held_out * len(block))].tolist())
            yield number, ([block[k] for k in sorted(held)], [one for k, one in enumerate(block) if k not in held])
            number += 1

    def _named(self) -> Iterator[tuple[str, Any]]:
        factory, number = self.settings.factory, 0
        stream = iter(made_by(self.settings))
        while True:
            try:
                example = next(stream)
            except StopIteration:
                return
            except OWN_CODE as error:
                what = f"{type(error).__name__}: {error}"
                raise InputError(f"example {number:,} of {factory} fails: {what}", FIELD) from error
            yield f"example {number:,} of {factory}", example
            number += 1
