"""The roofline of a kernel: a launch, then arithmetic in waves of tiles or memory traffic, whichever is longer.

A matrix product is cut into tiles that the multiprocessors process in waves: the last wave takes as long as a full
one (wave quantization). A tile takes its arithmetic and the time in which its operands pass the multiprocessor's shared
memory, which is why a device with fast matrix units reaches less of its peak. Of a small menu of tiles, and of splits
of the summed dimension, the fastest is taken, which is what cuBLAS' heuristic aims for.

Fused attention is cut as FlashAttention 2 cuts it: each multiprocessor takes a tile of queries through the keys.

Few parameters, each a plain physical quantity, so that the law transfers to devices that were never measured. See
Williams et al., "Roofline", CACM 2009, and NVIDIA's "Matrix multiplication background user's guide" on tiles and waves.

Shape suffixes: K = kernels, T = tiles of the menu, S = splits of the summed dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.estimates import CostError
from dejavu.cost.kernels.power import matrix_units_share, sustained_fraction
from dejavu.profiles.kernel import Kernel

Floats = NDArray[np.float64]

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))  # elements of the result, rows × columns
SPLITS = (1, 2, 3, 4, 6, 8)  # of the summed dimension, each worked off by another multiprocessor
QUERY_TILE = 128  # queries that one multiprocessor holds, in FlashAttention 2
# Each of its four warps reads a key and its value, 2 × 2 bytes for each of the head's dimensions, and does with them
# the products of 32 queries, 4 × 32 for each: so many operations for a byte of shared memory. Counted, not fitted.
ATTENTION_FLOPS_PER_OPERAND_BYTE = 32.0
ACCUMULATOR_BYTES = 4  # partial sums of a split are float32
# 128 bytes a clock (NVIDIA's tuning guides, Volta to Hopper) at 1.5 GHz, between A100's 1.41 and A40's 1.74 GHz.
# Fixed from these, not fitted: with it, A100 and A40 alone each give the same compute efficiency, 0.87.
MULTIPROCESSOR_BYTES_PER_SECOND = 128 * 1.5e9
# Up to Ampere each warp loads its own operands: eight warps of 64 × 64 read 2,048 bytes of a 128 × 256 tile's step in
# 16 bits. From Hopper on a warpgroup reads them where they lie, two of 64 × 256 only 1,280 (PTX ISA, `wgmma`), and its
# clock is 1.22 times as high (H100: 1.83 GHz): the same tile passes 1.95 times as fast. Counted, fitted to nothing.
# And they pass while it multiplies (`wgmma.mma_async`), so that the longer of the two counts, not their sum; a warp of
# an Ampere spends slots to issue in on loading them.
HOPPER_CLOCK = 1.83 / 1.5
WARPGROUP_SPEEDUP = 2048 / 1280 * HOPPER_CLOCK
MOST_WARP_FLOPS_PER_SECOND = 3072 * 1.5e9  # a multiprocessor's in 16 bits: Ampere's do 2,048 a clock, Hopper's 4,096
# Kernels written for warps, as FlashAttention 2, keep so much of what warpgroups reach: mma.sync on an H100 62.9 % of
# the peak (Luo et al., arXiv:2402.13499, as recalled); on later devices, where the peak is another unit's, no more.
WARP_SHARE = 0.629
MOST_WARPGROUP_FLOPS_PER_SECOND = 4096 * 1.83e9  # of an H100's multiprocessor
MATRIX_UNIT_RATIO = 2.5  # times the float32 peak: a type that is faster has matrix units; without them it has twice
CACHE_SHARPNESS = 4.0  # exponent of how fast the share that a cache holds falls once the tensors outgrow it
PRODUCTS = ("matmul", "convolution", "attention")
MOST_AT_ONCE = 16384  # kernels; every tile and split of each is in memory, some 100 MiB
ITEM_BYTES = {"float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class KernelLaw:
    """The parameters for one class of arithmetic.

    Attributes:
        compute_efficiency: share of the peak that a tile reaches when its operands cost nothing.
        convolution_efficiency, attention_efficiency: times that, for these families.
        attends_by: the instructions of fused attention in 16 bits: `warps` is FlashAttention 2, which torch runs,
            `warpgroups` its third version; `tiles` is any kernel, at `attention_efficiency`.
        memory_efficiency: share of the peak bytes per second that products reach; `traffic_efficiency` that of other
            families, by name.
        cache_speedup: how much faster traffic is where all tensors fit into the device's cache.
        launch_seconds: every kernel; `tile_seconds`: every tile, before its first and after its last product;
            `split_seconds`: once where partial sums are added.
        overlap: arithmetic a and traffic t together take (a^p + t^p)^(1/p); ∞ would hide the shorter one.
        power_efficiency: times the share of the peak that the board's power is said to sustain.
        most_share: the share of the peak that power sustains on the device.
    """

    compute_efficiency: float
    memory_efficiency: float
    launch_seconds: float
    tile_seconds: float = 0.0
    split_seconds: float = 0.0
    overlap: float = 3.0
    convolution_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    attends_by: Literal["tiles", "warps", "warpgroups"] = "tiles"
    cache_speedup: float = 1.0
    traffic_efficiency: Mapping[str, float] = field(default_factory=dict)
    power_efficiency: float = 1.0
    most_share: float = math.inf

    def limited(self, most_share: float) -> KernelLaw:
        """Return the law where power is said to sustain this share of the peak at most."""
        return replace(self, most_share=most_share * self.power_efficiency)

    def seconds(self, columns: Columns, family: str, peak_flops_per_second: float, device: DeviceType) -> Floats:
        """Return the seconds of kernels of one family; the peak does not matter outside `PRODUCTS`."""
        bandwidth = device.memory_bytes_per_second * self.traffic_efficiency.get(family, self.memory_efficiency)
        if family not in PRODUCTS:
            return self.launch_seconds + self._memory_seconds(columns.bytes_K, bandwidth, device)
        scale = {"convolution": self.convolution_efficiency, "attention": self.attention_efficiency}.get(family, 1.0)
        rate = peak_flops_per_second * self.compute_efficiency * scale
        most_rate = peak_flops_per_second * self.most_share
        if device.num_multiprocessors is None:  # a core of a CPU: no waves
            arithmetic, traffic, extra = columns.flops_K / rate, columns.bytes_K, np.zeros(1)
        elif family == "attention" and self.attends_by != "tiles":
            return self._attention_seconds(columns, rate, most_rate, bandwidth, device)
        elif family == "attention":
            blocks_K = columns.batch_K * np.ceil(columns.m_K / QUERY_TILE)
            idle_K = np.ceil(blocks_K / device.num_multiprocessors) * device.num_multiprocessors / blocks_K
            arithmetic, traffic, extra = columns.flops_K / rate * idle_K, columns.bytes_K, np.zeros(1)
        else:
            return self._tiled_seconds(columns, rate, most_rate, bandwidth, device)
        return (
            self.launch_seconds + extra + self._together(arithmetic, self._memory_seconds(traffic, bandwidth, device))
        )

    def _tiled_seconds(
        self, columns: Columns, rate: float, most_rate: float, bandwidth: float, device: DeviceType
    ) -> Floats:
        """Return each product's time with its fastest tile and split."""
        count = device.num_multiprocessors
        assert count is not None
        rows_T, width_T = (np.array(sizes, dtype=float)[None, :, None] for sizes in zip(*TILES, strict=True))
        split_S = np.array(SPLITS, dtype=float)[None, None, :]
        batch, m, n, k = (values[:, None, None] for values in (columns.batch_K, columns.m_K, columns.n_K, columns.k_K))
        item_bytes, first = columns.item_bytes_K[:, None, None], columns.bytes_K[:, None, None]
        waves = np.ceil(batch * np.ceil(m / rows_T) * np.ceil(n / width_T) * split_S / count)
        # of one step along the summed dimension: multiply, and bring both operands past the shared memory
        multiply = 2 * rows_T * width_T * count / rate
        bring = (rows_T + width_T) * item_bytes / _operand_bytes_per_second(device)
        step = np.maximum(multiply, bring) if multiplies_by_warpgroups(device) else multiply + bring
        step = np.maximum(step, 2 * rows_T * width_T * count / most_rate)
        arithmetic = waves * (self.tile_seconds + np.ceil(k / split_S) * step)
        partial_bytes = np.where(split_S > 1, ACCUMULATOR_BYTES * split_S * batch * m * n, 0.0)
        memory = self._memory_seconds(first, bandwidth, device) + partial_bytes / bandwidth
        choices = self._together(arithmetic, memory) + np.where(split_S > 1, self.split_seconds, 0.0)
        fastest_K: Floats = choices.min(axis=(1, 2))
        return self.launch_seconds + fastest_K

    def _attention_seconds(
        self, columns: Columns, rate: float, most_rate: float, bandwidth: float, device: DeviceType
    ) -> Floats:
        """Return what FlashAttention takes: products and operands of each tile of queries, one after the other.

        Causal attention computes half of the scores and those of the diagonal's tiles whole; its longest tile, twice
        the mean, is in the middle of its work when others have ended. Going backward, kernels of their own multiply the
        output and its gradient, clear a sum of the queries' gradients in float32, and round it.
        """
        count = device.num_multiprocessors
        assert count is not None
        operands = ATTENTION_FLOPS_PER_OPERAND_BYTE * _operand_bytes_per_second(device, self.attends_by)
        if self.attends_by == "warps" and multiplies_by_warpgroups(device):
            reached = min(self.compute_efficiency, self.most_share)
            rate = WARP_SHARE * reached * min(rate / self.compute_efficiency, count * MOST_WARPGROUP_FLOPS_PER_SECOND)
        tiles_K, causal_K = np.ceil(columns.m_K / QUERY_TILE), columns.causal_K
        blocks_K = columns.batch_K * tiles_K
        block_K = columns.flops_K * (1 + causal_K) * (tiles_K * QUERY_TILE / columns.m_K) / blocks_K  # as if it saw all
        waves_K = np.ceil(blocks_K / count)
        some_K = (blocks_K / count + 1) / 2 * (1 + QUERY_TILE / columns.n_K)
        waves_K = np.where(causal_K, np.minimum(some_K, waves_K), waves_K)
        arithmetic_K = waves_K * block_K * max(count / rate + 1 / operands, count / most_rate)
        together_K = self._together(arithmetic_K, self._memory_seconds(columns.bytes_K, bandwidth, device))
        elements_K = columns.batch_K * columns.m_K * columns.k_K
        prepared_K = elements_K * (3 * columns.item_bytes_K + 2 * ACCUMULATOR_BYTES) / bandwidth
        return self.launch_seconds + together_K + columns.backward_K * (2 * self.launch_seconds + prepared_K)

    def _together(self, arithmetic: Floats, memory: Floats) -> Floats:
        longer, shorter = np.maximum(arithmetic, memory), np.minimum(arithmetic, memory)
        return longer * (1 + (shorter / np.maximum(longer, 1e-30)) ** self.overlap) ** (1 / self.overlap)

    def _memory_seconds(self, size_bytes: Floats, bandwidth: float, device: DeviceType) -> Floats:
        seconds = size_bytes / bandwidth
        if self.cache_speedup == 1.0 or not device.cache_bytes:
            return seconds
        inside = 1 / (1 + (size_bytes / device.cache_bytes) ** CACHE_SHARPNESS)
        return seconds * (1 - inside + inside / self.cache_speedup)


