"""What torch's own kernels take on GPUs: against times from traces of an H100, and as properties on every device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dejavu.cluster import DeviceType, catalogue
from dejavu.cost.kernels.calibration import elementwise, product, row_wise
from dejavu.cost.kernels.roofline import ITEM_BYTES, has_matrix_units
from dejavu.cost.sources.predicted import Predicted
from dejavu.cost.sources.torch_kernels import (
    CACHED_ROW_STEP_SECONDS,
    INDEXED_PER_CLOCK,
    LAYOUT_SHARE,
    ROW_STEP_SECONDS,
    as_torch_runs,
    at_least,
    at_most,
    convolved,
)
from dejavu.graphs.graph import Operator
from dejavu.graphs.kernels import kernel_of
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.workload import OptimizerSettings

H100 = catalogue()["H100-SXM5-80GB"]
GPUS = [device for device in catalogue().values() if device.kind != "cpu"]
every_gpu = pytest.mark.parametrize("device", GPUS, ids=[device.name for device in GPUS])


def predicted(kernels: list[Kernel], device: DeviceType) -> np.ndarray:
    prices = Predicted(ProfileDatabase(Path("absent")), OptimizerSettings()).prices(kernels, device)
    assert (prices.low_seconds_K <= prices.seconds_K).all() and (prices.seconds_K <= prices.high_seconds_K).all()
    return prices.seconds_K


def operator(kind: str, dtype: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], **moved: float) -> Operator:
    """An operator that reads and writes its tensors once."""
    size = ITEM_BYTES[dtype]
    read = int(moved.get("read", sum(int(np.prod(shape)) for shape in inputs) * size))
    written = int(moved.get("written", int(np.prod(output)) * size))
    way = "backward" if kind.endswith("backward") else "forward"
    return Operator(kind, way, tuple(inputs), (output,), dtype, 0.0, read, written)


WIDE, NARROW = (8192, 4096), (8192, 1024)
IMAGES = (32, 256, 64, 64)
# Microseconds of kernels in traces (torch.profiler) of blocks of a GPT, a Llama and a CNN on an H100, torch 2.11.
TRACED = [
    (operator("aten.sum", "bfloat16", [NARROW], (1, 1024)), 18.9),
    (operator("aten.sum", "bfloat16", [WIDE], (1, 4096)), 40.2),
    (operator("aten.sum", "bfloat16", [(8192, 3072)], (1, 3072)), 33.6),
    (operator("aten.sum", "float32", [NARROW], (1, 1024)), 27.1),
    (operator("aten.sum", "float32", [WIDE], (1, 4096)), 63.5),
    (operator("aten.sum", "float32", [(8192, 3072)], (1, 3072)), 53.9),
    (operator("aten.clone", "bfloat16", [(8, 1024, 16, 3, 64)], (8, 1024, 16, 3, 64)), 80.6),
    (operator("aten.clone", "float32", [(8, 1024, 16, 3, 64)], (8, 1024, 16, 3, 64)), 94.4),
    (operator("aten.stack", "bfloat16", [(8, 16, 1024, 64)] * 3, (3, 8, 16, 1024, 64)), 98.6),
    (operator("aten.stack", "float32", [(8, 16, 1024, 64)] * 3, (3, 8, 16, 1024, 64)), 104.3),
    (operator("aten.mul", "bfloat16", [(8, 16, 1024, 32), (1024, 32)], (8, 16, 1024, 32)), 14.6),
    (operator("aten._log_softmax", "bfloat16", [(8192, 16384)], (8192, 16384)), 216.3),
    (operator("aten._log_softmax_backward_data", "bfloat16", [(8192, 16384)] * 2, (8192, 16384)), 267.6),
    (
        operator(
            "aten.embedding_dense_backward", "bfloat16", [(8, 1024, 1024), (8, 1024)], (16384, 1024)
        ),
        190.0,
    ),
    (operator("aten.embedding_dense_backward", "bfloat16", [(1024, 1024), (1024,)], (1024, 1024)), 28.9),
]  # fmt: skip


def test_kernels_of_a_trace_are_predicted() -> None:
    """Their constants come from these: so this says how well a handful of figures holds them, not how well others."""
    kernels = [kernel for one, _ in TRACED if (kernel := kernel_of(one))]
    traced = np.array([seconds for _, seconds in TRACED]) * 1e-6
    error = np.abs(predicted(kernels, H100) / traced - 1)
    assert error.mean() < 0.15 and error.max() < 0.45


def test_only_what_is_out_of_order_is_indexed() -> None:
    same = kernel_of(operator("aten.add", "float32", [NARROW, NARROW], NARROW))
    scalar = kernel_of(operator("aten.mul", "float32", [NARROW, ()], NARROW))
    broadcast = kernel_of(operator("aten.add", "float32", [NARROW, (1024,)], NARROW))
    rows = kernel_of(operator("aten.sum", "float32", [NARROW], (8192, 1)))
    cast = kernel_of(operator("aten._to_copy", "float32", [NARROW], NARROW))
    assert same and scalar and broadcast and rows and cast
    assert [one.is_indexed for one in (same, scalar, broadcast, rows, cast)] == [False, False, True, False, False]


def test_rows_written_before_the_flags_keep_their_keys() -> None:
    kernel = elementwise("add", 1000, 2)
    assert "is_indexed" not in kernel.to_json() and "has_bias" not in kernel.to_json()
    flagged = replace(kernel, is_indexed=True)
    assert Kernel.from_json(flagged.to_json()) == flagged and flagged.subject != kernel.subject


@every_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_group_normalization_waits_for_its_rows(device: DeviceType, dtype: str) -> None:
    long, short = (
        Kernel(
            family="normalization", name="native_group_norm", dtype=dtype, m=32, n=n,
            read_bytes=64.0 * n, written_bytes=64.0 * n,
        )
        for n in (2**20, 2**10)
    )  # fmt: skip
    least = at_least([long, short, elementwise("add", 2**20, 2, dtype)], device)
    assert least[0] >= 2**20 / 512 * ROW_STEP_SECONDS or long.read_bytes <= (device.cache_bytes or 0)
    assert least[0] >= 2**20 / 512 * CACHED_ROW_STEP_SECONDS and least[1] >= 2 * CACHED_ROW_STEP_SECONDS
    assert least[2] == 0.0
    assert predicted([long, short], device)[0] >= least[0]


@every_gpu
def test_indexed_kernels_and_softmax_keep_their_bounds(device: DeviceType) -> None:
    """No faster than the multiprocessors find places, no slower than reading each row once."""
    plain = elementwise("add", 2**25, 2, "float32")
    indexed = replace(plain, is_indexed=True)
    rows = row_wise("softmax", "softmax", 8192, 4096)
    seconds = predicted([plain, indexed, rows], device)
    assert seconds[1] >= seconds[0] and (seconds >= at_least([plain, indexed, rows], device) * (1 - 1e-9)).all()
    assert (seconds <= at_most([plain, indexed, rows], device) * (1 + 1e-9)).all()
    if device.kind == "cuda" and device.num_multiprocessors:
        assert 2**25 / (INDEXED_PER_CLOCK * at_least([indexed], device)[0]) > 1e9


def test_layer_normalization_is_no_faster_where_only_the_memory_is() -> None:
    """H100 and H200 have the same multiprocessors: 345e9 elements a second (H200, measured), in any type."""
    for name in ("H100-SXM5-80GB", "H200-SXM-141GB"):
        device = catalogue()[name]
        for dtype in ("float32", "bfloat16"):
            seconds = at_least([row_wise("normalization", "native_layer_norm", 390_625, dtype=dtype)], device)
            assert 390_625 * 1024 / seconds[0] == pytest.approx(345e9, rel=0.02)


def convolution(dtype: str, *, backward: bool = False, bias: bool = False) -> Kernel:
    """3 × 3, 256 channels, 32 images of 64 × 64."""
    m, n, k, size = 131_072, 256, 2304, ITEM_BYTES[dtype]
    images, weights = m * n * size, n * k * size
    count = 2 if backward else 1
    return Kernel(
        family="convolution", name="convolution_backward" if backward else "convolution", dtype=dtype,
        batch=count, m=m, n=n, k=k, flops=2.0 * count * m * n * k, has_bias=bias,
        read_bytes=float(count * images + weights), written_bytes=float(images + (weights if backward else 0)),
    )  # fmt: skip


@every_gpu
def test_images_are_copied_for_matrix_units_that_want_channels_last(device: DeviceType) -> None:
    """In and out once more each way; nothing where there are no such units, or where each group has its own kernel."""
    whole = as_torch_runs(convolution("float32"), device)
    grouped = replace(whole, batch=32)
    kernels = [whole, grouped, product(64, 64, 64, "float16")]
    copied, alone, product_alone = convolved(np.zeros(3), kernels, device)
    expected = 2 * (whole.read_bytes + whole.written_bytes) / (LAYOUT_SHARE[4] * device.memory_bytes_per_second)
    copies = device.kind == "cuda" and has_matrix_units(device, whole.dtype)
    assert copied == pytest.approx(expected if copies else 0.0) and (alone, product_alone) == (0.0, 0.0)


# Milliseconds on an H100: forward with its bias, both gradients and the bias's (sums of kernels in traces).
@pytest.mark.parametrize(
    ("dtype", "backward", "milliseconds"),
    [("bfloat16", False, 0.444), ("bfloat16", True, 0.722), ("float32", False, 0.683), ("float32", True, 1.711)],
)
def test_a_convolution_takes_what_its_kernels_took(dtype: str, backward: bool, milliseconds: float) -> None:
    (seconds,) = predicted([convolution(dtype, backward=backward, bias=True)], H100)
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.15)
