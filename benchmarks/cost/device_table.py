"""The --devices CSV in any of three forms, and which device a name means.

The files spell one device in many ways: `NVIDIA A100 80GB PCIe`, `NVIDIA_A100_80GB_PCIe`, `A100-PCIE-80GB`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dejavu.cluster import DeviceType
from dejavu.cluster.catalogue import catalogue, catalogue_rows
from dejavu.foundation.errors import InputError

VENDOR_WORDS = {"nvidia", "amd", "tesla", "instinct", "geforce"}
TFLOPS, GFLOPS, GBYTES, MIB, GIB = 1e12, 1e9, 1e9, 2**20, 2**30
DTYPES = ("float32", "tfloat32", "float16", "bfloat16")
# Columns of the three forms, by what they say: dejavu/devices.csv, the data folder's list, NeuSight's.
_NAME = ("name", "device", "Device")
_BANDWIDTH_GBYTES = ("memory_gbytes_per_second", "mem_bw_gbs", "Mem_Bw")
_MULTIPROCESSORS = ("multiprocessors", "sms", "Num_Sm")
_CACHE_MIB = ("l2_mib", "l2_mb", "L2Cache")
_MEMORY_GIB = ("memory_gib", "mem_gb_nominal", "Dev_Mem")
_PEAK_TFLOPS = {
    "float32": ("float32_tflops", "fp32_tflops"),
    "tfloat32": ("tfloat32_tflops", "tf32_tflops"),
    "float16": ("float16_tflops", "fp16_tflops_dense"),
    "bfloat16": ("bfloat16_tflops", "bf16_tflops_dense"),
}


def words(name: str) -> frozenset[str]:
    """What of a device's name tells it from others: `a100`, `80`, `pcie`."""
    found = re.split(r"[^a-z0-9]+", name.casefold())
    return frozenset(re.sub(r"^(\d+)gb$", r"\1", word) for word in found if word) - VENDOR_WORDS


def catalogue_name(name: str) -> str | None:
    """Its name in dejavu/devices.csv, where a name or a reported name there has the same words."""
    for row in catalogue_rows():
        if any(words(known) == words(name) for known in (row.device_type.name, *row.reported_names)):
            return row.device_type.name
    return None


def meant(name: str) -> str | None:
    """The one device of dejavu/devices.csv with all of the name's words (`sxm` is `sxm5` too), or None.

    So `GH200`, `H100-SXM` and `h100 pcie` each mean one, `A100` means none.
    """
    found = candidates(name)
    return catalogue_name(name) or (found[0] if len(found) == 1 else None)


def candidates(name: str) -> list[str]:
    """The devices of dejavu/devices.csv with all of the name's words, in its order; none where all are numbers."""
    asked, found = words(name), []
    for row in catalogue_rows() if any(not word.isdigit() for word in asked) else ():
        known = words(row.device_type.name)
        if all(
            any(one == word or (one.isalpha() and word.rstrip("0123456789") == one) for word in known) for one in asked
        ):
            found.append(row.device_type.name)
    return found


def chosen(asked: str, present: Sequence[str], option: str) -> list[str]:
    """The names in `present` that each of the comma-separated names means; `A100-80` is enough where it is clear.

    Raises:
        InputError: a name means none of them, or several different devices.
    """
    found = []
    for name in (part.strip() for part in asked.split(",") if part.strip()):
        matches = [known for known in present if words(name) <= words(known)]
        exact = [known for known in matches if words(known) == words(name)]
        matches = exact or matches
        if len({words(known) for known in matches}) != 1:
            problem = "no device" if not matches else f"several devices: {', '.join(matches)}"
            raise InputError(f"{option} {name!r} is {problem}; the measurements have {', '.join(present)}")
        found.append(matches[0])
    if not found:
        raise InputError(f"{option} names no device; the measurements have {', '.join(present)}")
    return found


