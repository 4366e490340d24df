"""This machine as a cluster of one node: its GPUs or else its CPU cores, looked up and guessed, not measured."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dejavu.cluster.catalogue import NODE_LATENCY_SECONDS, CatalogueRow, catalogue_rows
from dejavu.cluster.records import DTYPES, Cluster, DeviceType, Kind, Link, NodeGroup
from dejavu.foundation import units
from dejavu.foundation.errors import InputError

# Assumptions about a core of this machine. Fixed, because the current clock changes from call to call and the
# fingerprint must not; a profile of the machine overrides all of them.
CORE_CYCLES_PER_SECOND = 2.5e9
CORE_MEMORY_BYTES_PER_SECOND = 10e9
LOOPBACK = {"bytes_per_second": 1e9, "latency_seconds": 100e-6}  # gloo between two processes, the order of magnitude
MEMORY_STEP_BYTES = 256 << 20  # memory is rounded down to it: the kernel reserves a little more or less at each boot

# FLOP per cycle in float32: lanes × 2 (multiply and add) × 2 units; the first flag that the CPU has counts.
CORE_FLOPS_PER_CYCLE = {"avx512f": 64, "fma": 32, "avx": 16, "asimd": 16}
CORE_FLOPS_PER_CYCLE_OTHERWISE = 8

# The least of a CUDA device that the catalogue does not have: 64 float32 lanes per multiprocessor (as P100 and A100;
# others have more) × 2 at a clock that all reach, and memory slower than that of all devices in the catalogue but P4.
UNKNOWN_FLOPS_PER_MULTIPROCESSOR_PER_SECOND = 64 * 2 * 1.2e9
UNKNOWN_MEMORY_BYTES_PER_SECOND = 300e9
VISIBLE = "CUDA_VISIBLE_DEVICES"
HOPPER_CAPABILITY = 9  # the compute capability's major number: 9.0, no other generation's


def this_machine() -> Cluster:
    """Return the CUDA or ROCm devices that torch sees here; without any, the CPU cores that this process may use.

    Two calls on the same machine give the same fingerprint.

    Raises:
        InputError: CUDA numbers GPUs of one type before and after others: a device of the cluster would be another GPU.

    Example:
        >>> import dejavu
        >>> sum(dejavu.this_machine().device_counts.values()) > 0
        True
    """
    import torch  # takes a second or two, and only this function needs it

    if torch.cuda.is_available():
        return _cuda_machine(torch)
    return _cpu_machine()


def _one_node(
    devices: list[tuple[DeviceType, int]], link: Link, assumptions: list[str], name: str = "this-machine"
) -> Cluster:
    group = NodeGroup(
        name=name,
        count=1,
        hosts=("localhost",),
        devices=tuple((device_type.name, count) for device_type, count in devices),
        link=link,
    )
    types = {device_type.name: device_type for device_type, _ in devices}
    return Cluster(
        name=name,
        groups=(group,),
        device_types=dict(sorted(types.items())),
        links_between={},
        assumptions=tuple(assumptions),
    )


def visible_gpus(count: int) -> list[str]:
    """List this many GPUs, in CUDA's order, by the names that the variable `VISIBLE` takes."""
    told = os.environ.get(VISIBLE)
    return (told.split(",") if told else [str(k) for k in range(count)])[:count]


def gpus_by_type() -> dict[str, list[str]]:
    """Return the GPUs of each type of `this_machine`, by the names that the variable `VISIBLE` takes; {}: no GPUs."""
    import torch

    if not torch.cuda.is_available():
        return {}
    count, found = torch.cuda.device_count(), dict[str, list[str]]()
    for index, name in enumerate(visible_gpus(count)):
        found.setdefault(_cuda_type(torch, index)[0].name, []).append(name)
    return found


def _check_order(type_names: Sequence[str]) -> None:
    """Check that the types of GPUs in CUDA's order are those of the cluster's devices, which go type by type."""
    grouped = sorted(range(len(type_names)), key=lambda index: (type_names.index(type_names[index]), index))
    if grouped != [*range(len(type_names))]:
        names = visible_gpus(len(type_names))
        raise InputError(
            f"CUDA numbers this machine's GPUs as {', '.join(type_names)}; wanted those of a type one after another, "
            f"as with {VISIBLE}={','.join(names[index] for index in grouped)} in the environment"
        )


def _cuda_type(torch: Any, index: int) -> tuple[DeviceType, CatalogueRow | None]:
    """Return the type of a GPU, and its row of the catalogue; None: the catalogue does not have it."""
    kind: Kind = "rocm" if torch.version.hip else "cuda"
    properties = torch.cuda.get_device_properties(index)
    row = next((row for row in catalogue_rows() if properties.name in row.reported_names), None)
    if row is None:
        return _unknown_cuda_type(properties, kind), None
    # What the driver leaves: a little less than the catalogue's, and less again in a slice of a device.
    memory_bytes = min(_rounded_memory(properties.total_memory), row.device_type.memory_bytes)
    return replace(row.device_type, memory_bytes=memory_bytes, source="this machine"), row


