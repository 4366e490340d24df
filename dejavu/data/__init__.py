"""Real data for the zoo. To add a data set: its file, and one line in `dataset_of`."""

from __future__ import annotations

from dejavu.data._base import Dataset, ExampleShape
from dejavu.data.digits import Digits
from dejavu.data.text import Text
from dejavu.workload import Workload

__all__ = ["DATASETS", "Dataset", "Digits", "ExampleShape", "Text", "dataset_of"]

DATASETS = {
    "text": lambda workload: Text(workload.text, workload.sequence_length),
    "digits": lambda workload: Digits(),
}


def dataset_of(workload: Workload) -> Dataset:
    """The data that the workload names."""
    return DATASETS[workload.data](workload)
