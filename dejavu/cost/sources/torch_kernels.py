"""What torch's own kernels on GPUs do that neither a roofline nor other devices' measurements know.

Learned on one H200 and one H100 (docs/log.md, 2026-11-27); the figures say of what.

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
from dejavu.cost.kernels.roofline import ITEM_BYTES, has_matrix_units, multiplies_by_warpgroups
from dejavu.profiles.kernel import Kernel

Floats = NDArray[np.float64]

# Group normalization in torch goes through each row (a group of channels of one example) with one block of threads,
# however long it is (aten native/cuda/group_norm_kernel.cu), and then once over all elements: with few long rows most
# of the device is idle, and neither bandwidth nor the elements' type matter. 2,048 threads fit on a multiprocessor of
# most devices, T4's and A10's 1,024 and 1,536. The seconds of a step are of 32 rows of 1,048,576 elements on an H100,
# 0.86 ms in 16 and 32 bits alike; where the cache holds all rows, of 16 rows in 16 bits on an H200, whose layers' other
# kernels leave so much: that the cache is the reason is inferred.
BY_ROWS, ROW_THREADS, ROWS_PER_MULTIPROCESSOR = "native_group_norm", 512, 4
ROW_STEP_SECONDS, CACHED_ROW_STEP_SECONDS = 0.42e-6, 0.26e-6
# Layer normalization in torch takes most of its time for arithmetic where memory is fast: of nine devices' float32 no
# multiprocessor passes more elements a clock (A100 1.26, NeuSight's; H200 1.32, ours). It is taken for granted that
# 16 bits, which take the same instructions, pass no faster.
NORMALIZED_PER_CLOCK = 1.32
# Elements that a multiprocessor passes in a clock where it works out each one's place (`Kernel.is_indexed`), whatever
# their type: on an H100 1.02 to 1.19 of additions and products with a broadcast operand and of copies into another
# order (0.8 to 1.6 of those below 9 million elements), 0.77 to 0.98 of tensors that are joined.
INDEXED_PER_CLOCK, JOINED_PER_CLOCK = 1.1, 0.95
# Sums of so many rows with each other and more (gradients of biases) pass so much of the memory's peak after a start
# that is the same for all: six sizes on an H100, in 16 and 32 bits, within 14 %. Of 4 to 16 rows on an H200 there was
# no such start.
ROW_SUM_SECONDS, ROW_SUM_SHARE, SUMMED_ROWS = 10e-6, 0.75, 1024
# The gradient of an embedding clears the table, sorts indices and adds rows, so many elements a clock besides what it
# moves: 8,192 and 1,024 rows of 1,024 elements on an H100.
SCATTER_SECONDS, SCATTERED_PER_CLOCK = 20e-6, 0.21
LAUNCH_SECONDS = 3e-6  # until a short kernel's memory is at full speed
# A softmax whose rows fit into shared memory reads them once: 74 to 90 % of the memory's peak on an H100 (rows of
# 16,384, both passes, 16 and 32 bits), where older kernels were learned to read twice.
SOFTMAX_SHARE, SHARED_ROW_BYTES = 0.8, 64 * 2**10
# Copies of images into the layout of matrix units and back, of the memory's peak: H100, in 16 and in 32 bits.
LAYOUT_SHARE = {2: 0.6, 4: 0.84}
# On a Hopper the gradient of a convolution's weights in TF32 runs at half the speed of the other products (one size).
TF32_BACKWARD = 1.5


def at_least(kernels: Sequence[Kernel], device: DeviceType) -> Floats:
    """Return what kernels take at least, K; 0 where nothing is known, and on CPUs."""
    return np.array([_least(kernel, device) for kernel in kernels], dtype=float)


def at_most(kernels: Sequence[Kernel], device: DeviceType) -> Floats:
    """Return what kernels take at most, K; infinite where nothing is known, and on CPUs."""
    most_K = np.full(len(kernels), math.inf)
    if device.kind == "cuda":
        for k, kernel in enumerate(kernels):
            if kernel.family == "softmax" and kernel.n * ITEM_BYTES.get(kernel.dtype, 4) <= SHARED_ROW_BYTES:
                most_K[k] = LAUNCH_SECONDS + _passed(kernel, device, SOFTMAX_SHARE)
    return most_K


def _least(kernel: Kernel, device: DeviceType) -> float:
    if not device.num_multiprocessors:
        return 0.0
    per_clock = _clocks_of_all(device)
    if kernel.name == BY_ROWS:
        waves = math.ceil(kernel.m / (device.num_multiprocessors * ROWS_PER_MULTIPROCESSOR))
        is_cached = kernel.read_bytes <= (device.cache_bytes or 0.0)
        step_seconds = CACHED_ROW_STEP_SECONDS if is_cached else ROW_STEP_SECONDS
        rows = waves * math.ceil(kernel.n / ROW_THREADS) * step_seconds
        return rows + kernel.m * kernel.n / (INDEXED_PER_CLOCK * per_clock)
    if device.kind != "cuda":
        return 0.0
    if kernel.name == "native_layer_norm":
        return kernel.m * kernel.n / (NORMALIZED_PER_CLOCK * per_clock)
    if kernel.name == "embedding_dense_backward":
        arriving = kernel.read_bytes / ITEM_BYTES.get(kernel.dtype, 4)
        added = SCATTER_SECONDS + arriving / (SCATTERED_PER_CLOCK * per_clock)
        return added + _passed(kernel, device, MOST_MEMORY_SHARE)
    if not kernel.is_indexed:
        return 0.0
    if kernel.family == "reduction":
        start = max(LAUNCH_SECONDS, ROW_SUM_SECONDS * min(1.0, kernel.n / SUMMED_ROWS))
        return start + _passed(kernel, device, ROW_SUM_SHARE)
    return kernel.m / ((JOINED_PER_CLOCK if kernel.name in ("cat", "stack") else INDEXED_PER_CLOCK) * per_clock)


def _clocks_of_all(device: DeviceType) -> float:
    """Return the clocks of all multiprocessors together, a second; infinite: unknown."""
    clocks = clocks_per_second(device)
    return (device.num_multiprocessors or 0) * clocks if clocks else math.inf


def _passed(kernel: Kernel, device: DeviceType, share: float) -> float:
    return (kernel.read_bytes + kernel.written_bytes) / (share * device.memory_bytes_per_second)


def convolved(seconds_K: Floats, kernels: Sequence[Kernel], device: DeviceType) -> Floats:
    """Return what convolutions take in all, of what their products take, K; other kernels' seconds as they are."""
    found_K = seconds_K.copy()
    for k, kernel in enumerate(kernels):
        if kernel.family != "convolution" or device.kind != "cuda":
            continue
        if kernel.dtype == "tfloat32" and kernel.is_backward and multiplies_by_warpgroups(device):
            found_K[k] *= TF32_BACKWARD
        found_K[k] += _bias_seconds(kernel, device)
        # Those of many groups have kernels of their own, without matrix units.
        if has_matrix_units(device, kernel.dtype) and kernel.batch <= (2 if kernel.is_backward else 1):
            found_K[k] += _layout_seconds(kernel, device)
    return found_K


