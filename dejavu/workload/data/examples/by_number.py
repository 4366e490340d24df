"""A torch Dataset: examples by their number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dejavu.foundation.errors import OWN_CODE, InputError
from dejavu.workload.data._base import Batch, ExampleShape, Part, Stored, hash_of, split_rows
from dejavu.workload.data.examples.making import FIELD, as_pair, code_of, known, stacked
from dejavu.workload.data_settings import ExamplesSettings

SAMPLES = 16  # of all examples, that the hash is of


@dataclass(frozen=True)
class Examples(Stored):
    """Examples of a Dataset; each is made when a step wants it.

    Attributes:
        given: the Dataset to train on, and perhaps another to test on, which is taken where nothing is held out.
    """

    settings: ExamplesSettings
    given: Sequence[Any] = field(repr=False)

    @property
    def shape(self) -> ExampleShape:
        return known(self.settings).shape

    @cached_property
    def content_hash(self) -> str:
        """A hash of the factory's file and options, of the number of examples, and of some of them."""
        hashed = hashlib.sha256(f"{code_of(self.settings)} {self.settings.options}".encode())
        for data in self.given:
            hashed.update(f"{len(data)} ".encode())
            for number in np.unique(np.linspace(0, len(data) - 1, SAMPLES).astype(np.int64)):
                what, example = self._at(data, int(number))
                for tensor in as_pair(example, what):
                    hashed.update(tensor.contiguous().numpy().tobytes())
        return hash_of(hashed.digest())

    def parts(self) -> tuple[Part, Part]:
        data = self.given[0]
        train, held_out = split_rows(len(data), self.held_out, self.split_seed)
        if self.held_out or len(self.given) == 1:
            return Part.of_rows(train, self._taken_from(data)), Part.of_rows(held_out, self._taken_from(data))
        return Part.of_rows(train, self._taken_from(data)), Part(len(self.given[1]), self._taken_from(self.given[1]))

    def _taken_from(self, data: Any) -> Any:
        def take(rows: np.ndarray) -> Batch:
            return stacked([self._at(data, int(row)) for row in rows], self.shape)

        return take

    def _at(self, data: Any, number: int) -> tuple[str, Any]:
        """Return what an example is called, and the example."""
        what = f"{self.settings.factory}[{number}]"
        try:
            return what, data[number]
        except OWN_CODE as error:
            raise InputError(f"{what} fails: {type(error).__name__}: {error}", FIELD) from error
