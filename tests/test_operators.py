"""Kernels that are measured here: rebuilt as recorded, and a few of them correct the prediction of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dejavu.cluster import this_machine
from dejavu.cost.kernels.calibration import Calibration, calibrate, elementwise, product, row_wise
from dejavu.cost.kernels.roofline import KernelRoofline
from dejavu.graphs.kernels import kernel_of
from dejavu.graphs.layer_trace import _Recorder
from dejavu.profiles.kernel import Kernel
from dejavu.profiling.kernels import OperatorError, _work, can_measure, measure_kernels

(DEVICE, *_) = this_machine().device_types.values()

# Small enough that a busy machine's time slices seldom fall into one.
TO_CALIBRATE = [
    *(product(side, side, side, "float32") for side in (64, 128, 192, 256)),
    *(product(32, 8 * side, side, "float32") for side in (96, 160)),
    *(elementwise(name, 2**power, 1 + (name == "add")) for name in ("add", "gelu") for power in (12, 15, 18)),
    *(row_wise("softmax", "softmax", rows) for rows in (16, 128)),
    *(row_wise("normalization", "native_layer_norm", rows) for rows in (16, 128)),
    elementwise("relu", 256, 1),
]
HELD_OUT = [
    *(product(m, n, k, "float32") for m, n, k in ((100, 120, 140), (48, 512, 200), (256, 64, 320), (224, 224, 224))),
    *(product(side, side, 64, "float32", batch=4) for side in (64, 96)),
    *(elementwise(name, 3 * 2**power, 1) for name in ("tanh", "relu", "exp", "silu") for power in (11, 14, 16)),
    *(row_wise("softmax", "log_softmax", rows, 768) for rows in (24, 100)),
]


@pytest.mark.parametrize(
    "kernel",
    [
        product(8, 12, 16, "float32"),
        product(8, 12, 16, "float32", batch=3),
        elementwise("add", 60, 2),
        elementwise("gelu", 60, 1),
        elementwise("gelu_backward", 60, 2),
        row_wise("softmax", "log_softmax", 5, 8),
        row_wise("softmax", "softmax_backward_data", 5, 8),
        row_wise("normalization", "native_layer_norm", 5, 8),
        row_wise("normalization", "native_layer_norm_backward", 5, 8),
        Kernel(family="reduction", name="sum", dtype="float32", m=5, n=8),
        Kernel(family="copy", name="clone", dtype="float32", m=60),
        Kernel(
            family="attention",
            name="scaled_dot_product_flash_attention_for_cpu",
            dtype="float32",
            batch=4,
            m=6,
            n=7,
            k=8,
        ),
    ],
    ids=lambda kernel: f"{kernel.family} {kernel.name} {kernel.batch}",
)
def test_what_runs_is_what_was_recorded(kernel: Kernel) -> None:
    assert can_measure(kernel)
    work = _work(kernel, torch.device("cpu"))
    assert work is not None
    with torch.no_grad(), _Recorder(set()) as recorder:
        work()
    (found,) = (found for operator in recorder.operators if (found := kernel_of(operator)))
    assert (found.family, found.batch, found.m, found.n, found.k) == (
        kernel.family,
        kernel.batch,
        kernel.m,
        kernel.n,
        kernel.k,
    )
    assert found.name == kernel.name
    if kernel.family == "matmul":
        assert (found.flops, found.read_bytes) == (kernel.flops, kernel.read_bytes)


def test_what_is_not_recorded_is_left_to_predictors() -> None:
    for family, name in (("convolution", "convolution"), ("gather", "embedding"), ("elementwise", "mine.scan")):
        kernel = Kernel(family=family, name=name, dtype="float32", m=64)
        assert not can_measure(kernel)
        assert list(measure_kernels([kernel], DEVICE.name)) == []


def test_a_kernel_that_does_not_fit_is_named() -> None:
    with pytest.raises(OperatorError, match=DEVICE.name):
        list(measure_kernels([elementwise("add", 2**46, 2)], DEVICE.name))


def test_calibration_on_this_machine_helps_where_the_guess_was_wrong() -> None:
    """Kernels that the calibration did not see are predicted better with it, on whatever machine this runs."""
    names: list[str] = []
    rows = list(measure_kernels([*TO_CALIBRATE, *HELD_OUT], DEVICE.name, progress=names.append))
    assert [row.subject for row in rows] == [kernel.subject for kernel in (*TO_CALIBRATE, *HELD_OUT)]
    assert len(names) == len(rows)
    for row in rows:
        row.check()
        assert Kernel.from_json(row.extra or "").subject == row.subject
    before = KernelRoofline()
    seconds = [row.seconds for row in rows[: len(TO_CALIBRATE)]]
    found = calibrate(TO_CALIBRATE, seconds, DEVICE)
    assert found.num_kernels == len(TO_CALIBRATE)
    measured = np.array([row.seconds for row in rows[len(TO_CALIBRATE) :]])

    def error(roofline: KernelRoofline) -> float:
        return float(np.median(np.abs(np.log(roofline.seconds(HELD_OUT, DEVICE) / measured))))

    assert error(found.roofline(before)) < error(before) + 0.3  # never clearly worse, whatever the guess was worth
    # a device whose guess is far off: the same kernels bring it back
    wrong = Calibration(compute=0.2, memory=0.2, launch=5.0).roofline(before)
    corrected = calibrate(TO_CALIBRATE, seconds, DEVICE, wrong).roofline(wrong)
    assert error(corrected) < 0.6 * error(wrong)
