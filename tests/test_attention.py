"""Prices of fused attention on GPUs: what captured operators say of it, the law's physics, and what others measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.cost import attention as benchmark
from benchmarks.published.attention import Attention, published
from dejavu.cluster import DeviceType, catalogue
from dejavu.cost.kernels.roofline import MATRIX_UNITS, KernelRoofline, has_matrix_units, multiplies_by_warpgroups
from dejavu.cost.kernels.sequence import OwnTokens, attending
from dejavu.graphs.attention import AttendsOnGPU
from dejavu.graphs.graph import Operator
from dejavu.graphs.kernels import kernel_of
from dejavu.graphs.layer_trace import _Recorder, _signature
from dejavu.profiles.kernel import CAUSAL, Kernel

GPUS = [device for device in catalogue().values() if has_matrix_units(device, "float16")]
every_gpu = pytest.mark.parametrize("device", GPUS, ids=[device.name for device in GPUS])


class Attends(torch.nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.is_causal)


def operators(dtype: torch.dtype, *, is_causal: bool, on_gpu: bool) -> list[Operator]:
    """Of one forward and backward of attention with 2 examples, 4 heads, 64 positions, 16 wide."""
    with FakeTensorMode():
        x = torch.empty(2, 4, 64, 16, dtype=dtype, requires_grad=True)
        layer: torch.nn.Module = Attends(is_causal=is_causal)
        layer = AttendsOnGPU(lambda: Attends(is_causal=is_causal)) if on_gpu else layer
        recorder = _Recorder(set())
        with recorder:
            output = layer(x)
            recorder.direction = "backward"
            output.sum().backward()
    return [one for one in recorder.operators if "attention" in one.kind]


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpus_causal_attention_computes_half_of_the_scores(dtype: torch.dtype, on_gpu: bool) -> None:
    """What is counted of the model, its FLOPs, is all of them either way; a CPU's kernel is measured, not told."""
    causal, whole = (operators(dtype, is_causal=causal, on_gpu=on_gpu) for causal in (True, False))
    assert [one.direction for one in causal] == ["forward", "backward"]
    assert [one.is_causal for one in causal] == [True, True]
    assert not any(one.is_causal for one in whole)
    for half, full in zip(causal, whole, strict=True):
        assert half.flops == full.flops
        ours, theirs = kernel_of(half), kernel_of(full)
        assert ours is not None
        assert theirs is not None
        assert ours.flops == theirs.flops / (2 if on_gpu else 1)
        assert ours.name == theirs.name + (CAUSAL if on_gpu else "")
        assert (ours.subject != theirs.subject) == on_gpu
    assert _signature(causal) != _signature(whole)


def kernel(batch: int = 8, m: int = 2048, n: int = 2048, k: int = 64, **of: bool) -> Kernel:
    shape = (1, batch, m, n, k)
    is_causal, is_backward = of.get("is_causal", False), of.get("is_backward", False)
    return Attention(GPUS[0], 2, shape, is_causal, is_backward, 1.0, "").kernel


def drawn(seed: int, count: int = 40) -> list[Kernel]:
    rng = np.random.default_rng(seed)
    sizes = (2 ** rng.uniform((0, 5, 5, 4), (8, 13, 13, 8), (count, 4))).astype(int).tolist()
    ways = rng.random((count, 2)) < 0.5
    return [
        kernel(b, m, m if causal else n, k, is_causal=bool(causal), is_backward=bool(backward))
        for (b, m, n, k), (causal, backward) in zip(sizes, ways.tolist(), strict=True)
    ]


def seconds(kernels: list[Kernel], device: DeviceType, by: str = "warps") -> np.ndarray:
    law = replace(MATRIX_UNITS, attends_by=by)
    dtype = "bfloat16" if "bfloat16" in device.peak_flops_per_second else "float16"
    own = [replace(one, dtype=dtype) for one in kernels]
    return KernelRoofline(matrix_units=law).seconds(own, device)


@every_gpu
@pytest.mark.parametrize("by", ["warps", "warpgroups"])
def test_no_attention_is_faster_than_the_hardware(device: DeviceType, by: str) -> None:
    kernels, dtype = drawn(0), "float16"
    arithmetic = np.array([one.flops for one in kernels]) / device.peak_flops_per_second[dtype]
    traffic = np.array([one.read_bytes + one.written_bytes for one in kernels]) / device.memory_bytes_per_second
    assert (seconds(kernels, device, by) > np.maximum(arithmetic, traffic)).all()


@every_gpu
def test_attention_takes_longer_with_more_of_anything(device: DeviceType) -> None:
    for one in drawn(1, 20):
        before = seconds([one], device)[0]
        ways = {"is_causal": one.is_causal, "is_backward": one.is_backward}
        sizes = {"batch": one.batch, "m": one.m, "n": one.n, "k": one.k}
        for more in ("batch", "k") if one.is_causal else sizes:
            larger = kernel(**{**sizes, more: 2 * sizes[more]}, **ways)
            assert seconds([larger], device)[0] >= before
        if not one.is_backward:
            assert seconds([kernel(**sizes, is_causal=one.is_causal, is_backward=True)], device)[0] > before


