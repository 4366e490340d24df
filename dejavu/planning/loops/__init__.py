"""The compiled loops that every planning runs, loaded before a clock starts; where there are none, made side by side.

    python -m dejavu.planning.loops

compiles them, once for a machine and a version of their source, so that the first plan need not.
"""

from __future__ import annotations

from types import ModuleType

from dejavu.foundation.compiled import compiling_elsewhere, has_compiled
from dejavu.foundation.cores import num_cores
from dejavu.foundation.processes.homes import Homes
from dejavu.plans import cutting
from dejavu.search import exact, feasible, pipedream
from dejavu.simulation import bound

# Each takes half of the time. Loops of exact and feasible are the same in part.
TOGETHER: tuple[tuple[ModuleType, ...], ...] = ((bound, pipedream), (exact, feasible, cutting))


def load_compiled_loops() -> None:
    """Load what every planning runs, once for all processes that are forked then.

    Where nothing of it was ever compiled, forked processes do so, and this one reads what they wrote to the cache.
    """
    places = range(len(TOGETHER))
    if num_cores() > 1 and not (has_compiled("search") and has_compiled("simulation")):
        with compiling_elsewhere(), Homes(TOGETHER, len(TOGETHER), forks=True) as homes:
            homes.each([(place, ()) for place in places], _load)
    for packages in TOGETHER:
        _load(packages)


def _load(packages: tuple[ModuleType, ...]) -> None:
    for package in packages:
        package.load_compiled_loops()
