"""Data for the zoo. To add a data set: its file, and one line in `dataset_of`."""

from __future__ import annotations

from dejavu.data._base import Dataset, ExampleShape
from dejavu.data.digits import Digits
from dejavu.data.synthetic import Synthetic
from dejavu.data.text import Text
from dejavu.workload import Workload

__all__ = ["DATASETS", "Dataset", "Digits", "ExampleShape", "Synthetic", "Text", "dataset_of"]

DATASETS = {
    "text": lambda workload: Text(workload.text, workload.sequence_length),
    "digits": lambda workload: Digits(),
    "synthetic": lambda workload: Synthetic(
        workload.synthetic.num_classes, workload.sequence_length, workload.synthetic.image_shape
    ),
}


def dataset_of(workload: Workload) -> Dataset:
    """The data that the workload names."""
    return DATASETS[workload.data](workload)