@dataclass(frozen=True, eq=False)
class Columns:
    """Kernels as arrays."""

    batch_K: Floats
    m_K: Floats
    n_K: Floats
    k_K: Floats
    flops_K: Floats
    bytes_K: Floats
    item_bytes_K: Floats
    causal_K: Floats  # 1 or 0, as the next
    backward_K: Floats

    @classmethod
    def of(cls, kernels: Sequence[Kernel]) -> Columns:
        rows = [
            (
                *(k.batch, k.m, k.n, k.k, k.flops, k.read_bytes + k.written_bytes),
                *(ITEM_BYTES.get(k.dtype, 4), k.is_causal, k.is_backward),
            )
            for k in kernels
        ]
        return cls(*np.array(rows, dtype=float).reshape(-1, 9).T)

    def at(self, positions: NDArray[np.intp] | slice) -> Columns:
        return Columns(*(values[positions] for values in vars(self).values()))


# Share of the peak bytes per second. The first three fitted with SCALAR_UNITS; reductions are taken for softmax, copies
# for elementwise operations, and a gather, whose rows lie apart, for half of a copy.
_TRAFFIC = {
    "elementwise": 0.93,
    "softmax": 0.66,
    "normalization": 0.48,
    "reduction": 0.66,
    "copy": 0.93,
    "gather": 0.46,
}

