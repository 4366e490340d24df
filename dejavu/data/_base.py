"""What every data set gives: any step's batch, computed from its number alone, so that a resumed run sees the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExampleShape:
    """One example without the batch: what a model is fed and what its loss compares with.

    Attributes:
        input_shape, input_dtype: of one example.
        target_shape: of one example's targets, integer classes.
        num_classes: how many values an input token (text) or a target (images) can take.
    """

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    target_shape: tuple[int, ...]
    num_classes: int


class Dataset(ABC):
    """Examples, addressed by step: no iterator, no state to save."""

    @property
    @abstractmethod
    def shape(self) -> ExampleShape:
        """The shape of one example."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The same for the same examples, whatever their file is called."""

    @abstractmethod
    def batch(self, step: int, batch_size: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one step, the same wherever and whenever it is asked."""
