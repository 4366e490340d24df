"""What a rule knows of replicas from earlier steps, in checkpoints: a training that goes on does so with the same.

It is kept by the name of a section's first layer, and belongs to devices. Where a section has other layers than before,
or a replica is on a device that was not there, judgement begins anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dejavu.runtime.gradients.watching import Tally
from dejavu.runtime.state import State
from dejavu.workload import GradientSettings


class Remembered:
    """Writes and reads it, section by section, for replicas in one order.

    Args:
        devices: of the replicas, as people name them.
    """

    def __init__(self, settings: GradientSettings, devices: Sequence[str]) -> None:
        self._rule, self._devices = settings.model_dump(mode="json"), list(devices)

    def to_state(self, layers: Sequence[str], trust_N: torch.Tensor, tallies: Sequence[Tally]) -> State:
        """Return what is known of a section, under its global name, as a tensor of text."""
        told = {
            "rule": self._rule,
            "layers": list(layers),
            "devices": self._devices,
            "trust": trust_N.tolist(),
            "tallies": [tally.to_dict() for tally in tallies],
        }
        return {_name_of(layers): torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)}

    def of_state(
        self, state: Mapping[str, torch.Tensor], layers: Sequence[str]
    ) -> tuple[torch.Tensor, list[Tally]] | None:
        """Return what was known of a section: trust in float64, and tallies; None: nothing of the same."""
        found = state.get(_name_of(layers))
        if found is None:
            return None
        told: dict[str, Any] = json.loads(bytes(found.tolist()))
        if told["rule"] != self._rule or told["layers"] != list(layers):
            return None
        before: list[str] = told["devices"]
        if before == self._devices:
            order = list(range(len(before)))
        elif len(set(before)) == len(before) and sorted(before) == sorted(self._devices):
            order = [before.index(device) for device in self._devices]
        else:
            return None
        trust_N = torch.tensor([told["trust"][n] for n in order], dtype=torch.float64)
        return trust_N, [Tally.from_dict(told["tallies"][n]) for n in order]


def _name_of(layers: Sequence[str]) -> str:
    return f"gradients.{layers[0]}.judged"
