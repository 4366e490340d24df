"""Dimensionless features of how well a kernel uses a device; none of them identifies the device.

Shape suffixes: K = kernels, F = features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.power import sustained_fraction
from dejavu.profiles.kernel import Kernel

Floats = NDArray[np.float64]

# Tiles that libraries cut products into, rows × columns (as in the names of NVIDIA's SIMT kernels), and how well one
# keeps a multiprocessor busy beside the largest: a tile of 64 × 64 reads twice as much for each operation. The shares
# are guesses, fitted to nothing; the trees correct them.
TILES = ((128, 128, 1.0), (128, 64, 0.95), (64, 64, 0.85), (128, 32, 0.8), (64, 32, 0.7), (32, 32, 0.55))
SHOWN_TILES = (128, 64, 32)  # square tiles whose waves and padding are features
MEMORY_EFFICIENCY = 0.85  # of peak; between 0.74 (P100) and 0.91 (V100) in NeuSight's element-wise kernels
# Nothing that outgrows the cache passes faster than this share of the peak: the most of ten devices' element-wise
# kernels, 0.93 on V100 (NeuSight's), and 0.92 on an H200 (ours). It holds in full from four caches of traffic on.
MOST_MEMORY_SHARE, CACHE_SPAN = 0.93, 3.0
USUAL_MULTIPROCESSORS = 80  # where a device does not say
# Winograd's F(2×2, 3×3) needs 4/9 of the multiplications of the direct way; Lavin and Gray, CVPR 2016.
WINOGRAD = 2.25

MODELS = ("matmul", "convolution", "elementwise", "softmax", "normalization")
PRODUCTS = ("matmul", "convolution", "attention")  # bound by the peak of their dtype
# Families that have no measurements of their own and move data as element-wise kernels do.
BORROWED = {"copy": "elementwise", "reduction": "elementwise", "gather": "elementwise"}


@dataclass(frozen=True, eq=False)
class KernelWork:
    """The numbers of many kernels of one model (`MODELS`), as in `Kernel`."""

    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    flops: Floats
    read_bytes: Floats
    written_bytes: Floats

    @classmethod
    def of(cls, kernels: Sequence[Kernel]) -> KernelWork:
        names = [field.name for field in fields(cls)]
        table = np.array([[getattr(kernel, name) for name in names] for kernel in kernels], dtype=float)
        return cls(*table.reshape(-1, len(names)).T)


@dataclass(frozen=True, eq=False)
class KernelBounds:
    """Seconds that peaks allow, for each kernel.

    Attributes:
        compute_K: arithmetic at the peak; least_K also counts memory: nothing ends sooner.
        queued_K: the least of a kernel in a stream of work: what caches do not hold comes at `MOST_MEMORY_SHARE`.
        expected_K: arithmetic in the best tiles at the power that the board has, and memory, without the launch.
    """

    compute_K: Floats
    memory_K: Floats
    least_K: Floats
    queued_K: Floats
    expected_K: Floats
    tiles_K: Floats


def peak_flops_per_second(device: DeviceType, dtype: str, model: str) -> float | None:
    """Return the peak of the units that a kernel of this model uses.

    float32 products run on matrix units of AMD's CDNA 1 and 2, twice as fast as what the catalogue quotes for
    float32; later ones, which the catalogue gives TF32 for, are quoted with them.
    """
    peak = device.peak_flops_per_second.get(dtype)
    if peak is None and dtype == "tfloat32":
        peak = device.peak_flops_per_second.get("float32")
    doubled = model in PRODUCTS and dtype == "float32" and device.kind == "rocm"
    return 2.0 * peak if peak and doubled and "tfloat32" not in device.peak_flops_per_second else peak


def bounds(model: str, work: KernelWork, device: DeviceType, dtype: str) -> KernelBounds | None:
    """Compute the bounds; None where the device's peak at this dtype is unknown."""
    peak = peak_flops_per_second(device, dtype, model)
    if model in PRODUCTS:
        if peak is None:
            return None
    else:  # arithmetic of these is small beside their traffic, at any dtype
        peak = device.peak_flops_per_second.get("float32") or max(device.peak_flops_per_second.values())
    compute = work.flops / peak
    memory = (work.read_bytes + work.written_bytes) / device.memory_bytes_per_second
    beyond = np.clip((memory * device.memory_bytes_per_second / (device.cache_bytes or 1.0) - 1) / CACHE_SPAN, 0.0, 1.0)
    tiles = np.ones_like(compute)
    if model in ("matmul", "convolution"):
        shares = [_padding(work, *tile[:2]) * _quantized(_waves(work, device, *tile[:2])) / tile[2] for tile in TILES]
        tiles = np.min(shares, axis=0)
    arithmetic = compute * tiles / sustained_fraction(device, dtype)
    quickest = compute / WINOGRAD if model == "convolution" else compute
    return KernelBounds(
        compute_K=compute,
        memory_K=memory,
        least_K=np.maximum(quickest, memory),
        queued_K=np.maximum(quickest, memory / (1 - (1 - MOST_MEMORY_SHARE) * beyond)),
        expected_K=np.hypot(arithmetic, memory / MEMORY_EFFICIENCY),
        tiles_K=tiles,
    )


