"""Planner problems in Alpa's form, made from a seed, with the optimum beside them: more shapes for `--cases`.

Times are work over devices to a power below one, times a factor for each way to spread a stage, times noise; memory is
parameters shared by the devices of tensor parallelism and activations shared by all. No number comes from a real model.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search.alpa_loop import AlpaArrays
from benchmarks.search.pareto import optimum

MICROBATCHES = (16, 64)
_NO_LIMIT = 4096  # successors, where memory does not bind
_EFFICIENCY = 0.93  # n devices are n^0.93 times as fast
_NOISE = 0.03  # of a measurement


@dataclass(frozen=True)
class Shape:
    """Layers on hosts × devices.

    Attributes:
        every_host_count: submeshes of any number of whole hosts, instead of powers of two.
        room: memory of all devices over what parameters and one microbatch need; None: memory does not bind.
        own_microbatches: written into the case, which is then run with this number only.
    """

    num_layers: int
    num_hosts: int
    devices_per_host: int
    every_host_count: bool = False
    room: float | None = None
    own_microbatches: int | None = None

    def __str__(self) -> str:
        space = "all" if self.every_host_count else "power_of_two"
        memory = "" if self.room is None else "mem_"
        return f"{memory}K{self.num_layers}_{self.num_hosts}x{self.devices_per_host}_{space}"


SHAPES = (
    Shape(96, 8, 8),
    Shape(96, 8, 8, every_host_count=True),
    Shape(96, 8, 8, room=2.5),
    Shape(96, 4, 8, room=1.8),
    Shape(64, 8, 8, every_host_count=True, room=2.0),
    Shape(96, 1, 8, room=2.0),
    Shape(48, 3, 4, every_host_count=True),
    Shape(31, 5, 6, every_host_count=True, room=2.5),
    Shape(7, 3, 1, every_host_count=True),
    Shape(1, 1, 1),
    Shape(24, 2, 4, own_microbatches=1),
)
QUICK = {"shapes": SHAPES[-4:]}


def table(
    *, folder: Path, seed: int = 0, shapes: tuple[Shape, ...] = SHAPES
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Writes a case of each shape, and the optimum by `pareto`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, shape in enumerate(shapes):
        path = folder / f"{shape}.npz"
        np.savez_compressed(path, allow_pickle=False, **arrays(shape, seed + number))
        known = []
        for B in MICROBATCHES if shape.own_microbatches is None else (shape.own_microbatches,):
            cpu = time.process_time()
            best = optimum(AlpaArrays.load(path), B)
            cpu = time.process_time() - cpu
            known.append({"case": str(shape), "B": B, "opt": best if math.isfinite(best) else None})
            rows.append(
                {"case": str(shape), "microbatches": B, "optimum_seconds": known[-1]["opt"], "cpu_seconds": cpu}
            )
        path.with_suffix(".json").write_text(json.dumps(known, indent=1) + "\n")
    summary = {"cases": len(shapes), "without_a_plan": sum(row["optimum_seconds"] is None for row in rows)}
    return f"Cases written to {folder}, with their optimum by steps of the trade-off", rows, summary


def arrays(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """What the file of a case holds."""
    rng = np.random.default_rng(seed)
    L = shape.num_layers
    submeshes = _submeshes(shape)
    devices_M = np.array([hosts * each for hosts, each in submeshes])
    # Each way of a submesh is one number of devices for tensor parallelism, a power of two; ways it lacks are inf.
    C = 1 + int(math.log2(devices_M.max()))
    work_L = rng.lognormal(0.0, 0.25, L) * 8.0 / L
    stop, start = np.arange(L)[None, :], np.arange(L)[:, None]
    sums = np.concatenate([[0.0], np.cumsum(work_L)])
    work_LL = np.where(stop >= start, sums[stop + 1] - sums[start], np.inf)
    seconds = np.full((L, L, len(submeshes), C), np.inf, dtype=np.float32)
    successors = np.full(seconds.shape, -1, dtype=np.int16)
    parameters_L, kept_L = rng.lognormal(0.0, 0.3, L), rng.lognormal(0.0, 0.3, L) * 0.15
    capacity = (shape.room or 1.0) * float(parameters_L.sum() + kept_L.sum()) / float(devices_M.max())
    parameters_LL, kept_LL = (_spans(values) for values in (parameters_L, kept_L))
    for m, n in enumerate(devices_M):
        for c in range(1 + int(math.log2(n))):
            slower = 1.0 + 0.05 * c + rng.uniform(0.0, 0.15)
            noise = rng.normal(1.0, _NOISE, (L, L)).clip(0.8, 1.2)
            seconds[:, :, m, c] = work_LL / n**_EFFICIENCY * slower * noise
            held = (capacity - parameters_LL / 2**c) / (kept_LL / n) - 1.0
            successors[:, :, m, c] = np.clip(np.floor(held), -1, _NO_LIMIT)
    found: dict[str, np.ndarray] = {
        "compute_cost": seconds,
        "max_n_succ_stages": successors if shape.room is not None else np.array(_NO_LIMIT, dtype=np.int16),
        "submesh_choices": np.array(submeshes, dtype=np.int64),
        "num_devices": np.array(shape.num_hosts * shape.devices_per_host),
    }
    if shape.own_microbatches is not None:
        found["num_microbatches"] = np.array(shape.own_microbatches)
    return found


def _submeshes(shape: Shape) -> list[tuple[int, int]]:
    """(1, powers of two within a host), whole hosts, and their multiples: Alpa's section 5.2."""
    each = shape.devices_per_host
    inside = [(1, 2**k) for k in range(each.bit_length()) if 2**k < each]
    counts = range(1, shape.num_hosts + 1)
    return inside + [(n, each) for n in counts if shape.every_host_count or n & (n - 1) == 0]


def _spans(values_L: np.ndarray) -> np.ndarray:
    """Sums over layers start to stop, inclusive; one where there are none."""
    sums = np.concatenate([[0.0], np.cumsum(values_L)])
    spans = sums[None, 1:] - sums[:-1, None]
    return np.where(spans > 0, spans, 1.0)
