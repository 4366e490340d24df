"""The same binding on the devices that already hold most of its state.

Nodes of a group are alike, and so are the links between them: any exchange of two of them leaves every price as it is.
Of all these the one is taken that has to move the least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from dejavu.binding import Binding, Placement
from dejavu.cluster import Cluster, Device
from dejavu.plans.stage_costs import Floats

Held = Mapping[str, frozenset[int]]  # the layers whose state is in each host's memory


@dataclass(frozen=True)
class Move:
    """State that a host does not have yet.

    Attributes:
        layers: `start` to `stop`, `stop` not included.
        size_bytes: of weights, their gradients and the optimizer's state; gradients stay, so no more than this moves.
    """

    host: str
    start: int
    stop: int
    size_bytes: float


def held_by(binding: Binding) -> dict[str, frozenset[int]]:
    """Return the layers that each host holds under this binding."""
    found: dict[str, frozenset[int]] = {}
    for placed in binding.placements:
        found[placed.device.host] = found.get(placed.device.host, frozenset()) | _layers(binding, placed)
    return found


def _layers(binding: Binding, placed: Placement) -> frozenset[int]:
    spans = (binding.plan.stages[s] for s in binding.plan.ranks[placed.pipeline_rank])
    return frozenset(layer for span in spans for layer in range(span.start, span.stop))


def moves(binding: Binding, held: Held, bytes_L: Floats) -> tuple[Move, ...]:
    """List what the hosts of this binding lack, in runs of layers."""
    found = []
    for host, wanted in held_by(binding).items():
        missing = sorted(wanted - held.get(host, frozenset()))
        starts = [layer for layer in missing if layer - 1 not in missing]
        for start in starts:
            stop = start
            while stop in missing:
                stop += 1
            found.append(Move(host, start, stop, float(bytes_L[start:stop].sum())))
    return tuple(found)


def settled(binding: Binding, cluster: Cluster, held: Held, bytes_L: Floats) -> Binding:
    """Exchange nodes of a group, whose devices are alike, so that as little state as possible has to move."""
    names = {device.host: device.group for device in cluster.devices()}
    wanted = held_by(binding)
    goes: dict[str, str] = {}
    for group in cluster.groups:
        hosts = [host for host, name in names.items() if name == group.name]
        lacking = np.array(
            [
                [sum(bytes_L[list(wanted.get(host, frozenset()) - held.get(other, frozenset()))]) for other in hosts]
                for host in hosts
            ]
        )
        rows, columns = linear_sum_assignment(lacking)
        goes |= {hosts[row]: hosts[column] for row, column in zip(rows, columns, strict=True)}
    at = {(device.host, device.index): device for device in cluster.devices()}

    def moved(device: Device) -> Device:
        return at[goes[device.host], device.index]

    placements = (replace(placed, device=moved(placed.device)) for placed in binding.placements)
    return replace(binding, placements=tuple(placements))
