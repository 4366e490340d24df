"""Clusters with more or fewer nodes than their file says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dejavu.cluster import Cluster, catalogue, load_cluster
from dejavu.foundation.errors import InputError

_CHANGE = re.compile(r"\s*([0-9]+)\s*[x×]\s*(\S+)\s*")
MOST_NODES = 100_000


@dataclass(frozen=True)
class NodeFile:
    """A cluster file, and what it says."""

    path: Path

    @cached_property
    def cluster(self) -> Cluster:
        return load_cluster(self.path)

    @property
    def counts(self) -> dict[str, int]:
        """Nodes by group."""
        return {group.name: group.count for group in self.cluster.groups}

    def with_counts(self, counts: Mapping[str, int]) -> Cluster:
        """Return the file's cluster with other numbers of nodes."""
        return load_cluster(self.path, counts)

    def group_named(self, name: str) -> str:
        """Return the group that this names: by its own name, or by that of a type of device in its nodes alone.

        Raises:
            InputError: no group is meant, or several are.
        """
        folded, groups = name.casefold(), self.cluster.groups
        ways = (
            [group.name for group in groups if group.name.casefold() == folded],
            [group.name for group in groups if any(of.casefold() == folded for of, _ in group.devices)],
            [group.name for group in groups if any(_is_meant(folded, of.casefold()) for of, _ in group.devices)],
        )
        found = next((way for way in ways if way), [])
        if len(found) == 1:
            return found[0]
        known = ", ".join(f"{one.name} ({' + '.join(f'{n} × {of}' for of, n in one.devices)})" for one in groups)
        if found:
            raise InputError(f"{name!r} is in the nodes of {', '.join(found)} in {self.path}; wanted one group's name")
        raise InputError(f"{self.path} has no nodes called {name!r} or with such devices; it has {known}")


def _is_meant(short: str, name: str) -> bool:
    """Return whether a device's beginning names it: `a100` A100-SXM4-80GB, which is no `a10`."""
    begins = name.startswith(short) and name.partition("-")[0] == short.partition("-")[0]
    return begins and short not in (known.casefold() for known in catalogue())  # RTX2080 is another than RTX2080-TI


def parse_changes(option: str, words: Sequence[str]) -> list[tuple[int, str]]:
    """Parse `2xa100` into (2, "a100").

    Raises:
        InputError: it is something else.
    """
    found = []
    for word in words:
        match = _CHANGE.fullmatch(word)
        if match is None or not 1 <= int(match[1]) <= MOST_NODES:
            raise InputError(f"{option} {word}: found no number of nodes and name; wanted such as {option} 2xa100")
        found.append((int(match[1]), match[2]))
    return found


def changed(file: NodeFile, added: Sequence[tuple[int, str]], removed: Sequence[tuple[int, str]]) -> dict[str, int]:
    """Return the nodes of each group after the changes.

    Raises:
        InputError: an unknown name, more nodes removed than there are, or none left.
    """
    counts = file.counts
    for number, name in added:
        counts[file.group_named(name)] += number
    for number, name in removed:
        group = file.group_named(name)
        if number > counts[group]:
            after = "" if counts[group] == file.counts[group] else ", after the other changes"
            raise InputError(
                f"--remove {number}x{name}: {group} has {counts[group]} in {file.path}{after}; wanted at most that"
            )
        counts[group] -= number
    if not any(counts.values()):
        raise InputError(f"--remove leaves no node of {file.path}; wanted one at least")
    return counts