# Matrix units (fp16): six figures fitted jointly to 57,640 of vidur's products with M ≥ 16, on A100-SXM4-80GB and A40
# (MLSys 2024), 2026-11-21; attention has no figure of its own (`python -m benchmarks.cost --attention`: how well).
MATRIX_UNITS = KernelLaw(
    compute_efficiency=0.872,
    memory_efficiency=0.770,
    launch_seconds=3.2e-6,
    tile_seconds=2.3e-7,
    split_seconds=2.7e-6,
    overlap=3.75,
    attends_by="warps",
    traffic_efficiency=_TRAFFIC,
)
# float32 without matrix units: fitted to NeuSight's kernels on P100, V100, T4 and A100-40GB (ASPLOS 2025), 2026-11-21.
# Its times hold the host's part of a launch. Winograd's convolutions multiply less than is counted: hence above 1.
SCALAR_UNITS = KernelLaw(
    compute_efficiency=0.849,
    memory_efficiency=0.595,
    launch_seconds=30e-6,
    tile_seconds=0.9e-6,
    split_seconds=26e-6,
    overlap=2.83,
    convolution_efficiency=1.49,
    attention_efficiency=0.60,  # of what the device sustains: an H100 and an H200 of ours, forward and backward
    traffic_efficiency=_TRAFFIC,
)
# A core of a CPU, against the nominal figures of `this_machine`: round figures, because those are guesses.
CPU_CORE = KernelLaw(
    compute_efficiency=0.7,
    memory_efficiency=1.0,
    launch_seconds=2e-6,
    attention_efficiency=0.5,
    traffic_efficiency={"softmax": 0.5},  # its exponentials: half the bytes per second of an addition
)


