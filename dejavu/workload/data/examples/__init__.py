"""A person's own examples: a torch Dataset, by number, or an IterableDataset, one after the other."""

from dejavu.workload.data.examples.by_number import Examples
from dejavu.workload.data.examples.making import examples_of
from dejavu.workload.data.examples.one_after_the_other import Stream

__all__ = ["Examples", "Stream", "examples_of"]
