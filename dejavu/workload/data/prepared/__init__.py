"""Data that are brought into a form to be mapped, once: tokens of texts, and columns of numbers."""

from dejavu.workload.data.prepared.columns import Columns
from dejavu.workload.data.prepared.documents import Documents

__all__ = ["Columns", "Documents"]
