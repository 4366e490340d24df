"""The searches. To add one: its file, and one line in `SEARCHES`; the family tests pick it up."""

from __future__ import annotations

from dejavu.foundation.registry import Family
from dejavu.search._base import Search
from dejavu.search.auto import Auto
from dejavu.search.balanced import Balanced
from dejavu.search.coarse import Coarse
from dejavu.search.differentiable import Differentiable
from dejavu.search.exact import Exact
from dejavu.search.exhaustive import Exhaustive
from dejavu.search.feasible import Feasible
from dejavu.search.hybrid import Hybrid
from dejavu.search.integer_program import IntegerProgram
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
    "IntegerProgram",
    "PipeDream",
    "Proportional",
    "Search",
    "Uniform",
]

SEARCHES: Family[type[Search]] = Family(
    "search",
    {
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
        "ilp": IntegerProgram,
        "exhaustive": Exhaustive,
    },
)