def _cuda_machine(torch: Any) -> Cluster:
    found: dict[str, tuple[DeviceType, int]] = {}
    type_names: list[str] = []
    assumptions: list[str] = []
    rates: list[float] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device_type, row = _cuda_type(torch, index)
        type_names.append(device_type.name)
        rates += [row.interconnect_bytes_per_second] if row is not None else []
        known, count = found.get(device_type.name, (device_type, 0))
        smaller = min(known, device_type, key=lambda entry: entry.memory_bytes)
        found[device_type.name] = (smaller, count + 1)
        if row is None and count == 0:
            assumptions.append(
                f"The catalogue has no {properties.name!r}: its peaks are a low guess from "
                f"{properties.multi_processor_count} multiprocessors; `dejavu profile` measures it."
            )
    _check_order(type_names)
    pcie = next(row for row in catalogue_rows() if row.interconnect == "PCIe 3.0 x16")
    rate = min(rates) if len(rates) == torch.cuda.device_count() else pcie.interconnect_bytes_per_second
    link = Link(rate, NODE_LATENCY_SECONDS, assumed=True)
    if torch.cuda.device_count() > 1:
        assumptions.append(f"Between the devices of this machine: {link.describe()}, by the catalogue, not measured.")
    return _one_node(list(found.values()), link, assumptions)


def _unknown_cuda_type(properties: Any, kind: Kind) -> DeviceType:
    float32 = properties.multi_processor_count * UNKNOWN_FLOPS_PER_MULTIPROCESSOR_PER_SECOND
    peaks = {"float32": float32, "float16": float32}
    if kind == "cuda" and properties.major >= 8:
        # Matrix units since Ampere: 2 to 16 times float32, of which the least is taken.
        peaks |= {"tfloat32": float32, "float16": 2 * float32, "bfloat16": 2 * float32}
    return DeviceType(
        name=_slug(properties.name),
        kind=kind,
        peak_flops_per_second={dtype: peaks[dtype] for dtype in DTYPES if dtype in peaks},
        memory_bytes=_rounded_memory(properties.total_memory),
        memory_bytes_per_second=UNKNOWN_MEMORY_BYTES_PER_SECOND,
        num_multiprocessors=properties.multi_processor_count,
        cache_bytes=getattr(properties, "L2_cache_size", None) or None,
        source="this machine",
        architecture="Hopper" if kind == "cuda" and properties.major == HOPPER_CAPABILITY else None,
    )


def _cpu_machine() -> Cluster:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    name, flags = _cpu_identity()
    per_cycle = next((n for flag, n in CORE_FLOPS_PER_CYCLE.items() if flag in flags), CORE_FLOPS_PER_CYCLE_OTHERWISE)
    float32 = per_cycle * CORE_CYCLES_PER_SECOND
    # Without instructions of their own the short types are computed in float32.
    peaks = {
        "float32": float32,
        "float16": float32 * (2 if "avx512_fp16" in flags or "asimdhp" in flags else 1),
        "bfloat16": float32 * (2 if "avx512_bf16" in flags or "bf16" in flags else 1),
    }
    core = DeviceType(
        name=name,
        kind="cpu",
        peak_flops_per_second=peaks,
        memory_bytes=_rounded_memory(_memory_limit_bytes() // len(cores)),
        memory_bytes_per_second=CORE_MEMORY_BYTES_PER_SECOND,
        num_multiprocessors=None,
        cache_bytes=_core_cache_bytes(cores[0]),
        source="this machine",
    )
    link = Link(**LOOPBACK, assumed=True)
    assumptions = [
        f"A core of this machine is taken for {units.format_flops_per_second(float32)} in float32 ({per_cycle} FLOP "
        f"per cycle at {CORE_CYCLES_PER_SECOND / 1e9:g} GHz) and "
        f"{units.format_bytes_per_second(CORE_MEMORY_BYTES_PER_SECOND)} from memory; `dejavu profile` measures it.",
        f"Between the processes of this machine: {link.describe()}, nominal, not measured.",
    ]
    return _one_node([(core, len(cores))], link, assumptions)


def _cpu_identity() -> tuple[str, set[str]]:
    """Return a name unique to this CPU model, as profiles are kept under it, and the instruction sets."""
    path = Path("/proc/cpuinfo")
    first_core = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0] if path.exists() else ""
    entries = [line.partition(":") for line in first_core.splitlines()]
    info = {key.strip().lower(): value.strip() for key, _, value in entries}
    flags = set((info.get("flags") or info.get("features") or "").split())
    model = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b", " ", info.get("model name", "").lower())
    parts = [_slug(model) or _slug(platform.processor() or platform.machine() or "unknown")]
    labels = {"family": "cpu family", "model": "model", "implementer": "cpu implementer", "part": "cpu part"}
    parts += [f"{label}{_slug(info[key])}" for label, key in labels.items() if info.get(key)]
    return "-".join(["cpu-core", *parts]), flags


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _rounded_memory(size_bytes: int) -> int:
    return size_bytes // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES or size_bytes


def _memory_limit_bytes() -> int:
    """Return the machine's memory, or the limit of the container's control group (version 2, then 1)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        limits += [int(text)] if text.isdigit() else []  # version 2 writes "max" for none
    return min(limits)


def _core_cache_bytes(core: int) -> int | None:
    """Return the size of the second-level cache: on most CPUs the largest that cores do not share."""
    for index in sorted(Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*")):
        level, size = index / "level", index / "size"
        if level.is_file() and size.is_file() and level.read_text().strip() == "2":
            return units.parse_bytes(size.read_text().strip().removesuffix("K") + " KiB")
    return None
