"""The roofline of kernels: its physics, what it makes of captured operators, its fit and its calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.cost import fp16
from dejavu.cluster import DeviceType, catalogue, this_machine
from dejavu.cost import CostError
from dejavu.cost.kernels import roofline_fit
from dejavu.cost.kernels.calibration import (
    NUM_FACTORS,
    SUSTAINED_SECONDS,
    Calibration,
    calibrate,
    calibration_kernels,
    elementwise,
    product,
    row_wise,
)
from dejavu.cost.kernels.features import MOST_MEMORY_SHARE, WINOGRAD
from dejavu.cost.kernels.roofline import (
    MATRIX_UNITS,
    PRODUCTS,
    KernelRoofline,
    has_matrix_units,
    multiplies_by_warpgroups,
)
from dejavu.cost.kernels.roofline_fit import FitError, Sample, fit
from dejavu.cost.sources.predicted import Predicted
from dejavu.cost.sources.torch_kernels import as_torch_runs
from dejavu.foundation.errors import InputError
from dejavu.graphs.graph import Operator
from dejavu.graphs.kernels import family_of, kernel_of, without_family
from dejavu.graphs.layer_trace import _Recorder
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.profiling.kernels import can_measure
from dejavu.workload import OptimizerSettings

GPUS = [device for device in catalogue().values() if device.kind != "cpu"]
A100 = catalogue()["A100-SXM4-80GB"]
ROOFLINE = KernelRoofline()
VIDUR = Path(__file__).parents[2] / "shared" / "data" / "vidur" / "compute_a100_a40.parquet"

every_gpu = pytest.mark.parametrize("device", GPUS, ids=[device.name for device in GPUS])


def half(device: DeviceType) -> str:
    return "float16" if "float16" in device.peak_flops_per_second else "float32"


def random_kernels(dtype: str, count: int, seed: int) -> list[Kernel]:
    rng = np.random.default_rng(seed)
    sizes = (2 ** rng.uniform(4, 13, (count, 3))).astype(int)
    return [product(m, n, k, dtype) for m, n, k in sizes.tolist()]


@every_gpu
def test_nothing_is_faster_than_the_hardware(device: DeviceType) -> None:
    dtype = half(device)
    kernels = random_kernels(dtype, 200, seed=0)
    arithmetic = np.array([kernel.flops for kernel in kernels]) / device.peak_flops_per_second[dtype]
    traffic = (
        np.array([kernel.read_bytes + kernel.written_bytes for kernel in kernels]) / device.memory_bytes_per_second
    )
    seconds = ROOFLINE.seconds(kernels, device)
    assert (seconds > np.maximum(arithmetic, traffic)).all()
    assert np.isfinite(seconds).all()


@every_gpu
def test_more_work_takes_longer(device: DeviceType) -> None:
    kernels = random_kernels(half(device), 100, seed=1)
    for more in ("m", "n", "k"):
        larger = [product(**{**sizes_of(kernel), more: 2 * getattr(kernel, more)}) for kernel in kernels]
        assert (ROOFLINE.seconds(larger, device) >= ROOFLINE.seconds(kernels, device)).all()


def sizes_of(kernel: Kernel) -> dict[str, Any]:
    return {"m": kernel.m, "n": kernel.n, "k": kernel.k, "dtype": kernel.dtype, "batch": kernel.batch}


def test_one_tile_too_many_takes_another_wave() -> None:
    """108 multiprocessors: 108 tiles are one wave and more are two; smaller tiles and splits win back a part."""
    full, over = product(256 * 12, 128 * 9, 4096, "float16"), product(256 * 12 + 1, 128 * 9, 4096, "float16")
    before, after = ROOFLINE.seconds([full, over], A100)
    assert after > 1.1 * before
    one_wave = 4096 * (2 * 256 * 128 * 108 / (0.872 * 312e12) + 384 * 2 / (128 * 1.5e9))
    assert before == pytest.approx(one_wave, rel=0.3)


def test_a_faster_device_of_the_same_make_is_no_slower() -> None:
    for faster in (
        replace(A100, memory_bytes_per_second=2 * A100.memory_bytes_per_second),
        replace(A100, peak_flops_per_second={name: 2 * peak for name, peak in A100.peak_flops_per_second.items()}),
        replace(
            A100,
            num_multiprocessors=108 * 2,
            board_watts=2 * A100.board_watts,
            peak_flops_per_second={name: 2 * peak for name, peak in A100.peak_flops_per_second.items()},
        ),
    ):
        kernels = [*random_kernels("bfloat16", 100, seed=2), row_wise("softmax", "softmax", 4096)]
        assert (ROOFLINE.seconds(kernels, faster) <= ROOFLINE.seconds(kernels, A100) * 1.0001).all()


def test_kernels_are_priced_one_by_one_as_together() -> None:
    kernels = [*random_kernels("float16", 5, 3), *random_kernels("float32", 5, 4), elementwise("add", 10**6, 2)]
    alone = [ROOFLINE.seconds([kernel], A100)[0] for kernel in kernels]
    np.testing.assert_allclose(ROOFLINE.seconds(kernels, A100), alone)


def test_matrix_units_are_known_by_the_peaks() -> None:
    having = {name for name, device in catalogue().items() if has_matrix_units(device, "float16")}
    assert {"V100-PCIE-32GB", "T4", "A10G", "A40", "RTX3090", "H200-SXM-141GB", "MI210"} <= having
    assert not {"P100-PCIE-16GB", "P4"} & having
    assert not any(has_matrix_units(device, "float32") for device in GPUS)


def test_warpgroups_are_known_by_the_generation_or_the_peaks() -> None:
    by_warpgroups = {name for name, device in catalogue().items() if multiplies_by_warpgroups(device)}
    assert {"H100-SXM5-80GB", "H100-PCIE-80GB", "GH200-96GB", "H200-SXM-141GB", "B200-SXM-180GB"} == by_warpgroups
    slowed = {"float32": 44e12, "float16": 148e12, "bfloat16": 148e12}  # of a Hopper with 78 multiprocessors, as an H20
    for name, device in catalogue().items():
        if device.architecture == "Hopper":
            cut = replace(device, peak_flops_per_second=slowed, num_multiprocessors=78)
            assert multiplies_by_warpgroups(cut) and not multiplies_by_warpgroups(replace(cut, architecture=None)), name


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "H200-SXM-141GB"])
def test_newer_matrix_units_keep_most_of_their_share(name: str) -> None:
    """Large products reach a share of the peak near A100's: operands that cost as much there would leave 0.61."""
    large = [product(8192, 8192, 8192, dtype) for dtype in ("float16", "tfloat32")]

    def share(device: DeviceType) -> np.ndarray:
        peaks = np.array([device.peak_flops_per_second[kernel.dtype] for kernel in large])
        return np.array([kernel.flops for kernel in large]) / peaks / ROOFLINE.seconds(large, device)

    older, newer = share(A100), share(catalogue()[name])
    assert (newer > 0.9 * older).all()
    assert (newer < 0.77).all()  # the most that an H100 sustains


