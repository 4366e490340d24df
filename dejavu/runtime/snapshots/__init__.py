"""A training's state after each step in the memory of its hosts, from which ranks go on under any plan.

memory.py    where this attempt's ranks keep snapshots, and which ones they start from
files.py     one rank's state as one file
serving.py   a host's memory, for the other hosts: ranks fetch layers from it and leave copies in it
keeping.py   a rank takes a snapshot beside its next step
reading.py   a rank reads the layers of its stages, from whichever host has them
"""

from dejavu.runtime.snapshots.files import Taken, inventory
from dejavu.runtime.snapshots.keeping import SnapshotKeeper, is_due
from dejavu.runtime.snapshots.memory import Memory, Part, Start
from dejavu.runtime.snapshots.reading import read_start
from dejavu.runtime.snapshots.serving import MemoryServer

__all__ = ["Memory", "MemoryServer", "Part", "SnapshotKeeper", "Start", "Taken", "inventory", "is_due", "read_start"]
