"""What a person does by hand: equal stages, layers cut evenly by count."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from dejavu.plans import Answer, Problem
from dejavu.search._base import Incumbent, Search
from dejavu.search.shared.rows import Row, cheapest, rows_of_one_type, rows_of_several_types


@dataclass(frozen=True)
class Uniform(Search):
    """The best plan whose stages are all alike, on any subset of the devices: the first yardstick of a planner.

    Each plan has one shape of stage (nodes × devices, data and tensor parallel, recompute, ZeRO), on one type of
    device with any number of stages, or on several types with as many stages as each type has room for, if the layers
    and the problem's `max_stages` allow so many. Layers are cut evenly by count, the earlier stages taking one more. It
    proves nothing, and finds nothing where only an uneven cut fits.
    """

    name: ClassVar[str] = "uniform"

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        rows = chain(rows_of_one_type(problem), rows_of_several_types(problem))
        return cheapest(problem, ((row, even_cuts(problem, row)) for row in rows), best, "equal stages")


def even_cuts(problem: Problem, row: Row) -> list[int]:
    """As many layers for each stage; the earlier ones take one more."""
    each, longer = divmod(problem.num_layers, len(row))
    return [s * each + min(s, longer) for s in range(len(row) + 1)]
