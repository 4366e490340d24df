"""What torch's own kernels on GPUs do that neither a roofline nor other devices' measurements know.

Learned on one H200 (docs/log.md, 2026-11-27); the figures say of what.

Shape suffixes: K = kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.features import MOST_MEMORY_SHARE
from dejavu.cost.kernels.power import clocks_per_second
from dejavu.cost.kernels.roofline import has_matrix_units
from dejavu.profiles.kernel import Kernel

Floats = NDArray[np.float64]

# Group normalization in torch goes through each row (a group of channels of one example) with one block of threads,
# however long it is (aten native/cuda/group_norm_kernel.cu): with few long rows most of the device is idle, and neither
# bandwidth nor the elements' type matter. 2,048 threads fit on a multiprocessor of most devices, T4's and A10's 1,024
# and 1,536. The seconds of a step are what a layer's other kernels do not explain of its time on an H200 (32 rows of
# 1,048,576 elements: 1 ms, in 16 and 32 bits alike): one device, one size.
# Layer normalization in torch takes most of its time for arithmetic where memory is fast: of nine devices' float32 no
# multiprocessor passes more elements a clock (A100 1.26, NeuSight's; H200 1.32, ours). It is taken for granted that
# 16 bits, which take the same instructions, pass no faster.
NORMALIZED_PER_CLOCK = 1.32
BY_ROWS, ROW_THREADS, ROWS_PER_MULTIPROCESSOR, ROW_STEP_SECONDS = "native_group_norm", 512, 4, 0.5e-6


def least_seconds(kernels: Sequence[Kernel], device: DeviceType) -> Floats:
    """Return what normalizations take at least however fast the memory is, K; 0 for other kernels, and on CPUs."""
    return np.array([_normalization_seconds(kernel, device) for kernel in kernels], dtype=float)


def _normalization_seconds(kernel: Kernel, device: DeviceType) -> float:
    count, clocks = device.num_multiprocessors, clocks_per_second(device)
    if count and kernel.name == BY_ROWS:
        waves = math.ceil(kernel.m / (count * ROWS_PER_MULTIPROCESSOR))
        return waves * math.ceil(kernel.n / ROW_THREADS) * ROW_STEP_SECONDS
    if count and clocks and kernel.name == "native_layer_norm":
        return kernel.m * kernel.n / (NORMALIZED_PER_CLOCK * count * clocks)
    return 0.0


def layout_seconds(kernels: Sequence[Kernel], device: DeviceType) -> Floats:
    """Return what convolutions on matrix units take besides their products, K; 0 for other kernels.

    NVIDIA's matrix units want channels last, torch's images have them first unless a model says otherwise: cuDNN copies
    what comes in and what goes out. Those of many groups have kernels of their own, without matrix units.
    """
    moved_K = [
        2 * (kernel.read_bytes + kernel.written_bytes)
        if kernel.family == "convolution"
        and device.kind == "cuda"
        and has_matrix_units(device, kernel.dtype)
        and kernel.batch <= (2 if kernel.is_backward else 1)
        else 0.0
        for kernel in kernels
    ]
    return np.array(moved_K, dtype=float) / (MOST_MEMORY_SHARE * device.memory_bytes_per_second)


def as_torch_runs(kernel: Kernel, device: DeviceType) -> Kernel:
    """Return the kernel in the type that torch computes it in unless it is told otherwise.

    cuDNN may round operands of float32 convolutions to TF32 (`torch.backends.cudnn.allow_tf32` is true); cuBLAS may
    not. On an H200 a convolution's backward pass took less than its float32 units need at their peak.
    """
    if device.kind == "cuda" and kernel.family == "convolution" and kernel.dtype == "float32":
        return replace(kernel, dtype="tfloat32")
    return kernel
