"""The searches. To add one: its file, and one line in `SEARCHES`; the family tests pick it up."""

from __future__ import annotations

import difflib

from dejavu.foundation.errors import InputError
from dejavu.search._base import Search
from dejavu.search.auto import Auto
from dejavu.search.balanced import Balanced
from dejavu.search.coarse import Coarse
from dejavu.search.differentiable import Differentiable
from dejavu.search.exact import Exact
from dejavu.search.exhaustive import Exhaustive
from dejavu.search.feasible import Feasible
from dejavu.search.hybrid import Hybrid
from dejavu.search.mcmc import MCMC
from dejavu.search.pipedream import PipeDream
from dejavu.search.proportional import Proportional
from dejavu.search.uniform import Uniform

__all__ = [
    "MCMC",
    "SEARCHES",
    "Auto",
    "Balanced",
    "Coarse",
    "Differentiable",
    "Exact",
    "Exhaustive",
    "Feasible",
    "Hybrid",
    "PipeDream",
    "Proportional",
    "Search",
    "Uniform",
    "search_named",
]

SEARCHES: dict[str, type[Search]] = {
    "auto": Auto,
    "exact": Exact,
    "hybrid": Hybrid,
    "differentiable": Differentiable,
    "coarse": Coarse,
    "mcmc": MCMC,
    "pipedream": PipeDream,
    "balanced": Balanced,
    "proportional": Proportional,
    "uniform": Uniform,
    "feasible": Feasible,
    "exhaustive": Exhaustive,
}


def search_named(name: str) -> type[Search]:
    """The search that a person named.

    Raises:
        InputError: there is none of that name.
    """
    if name not in SEARCHES:
        near = difflib.get_close_matches(name, SEARCHES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; wanted one of {', '.join(SEARCHES)}"
        raise InputError(f"unknown search {name!r}{hint}")
    return SEARCHES[name]
