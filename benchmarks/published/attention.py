"""Published speeds of fused attention on GPUs: FlashAttention 2 and 3 by device, head, length, mask and pass.

All were read where they stand, on 2026-11-24, none is from memory but `RECALLED`. TFLOP/s are as FlashAttention counts:
4 × batch × heads × queries × keys × head width forward, half of it where causal, 2.5 times as much backward.

Sources, all on github.com: gpu-mode/ring-attention issue 10 (RTX A5000); liangan1/GPU_travel
performance/flash-attn/README.md (A100); apache/tvm tl_doc/flash_perf.md, two versions (RTX 4090); pytorch/benchmark
pull 2296 (H100, torch's own kernel) and 2391 (version 3); meta-pytorch/tritonbench pull 1254 (version 3) and 171
(B200); Dao-AILab/flash-attention issues 1310 (H20) and 1589 (B200).

What the sources do not say is assumed here and said in `note`: an A100's form (SXM4 80 GB is assumed; its author saw
it at 1.2 of 1.41 GHz, for power), that the H100's were Meta's (500 W, HBM2e) or not, and the batch on the RTX 4090
(16,384 tokens and 2,048 dimensions, as in FlashAttention's own benchmark, whose output the A5000's and B200's are).

FlashAttention 1 is left out: torch has not run it since 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dejavu.cluster import DeviceType, catalogue
from dejavu.cost.kernels.roofline import ITEM_BYTES
from dejavu.profiles.kernel import CAUSAL, Kernel

TOKENS, WIDTH = 16_384, 2_048  # of FlashAttention's own benchmark (benchmarks/benchmark_flash_attention.py)
TFLOPS = 1e12
Version = Literal[2, 3]


@dataclass(frozen=True)
class Attention:
    """One published measurement.

    Attributes:
        version: of FlashAttention.
        shape: batch, heads, queries, keys, head width.
        tflops: TFLOP/s.
    """

    device: DeviceType
    version: Version
    shape: tuple[int, int, int, int, int]
    is_causal: bool
    is_backward: bool
    tflops: float
    source: str
    note: str = ""

    @property
    def kernel(self) -> Kernel:
        """The kernel as captured operators give it: in bfloat16, each tensor read or written once."""
        batch, heads, queries, keys, width = self.shape
        own, other = batch * heads * queries * width, batch * heads * keys * width
        item_bytes = ITEM_BYTES["bfloat16"]
        read, written = (3 * own + 2 * other, own + 2 * other) if self.is_backward else (own + 2 * other, own)
        name = "_scaled_dot_product_flash_attention" + "_backward" * self.is_backward + CAUSAL * self.is_causal
        return Kernel(
            family="attention",
            name=name,
            dtype="bfloat16",
            batch=batch * heads,
            m=queries,
            n=keys,
            k=width,
            flops=4.0 * own * keys * (2.5 if self.is_backward else 1.0) * (0.5 if self.is_causal else 1.0),
            read_bytes=float(item_bytes * read),
            written_bytes=float(item_bytes * written),
        )

    @property
    def seconds(self) -> float:
        return self.kernel.flops / (self.tflops * TFLOPS)


A100, RTX4090, H100, B200 = (
    catalogue()[name] for name in ("A100-SXM4-80GB", "RTX4090", "H100-SXM5-80GB", "B200-SXM-180GB")
)
# Not in the catalogue; figures as recalled from their data sheets.
A5000 = replace(
    catalogue()["RTX-A6000"],
    name="RTX-A5000",
    peak_flops_per_second={"float32": 27.8e12, "float16": 111.1e12, "bfloat16": 111.1e12},
    memory_bytes=24 * 10**9,
    memory_bytes_per_second=768e9,
    num_multiprocessors=64,
    board_watts=230.0,
    source="recalled",
)
H20 = replace(
    H100,
    name="H20",
    peak_flops_per_second={"float32": 44e12, "float16": 148e12, "bfloat16": 148e12},
    memory_bytes=96 * 10**9,
    memory_bytes_per_second=4000e9,
    num_multiprocessors=78,
    board_watts=400.0,
    source="its peak and bandwidth as the source of its times has them, the rest recalled",
)

# Short names of the sources, as the docstring has them.
_A5000_SOURCE, _A100_SOURCE, _RTX4090_SOURCE = "ring-attention 10", "GPU_travel", "tvm flash_perf"
_SDPA_SOURCE, _H20_SOURCE = "benchmark 2296", "flash-attention 1310"
_H100_SOURCES, _B200_SOURCES = ("benchmark 2391", "tritonbench 1254"), ("flash-attention 1589", "tritonbench 171")

# (length, forward, backward), heads of 64, no mask
_A5000_ROWS = (
    *((512, 84.08, 52.88), (1024, 81.02, 62.54), (2048, 81.31, 70.07)),
    *((4096, 81.69, 74.80), (8192, 81.86, 77.42)),
)
_B200_ROWS = (
    *((512, 308.40, 243.05), (1024, 359.30, 280.64), (2048, 380.99, 301.61)),
    *((4096, 306.94, 314.71), (8192, 343.07, 329.09), (16384, 379.44, 333.95)),
)
# batch, queries, keys, causal, TFLOP/s; 32 heads of 128, which follows from FLOP, time and speed
_A100_ROWS = (
    *((16, 1024, 1024, False, 179.11), (16, 1024, 1024, True, 143.70), (4, 1024, 4096, False, 179.89)),
    *((1, 4096, 4096, False, 184.04), (1, 4096, 4096, True, 156.27)),
)
# length, head width, causal, backward, TFLOP/s
_RTX4090_ROWS = (
    *((512, 64, False, False, 155.64), (1024, 64, False, False, 166.98), (2048, 64, False, False, 168.06)),
    *((512, 128, False, False, 153.14), (1024, 128, False, False, 166.15), (2048, 128, False, False, 169.28)),
    *((512, 256, False, False, 143.92), (1024, 256, False, False, 152.3), (2048, 256, False, False, 156.15)),
    *((2048, 32, False, False, 159.79), (2048, 32, True, False, 126.78), (2048, 64, True, False, 142.23)),
    *((2048, 128, True, False, 151.19), (2048, 256, True, False, 144.12)),
    *((2048, 32, False, True, 115.12), (2048, 64, False, True, 124.81), (2048, 128, False, True, 124.57)),
    *((2048, 32, True, True, 86.48), (2048, 64, True, True, 96.53), (2048, 128, True, True, 99.23)),
)
_SDPA_ROWS = ((1024, 287.457), (2048, 293.208), (4096, 298.428), (8192, 287.696), (16384, 304.199))
_H100_ROWS = (
    ((512, 430.32), (1024, 517.099), (2048, 565.544), (4096, 590.233), (8192, 614.234), (16384, 620.73)),
    ((1024, 541.291), (2048, 617.773), (4096, 628.363), (8192, 638.572)),
)
# head width, causal, version 2, version 3: forward, batch 2, length 2,048
_H20_ROWS = ((64, False, 81.8, 120.1), (64, True, 71.0, 100.3), (128, False, 83.7, 126.2), (128, True, 65.9, 107.8))
# The length of 128 and 256 (60.6 and 147.5 TFLOP/s) are left out: they take 9 and 15 us, as the host's calls do.
_B200_WIDE_ROWS = (
    *((512, 245.259), (1024, 315.111), (2048, 352.104), (4096, 353.912), (8192, 361.591), (16384, 330.587)),
)


# From the papers, not read again: best of all lengths with heads of 128 and no mask; share of the device's peak.
RECALLED: tuple[tuple[str, Version, str, float, str], ...] = (
    ("A100-SXM4-80GB", 2, "forward", 0.73, "Dao, FlashAttention-2, 2023 (arXiv:2307.08691)"),
    ("A100-SXM4-80GB", 2, "backward", 0.63, "Dao, FlashAttention-2, 2023 (arXiv:2307.08691)"),
    ("H100-SXM5-80GB", 2, "forward", 0.35, "Shah et al., FlashAttention-3, 2024 (arXiv:2407.08608)"),
    ("H100-SXM5-80GB", 3, "forward", 0.75, "Shah et al., FlashAttention-3, 2024 (arXiv:2407.08608)"),
)


def published() -> tuple[Attention, ...]:
    """Return all measurements."""
    return (*_by_benchmark(), *_on_a100_and_h100(), *_on_4090(), *_on_h20_and_b200())


def _by_benchmark() -> Iterator[Attention]:
    for device, rows, source in ((A5000, _A5000_ROWS, _A5000_SOURCE), (B200, _B200_ROWS, _B200_SOURCES[0])):
        for length, forward, backward in rows:
            for is_backward, tflops in ((False, forward), (True, backward)):
                yield Attention(device, 2, _shape(length, 64), False, is_backward, tflops, source)


def _on_a100_and_h100() -> Iterator[Attention]:
    for batch, queries, keys, is_causal, tflops in _A100_ROWS:
        shape = (batch, 32, queries, keys, 128)
        yield Attention(A100, 2, shape, is_causal, False, tflops, _A100_SOURCE, "form of the A100 not said")
    for length, tflops in _SDPA_ROWS:
        yield Attention(H100, 2, (128, 8, length, length, 128), False, False, tflops, _SDPA_SOURCE, "board not said")
    for rows, heads, source in zip(_H100_ROWS, (16, 48), _H100_SOURCES, strict=True):
        for length, tflops in rows:
            batch = TOKENS // length if heads == 16 else 4
            shape = (batch, heads, length, length, 128)
            yield Attention(H100, 3, shape, False, False, tflops, source, "a Hopper, board not said")


def _on_4090() -> Iterator[Attention]:
    for length, width, is_causal, is_backward, tflops in _RTX4090_ROWS:
        shape = _shape(length, width)
        yield Attention(RTX4090, 2, shape, is_causal, is_backward, tflops, _RTX4090_SOURCE, "batch not said")


def _on_h20_and_b200() -> Iterator[Attention]:
    for width, is_causal, second, third in _H20_ROWS:
        shape = (2, WIDTH // width, 2048, 2048, width)
        yield Attention(H20, 2, shape, is_causal, False, second, _H20_SOURCE)
        yield Attention(H20, 3, shape, is_causal, False, third, _H20_SOURCE)
    for length, tflops in _B200_WIDE_ROWS:
        yield Attention(B200, 2, (8, 16, length, length, 128), False, False, tflops, _B200_SOURCES[1])


def _shape(length: int, width: int) -> tuple[int, int, int, int, int]:
    return TOKENS // length, WIDTH // width, length, length, width
