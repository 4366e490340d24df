"""One collective over groups of ranks on a mesh: the key of communication costs, whatever their source.

An imported row, a measurement and a query of the planner all become a `Collective`, so that one source's measurements
price another's queries. Rank r of a mesh is in node r // `devices_per_node`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """An operation that each group of ranks runs for itself, all groups at once.

    Attributes:
        name: one of `COLLECTIVES`. In send_recv the first rank of a group sends to the second.
        replica_groups: the ranks of each group; groups of one size that share no rank.
        mesh_nodes, devices_per_node: the mesh that the ranks count through, node by node.
    """

    name: str
    replica_groups: tuple[tuple[int, ...], ...]
    mesh_nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        if self.name not in COLLECTIVES:
            raise ValueError(f"unknown collective {self.name!r}; wanted one of {', '.join(COLLECTIVES)}")
        for field in ("mesh_nodes", "devices_per_node"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; wanted 1 or more")
        sizes = sorted({len(group) for group in self.replica_groups})
        if len(sizes) != 1 or not sizes[0]:
            raise ValueError(f"groups of {sizes} ranks; wanted one or more groups of one size")
        if self.name == "send_recv" and sizes[0] > 2:
            raise ValueError(f"send_recv among {sizes[0]} ranks; wanted 2")
        ranks = [rank for group in self.replica_groups for rank in group]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"a rank is in two places of the groups {self.replica_groups}; wanted it once")
        wrong = [rank for rank in ranks if not 0 <= rank < self.mesh_nodes * self.devices_per_node]
        if wrong:
            raise ValueError(f"rank {wrong[0]} is not on a mesh of {self.mesh_nodes} × {self.devices_per_node} devices")

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one group."""
        return len(self.replica_groups[0])

    def node(self, rank: int) -> int:
        return rank // self.devices_per_node

    @cached_property
    def crosses_nodes(self) -> bool:
        """Whether some group has ranks in two nodes."""
        return any(len({self.node(rank) for rank in group}) > 1 for group in self.replica_groups)

    @property
    def subject(self) -> str:
        """The key of its rows in the cost database, as `foundation.hashing.stable_hash` makes it."""
        groups = [list(group) for group in self.replica_groups]
        content = [self.name, groups, self.mesh_nodes, self.devices_per_node]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return it for the column `extra` of the cost database; the name has a column of its own."""
        return json.dumps(
            {
                "replica_groups": [list(group) for group in self.replica_groups],
                "mesh_nodes": self.mesh_nodes,
                "devices_per_node": self.devices_per_node,
            }
        )

    @classmethod
    def from_json(cls, name: str, text: str) -> Collective:
        """Read what `to_json` gave.

        Raises:
            ValueError: the name or the text is no collective.
        """
        try:
            content: dict[str, Any] = json.loads(text)
            groups: Sequence[Sequence[int]] = content["replica_groups"]
            return cls(
                name=name,
                replica_groups=tuple(tuple(int(rank) for rank in group) for group in groups),
                mesh_nodes=int(content["mesh_nodes"]),
                devices_per_node=int(content["devices_per_node"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{text!r} is no collective; wanted replica_groups, mesh_nodes and devices_per_node ({error})"
            ) from None