@dataclass(frozen=True)
class KernelRoofline:
    """Seconds of any kernel on any device whose peaks are known.

    It is no more accurate than its physics: on the devices that it was fitted to, products are 7 % off in fp16 and 20 %
    in float32, convolutions 40 % and the rest 17 to 20 %. `calibration` corrects it with a few measured kernels.

    Attributes:
        in_bursts: of kernels that end before the board's power limits them; a training's do not.
    """

    matrix_units: KernelLaw = MATRIX_UNITS
    scalar_units: KernelLaw = SCALAR_UNITS
    cpu_core: KernelLaw = CPU_CORE
    in_bursts: bool = False

    def seconds(self, kernels: Sequence[Kernel], device: DeviceType) -> Floats:
        """Return the seconds of each kernel.

        Raises:
            CostError: a product in a dtype whose peak is unknown on this device.
        """
        columns, seconds_K = Columns.of(kernels), np.empty(len(kernels))
        groups: dict[tuple[str, str], list[int]] = {}
        for position, kernel in enumerate(kernels):
            groups.setdefault((kernel.family, kernel.dtype), []).append(position)
        for (family, dtype), members in groups.items():
            peak = peak_flops_per_second(device, dtype) if family in PRODUCTS else None
            if peak is None and family in PRODUCTS:
                raise CostError(
                    f"no peak FLOP/s of {device.name!r} in {dtype} for {kernels[members[0]].name!r}; "
                    f"{device.wanted_peak(dtype)}"
                )
            law = self.law(device, dtype)
            for start in range(0, len(members), MOST_AT_ONCE):
                positions = np.array(members[start : start + MOST_AT_ONCE])
                seconds_K[positions] = law.seconds(columns.at(positions), family, peak or 1.0, device)
        return seconds_K

    def law(self, device: DeviceType, dtype: str) -> KernelLaw:
        """Return the law for this dtype on this device."""
        if device.kind == "cpu":
            return self.cpu_core
        if not has_matrix_units(device, dtype):
            sustained = sustained_fraction(device, dtype)  # of products outside attention the learned predictor knows
            return replace(self.scalar_units, attention_efficiency=self.scalar_units.attention_efficiency * sustained)
        return self.matrix_units if self.in_bursts else self.matrix_units.limited(matrix_units_share(device))


def peak_flops_per_second(device: DeviceType, dtype: str) -> float | None:
    """Return the peak that kernels of this dtype can reach; tfloat32 is float32 where the device has no such units."""
    peak = device.peak_flops_per_second.get(dtype)
    return device.peak_flops_per_second.get("float32") if peak is None and dtype == "tfloat32" else peak


def _operand_bytes_per_second(device: DeviceType, by: str = "warpgroups") -> float:
    """Return how fast one multiprocessor's tile gets its operands; `by` warps only the clock of a Hopper is faster."""
    speedup = WARPGROUP_SPEEDUP if by == "warpgroups" else HOPPER_CLOCK
    return MULTIPROCESSOR_BYTES_PER_SECOND * (speedup if multiplies_by_warpgroups(device) else 1.0)


def multiplies_by_warpgroups(device: DeviceType) -> bool:
    """Return whether matrix units take operands from shared memory, as since Hopper.

    Known by its generation, or by the 16-bit peak: an H20 is a Hopper whose units were made slower.
    """
    if device.kind != "cuda":
        return False
    if (device.architecture or "").casefold() == "hopper":
        return True
    peaks, count = device.peak_flops_per_second, device.num_multiprocessors
    peak = peaks.get("float16") or peaks.get("bfloat16") or 0.0
    return count is not None and peak / count > MOST_WARP_FLOPS_PER_SECOND


def has_matrix_units(device: DeviceType, dtype: str) -> bool:
    """Return whether products in this dtype run on matrix units (tensor cores)."""
    peaks = device.peak_flops_per_second
    if dtype in ("float32", "float64") or dtype not in peaks or device.kind == "cpu":
        return False
    return "bfloat16" in peaks or peaks[dtype] >= MATRIX_UNIT_RATIO * peaks.get("float32", np.inf)
