"""Data for the zoo. To add a data set: its file, and one line in `DATASETS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dejavu.foundation.registry import Family, named
from dejavu.workload import Workload
from dejavu.workload.data._base import Batch, Dataset, ExampleShape
from dejavu.workload.data.cifar10 import Cifar10
from dejavu.workload.data.digits import Digits
from dejavu.workload.data.examples import Examples, Stream, examples_of
from dejavu.workload.data.image_folder import ImageFolder
from dejavu.workload.data.prepared import Columns, Documents
from dejavu.workload.data.synthetic import Synthetic
from dejavu.workload.data.text import Text
from dejavu.workload.data.tokens import Tokens

__all__ = [
    "DATASETS",
    "Batch",
    "Cifar10",
    "Columns",
    "Dataset",
    "Digits",
    "Documents",
    "ExampleShape",
    "Examples",
    "ImageFolder",
    "Stream",
    "Synthetic",
    "Text",
    "Tokens",
    "check_data",
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


def _text(workload: Workload) -> Dataset:
    if workload.tokenizer is None:
        return Text(workload.text, sequence_length=workload.sequence_length)
    assert workload.text is not None  # likewise
    return Documents(workload.text, workload.tokenizer, sequence_length=workload.sequence_length)


def _parquet(workload: Workload) -> Dataset:
    found, length = workload.parquet, workload.sequence_length
    assert found is not None  # likewise
    if found.target is not None:
        return Columns(found.path, found.features, found.target)
    if found.text is not None:
        return Documents(found.path, workload.tokenizer, found.text, sequence_length=length)
    return Documents(found.path, None, found.tokens, found.vocabulary, found.end_token, sequence_length=length)


def _image_folder(workload: Workload) -> ImageFolder:
    found = workload.image_folder
    assert found is not None  # likewise
    return ImageFolder(found.path, found.shape)


def _examples(workload: Workload) -> Dataset:
    assert workload.examples is not None  # likewise
    return examples_of(workload.examples)


DATASETS: Family[Callable[[Workload], Dataset]] = Family(
    "data set",
    {
        "text": _text,
        "digits": lambda workload: Digits(),
        "cifar10": _cifar10,
        "synthetic": _synthetic,
        "tokens": _tokens,
        "parquet": _parquet,
        "image_folder": _image_folder,
        "examples": _examples,
    },
    field=("data",),
)


def check_data(workload: Workload) -> None:
    """Check that the workload's data can be trained on, and evaluated where it wants that.

    Raises:
        InputError: they cannot be read, there are fewer examples than a step takes, or none is held out.
    """
    data = dataset_of(workload)
    data.check(workload.batch_size)
    if workload.evaluate_every:
        data.test_batch(1, seed=workload.seed)


def dataset_of(workload: Workload) -> Dataset:
    """The data that the workload names, with the share of them that it holds out.

    Raises:
        InputError: there are none of that name.
    """
    return replace(named(DATASETS, workload.data)(workload), held_out=workload.held_out, split_seed=workload.seed)
