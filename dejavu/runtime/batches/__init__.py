"""What a rank reads: the examples of a step, and those that are held out."""

from dejavu.runtime.batches.ahead import Reader
from dejavu.runtime.batches.held_out import HeldOut

__all__ = ["HeldOut", "Reader"]
