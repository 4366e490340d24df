"""Calibrating the roofline of one device with a few measured kernels: five factors, held near 1 while there are few.

The corrections of arithmetic, memory and launch are the maximum a posteriori under robust errors and a prior around 1.
Without kernels they are 1; a dozen kernels outweigh the prior. Matrix units have a factor of their own: they are other
units, and how fast they are says nothing of the rest. Their launch stays as it is: that of the other law holds the
host's part, and no product of the micro-benchmark in their types is short enough to tell. What power sustains shows in
long products alone: short ones end before the clock falls, and say what matrix units reach without that limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.roofline import ITEM_BYTES, Floats, KernelLaw, KernelRoofline, has_matrix_units
from dejavu.profiles.kernel import Kernel

PRIOR_DEVIATION = math.log(2)  # of a logarithm: a device is seldom more than twice off its catalogue
NUM_FACTORS = 5  # compute, memory, launch, matrix_compute, power
SUSTAINED_SECONDS = 1e-3  # of a kernel, from which on power limits it
KERNEL_DEVIATION = 0.2  # of a logarithm: what the law leaves open once it is calibrated; larger errors count softly
MOST_CORRECTION = 30.0  # times or one over; more is a fault of the unit, and stays visible

# The micro-benchmark: what each kernel should take at the peaks, so that it runs on a core and on an H200 alike.
PRODUCT_SECONDS = (20e-6, 200e-6, 2e-3, 10e-3)
TRAFFIC_SECONDS = (10e-6, 50e-6, 250e-6, 1e-3)  # of layers' tensors; larger ones were 20 to 40 % apart from these
LAUNCH_ELEMENTS = 256  # so few that only the launch is left
ROW_ELEMENTS = 1024
SIZE_STEP = 32  # sizes of products are multiples of it


@dataclass(frozen=True)
class Calibration:
    """How one device differs from the roofline: above 1 is faster than it says, but a longer launch.

    Attributes:
        matrix_compute: in place of `compute`, of matrix units.
        power: of what the board's power sustains in them.
        num_kernels: what it was fitted to.
    """

    compute: float = 1.0
    memory: float = 1.0
    launch: float = 1.0
    matrix_compute: float = 1.0
    power: float = 1.0
    num_kernels: int = 0

    def roofline(self, roofline: KernelRoofline) -> KernelRoofline:
        """Return the calibrated roofline of this device."""
        return replace(
            roofline,
            matrix_units=self._law(roofline.matrix_units, self.matrix_compute, 1.0),
            scalar_units=self._law(roofline.scalar_units, self.compute, self.launch),
            cpu_core=self._law(roofline.cpu_core, self.compute, self.launch),
        )

    def _law(self, law: KernelLaw, compute: float, launch: float) -> KernelLaw:
        return replace(
            law,
            compute_efficiency=law.compute_efficiency * compute,
            power_efficiency=law.power_efficiency * self.power,
            memory_efficiency=law.memory_efficiency * self.memory,
            traffic_efficiency={name: share * self.memory for name, share in law.traffic_efficiency.items()},
            launch_seconds=law.launch_seconds * launch,
        )


def calibrate(
    kernels: Sequence[Kernel],
    seconds: Sequence[float] | Floats,
    device: DeviceType,
    roofline: KernelRoofline | None = None,
) -> Calibration:
    """Calibrate one device from measured kernels.

    Raises:
        CostError: a product in a dtype whose peak is unknown.
    """
    before, measured_K = roofline or KernelRoofline(), np.asarray(seconds, dtype=float)
    if not len(kernels):
        return Calibration()

    def calibration_at(x: Floats) -> Calibration:
        compute, memory, launch, matrix_compute, power = np.exp(x).tolist()
        return Calibration(compute, memory, launch, matrix_compute, power, num_kernels=len(kernels))

    lasting_K = measured_K >= SUSTAINED_SECONDS
    parts = [
        (members_K, [kernels[k] for k in members_K.tolist()], replace(before, in_bursts=in_bursts))
        for members_K, in_bursts in ((np.flatnonzero(lasting_K), False), (np.flatnonzero(~lasting_K), True))
    ]

    def residuals(x: Floats) -> Floats:
        predicted_K = np.empty(len(kernels))
        for members_K, members, roofline in parts:
            predicted_K[members_K] = calibration_at(x).roofline(roofline).seconds(members, device)
        return np.concatenate([np.log(predicted_K / measured_K) / KERNEL_DEVIATION, x / PRIOR_DEVIATION])

    limit = math.log(MOST_CORRECTION)
    found = least_squares(residuals, np.zeros(NUM_FACTORS), loss="soft_l1", bounds=(-limit, limit), diff_step=1e-3)
    return calibration_at(found.x)


def calibration_kernels(device: DeviceType) -> list[Kernel]:
    """Return some two dozen kernels, sized for the device so that all take 15 seconds with the process's start."""
    matrix = next((dtype for dtype in ("bfloat16", "float16") if has_matrix_units(device, dtype)), None)
    kernels: list[Kernel] = []
    for dtype in ("float32", matrix):
        if dtype is None or dtype not in device.peak_flops_per_second:
            continue
        kernels += _products(dtype, device.peak_flops_per_second[dtype])
    for seconds in TRAFFIC_SECONDS:
        kernels += _traffic(seconds * device.memory_bytes_per_second)
    kernels.append(elementwise("relu", LAUNCH_ELEMENTS, num_read=1))
    return kernels


