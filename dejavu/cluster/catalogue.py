"""Specifications of hardware that was not measured: the devices of dejavu/devices.csv, and the latency of a hop."""

import csv
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from dejavu.cluster.records import DTYPES, Device, DeviceType, Kind
from dejavu.foundation import units
from dejavu.foundation.registry import Family

# The latency of one hop where none is given: between NCCL's tuning constants for NVLink (3.4 us) and PCIe (5.7 us), and
# its constant for the network (14 us); hardware latencies of the Simple protocol on a ring, NCCL src/graph/tuning.cc.
NODE_LATENCY_SECONDS = 5e-6
NETWORK_LATENCY_SECONDS = 14e-6

SAME_CHIP = 1.15  # a chip's peaks differ by less in another form

DEVICES_CSV = Path(__file__).parent.with_name("devices.csv")


@dataclass(frozen=True)
class CatalogueRow:
    """A line of devices.csv. Peaks are dense, with float32 accumulation; memory is what ECC leaves.

    The interconnect is one way and the sum of a device's links: a pair of devices can have less. NVLink counts where
    every such device has it; a bridge that can be bought for a PCIe card does not (the source column has its figure).
    """

    device_type: DeviceType
    interconnect: str
    interconnect_bytes_per_second: float  # one way
    reported_names: tuple[str, ...]  # by torch.cuda.get_device_name


@cache
def catalogue_rows() -> tuple[CatalogueRow, ...]:
    with DEVICES_CSV.open(newline="", encoding="utf-8") as file:
        return tuple(_catalogue_row(row) for row in csv.DictReader(file))


def _catalogue_row(row: dict[str, str]) -> CatalogueRow:
    peaks = {
        dtype: units.parse_flops_per_second(f"{row[dtype + '_tflops']} TFLOP/s")
        for dtype in DTYPES
        if row[dtype + "_tflops"]
    }
    device_type = DeviceType(
        name=row["name"],
        kind=cast(Kind, row["kind"]),
        peak_flops_per_second=peaks,
        memory_bytes=units.parse_bytes(f"{row['memory_gib']} GiB"),
        memory_bytes_per_second=units.parse_bytes_per_second(f"{row['memory_gbytes_per_second']} GB/s"),
        num_multiprocessors=int(row["multiprocessors"]) if row["multiprocessors"] else None,
        cache_bytes=units.parse_bytes(f"{row['l2_mib']} MiB") if row["l2_mib"] else None,
        source="catalogue",
        board_watts=float(row["board_watts"]) if row["board_watts"] else None,
        process_nanometres=int(row["process_nanometres"]) if row["process_nanometres"] else None,
        architecture=row["architecture"] or None,
    )
    return CatalogueRow(
        device_type=device_type,
        interconnect=row["interconnect"],
        interconnect_bytes_per_second=units.parse_bytes_per_second(
            f"{row['interconnect_one_way_gbytes_per_second']} GB/s"
        ),
        reported_names=tuple(row["reported_names"].split(";")) if row["reported_names"] else (),
    )


def catalogue(or_else: str = "a new row there") -> Family[DeviceType]:
    """Return the device types of devices.csv by name, in the file's order.

    Args:
        or_else: what is said of a name that is not there, beside that it is wanted there.
    """
    return Family(
        "device",
        {row.device_type.name: row.device_type for row in catalogue_rows()},
        wanted=f"one of dejavu/devices.csv, or {or_else}",
        near=nearest_devices,
    )


def filled_in(device: DeviceType) -> tuple[DeviceType, str]:
    """Return a GPU that nobody has counted the multiprocessors of as the catalogue's nearest one, and say so; else "".

    It has as many for its peak as the device of its kind whose peaks are nearest. Where both of these are within
    `SAME_CHIP` it is taken for that device, and what else is not known of it is that one's, too.

    Without a number nothing waits for operands or for a last wave: of each GPU of the catalogue with matrix units,
    large 16-bit products came out 18 % and attention 39 % shorter in the mean than with all that is known of it. As the
    nearest other GPU they are 7 and 9 % off, as the nearest of another chip 10 and 23 % (2026-11-30).
    """
    near = None if device.num_multiprocessors is not None else _nearest_by_peaks(device)
    if near is None or near.num_multiprocessors is None:
        return device, ""
    ours, theirs = _peaks(device), _peaks(near)
    ratios = [ours[one] / theirs[one] for one in ours if one in theirs]
    count = max(1, round(near.num_multiprocessors * ratios[0]))
    filled = replace(device, num_multiprocessors=count, like=near.name)
    if len(ratios) > 1 and all(1 / SAME_CHIP <= ratio <= SAME_CHIP for ratio in ratios):
        rest = ("cache_bytes", "board_watts", "process_nanometres", "architecture")
        known = {name: getattr(near, name) for name in rest if getattr(device, name) is None}
        said = (
            f"{device.name} has about the peaks of {near.name}, and is taken for one in all that the file does not say"
        )
        return replace(filled, **known), f"{said}; for its peak, {count} multiprocessors."
    said = f"{device.name} is assumed to have {count} multiprocessors, as many for its peaks as {near.name}"
    return filled, f"{said}: `multiprocessors` under `devices` says it better."


def _nearest_by_peaks(device: DeviceType) -> DeviceType | None:
    ours, found = _peaks(device), list[tuple[float, int, DeviceType]]()
    for k, other in enumerate(catalogue().values()):
        theirs = _peaks(other)
        if other.kind == device.kind and other.num_multiprocessors and set(ours) <= set(theirs):
            found.append((sum(abs(math.log(ours[one] / theirs[one])) for one in ours), k, other))
    return min(found)[2] if found and ours else None


def _peaks(device: DeviceType) -> dict[str, float]:
    """Return the peak of matrix units in 16 bits, in either type, and that in float32, as far as they are known."""
    peaks = device.peak_flops_per_second
    half = max((peaks[one] for one in ("float16", "bfloat16") if one in peaks), default=None)
    found = {"16 bits": half, "float32": peaks.get("float32")}
    return {name: peak for name, peak in found.items() if peak is not None}


def is_gpu(device: Device) -> bool:
    """Return whether a device is a GPU: as its cluster says, or the catalogue where its record is too old to say."""
    known = catalogue().get(device.type_name)
    kind = device.kind or (known.kind if known is not None else "cpu")
    return kind != "cpu"


def nearest_devices(name: str, known: Iterable[str]) -> list[str]:
    """Return the device names that may be meant: compares full and short (H100) names, ignoring case and maker."""
    words = [word for word in name.casefold().replace("_", " ").split() if word not in ("nvidia", "amd", "tesla")]
    word, names = "-".join(words) or name.casefold(), list(known)
    family = [full for full in names if full.casefold() == word or word in _shortened(full)]
    if family:
        return family
    likeness = {  # a misspelling: the most similar name, full or short; the first of equals
        full: max(difflib.SequenceMatcher(None, word, short).ratio() for short in _shortened(full)) for full in names
    }
    return [full for full in sorted(names, key=lambda full: -likeness[full])[:1] if likeness[full] >= 0.6]


def _shortened(name: str) -> list[str]:
    """Return `h100`, `h100-sxm5`, `h100-sxm5-80gb`."""
    parts = name.casefold().split("-")
    return ["-".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
