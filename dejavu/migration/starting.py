"""Which snapshots hosts have, and the newest ones that are a whole model; and who keeps copies for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dejavu.binding import Binding, Placement
from dejavu.runtime.snapshots import Part, Start, Taken

Found = Mapping[str, frozenset[Taken]]  # by host


def newest_start(found: Found, bindings: Mapping[int, Binding], layers: Sequence[str]) -> Start | None:
    """Return the newest snapshots that together hold every layer; None: there are none.

    Args:
        bindings: of the attempts.
        layers: the model's, by name.
    """
    steps = {(taken.step, taken.attempt) for of_host in found.values() for taken in of_host}
    for step, attempt in sorted(steps, reverse=True):
        parts = [
            Part(
                names,
                tuple((rank, host) for rank in ranks for host in found if Taken(attempt, step, rank) in found[host]),
            )
            for names, ranks in _needed(bindings[attempt], layers)
        ]
        if all(part.sources for part in parts):
            return Start(attempt, step, tuple(parts))
    return None


def _needed(binding: Binding, layers: Sequence[str]) -> list[tuple[tuple[str, ...], list[int]]]:
    """List what makes a whole model: layers, and the ranks any one of which has this state of them."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, placed in enumerate(binding.placements):
        groups.setdefault(_state_of(binding, placed), []).append(rank)
    plan = binding.plan
    spans = {
        pipeline_rank: tuple(name for s in stages for name in layers[plan.stages[s].start : plan.stages[s].stop])
        for pipeline_rank, stages in enumerate(plan.ranks)
    }
    return [(spans[pipeline_rank], ranks) for (pipeline_rank, _, _), ranks in groups.items()]


def _state_of(binding: Binding, placed: Placement) -> tuple[int, int, int]:
    """Return what ranks with the same state share: replicas have the same, unless ZeRO shards it among them."""
    shards = binding.plan.rank_configuration(placed.pipeline_rank).zero_level > 0
    return placed.pipeline_rank, placed.shard, placed.replica if shards else 0


def copies_wanted(binding: Binding) -> dict[int, str]:
    """Return the hosts that keep copies of ranks' snapshots: the next host, where no replica elsewhere has the same."""
    hosts = list(dict.fromkeys(placed.device.host for placed in binding.placements))
    if len(hosts) < 2:
        return {}
    holders: dict[tuple[int, int, int], set[str]] = {}
    for placed in binding.placements:
        holders.setdefault(_state_of(binding, placed), set()).add(placed.device.host)
    return {
        rank: hosts[(hosts.index(placed.device.host) + 1) % len(hosts)]
        for rank, placed in enumerate(binding.placements)
        if len(holders[_state_of(binding, placed)]) == 1
    }