def test_a_warpgroups_operands_pass_while_it_multiplies() -> None:
    """Without limit of power, large tiles on a Hopper reach what is fitted of the peak; an A100's wait for operands."""
    hopper = replace(catalogue()["H100-SXM5-80GB"], board_watts=None)
    for device, least, most in ((hopper, 0.85, 0.873), (A100, 0.7, 0.76)):
        whole = product(256 * 12, 128 * 11 * device.num_multiprocessors // 12, 65536, "float16")
        share = whole.flops / ROOFLINE.seconds([whole], device)[0] / device.peak_flops_per_second["float16"]
        assert least < share < most, (device.name, share)


def test_less_power_makes_no_product_faster() -> None:
    kernels, known = random_kernels("bfloat16", 50, seed=3), catalogue()["H100-SXM5-80GB"]
    seconds = [ROOFLINE.seconds(kernels, replace(known, board_watts=watts)) for watts in (250.0, 500.0, 700.0)]
    assert (seconds[0] >= seconds[1]).all()
    assert (seconds[1] >= seconds[2]).all()
    assert seconds[0].sum() > 1.2 * seconds[2].sum()


def test_a_dtype_without_peak_is_named() -> None:
    with pytest.raises(CostError, match=r"'V100-PCIE-32GB' in bfloat16.*float16"):
        ROOFLINE.seconds([product(64, 64, 64, "bfloat16")], catalogue()["V100-PCIE-32GB"])
    seconds = ROOFLINE.seconds([elementwise("add", 1000, 2, "bfloat16")], catalogue()["V100-PCIE-32GB"])
    assert np.isfinite(seconds).all()  # traffic needs no peak


def test_the_fit_finds_the_law_that_made_the_times() -> None:
    truth = replace(MATRIX_UNITS, compute_efficiency=0.7, memory_efficiency=0.6, launch_seconds=8e-6)
    samples = []
    for name in ("A100-SXM4-80GB", "A40"):
        kernels, device = random_kernels("float16", 300, seed=5), catalogue()[name]
        samples.append(Sample.of(kernels, replace(ROOFLINE, matrix_units=truth).seconds(kernels, device), device))
    found = fit(MATRIX_UNITS, samples, ["compute_efficiency", "memory_efficiency", "launch_seconds"])
    for name in ("compute_efficiency", "memory_efficiency", "launch_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.03)


def test_the_fit_refuses_what_it_cannot_use() -> None:
    with pytest.raises(FitError, match="no measured kernels"):
        fit(MATRIX_UNITS, [])
    with pytest.raises(FitError, match="no positive number"):
        Sample.of([product(64, 64, 64, "float16")], [0.0], A100)
    with pytest.raises(FitError, match="2 families and dtypes"):
        Sample.of([product(64, 64, 64, "float16"), elementwise("add", 9, 2)], [1.0, 1.0], A100)


@pytest.mark.skipif(not VIDUR.exists(), reason="no ../shared/data")
def test_the_shipped_law_knows_a100_and_a40() -> None:
    found = fp16.read(VIDUR)
    assert set(found.samples) == set(found.taken_for.values()) == {"A100-SXM4-80GB", "A40"}
    assert not any(found.refused.values())
    num_products = sum(len(sample.seconds_K) for sample in found.samples.values())
    assert num_products + sum(found.no_products.values()) == len(pd.read_parquet(VIDUR, columns=["M"]))
    for sample in found.samples.values():
        assert sample.some(3000, seed=0).mape(MATRIX_UNITS) < 0.08


def times_by_the_law(names: dict[str, str], seed: int) -> pd.DataFrame:
    """vidur's columns, N the dimension that is summed over, on devices by the name that a file calls them."""
    frames = []
    for called, name in names.items():
        kernels = random_kernels("float16", 150, seed)
        seconds = ROOFLINE.seconds(kernels, catalogue()[name])
        sizes = {"M": [k.m for k in kernels], "N": [k.k for k in kernels], "K": [k.n for k in kernels]}
        frames.append(pd.DataFrame({"device": called, **sizes, "median_ms": seconds * 1e3, "further": "ignored"}))
    return pd.concat(frames, ignore_index=True)


def test_the_benchmark_leaves_each_device_out(tmp_path: Path) -> None:
    frame = times_by_the_law({"a100": "A100-SXM4-80GB", "A40": "A40", "H100-PCIE-80GB": "H100-PCIE-80GB"}, seed=6)
    few = frame["M"] < fp16.LEAST_M
    frame.loc[~few, "median_ms"] = frame.loc[~few, "median_ms"].where(np.arange((~few).sum()) > 1, [np.nan])
    frame.loc[len(frame)] = ["a40", 64, np.nan, 64, 1.0, "no product"]
    frame.to_parquet(tmp_path / "compute.parquet")
    _, rows, summary = fp16.run(tmp_path / "compute.parquet")
    assert {row["test"] for row in rows} == {"A100-SXM4-80GB", "A40", "H100-PCIE-80GB"}
    assert len(rows) == 9
    assert len(summary["directions"]) == 3
    assert summary["mape_percent"] <= summary["worst_percent"] < 3
    assert all(error > 10 for error in summary["baselines"]["roofline"].values())
    assert summary["refused_rows"] == {"no positive time or size": 2, "absurd": 0}
    assert summary["no_products"] == {"no N": 1, f"M below {fp16.LEAST_M}": int(few.sum())}


WITHOUT_FP16 = [name for name, device in catalogue().items() if fp16.DTYPE not in device.peak_flops_per_second]


@pytest.mark.parametrize("name", WITHOUT_FP16)
def test_a_device_without_a_peak_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    path, known = tmp_path / "compute.parquet", {"A100-SXM4-80GB": "A100-SXM4-80GB", "A40": "A40"}
    frame = times_by_the_law(known, seed=6)
    others = frame[frame["device"] == "A40"].assign(device=name)
    frame.to_parquet(path)
    alone = fp16.read(path)
    pd.concat([frame, others], ignore_index=True).to_parquet(path)
    found = fp16.read(path)
    assert set(found.samples) == set(alone.samples) == set(known)
    left_out = {why: count for why, count in found.refused.items() if count}
    assert left_out == {f"{name} has no peak FLOP/s in float16": int((others["M"] >= fp16.LEAST_M).sum())}
    others.to_parquet(path)
    with pytest.raises(
        InputError, match=f"fp16 products of no device; wanted two.*{name} has no peak FLOP/s in float16"
    ):
        fp16.read(path)


BROKEN_CELLS = ("", "none", "1e400", -3, 0, 7.5, float("nan"), float("inf"), None, 2.0**70)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_of_a_file_is_predicted_or_counted(tmp_path: Path, seed: int) -> None:
    """Whatever stands in some of its cells, in any order; what is left is predicted as if it stood there alone."""
    rng = np.random.default_rng(seed)
    frame = times_by_the_law({" a100 ": "A100-SXM4-80GB", "NVIDIA A40": "A40"}, seed).astype({"M": object})
    frame = frame.astype(dict.fromkeys(("device", "N", "K", "median_ms"), object))
    broken = rng.choice(len(frame), 40, replace=False)
    for row in broken:
        column = str(rng.choice(["M", "N", "K", "median_ms"]))
        values = BROKEN_CELLS if column != "median_ms" else [cell for cell in BROKEN_CELLS if cell != 7.5]
        frame.loc[row, column] = values[int(rng.integers(len(values)))]
    frame.loc[rng.choice(broken, 3, replace=False), "device"] = None
    alone = frame.drop(index=broken)
    alone.infer_objects().to_parquet(tmp_path / "alone.parquet")
    mixed = frame.iloc[rng.permutation(len(frame))]
    mixed = mixed.assign(
        **{name: mixed[name].map(lambda cell: cell if cell is None else str(cell)) for name in fp16.COLUMNS}
    )
    mixed.to_parquet(tmp_path / "mixed.parquet")
    found, wanted = (fp16.read(tmp_path / f"{name}.parquet") for name in ("mixed", "alone"))
    num_predicted = sum(len(sample.seconds_K) for sample in found.samples.values())
    assert num_predicted + sum(found.refused.values()) + sum(found.no_products.values()) == len(frame)
    for name, sample in found.samples.items():
        own = np.sort(sample.seconds_K)
        np.testing.assert_allclose(own, np.sort(wanted.samples[name].seconds_K))


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_another_order_give_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A law is fitted to some rows that are drawn: the same ones."""
    monkeypatch.setattr(roofline_fit, "MOST_KERNELS", 30)
    frame = times_by_the_law({"a100": "A100-SXM4-80GB", "A40": "A40"}, seed)
    frame["median_ms"] *= np.random.default_rng(seed).uniform(0.5, 2.0, len(frame))
    frame.to_parquet(tmp_path / "compute.parquet")
    frame.sample(frac=1, random_state=seed).to_parquet(tmp_path / "shuffled.parquet")
    found, shuffled = (fp16.run(tmp_path / f"{name}.parquet")[1:] for name in ("compute", "shuffled"))
    assert shuffled[0] == found[0]
    assert shuffled[1] == found[1]


def test_the_benchmark_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "compute.parquet"
    times_by_the_law({"a40": "A40"}, seed=7).to_parquet(path)
    with pytest.raises(InputError, match="two devices"):
        fp16.run(path)
    times_by_the_law({"a40": "A40", "a41": "A40"}, seed=7).to_parquet(path)
    with pytest.raises(InputError, match="unknown device 'a41'"):
        fp16.run(path)
    times_by_the_law({"a40": "A40", "40": "A40"}, seed=7).to_parquet(path)  # a size of memory is no device
    with pytest.raises(InputError, match="row 150, device: unknown device '40'"):
        fp16.run(path)
    times_by_the_law({"a40": "A40", "a100": "A100-SXM4-80GB"}, seed=7).assign(median_ms=0.0).to_parquet(path)
    with pytest.raises(InputError, match=r"no device; wanted two .*; left out were .*\d+ rows \(no positive time"):
        fp16.run(path)
    times_by_the_law({"a40": "A40"}, seed=7).drop(columns="N").to_parquet(path)
    with pytest.raises(InputError, match="expected columns N"):
        fp16.run(path)
    frame = times_by_the_law({"a40": "A40", "a100": "A100-SXM4-80GB"}, seed=7)
    frame.assign(median_ms=frame["median_ms"] * 1e3).to_parquet(path)  # microseconds
    with pytest.raises(InputError, match=r"compute\.parquet: all .* unit of median_ms"):
        fp16.run(path)
    path.write_bytes(b"no Parquet")
    with pytest.raises(InputError, match=r"compute\.parquet is no whole Parquet file"):
        fp16.run(path)


@pytest.mark.parametrize("seed", range(5))
def test_calibration_finds_how_a_device_differs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    device = GPUS[int(rng.integers(len(GPUS)))]
    truth = Calibration(*np.exp(rng.normal(0, 0.4, NUM_FACTORS)).tolist())
    kernels = calibration_kernels(device)
    noise = np.exp(rng.normal(0, 0.05, len(kernels)))
    noise[0] *= 20  # an outlier
    seconds = truth.roofline(ROOFLINE).seconds(kernels, device) * noise
    found = calibrate(kernels, seconds, device)
    assert found.num_kernels == len(kernels)
    held_out = [
        *random_kernels(half(device), 50, seed + 1),
        *(row_wise("softmax", "softmax", 2**n) for n in range(5, 16)),
    ]
    wanted = truth.roofline(ROOFLINE).seconds(held_out, device)
    error = np.abs(np.log(found.roofline(ROOFLINE).seconds(held_out, device) / wanted))
    before = np.abs(np.log(ROOFLINE.seconds(held_out, device) / wanted))
    assert error.mean() < 0.15
    assert error.mean() < before.mean() + 0.02


def test_few_kernels_move_the_calibration_little() -> None:
    assert calibrate([], [], A100) == Calibration()
    kernels = [elementwise("add", 10**8, 2)] * 20
    twice = ROOFLINE.seconds(kernels, A100) / 1.2
    moved = [calibrate(kernels[:count], twice[:count], A100).memory for count in (1, 3, 20)]
    assert 1 < moved[0] < moved[1] < moved[2] < 1.2 * 1.01
    assert calibrate(kernels, twice, A100).compute == pytest.approx(1.0)  # nothing was learned of it


def lasting_and_bursts(roofline: KernelRoofline, kernels: list[Kernel], device: DeviceType) -> np.ndarray:
    """What kernels take that are measured alone: power limits those alone that last."""
    lasting, bursts = (replace(roofline, in_bursts=short).seconds(kernels, device) for short in (False, True))
    return np.where(lasting >= SUSTAINED_SECONDS, lasting, np.minimum(bursts, SUSTAINED_SECONDS))


def test_bursts_say_nothing_of_what_power_sustains() -> None:
    """Short products a fifth faster leave long ones in a training where they were, and the other way round."""
    device = catalogue()["H100-SXM5-80GB"]
    kernels = calibration_kernels(device)
    seconds = lasting_and_bursts(ROOFLINE, kernels, device)
    is_long = seconds >= SUSTAINED_SECONDS
    long_product = [product(16384, 16384, 16384, "bfloat16")]
    usual = ROOFLINE.seconds(long_product, device)[0]
    fast_bursts = calibrate(kernels, np.where(is_long, seconds, seconds / 1.2), device)
    assert fast_bursts.roofline(ROOFLINE).seconds(long_product, device)[0] == pytest.approx(usual, rel=0.03)
    fast_long = calibrate(kernels, np.where(is_long, seconds / 1.1, seconds), device)
    assert fast_long.roofline(ROOFLINE).seconds(long_product, device)[0] == pytest.approx(usual / 1.1, rel=0.04)


def test_matrix_units_are_calibrated_by_their_own_kernels() -> None:
    """Slow float32 products and launches that the host does not hold say nothing of products in 16 bits."""
    device = catalogue()["H100-SXM5-80GB"]
    kernels = calibration_kernels(device)
    truth = Calibration(compute=0.6, launch=0.1)
    found = calibrate(kernels, lasting_and_bursts(truth.roofline(ROOFLINE), kernels, device), device)
    assert found.compute < 0.7 and found.launch < 0.3
    assert found.matrix_compute == pytest.approx(1.0, abs=0.03)
    in_16_bits = random_kernels("bfloat16", 50, seed=4)
    expected = ROOFLINE.seconds(in_16_bits, device)
    np.testing.assert_allclose(found.roofline(ROOFLINE).seconds(in_16_bits, device), expected, rtol=0.1)


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "H100-PCIE-80GB", "T4"])
def test_a_device_that_is_faster_than_its_power_says_is_calibrated(name: str) -> None:
    device = catalogue()[name]
    kernels = [product(8192, 8192, 8192 * number, "float16") for number in range(1, 9)]
    faster = ROOFLINE.seconds(kernels, device) / 1.2
    found = calibrate(kernels, faster, device).roofline(ROOFLINE).seconds(kernels, device)
    np.testing.assert_allclose(found, faster, rtol=0.05)


@pytest.mark.parametrize("device", [*GPUS, *this_machine().device_types.values()], ids=lambda device: device.name)
def test_the_micro_benchmark_is_short_and_spans_the_families(device: DeviceType) -> None:
    kernels = calibration_kernels(device)
    assert 12 <= len(kernels) <= 40
    assert {"matmul", "elementwise", "softmax", "normalization"} <= {kernel.family for kernel in kernels}
    assert ROOFLINE.seconds(kernels, device).sum() < 0.5  # once through all of them


def record(work: Callable[[], Any]) -> list[Operator]:
    """The operators, forward and backward, of what makes a tensor."""
    with FakeTensorMode():
        recorder = _Recorder(set())
        with recorder:
            total = work().sum()
        recorder.direction = "backward"
        with recorder:
            total.backward()
    return recorder.operators


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def only(operators: list[Operator], kind: str) -> Kernel:
    found = {kernel_of(operator) for operator in operators if operator.kind == kind}
    assert len(found) == 1, f"{kind}: {sorted({operator.kind for operator in operators})}"
    kernel = found.pop()
    assert kernel is not None
    return kernel


def sizes(kernel: Kernel) -> tuple[int, int, int, int]:
    return kernel.batch, kernel.m, kernel.n, kernel.k


def test_products_of_captured_operators() -> None:
    linear = torch.nn.Linear(24, 40)
    operators = record(lambda: torch.nn.functional.linear(leaf(3, 5, 24), leaf(40, 24), leaf(40)))
    assert sizes(only(operators, "aten.addmm")) == (1, 15, 40, 24)
    assert {sizes(kernel) for op in operators if op.kind == "aten.mm" and (kernel := kernel_of(op))} == {
        (1, 15, 24, 40),
        (1, 40, 24, 15),
    }
    assert sizes(only(record(lambda: torch.baddbmm(leaf(4, 6, 8), leaf(4, 6, 7), leaf(4, 7, 8))), "aten.baddbmm")) == (
        4,
        6,
        8,
        7,
    )
    assert linear.in_features == 24


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolutions_backward_is_two_products(groups: int) -> None:
    operators = record(
        lambda: torch.nn.functional.conv2d(leaf(2, 4, 16, 16), leaf(6, 4 // groups, 3, 3), stride=2, groups=groups)
    )
    forward, backward = (only(operators, f"aten.convolution{end}") for end in ("", "_backward"))
    assert sizes(forward) == (groups, 2 * 7 * 7, 6 // groups, 4 // groups * 9)
    assert sizes(backward) == (2 * groups, *sizes(forward)[1:])


@pytest.mark.parametrize("has_input_gradient", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("function", [torch.nn.functional.conv2d, torch.nn.functional.conv_transpose2d])
def test_a_captured_convolutions_backward_is_as_many_products_as_it_makes_gradients(
    function: Callable[..., torch.Tensor], groups: int, has_input_gradient: bool
) -> None:
    channels = (16, 8 // groups) if function is torch.nn.functional.conv_transpose2d else (8, 16 // groups)
    operators = record(
        lambda: function(
            torch.randn(2, 16, 9, 9, requires_grad=has_input_gradient), leaf(*channels, 3, 3), stride=2, groups=groups
        )
    )
    forward, backward = (
        next(one.flops for one in operators if one.kind == f"aten.convolution{end}") for end in ("", "_backward")
    )
    assert backward == (2 if has_input_gradient else 1) * forward


@pytest.mark.parametrize("channels", [(16, 8), (8, 16), (16, 16)])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (4, 4, 0), (3, 1, 1)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_convolutions_sizes_are_those_of_its_products(
    is_transposed: bool, size: int, stride: int, padding: int, groups: int, channels: tuple[int, int]
) -> None:
    come, go = channels
    weight = (come, go // groups) if is_transposed else (go, come // groups)
    function = torch.nn.functional.conv_transpose2d if is_transposed else torch.nn.functional.conv2d
    operators = record(
        lambda: function(leaf(2, come, 12, 12), leaf(*weight, size, size), None, stride, padding, groups=groups)
    )
    for end in ("", "_backward"):
        kernel = only(operators, f"aten.convolution{end}")
        assert kernel.flops == 2 * kernel.batch * kernel.m * kernel.n * kernel.k


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_directions", [1, 2])
def test_a_layer_of_an_lstm_is_a_product_of_each_step(num_directions: int, dtype: str) -> None:
    x, directions = (7, 3, 16), {"bidirectional": num_directions == 2}
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        operators = record(lambda: torch.nn.LSTM(16, 32, **directions)(leaf(*x))[0])
    finally:
        torch.set_default_dtype(before)
    layers = [one for one in operators if "rnn" in one.kind]
    assert len(layers) == 2 * num_directions and without_family(operators) == ()
    gates = 2 * 7 * 3 * (4 * 32) * (16 + 32)  # by hand: of each number that comes in, and of each of the state
    assert [one.flops for one in layers] == [gates] * num_directions + [2 * gates] * num_directions
    for kernel in filter(None, map(kernel_of, layers)):
        assert kernel.family == "matmul" and not can_measure(kernel)
        assert kernel.flops == 2 * kernel.batch * kernel.m * kernel.n * kernel.k
        device = catalogue()["A100-SXM4-80GB"]
        assert ROOFLINE.seconds([kernel], device)[0] > kernel.flops / device.peak_flops_per_second[dtype]


def test_every_products_flops_are_those_of_its_sizes() -> None:
    operators = record(lambda: torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)(leaf(2, 9, 32)))
    kernels = [kernel for operator in operators if (kernel := kernel_of(operator))]
    for kernel in kernels:
        if kernel.family in ("matmul", "convolution"):
            assert kernel.flops == 2 * kernel.batch * kernel.m * kernel.n * kernel.k
    assert without_family(operators) == ()
    assert all(kernel.read_bytes + kernel.written_bytes > 0 for kernel in kernels)


def test_attention_and_rows() -> None:
    operators = record(
        lambda: torch.nn.functional.scaled_dot_product_attention(
            leaf(2, 4, 10, 8), leaf(2, 4, 12, 8), leaf(2, 4, 12, 8)
        )
    )
    attention = [kernel for operator in operators if (kernel := kernel_of(operator)) and kernel.family == "attention"]
    assert [sizes(kernel) for kernel in attention] == [(8, 10, 12, 8)] * 2
    assert [kernel.flops for kernel in attention] == [products * 2 * 8 * 10 * 12 * 8 for products in (2, 5)]
    rows = record(lambda: torch.nn.functional.layer_norm(leaf(3, 5, 16), (16,), leaf(16)).softmax(-1))
    for kind in ("native_layer_norm", "native_layer_norm_backward", "_softmax", "_softmax_backward_data"):
        assert sizes(only(rows, f"aten.{kind}"))[1:3] == (15, 16)


def test_a_lookup_reads_its_rows_not_the_table() -> None:
    operators = record(lambda: torch.nn.functional.embedding(torch.zeros(2, 3, dtype=torch.int64), leaf(1000, 16)))
    lookup = only(operators, "aten.embedding")
    assert lookup.family == "gather"
    assert lookup.read_bytes == 2 * 3 * (16 * 4 + 8)


def test_unknown_kinds_move_their_bytes_and_are_listed() -> None:
    unknown = Operator("mine.scan", "forward", ((8, 9),), ((8,),), "float32", 0.0, 288, 32)
    kernel = kernel_of(unknown)
    assert kernel == Kernel(
        family="elementwise", name="mine.scan", dtype="float32", m=72, read_bytes=288, written_bytes=32
    )
    assert without_family([unknown]) == ("mine.scan",)
    assert kernel_of(replace(unknown, kind="aten.empty_like")) is None
    assert family_of("aten._foreach_addcmul_") == "elementwise"


def test_families_of_products_need_a_peak() -> None:
    assert set(PRODUCTS) == {"matmul", "convolution", "attention"}


def convolution_32() -> Kernel:
    m, n, k = 131_072, 256, 2304
    moved = {"read_bytes": 136e6, "written_bytes": 134e6}
    return Kernel(
        family="convolution", name="convolution", dtype="float32", m=m, n=n, k=k, flops=2.0 * m * n * k, **moved
    )


@every_gpu
def test_convolutions_in_float32_run_on_the_matrix_units_that_round(device: DeviceType) -> None:
    """cuDNN may round to TF32 as torch comes; only devices without such units keep float32's peak."""
    kernel, seconds = convolution_32(), Predicted(ProfileDatabase(Path("absent")), OptimizerSettings()).prices
    runs = as_torch_runs(kernel, device)
    assert (runs.dtype == "tfloat32") == (device.kind == "cuda")
    (predicted,) = seconds([kernel], device).seconds_K
    arithmetic = kernel.flops / (
        device.peak_flops_per_second.get(runs.dtype) or device.peak_flops_per_second["float32"]
    )
    fastest = WINOGRAD * (1 if device.kind == "cuda" else 2)  # AMD's matrix units take float32
    assert predicted >= arithmetic / fastest * (1 - 1e-9)


@every_gpu
def test_what_outgrows_the_cache_never_passes_at_the_peak(device: DeviceType) -> None:
    """The most that element-wise kernels of ten devices reached is 0.93 of it."""
    sizes = [int(factor * (device.cache_bytes or 6 << 20) / 12) for factor in (5, 16, 64)]
    kernels = [elementwise("add", size, 2, "float32") for size in sizes]
    seconds_K = Predicted(ProfileDatabase(Path("absent")), OptimizerSettings()).prices(kernels, device).seconds_K
    traffic_K = np.array([one.read_bytes + one.written_bytes for one in kernels]) / device.memory_bytes_per_second
    assert (seconds_K >= traffic_K / MOST_MEMORY_SHARE * (1 - 1e-9)).all()