def _bias_seconds(kernel: Kernel, device: DeviceType) -> float:
    """Return the kernels that add a bias, or sum its gradient: torch's own, before and after cuDNN's."""
    if not kernel.has_bias or not device.num_multiprocessors:
        return 0.0
    outputs = kernel.m * kernel.n
    if kernel.is_backward:
        summed = outputs * ITEM_BYTES.get(kernel.dtype, 4) / (ROW_SUM_SHARE * device.memory_bytes_per_second)
        return ROW_SUM_SECONDS + summed
    return outputs / (INDEXED_PER_CLOCK * _clocks_of_all(device))


def _layout_seconds(kernel: Kernel, device: DeviceType) -> float:
    """Return what copies take into and out of the layout of matrix units.

    These want channels last, torch's images have them first unless a model says otherwise: cuDNN copies what comes in
    and what goes out, for each product.
    """
    item_bytes = ITEM_BYTES.get(kernel.dtype, 4)
    again = kernel.m * kernel.n * item_bytes if kernel.is_backward and kernel.batch > 1 else 0.0  # the gradient, twice
    copied = kernel.read_bytes + kernel.written_bytes + again
    return 2 * copied / (LAYOUT_SHARE.get(item_bytes, MOST_MEMORY_SHARE) * device.memory_bytes_per_second)


def as_torch_runs(kernel: Kernel, device: DeviceType) -> Kernel:
    """Return the kernel in the type that torch computes it in unless it is told otherwise.

    cuDNN may round operands of float32 convolutions to TF32 (`torch.backends.cudnn.allow_tf32` is true); cuBLAS may
    not. On an H200 a convolution's backward pass took less than its float32 units need at their peak.
    """
    if device.kind == "cuda" and kernel.family == "convolution" and kernel.dtype == "float32":
        return replace(kernel, dtype="tfloat32")
    return kernel