@every_gpu
def test_long_causal_attention_takes_little_more_than_half(device: DeviceType) -> None:
    for length, most in ((2048, 0.75), (16384, 0.54)):
        whole, causal = (kernel(512, length, length, 128, is_causal=causal) for causal in (False, True))
        share = seconds([causal], device)[0] / seconds([whole], device)[0]
        assert 0.49 < share < most, length


@every_gpu
def test_warpgroups_are_no_slower_than_warps(device: DeviceType) -> None:
    warps, groups = (seconds(drawn(2), device, by) for by in ("warps", "warpgroups"))
    assert (groups <= warps).all()
    if multiplies_by_warpgroups(device):
        long = [kernel(64, 8192, 8192, 128)]
        assert seconds(long, device)[0] > 1.4 * seconds(long, device, "warpgroups")[0]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_devices_have_as_much_of_causal_attention_but_where_parts_are_odd(parts: int) -> None:
    """Replicas that share examples: all their scores are those of the whole; of runs of positions the last has most."""
    whole = kernel(8, 4096, 4096, 64, is_causal=True)
    size = 1.0 / (2 * parts)
    each = [(2 * index + 1) * size**2 for index in range(2 * parts)]  # of causal scores, chunk by chunk
    ends = [each[index] + each[2 * parts - 1 - index] for index in range(parts)]
    assert ends == pytest.approx([1 / parts] * parts)
    assert OwnTokens(parts).part(whole, holds_weights=False).flops / whole.flops == pytest.approx(1 / parts)
    odd = kernel(8, 513 * parts, 513 * parts, 64, is_causal=True)
    runs = [(2 * index + 1) / parts**2 for index in range(parts)]
    assert sum(runs) == pytest.approx(1.0)
    assert OwnTokens(parts).part(odd, holds_weights=False).flops / odd.flops == pytest.approx(runs[-1])
    plain = kernel(8, 4096, 4096, 64)
    assert OwnTokens(parts).part(plain, holds_weights=False).flops == plain.flops / parts


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("slices", [(8,), (1, 7), (3, 3, 2), (1,) * 8])
def test_slices_compute_what_the_whole_does(slices: tuple[int, ...], is_backward: bool) -> None:
    whole = kernel(8, 1024, 1024, 64, is_causal=True, is_backward=is_backward)
    context, flops = 0, 0.0
    for units in slices:
        flops += attending(whole, units / 8, (units + context) / 8, is_causal=True).flops
        context += units
    assert flops == pytest.approx(whole.flops)


def test_published_attention_is_predicted_better_than_by_the_roofline() -> None:
    """Rows and devices as the source's own FLOPs; each version of FlashAttention, and every device but GeForce's."""
    measured = published()
    assert len(measured) >= 70
    assert len({(one.device.name, one.version, one.shape, one.is_causal, one.is_backward) for one in measured}) >= 70
    _, rows, summary = benchmark.run()
    assert summary["mape_percent"] < min(summary["roofline_mape_percent"], summary["one_constant_mape_percent"]) / 2
    for name, ways in summary["by_device"].items():
        assert ways["ours"] < 30.0, name
    assert all(row["roofline_percent"] < 0 for row in rows if row["device"] != "RTX4090"), "faster than the peak"


@pytest.mark.parametrize(("width", "pads"), [(16, 0), (64, 0), (20, 3)])
def test_heads_are_padded_only_to_a_multiple_of_eight(width: int, pads: int) -> None:
    """Flash attention takes heads of whole multiples; torch copies the others into wider ones, and back."""
    with FakeTensorMode():
        x = torch.empty(2, 4, 64, width, dtype=torch.bfloat16, requires_grad=True)
        layer, recorder = AttendsOnGPU(lambda: Attends(is_causal=True)), _Recorder(set())
        with recorder:
            output = layer(x)
            recorder.direction = "backward"
            output.sum().backward()
    padded = [one.direction for one in recorder.operators if "pad" in one.kind]
    assert padded.count("forward") == pads
    assert output.shape == x.shape


def test_a_softmax_that_is_safe_passes_over_its_rows_again() -> None:
    """Each more kernel of it reads or writes the scores: 3 times read, 2 written, and one byte each for what is −∞."""
    with FakeTensorMode(), _Recorder(set()) as recorder:
        torch.ops.aten._safe_softmax(torch.empty(8, 4, 32, 32), -1)
    (kernel,) = (found for one in recorder.operators if (found := kernel_of(one)) is not None)
    elements = 8 * 4 * 32 * 32
    assert (kernel.read_bytes, kernel.written_bytes) == (13 * elements, 9 * elements)
