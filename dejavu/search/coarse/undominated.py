"""Fewer configurations: without those that another is as good as in every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search.shared.options import link_classes

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Undominated:
    """A problem without the configurations that no plan needs.

    Attributes:
        kept: which of the original's configurations these are.
        instead_C: for each of the original's configurations one that is as good, itself where it is kept; −1 where the
            cluster has too few devices for it.
        original: the problem with all of them.
    """

    kept: Ints
    instead_C: Ints
    original: Problem

    @cached_property
    def problem(self) -> Problem:
        """With the others only; its best plan is as good as the original's."""
        return self.among(self.original)

    def among(self, problem: Problem) -> Problem:
        """The same of another problem with the original's configurations."""
        return _with(problem, self.kept) if len(self.kept) else problem

    @classmethod
    def of(cls, problem: Problem) -> Undominated:
        """A configuration goes where another of the same type and links is nowhere worse, with no more devices.

        Where every device has to be used all stay: a plan may need one that is worse but takes more devices.
        """
        costs = problem.costs
        assert isinstance(costs, AdditiveCosts)
        class_C, _ = link_classes(problem)
        rooms = ("capacity_bytes_C", "host_capacity_bytes_C")  # of which more is better
        given = {name: getattr(costs, name) for name in AdditiveCosts.__dataclass_fields__}
        tables = [-table if name in rooms else table for name, table in given.items()]
        tables = [table.reshape(len(problem.configurations), -1) for table in tables]
        instead_C = np.full(len(problem.configurations), -1, dtype=np.int64)
        kept: list[int] = []
        order = sorted(range(len(problem.configurations)), key=lambda c: (problem.configurations[c].num_devices, c))
        for c in order:
            configuration = problem.configurations[c]
            if configuration.num_devices > problem.device_counts[configuration.kind]:
                continue
            instead_C[c] = c
            if problem.use_all_devices:
                kept.append(c)
                continue
            better = next((k for k in kept if _is_as_good(problem, class_C, tables, k, c)), None)
            if better is not None:
                instead_C[c] = better
                continue
            for k in [k for k in kept if _is_as_good(problem, class_C, tables, c, k)]:
                kept.remove(k)
                instead_C[instead_C == k] = c
            kept.append(c)
        rows = np.array(sorted(kept), dtype=np.int64)
        return cls(rows, instead_C, problem)

    def plan(self, plan: Plan) -> Plan:
        """A plan of the original with kept configurations only: it fits where that one fits, and is as cheap."""
        of = self.original
        stages = (
            replace(stage, configuration=of.configurations[self.instead_C[of.index(stage.configuration)]])
            for stage in plan.stages
        )
        return replace(plan, stages=tuple(stages))


def _is_as_good(problem: Problem, class_C: Ints, tables: list[Floats], a: int, b: int) -> bool:
    one, other = problem.configurations[a], problem.configurations[b]
    if one.kind != other.kind or class_C[a] != class_C[b] or one.num_devices > other.num_devices:
        return False
    return all(bool((table[a] <= table[b]).all()) for table in tables)


def _with(problem: Problem, kept: Ints) -> Problem:
    """The problem with some of its configurations only."""
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)

    def rows(table: Floats) -> Floats:
        all_alike = table.strides[0] == 0
        return np.broadcast_to(table[0], (len(kept), *table.shape[1:])) if all_alike else table[kept]

    return replace(
        problem,
        configurations=tuple(problem.configurations[c] for c in kept),
        costs=AdditiveCosts(**{name: rows(getattr(costs, name)) for name in AdditiveCosts.__dataclass_fields__}),
        link_latency_seconds_CC=problem.link_latency_seconds_CC[np.ix_(kept, kept)],
        link_seconds_per_byte_CC=problem.link_seconds_per_byte_CC[np.ix_(kept, kept)],
    )
