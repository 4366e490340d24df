"""Boards whose power limit does not sustain their float32 peak at the quoted clock.

A T4 (70 W) sustains half of its peak in matrix products, a V100 of the same process (250 W) all of it. No kernel shape
explains this; watts do. Without it, what is learned from one board is wrong on another by that factor. Watts and
processes are columns of dejavu/devices.csv, as recalled from data sheets, and may stand in a cluster.yaml.
"""

from __future__ import annotations

import math

from dejavu.cluster import DeviceType

# Joules of the whole board for a float32 operation outside matrix units, by manufacturing process in nanometres. 12 nm:
# a V100 has 17.9e-12 at its peak and sustains 0.97 of it, a T4 8.6e-12 and sustains 0.45 (NeuSight's matrix products,
# 2026-11-21). The others scale it by what is remembered of the foundries' claims (16 to 7 nm -65 %, 7 to 5 nm -30 %):
# rough, not fitted, and set when the error on the L4 without this rule had been seen.
JOULES_PER_FLOP = {16: 20e-12, 12: 17e-12, 8: 9e-12, 7: 7e-12, 6: 6.5e-12, 5: 4.9e-12, 4: 4.7e-12}


def sustained_fraction(device: DeviceType, dtype: str) -> float:
    """Return the share of the peak FLOP/s that the board's power sustains, at most 1; below 1 only for float32.

    Matrix units take several times less energy for an operation, and are kept at 1. A device whose watts or process
    nobody gave has no limit; a process between two that are known counts as the nearer one.
    """
    peak = device.peak_flops_per_second.get(dtype)
    watts, process = device.board_watts, device.process_nanometres
    if dtype != "float32" or not peak or watts is None or process is None:
        return 1.0
    nearest = min(JOULES_PER_FLOP, key=lambda known: abs(math.log(known / process)))
    return min(1.0, watts / (JOULES_PER_FLOP[nearest] * peak))
