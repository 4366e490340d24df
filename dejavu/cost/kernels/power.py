"""Boards whose power limit does not sustain their float32 peak at the quoted clock.

A T4 (70 W) sustains half of its peak in matrix products, a V100 of the same process (250 W) all of it. No kernel shape
explains this; watts do. Without it, what is learned from one board is wrong on another by that factor.
"""

from __future__ import annotations

from dejavu.cluster import DeviceType

# Board power in watts as recalled from data sheets, not looked up again; MI250X-GCD is half a card. Names of
# dejavu/devices.csv; a device that is not here has no limit.
BOARD_WATTS = {
    "P100-SXM2-16GB": 300.0,
    "P100-PCIE-16GB": 250.0,
    "P4": 75.0,
    "V100-SXM2-16GB": 300.0,
    "V100-SXM2-32GB": 300.0,
    "V100-PCIE-16GB": 250.0,
    "V100-PCIE-32GB": 250.0,
    "T4": 70.0,
    "A10": 150.0,
    "A10G": 300.0,
    "A30": 165.0,
    "A40": 300.0,
    "RTX-A6000": 300.0,
    "RTX3090": 350.0,
    "A100-SXM4-80GB": 400.0,
    "A100-SXM4-40GB": 400.0,
    "A100-PCIE-80GB": 300.0,
    "A100-PCIE-40GB": 250.0,
    "RTX4090": 450.0,
    "L4": 72.0,
    "L40S": 350.0,
    "H100-SXM5-80GB": 700.0,
    "H100-PCIE-80GB": 350.0,
    "H200-SXM-141GB": 700.0,
    "B200-SXM-180GB": 1000.0,
    "MI100": 300.0,
    "MI210": 300.0,
    "MI250X": 560.0,
    "MI250X-GCD": 280.0,
    "MI300X": 750.0,
}
# Joules of the whole board for a float32 operation outside matrix units, by manufacturing process in nanometres. 12 nm:
# a V100 has 17.9e-12 at its peak and sustains 0.97 of it, a T4 8.6e-12 and sustains 0.45 (NeuSight's matrix products,
# 2026-11-21). The others scale it by what is remembered of the foundries' claims (16 to 7 nm -65 %, 7 to 5 nm -30 %):
# rough, not fitted, and set when the error on the L4 without this rule had been seen.
JOULES_PER_FLOP = {16: 20e-12, 12: 17e-12, 8: 9e-12, 7: 7e-12, 6: 6.5e-12, 5: 4.9e-12, 4: 4.7e-12}
_PROCESS_NANOMETRES = {
    "P100": 16,
    "P4": 16,
    "V100": 12,
    "T4": 12,
    "A100": 7,
    "A30": 7,
    "MI100": 7,
    "MI210": 6,
    "MI250X": 6,
    "MI300X": 5,
    "A10": 8,
    "A10G": 8,
    "A40": 8,
    "RTX": 8,
    "RTX3090": 8,
    "RTX4090": 4,
    "L4": 4,
    "L40S": 4,
    "H100": 4,
    "H200": 4,
    "B200": 4,
}


def sustained_fraction(device: DeviceType, dtype: str) -> float:
    """Return the share of the peak FLOP/s that the board's power sustains, at most 1; below 1 only for float32.

    Matrix units take several times less energy for an operation, and are kept at 1.
    """
    peak = device.peak_flops_per_second.get(dtype)
    watts = BOARD_WATTS.get(device.name)
    process = _PROCESS_NANOMETRES.get(device.name.split("-")[0])
    if dtype != "float32" or not peak or watts is None or process is None:
        return 1.0
    return min(1.0, watts / (JOULES_PER_FLOP[process] * peak))