def features(
    model: str, work: KernelWork, device: DeviceType, dtype: str, found: KernelBounds, launch_seconds: float
) -> Floats:
    """Compute the features (KF), logarithms of ratios; `FEATURES[model]` names the columns."""
    fraction = sustained_fraction(device, dtype)
    size = np.log(np.maximum(np.maximum(found.compute_K / fraction, found.memory_K), 1e-12) / launch_seconds)
    if model in ("matmul", "convolution"):
        columns = [np.log(np.maximum(found.compute_K / fraction, 1e-15) / np.maximum(found.memory_K, 1e-15)), size]
        for side in SHOWN_TILES:
            waves = _waves(work, device, side, side)
            columns += [np.log(waves), np.log(np.minimum(_quantized(waves), 64.0)), np.log(_padding(work, side, side))]
        columns += [np.log(found.tiles_K), np.log(np.maximum(work.k, 1.0))]
    elif model == "elementwise":
        columns = [size]
    else:
        rows = np.log(np.maximum(work.m, 1.0) / _multiprocessors(device))
        columns = [size, rows, np.log(np.maximum(work.n, 1.0)), np.log(work.read_bytes / work.written_bytes)]
    return np.column_stack(columns)


_TILE_FEATURES = tuple(f"{what}_{side}" for side in SHOWN_TILES for what in ("waves", "quantization", "padding"))
_PRODUCT_FEATURES = ("intensity", "size", *_TILE_FEATURES, "tiles", "depth")
_ROW_FEATURES = ("size", "rows", "width", "read_to_written")
FEATURES = {
    **dict.fromkeys(("matmul", "convolution"), _PRODUCT_FEATURES),
    **dict.fromkeys(("softmax", "normalization"), _ROW_FEATURES),
    "elementwise": ("size",),
}
# A wave that is emptier, or a tile that covers less of the result, never makes a kernel faster.
MONOTONE = {name: 1 for name in _PRODUCT_FEATURES if name.startswith(("quantization", "padding", "tiles"))}


def _multiprocessors(device: DeviceType) -> float:
    return float(device.num_multiprocessors or USUAL_MULTIPROCESSORS)


def _tiles(work: KernelWork, rows: int, columns: int) -> Floats:
    return work.batch * np.ceil(work.m / rows) * np.ceil(work.n / columns)


def _waves(work: KernelWork, device: DeviceType, rows: int, columns: int) -> Floats:
    return _tiles(work, rows, columns) / _multiprocessors(device)


def _quantized(waves: Floats) -> Floats:
    """Return whole waves over exact waves of work: 1 where the last one is full."""
    return np.ceil(waves) / waves


def _padding(work: KernelWork, rows: int, columns: int) -> Floats:
    return _tiles(work, rows, columns) * rows * columns / (work.batch * work.m * work.n)
