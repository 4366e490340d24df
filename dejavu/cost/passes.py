"""What the pipeline runtime takes of a device beside the layers: for every pass, and for every message at both ends."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.cost.communication import fit
from dejavu.profiles import ProfileDatabase


@dataclass(frozen=True)
class PassCost:
    """Measured on CPUs, where ranks compute and communicate on the same core; nothing where it was not measured.

    Attributes:
        pass_seconds: of every pass of a microbatch through a stage.
        message_seconds, message_seconds_per_byte: of every message, once where it is sent and once where it arrives.
    """

    pass_seconds: float = 0.0
    message_seconds: float = 0.0
    message_seconds_per_byte: float = 0.0

    def of_message(self, size_bytes: float) -> float:
        """Device seconds at each end."""
        return self.message_seconds + self.message_seconds_per_byte * size_bytes


def pass_cost(database: ProfileDatabase, device_type: str) -> PassCost:
    """As measured on such devices (`dejavu.runtime.passes`)."""
    alone = database.latest(kind="pass", device_type=device_type, num_ranks=1)
    exchanges = database.latest(kind="pass", device_type=device_type, num_ranks=2)
    if not alone or len(exchanges) < 2:
        return PassCost()
    each, line = min(row.seconds for row in alone), fit(exchanges)
    return PassCost(each, max(line.latency_seconds - each, 0.0), line.seconds_per_byte)
