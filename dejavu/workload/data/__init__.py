"""Data for the zoo. To add a data set: its file, and one line in `DATASETS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dejavu.workload import Workload
from dejavu.workload.data._base import Dataset, ExampleShape
from dejavu.workload.data.cifar10 import Cifar10
from dejavu.workload.data.digits import Digits
from dejavu.workload.data.synthetic import Synthetic
from dejavu.workload.data.text import Text

__all__ = ["DATASETS", "Cifar10", "Dataset", "Digits", "ExampleShape", "Synthetic", "Text", "dataset_of"]

DATASETS: dict[str, Callable[[Any], Dataset]] = {  # of a workload that has what its data needs
    "text": lambda workload: Text(workload.text, workload.sequence_length),
    "digits": lambda workload: Digits(),
    "cifar10": lambda workload: Cifar10(workload.images),
    "synthetic": lambda workload: Synthetic(
        workload.synthetic.num_classes, workload.sequence_length, workload.synthetic.image_shape
    ),
}


def dataset_of(workload: Workload) -> Dataset:
    """The data that the workload names, with the share of them that it holds out."""
    return replace(DATASETS[workload.data](workload), held_out=workload.held_out, split_seed=workload.seed)