def device_types(path: Path) -> dict[str, DeviceType | InputError]:
    """By the file's own names: devices, and what is wrong with those that cannot be used, for whoever needs them.

    Of two rows with one name the one whose `file` is spelled like it has that name, the other its `file`'s: NeuSight's
    list has a pair of H100 under the name of one.

    Raises:
        InputError: it is none of the three forms.
    """
    try:
        table = pd.read_csv(path, skipinitialspace=True).rename(columns=str.strip)
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is no CSV file ({error}); wanted one row a device") from error
    name = next((column for column in _NAME if column in table.columns), None)
    if name is None:
        raise InputError(f"{path}: no column {' or '.join(_NAME)} among {', '.join(map(str, table.columns))}")
    rows = [(str(row[name]), row.get("file"), row) for row in table.to_dict("records")]
    spelled = {label for label, file, _ in rows if isinstance(file, str) and words(file) == words(label)}
    devices: dict[str, DeviceType | InputError] = {}
    for label, file, row in rows:
        own = file if label in spelled and isinstance(file, str) and words(file) != words(label) else label
        if own not in devices or own in spelled:
            devices[own] = _device_or_fault(own, row, path)
    return devices


def _device_or_fault(label: str, row: dict[str, Any], path: Path) -> DeviceType | InputError:
    try:
        return _device_type(label, row, path)
    except InputError as fault:
        return InputError(f"{path}: {label!r} {fault}")


def device_of(name: str, table: dict[str, DeviceType | InputError], path: Path) -> DeviceType:
    """The row that `name` of the measurements means: by its words, or by what the catalogue calls it.

    Where the file has no row for it, the catalogue's own figures serve.

    Raises:
        InputError: there is none, or more than one, or its row lacks a figure.
    """
    in_catalogue = meant(name)
    tests: tuple[Callable[[str], bool], ...] = (
        lambda known: words(known) == words(name),
        lambda known: in_catalogue is not None and meant(known) == in_catalogue,
        lambda known: words(known) <= words(name) or words(name) <= words(known),
    )
    for test in tests:
        matches = [known for known in table if test(known)]
        # Of `H100` and `H100 pair` the first is meant by what means both.
        matches = [one for one in matches if all(words(one) <= words(other) for other in matches)] or matches
        if len(matches) == 1:
            found = table[matches[0]]
            if isinstance(found, InputError):
                raise found
            return found
    if in_catalogue is not None:
        return catalogue()[in_catalogue]
    raise InputError(f"{path} has no row for {name!r}, nor has dejavu/devices.csv one; it has {', '.join(table)}")


def one_spelling(names: Iterable[str], table: dict[str, DeviceType | InputError], path: Path) -> dict[str, str]:
    """By name, the first of `names` that means the same device: so that none is left out under one of its names only.

    The first that `device_of` answers the same of; a name of which it knows nothing is the same as its own words.
    """
    first: dict[Any, str] = {}
    found = {}
    for name in names:
        try:
            key: Any = device_of(name, table, path).name
        except InputError:
            key = words(name)
        found[name] = first.setdefault(key, name)
    return found


def _device_type(label: str, row: dict[str, Any], path: Path) -> DeviceType:
    peaks = {
        dtype: value * TFLOPS for dtype, columns in _PEAK_TFLOPS.items() if (value := _number(row, columns)) is not None
    }
    neusight = _number(row, ("SingleFLOPs", "SingleFLOPsVEC"))
    if neusight is not None:
        peaks["float32"] = neusight * GFLOPS
    bandwidth = _number(row, _BANDWIDTH_GBYTES)
    if bandwidth is None or "float32" not in peaks:
        raise InputError("lacks its float32 peak or its memory bandwidth")
    multiprocessors, cache = _number(row, _MULTIPROCESSORS), _number(row, _CACHE_MIB)
    name = meant(label) or label
    known = catalogue().get(name)
    return DeviceType(
        name=name,
        kind="rocm" if re.search(r"\bamd\b|^mi\d", f"{row.get('vendor', '')} {label}".strip().casefold()) else "cuda",
        peak_flops_per_second=peaks,
        memory_bytes=int((_number(row, _MEMORY_GIB) or 0) * GIB),
        memory_bytes_per_second=bandwidth * GBYTES,
        num_multiprocessors=int(multiprocessors) if multiprocessors else None,
        cache_bytes=int(cache * MIB) if cache else None,
        source=path.name,
        board_watts=known.board_watts if known else None,
        process_nanometres=known.process_nanometres if known else None,
    )


def _number(row: dict[str, Any], columns: Iterable[str]) -> float | None:
    for column in columns:
        value = row.get(column)
        if value is not None and not pd.isna(value):
            number = float(pd.to_numeric(value, errors="coerce"))
            if not 0 < number < float("inf"):
                raise InputError(f"has {value!r} as {column}; wanted a number above 0")
            return number
    return None
