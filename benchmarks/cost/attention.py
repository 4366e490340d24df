"""Fused attention on GPUs as published, beside what the roofline's law says and the plain roofline.

Nothing of the law was fitted to attention, so every device is one that was left out; its rules were chosen with these
rows in sight (docs/log.md). The constant beside it is fitted, to the other devices' rows of the same version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from benchmarks.published.attention import RECALLED, TOKENS, WIDTH, Attention, Version, published
from dejavu.cluster import catalogue
from dejavu.cost.kernels.roofline import MATRIX_UNITS, KernelLaw, KernelRoofline, peak_flops_per_second

BY: dict[int, Literal["warps", "warpgroups"]] = {2: "warps", 3: "warpgroups"}
# What attention was priced at before: every kernel at one share of the peak, as on an A100.
BEFORE = replace(MATRIX_UNITS, attends_by="tiles", attention_efficiency=0.70)
COVERAGE = 0.90
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def run() -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Price all published measurements."""
    measured = published()
    rows = [_row(one, measured) for one in measured]
    return "Fused attention on GPUs: published, and what is predicted", rows, _summary(rows)


def seconds(one: Attention) -> float:
    """Return what the law says, of the version that was measured."""
    return _by(one, replace(MATRIX_UNITS, attends_by=BY[one.version]))


def plain_roofline(one: Attention) -> float:
    """Return the roofline at the peaks: nothing can be faster."""
    peak = peak_flops_per_second(one.device, one.kernel.dtype)
    assert peak is not None
    size_bytes = one.kernel.read_bytes + one.kernel.written_bytes
    return max(one.kernel.flops / peak, size_bytes / one.device.memory_bytes_per_second)


def _by(one: Attention, law: KernelLaw) -> float:
    return float(KernelRoofline(matrix_units=law).seconds([one.kernel], one.device)[0])


def _constant(one: Attention, measured: Sequence[Attention]) -> float:
    """Return the plain roofline times one figure: the median of the other devices' kernels of this version."""
    others = [other for other in measured if other.version == one.version and other.device != one.device]
    return plain_roofline(one) * float(np.median([other.seconds / plain_roofline(other) for other in others]))


def _row(one: Attention, measured: Sequence[Attention]) -> dict[str, Any]:
    ways: dict[str, Callable[[Attention], float]] = {
        "ours": seconds,
        "roofline": plain_roofline,
        "one_constant": lambda this: _constant(this, measured),
        "before": lambda this: _by(this, BEFORE),
    }
    batch, heads, queries, keys, width = one.shape
    return {
        "device": one.device.name,
        "version": f"FlashAttention {one.version}",
        "pass": "backward" if one.is_backward else "forward",
        "causal": "yes" if one.is_causal else "no",
        "batch_heads": f"{batch} · {heads}",
        "queries": queries,
        "keys": keys,
        "head": width,
        "tflops": one.tflops,
        "ours_tflops": one.kernel.flops / seconds(one) / 1e12,
        **{f"{name}_percent": 100.0 * (way(one) / one.seconds - 1.0) for name, way in ways.items()},
        "source": one.source,
        "note": one.note,
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ways = ("ours", "roofline", "one_constant", "before")

    def mape(way: str, chosen: Sequence[Mapping[str, Any]]) -> float:
        return float(np.mean([abs(row[f"{way}_percent"]) for row in chosen]))

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['version']} on {row['device']}", []).append(row)
    of_torch = [row for row in rows if row["version"] == "FlashAttention 2"]
    logs = np.abs(np.log([1.0 + row["ours_percent"] / 100.0 for row in rows]))
    return {
        "rows": len(rows),
        "devices": sorted({row["device"] for row in rows}),
        "mape_percent": mape("ours", rows),
        "worst_device_percent": max(mape("ours", group) for group in groups.values()),
        **{f"{way}_mape_percent": mape(way, rows) for way in ways[1:]},
        "by_device": {name: {way: mape(way, group) for way in ways} for name, group in groups.items()},
        "bias_by_device": {
            name: float(np.mean([row["ours_percent"] for row in group])) for name, group in groups.items()
        },
        "by_pass": {
            f"{way}, {'causal' if causal == 'yes' else 'no mask'}": mape("ours", chosen)
            for way in ("forward", "backward")
            for causal in ("no", "yes")
            if (chosen := [row for row in of_torch if (row["pass"], row["causal"]) == (way, causal)])
        },
        "log_error_quantile": float(np.quantile(logs, COVERAGE)),
        "recalled": {
            f"FlashAttention {version} {direction} on {name}": {
                "share_of_peak_percent": 100.0 * share,
                "ours_percent": 100.0 * best_share(name, version, direction),
                "source": source,
            }
            for name, version, direction, share, source in RECALLED
        },
        "fitted": "nothing to attention; the law's six figures to 16-bit products of A100 and A40",
    }


def best_share(name: str, version: Version, direction: str) -> float:
    """Return the largest share of the peak over the lengths of FlashAttention's benchmark, heads of 128, no mask."""
    device = catalogue()[name]
    found = []
    for length in LENGTHS:
        shape = (TOKENS // length, WIDTH // 128, length, length, 128)
        one = Attention(device, version, shape, False, direction == "backward", 1.0, "")
        found.append(one.kernel.flops / seconds(one) / device.peak_flops_per_second["bfloat16"])
    return max(found)