def _products(dtype: str, peak_flops_per_second: float) -> list[Kernel]:
    kernels = []
    for seconds in PRODUCT_SECONDS:
        side = (seconds * peak_flops_per_second / 2) ** (1 / 3)
        kernels.append(product(_multiple(side), _multiple(side), _multiple(side), dtype))
        kernels.append(product(_multiple(side / 4), _multiple(side * 4), _multiple(side), dtype))
    side = (PRODUCT_SECONDS[1] * peak_flops_per_second / 2 / 8) ** (1 / 3)
    return [*kernels, product(_multiple(side), _multiple(side), _multiple(side), dtype, batch=8)]


def _traffic(size_bytes: float) -> list[Kernel]:
    elements = max(round(size_bytes / 12), ROW_ELEMENTS)  # float32; most of these read one or two and write one
    rows = max(elements // ROW_ELEMENTS, 1)
    return [
        elementwise("add", elements, num_read=2),
        elementwise("gelu", elements, num_read=1),
        row_wise("softmax", "softmax", rows),
        row_wise("normalization", "native_layer_norm", rows),
    ]


def _multiple(size: float) -> int:
    return max(round(size / SIZE_STEP), 1) * SIZE_STEP


def product(m: int, n: int, k: int, dtype: str, batch: int = 1) -> Kernel:
    """Make a kernel of `batch` matrix products m × k by k × n."""
    item_bytes = ITEM_BYTES[dtype]
    return Kernel(
        family="matmul",
        name="bmm" if batch > 1 else "mm",
        dtype=dtype,
        batch=batch,
        m=m,
        n=n,
        k=k,
        flops=2.0 * batch * m * n * k,
        read_bytes=float(item_bytes * batch * k * (m + n)),
        written_bytes=float(item_bytes * batch * m * n),
    )


def elementwise(name: str, elements: int, num_read: int, dtype: str = "float32") -> Kernel:
    """Make a kernel that reads `num_read` tensors element by element."""
    size_bytes = float(ITEM_BYTES[dtype] * elements)
    return Kernel(
        family="elementwise",
        name=name,
        dtype=dtype,
        m=elements,
        read_bytes=num_read * size_bytes,
        written_bytes=size_bytes,
    )


def row_wise(family: str, name: str, rows: int, width: int = ROW_ELEMENTS, dtype: str = "float32") -> Kernel:
    """Make a kernel of a softmax or a norm of each row."""
    size_bytes = float(ITEM_BYTES[dtype] * rows * width)
    return Kernel(
        family=family, name=name, dtype=dtype, m=rows, n=width, read_bytes=size_bytes, written_bytes=size_bytes
    )
