"""GPUs of a person's own: what the cluster file leaves out is taken from the nearest one of the catalogue."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dejavu
from dejavu.cluster import Cluster, DeviceType, catalogue, load_cluster
from dejavu.cluster.catalogue import filled_in
from dejavu.cost.kernels.roofline import KernelRoofline, has_matrix_units
from dejavu.foundation.registry import Family
from dejavu.planning.planner import PlanOptions
from dejavu.planning.sentences import reason, what_devices_are_assumed
from dejavu.profiles.kernel import Kernel

GPUS = [one for one in catalogue().values() if one.kind == "cuda" and has_matrix_units(one, "float16")]
CHIPS = (
    ("A100", "A30"),
    ("V100",),
    ("T4", "RTX2080", "TITAN"),
    ("A10-", "A10G", "A40", "RTX-A6000", "RTX3090"),
    ("RTX4090", "L4"),
    ("H100", "H200", "GH200"),
    ("B200",),
)
SIZES = [(1024, 1024, 1024), (2048, 4096, 1024), (8192, 1024, 4096), (8192, 14336, 4096), (8192, 10240, 10240)]
HEADS = [(32, 2048, 128), (64, 1024, 64), (8, 8192, 128)]


def products() -> list[Kernel]:
    return [
        Kernel(
            family="matmul", name="mm", dtype="float16", m=m, n=n, k=k, flops=2.0 * m * n * k,
            read_bytes=2.0 * (m * k + k * n), written_bytes=2.0 * m * n,
        )
        for m, n, k in SIZES
    ]  # fmt: skip


def attention() -> list[Kernel]:
    return [
        Kernel(
            family="attention", name="flash", dtype="float16", batch=batch, m=length, n=length, k=width,
            flops=4.0 * batch * length**2 * width, read_bytes=6.0 * batch * length * width,
            written_bytes=2.0 * batch * length * width,
        )
        for batch, length, width in HEADS
    ]  # fmt: skip


def told_little(device: DeviceType) -> DeviceType:
    """As a person writes it: memory, bandwidth and peaks."""
    little = replace(device, name="Mine", source="cluster.yaml", num_multiprocessors=None, cache_bytes=None)
    return replace(little, board_watts=None, process_nanometres=None, architecture=None)


def chip_of(device: DeviceType) -> tuple[str, ...]:
    return next(chip for chip in CHIPS if f"{device.name}-".startswith(chip))


def errors(found: Iterable[tuple[DeviceType, DeviceType]], kernels: list[Kernel]) -> np.ndarray:
    """Mean logarithm of what is predicted for each over what is with all that is known of it."""
    law = KernelRoofline()
    return np.array([np.log(law.seconds(kernels, ours) / law.seconds(kernels, known)).mean() for ours, known in found])


def without(monkeypatch: pytest.MonkeyPatch, chip: tuple[str, ...]) -> None:
    left = {name: one for name, one in catalogue().items() if not f"{name}-".startswith(chip)}
    monkeypatch.setattr(sys.modules[filled_in.__module__], "catalogue", lambda: Family("device", left))


@pytest.mark.parametrize("device", GPUS, ids=lambda one: one.name)
def test_a_gpu_of_the_catalogue_under_another_name_is_predicted_as_that(device: DeviceType) -> None:
    found, said = filled_in(told_little(device))
    assert found.num_multiprocessors == device.num_multiprocessors and found.architecture == device.architecture
    assert said.startswith("Mine has about the peaks of ") and f"{device.num_multiprocessors} multiprocessors" in said
    for kernels in (products(), attention()):
        assert abs(errors([(found, device)], kernels)[0]) < 0.02


def test_a_chip_that_the_catalogue_has_not_is_nearer_than_if_nothing_were_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no more on the one side: without a number of multiprocessors all come out too fast."""
    filled = list[tuple[DeviceType, DeviceType]]()
    for device in GPUS:
        with monkeypatch.context() as left:
            without(left, chip_of(device))
            filled.append((filled_in(told_little(device))[0], device))
    little = [(told_little(device), device) for device in GPUS]
    for kernels, most in ((products(), 0.15), (attention(), 0.3)):
        assert (errors(little, kernels) < 0).all()
        off = np.abs(errors(filled, kernels))
        assert off.mean() < min(most, 0.6 * np.abs(errors(little, kernels)).mean())
        assert np.median(off) < 0.15


def test_what_is_assumed_is_said_of_devices_that_are_there(tmp_path: Path) -> None:
    mine = "kind: cuda, memory: 32 GiB, bandwidth: 1 TB/s, float32: 20 TFLOP/s, bfloat16: 100 TFLOP/s"
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n"
        "  - {name: a, devices: [{type: Mine, count: 2}, {type: Counted, count: 2}], link: {bandwidth: 50 GB/s}}\n"
        "  - {name: b, devices: [{type: Core}, {type: Alone}], link: {bandwidth: 50 GB/s}}\n"
        "links: {default: {bandwidth: 25 Gbit/s}}\n"
        "devices:\n"
        f"  Mine: {{{mine}}}\n"
        f"  Unused: {{{mine}}}\n"
        f"  Counted: {{{mine}, multiprocessors: 77}}\n"
        "  Core: {kind: cpu, memory: 32 GiB, bandwidth: 1 TB/s, float32: 1 TFLOP/s}\n"
        "  Alone: {kind: cuda, memory: 32 GiB, bandwidth: 1 TB/s, tfloat32: 20 TFLOP/s}\n"
    )
    cluster = load_cluster(tmp_path / "cluster.yaml")
    counts = {name: one.num_multiprocessors for name, one in cluster.device_types.items()}
    near = catalogue()["V100-SXM2-16GB"]
    assert near.num_multiprocessors is not None
    wanted = round(near.num_multiprocessors * 100e12 / near.peak_flops_per_second["float16"])
    assert counts == {"Mine": wanted, "Counted": 77, "Core": None, "Alone": None}
    (said,) = (one for one in cluster.assumptions if "multiprocessors" in one)
    assert [name for name, one in cluster.device_types.items() if one.like] == ["Mine"]
    told = Cluster.from_dict(cluster.to_dict())
    assert told == cluster and told.fingerprint == cluster.fingerprint
    counted = replace(cluster.device_types["Mine"], like=None)
    assert replace(cluster, device_types={**cluster.device_types, "Mine": counted}).fingerprint == cluster.fingerprint
    assert said.startswith(f"Mine is assumed to have {wanted} multiprocessors, as many for its peaks as V100-SXM2-16GB")


def test_a_plan_on_them_says_what_is_assumed(tmp_path: Path) -> None:
    mine = "kind: cuda, memory: 32 GiB, bandwidth: 1 TB/s, float32: 20 TFLOP/s, bfloat16: 100 TFLOP/s"
    nodes = "nodes:\n  - {name: a, devices: {type: Mine, count: 2}, link: {bandwidth: 50 GB/s}}\n"
    asked: PlanOptions = {"searches": ("exact",), "microbatches": (8,), "budget_seconds": 1.0}
    said = []
    for given in ("", ", multiprocessors: 64"):
        (tmp_path / "cluster.yaml").write_text(f"{nodes}devices:\n  Mine: {{{mine}{given}}}\n")
        choice = dejavu.plan("mlp", tmp_path / "cluster.yaml", **asked)
        said.append(what_devices_are_assumed(choice))
        assert (said[-1] in reason(choice)) and choice.request.cluster.device_types["Mine"].num_multiprocessors == 64
    assert said == ["Assumed multiprocessors: Mine has 64, as many for its peaks as V100-SXM2-16GB.", ""]
