"""How a bound was proved."""

from __future__ import annotations

from enum import StrEnum


class Proof(StrEnum):
    """What gave a bound, for people."""

    BALANCE = "the work spread over all devices as evenly as fractions of layers could be"
    DEVICES = "the fewest devices with which every rank and every link could do its part in time"
    PATHS = "weighted paths through the schedule's own order of actions"
    EVERY_PLAN = "every plan that such paths do not rule out, simulated"
    NO_PLAN = "no plan runs under the schedules"
