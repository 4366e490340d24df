"""Data for the zoo. To add a data set: its file, and one line in `DATASETS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dejavu.foundation.registry import Family, named
from dejavu.workload import Workload
from dejavu.workload.data._base import Batch, Dataset, ExampleShape
from dejavu.workload.data.cifar10 import Cifar10
from dejavu.workload.data.digits import Digits
from dejavu.workload.data.synthetic import Synthetic
from dejavu.workload.data.text import Text
from dejavu.workload.data.tokens import Tokens

__all__ = [
    "DATASETS",
    "Batch",
    "Cifar10",
    "Dataset",
    "Digits",
    "ExampleShape",
    "Synthetic",
    "Text",
    "Tokens",
    "dataset_of",
]


def _cifar10(workload: Workload) -> Cifar10:
    assert workload.images is not None  # checked by the workload
    return Cifar10(workload.images)


def _synthetic(workload: Workload) -> Synthetic:
    examples = workload.synthetic
    assert examples is not None  # likewise
    return Synthetic(examples.num_classes, workload.sequence_length, examples.image_shape)


def _tokens(workload: Workload) -> Tokens:
    found = workload.tokens
    assert found is not None  # likewise
    return Tokens(found.path, found.vocabulary, found.dtype, sequence_length=workload.sequence_length)


DATASETS: Family[Callable[[Workload], Dataset]] = Family(
    "data set",
    {
        "text": lambda workload: Text(workload.text, sequence_length=workload.sequence_length),
        "digits": lambda workload: Digits(),
        "cifar10": _cifar10,
        "synthetic": _synthetic,
        "tokens": _tokens,
    },
    field=("data",),
)


def dataset_of(workload: Workload) -> Dataset:
    """The data that the workload names, with the share of them that it holds out.

    Raises:
        InputError: there are none of that name.
    """
    return replace(named(DATASETS, workload.data)(workload), held_out=workload.held_out, split_seed=workload.seed)
