"""What keeps a device below its float32 peak, whatever the kernel: the board's power, and the slots to issue in.

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


# Joules of a 16-bit operation in matrix units, over those of a float32 operation outside them: at most so much, since a
# V100 (12 nm, 300 W) sustains 114 TFLOP/s in them (largest products of Alpa's profile, OSDI 2022). Scaled by process as
# above, it limits a T4, H100 PCIe, and boards whose owner lowered the limit; not an A100 SXM4, an A40 or an H100 SXM5.
MATRIX_ENERGY_SHARE = 300 / 114e12 / JOULES_PER_FLOP[12]
# A Hopper's: the largest products on an H100 and on an H200, 10 ms each and at the board's 700 W, run at 736 to 761
# TFLOP/s (random numbers; ours, 2026-11-27); of some thousand shapes the best is published as 794.5 (Bekman, "Machine
# Learning Engineering", compute/accelerator). Shorter bursts are faster, but a training has none.
HOPPER_MATRIX_JOULES_PER_FLOP = 700 / 755e12
MATRIX_DTYPES = ("float16", "bfloat16")  # others in proportion to their peak

# Since Volta a scheduler issues one instruction a clock. Where it has 16 float32 lanes (Volta, Turing, A100), one
# multiplication keeps them busy for two clocks, and loads and addresses are issued in between for nothing. Where it has
# 32 (GA102, Ada, Hopper, Blackwell: 128 in a multiprocessor), each other instruction takes a multiplication's place.
# The share is cuBLAS' on an H200, 82 % of what its units can multiply (CloudRift, "Surfacing a 60 % performance bug in
# cuBLAS", 2026; 73 % on an RTX PRO 6000), over the 95 % that NeuSight's largest products reach on V100 and A100 (90th
# percentile). Counted from instructions, 64 multiplications to some 5.5 others, it would be 0.92. Fitted to nothing.
ISSUED_SHARE = 0.86
# Lanes × clock of one multiprocessor from which it must have 128: 64 at 2.5 GHz. Pascal's GP104 has 128 too, but issues
# two instructions a clock; at 1.1 GHz it stays below.
MOST_NARROW_LANES_PER_SECOND = 64 * 2.5e9


def sustained_fraction(device: DeviceType, dtype: str) -> float:
    """Return the share of the peak FLOP/s that a device sustains in products, at most 1; below 1 only for float32.

    Power or issue slots, whichever is less: a board at its power limit lowers its clock, and one that waits for slots
    draws less. That they multiply would suit L4's single products better and its whole models worse (docs/log.md).
    Matrix units take several times less energy for an operation, and are kept at 1. A device whose watts or process
    nobody gave has no limit; a process between two that are known counts as the nearer one.
    """
    peak = device.peak_flops_per_second.get(dtype)
    if dtype != "float32" or not peak:
        return 1.0
    return min(_powered_share(device, peak), ISSUED_SHARE if has_wide_multiprocessors(device) else 1.0)


def has_wide_multiprocessors(device: DeviceType) -> bool:
    """Return whether each multiprocessor has 128 float32 lanes for four single-issue schedulers (NVIDIA alone)."""
    peak, count = device.peak_flops_per_second.get("float32"), device.num_multiprocessors
    if device.kind != "cuda" or not peak or not count:
        return False
    return peak / (2 * count) > MOST_NARROW_LANES_PER_SECOND


def clocks_per_second(device: DeviceType) -> float | None:
    """Return the clock of NVIDIA's multiprocessors that the float32 peak was quoted at; None: unknown."""
    peak, count = device.peak_flops_per_second.get("float32"), device.num_multiprocessors
    if device.kind != "cuda" or not peak or not count:
        return None
    return peak / (2 * count * (128 if has_wide_multiprocessors(device) else 64))


def matrix_units_share(device: DeviceType) -> float:
    """Return the share of the peak FLOP/s that the board's power sustains in matrix units, at most 1."""
    peak = next((device.peak_flops_per_second.get(name) for name in MATRIX_DTYPES), None)
    if peak and device.board_watts and (device.architecture or "").casefold() == "hopper":
        return min(1.0, device.board_watts / (HOPPER_MATRIX_JOULES_PER_FLOP * peak))
    return _powered_share(device, MATRIX_ENERGY_SHARE * peak) if peak else 1.0


def _powered_share(device: DeviceType, peak_flops_per_second: float) -> float:
    """Return it for operations that each take as much energy as a float32 one."""
    watts, process = device.board_watts, device.process_nanometres
    if watts is None or process is None:
        return 1.0
    nearest = min(JOULES_PER_FLOP, key=lambda known: abs(math.log(known / process)))
    return min(1.0, watts / (JOULES_PER_FLOP[nearest] * peak_flops_per_second))
