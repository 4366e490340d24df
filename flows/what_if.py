"""What-if questions of `dejavu plan` that need several plans: their options as typed, and what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dejavu.foundation.errors import InputError
from dejavu.foundation.tables import print_whole
from dejavu.foundation.units import plural
from dejavu.planning import Choice, PlanRequest
from dejavu.planning.considered import WIDTH_COLUMNS
from dejavu.planning.sentences import what_is_masked
from dejavu.what_if import (
    Case,
    Goal,
    NodeFile,
    answer,
    cases_table,
    changed,
    cheapest,
    cheapest_to_dict,
    goal_table,
    parse_changes,
    rows_to_dict,
    varied,
    what_changes,
    what_is_cheapest,
)
from dejavu.workload import Workload
from flows.inputs import load_cluster_file, whole_numbers

if TYPE_CHECKING:
    from rich.console import Console

CHEAPEST = "cheapest"
WIDE_COLUMNS = 130
_SECONDS = {"min": 60.0, "h": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0, "week": 604800.0}
_MANY = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class Answers(NamedTuple):
    """Several plans: as JSON, and a way to print them."""

    content: dict[str, Any]
    show: Callable[[Console], None]


@dataclass(frozen=True)
class WhatIf:
    """The options as typed; empty where they were not given.

    Attributes:
        clusters: one at least.
        lengths, batches: comma-separated whole numbers.
        nodes: `2-16`, of each type of node.
    """

    clusters: tuple[Path, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    lengths: str = ""
    batches: str = ""
    goal: str = ""
    within: str = ""
    tokens: str = ""
    nodes: str = ""

    def __post_init__(self) -> None:
        changes = self.added or self.removed
        if changes and len(self.clusters) > 1:
            raise InputError(f"--add and --remove change one cluster; found {len(self.clusters)} of --cluster")
        if self.goal not in ("", CHEAPEST):
            raise InputError(f"--goal {self.goal}: found no such goal; wanted --goal {CHEAPEST}")
        given = {"--within": self.within, "--tokens": self.tokens, "--nodes": self.nodes}
        if not self.goal and (without := [name for name, text in given.items() if text]):
            raise InputError(f"{without[0]} is for --goal {CHEAPEST}; found no --goal")
        if self.goal and not (self.within and self.tokens):
            raise InputError("--goal cheapest wants to know by when and how much: --within 14days --tokens 300e9")
        if self.goal and (changes or self.lengths or self.batches):
            raise InputError(
                "--goal cheapest plans one workload on the nodes of its clusters; leave out the other options"
            )

    @property
    def is_asked(self) -> bool:
        """Whether the answer is more than one plan."""
        return bool(
            len(self.clusters) > 1 or self.added or self.removed or self.goal or self._lengths[1:] or self._batches[1:]
        )

    @property
    def _lengths(self) -> tuple[int, ...]:
        return whole_numbers("--sequence-length", self.lengths)

    @property
    def _batches(self) -> tuple[int, ...]:
        return whole_numbers("--batch-size", self.batches)

    def first(self, workload: Workload) -> Workload:
        """Return the workload with the first, or the one, sequence length and batch size that were given."""
        return varied(workload, self._lengths[:1], self._batches[:1])[0][1]

    def cases(self, request: PlanRequest, workload: Workload) -> list[Case]:
        """Return what is planned side by side; before and after, where nodes are added or removed.

        Args:
            request: of the first.
            workload: as it was before any length or batch size was given.
        """
        workloads = varied(workload, self._lengths, self._batches)
        if self.added or self.removed:
            file = NodeFile(self.clusters[0])
            counts = changed(file, parse_changes("--add", self.added), parse_changes("--remove", self.removed))
            clusters = [("before", file.cluster), ("after", file.with_counts(counts))]
        else:
            loaded = [load_cluster_file(path) for path in self.clusters]
            names = [one.name for one in loaded]
            clusters = [
                (one.name if names.count(one.name) == 1 else str(path), one)
                for one, path in zip(loaded, self.clusters, strict=True)
            ]
        return [
            Case(
                _named(name if len(clusters) > 1 else "", of_workload), replace(request, cluster=one, workload=workload)
            )
            for of_workload, workload in workloads
            for name, one in clusters
        ]

    @property
    def _nodes(self) -> tuple[int, int] | None:
        if not self.nodes:
            return None
        match = re.fullmatch(r"\s*([1-9][0-9]{0,4})\s*(?:[-–]\s*([1-9][0-9]{0,4}))?\s*", self.nodes)
        lowest, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if most < lowest:
            raise InputError(f"--nodes {self.nodes}: found no range of numbers; wanted such as --nodes 1-16")
        return lowest, most

    def answer(self, request: PlanRequest, workload: Workload, plan: Callable[[PlanRequest], Choice]) -> Answers:
        """Plan everything that is asked; of the arguments see `cases`."""
        if self.goal:
            return self._cheapest(request, plan)
        rows = answer(self.cases(request, workload), plan)
        compares = bool(self.added or self.removed) and len(rows) == 2

        def show(console: Console) -> None:
            where = f" on {request.cluster.name}" if len(self.clusters) == 1 else ""
            print_whole(console, cases_table(f"{request.workload.model}{where}", self._differs, rows))
            for row in rows:
                said = what_is_masked(row.choice) if row.choice else "" if compares else row.failure
                if said:
                    console.print(f"{row.case.name}: {said}", highlight=False, markup=False)
            if compares:
                nodes = ", ".join(f"{number} {word} {name}" for word, number, name in self._changes)
                console.print(f"{nodes}: {what_changes(*rows)}", highlight=False, markup=False)

        return Answers(rows_to_dict(rows, compares=compares), show)

    def _cheapest(self, request: PlanRequest, plan: Callable[[PlanRequest], Choice]) -> Answers:
        goal, nodes = Goal(_tokens(self.tokens), _duration(self.within)), self._nodes
        files = [NodeFile(path) for path in self.clusters if load_cluster_file(path)]
        found = cheapest(goal, files, request, plan, nodes)

        def show(console: Console) -> None:
            title = f"{request.workload.model}: {plural(len(found.rows), 'cluster')} planned, all times predicted"
            print_whole(console, goal_table(found, title))
            console.print(what_is_cheapest(found), highlight=False, markup=False)

        return Answers(cheapest_to_dict(found), show)

    @property
    def _changes(self) -> list[tuple[str, int, str]]:
        added = [("more", *one) for one in parse_changes("--add", self.added)]
        return added + [("fewer", *one) for one in parse_changes("--remove", self.removed)]

    @property
    def _differs(self) -> str:
        return "cluster" if len(self.clusters) > 1 else "nodes" if self.added or self.removed else "workload"


def wide_console() -> Console:
    """Return a console for tables of many columns; none is cut off in a file or a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(WIDTH_COLUMNS, WIDE_COLUMNS))


def _named(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _duration(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+?)s?\s*", text)
    try:
        seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0 < seconds < 1e12:
        raise InputError(f"--within {text}: found no time; wanted such as 14days, 36h or 2weeks")
    return seconds


def _tokens(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.eE+]+)\s*([kMBT]?)\s*", text)
    try:
        tokens = float(match[1]) * _MANY[match[2]] if match else 0.0
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens < 1e18:
        raise InputError(f"--tokens {text}: found no number of tokens; wanted such as 300e9 or 300B")
    return tokens
