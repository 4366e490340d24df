"""Planner problems in Alpa's dense form, as `.npz` files.

`compute_cost[start, stop_inclusive, submesh, config]` seconds for one microbatch (inf: not possible),
`max_n_succ_stages` (same shape, or one number where memory does not bind), `submesh_choices[S, 2]` (nodes, devices on
each), `num_devices`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.plans import Problem, StageConfiguration
from dejavu.plans.stage_costs import DenseCosts

_DEVICE = "device"
_LABELS = tuple((recompute, zero) for recompute in (False, True) for zero in range(4))


def load_case(path: str | Path, num_microbatches: int) -> Problem:
    """Load a problem from Alpa's form, with Alpa's rule that every device is used.

    The file does not say what its configurations are, so of those of one submesh only the choices remain that are not
    both slower and larger in memory than another: slot 0 the fastest, slot 1 the next, and so on, stage by stage. Slots
    are told apart by recompute and the ZeRO level, which are labels here and nothing more, as is data_parallel.

    Raises:
        InputError: the file is not of this form.
    """
    with np.load(path, allow_pickle=False) as data:
        missing = {"compute_cost", "max_n_succ_stages", "submesh_choices", "num_devices"} - set(data.files)
        if missing:
            raise InputError(f"{path} has no {', '.join(sorted(missing))}; wanted a planner problem in Alpa's form")
        seconds = data["compute_cost"].astype(np.float64)
        successors = np.broadcast_to(data["max_n_succ_stages"].astype(np.int64), seconds.shape)
        submeshes = data["submesh_choices"]
        num_devices = int(data["num_devices"])
    L, _, S, _ = seconds.shape
    seconds, in_flight = _slots(seconds, np.maximum(successors + 1, 0))
    num_slots = seconds.shape[-1]
    if num_slots > len(_LABELS):
        raise InputError(f"{path} has stages with {num_slots} configurations worth keeping; at most {len(_LABELS)} do")
    C = S * num_slots
    tables = [np.full((C, L, L + 1), np.inf), np.zeros((C, L, L + 1), dtype=np.int64)]
    for table, values in zip(tables, (seconds, in_flight), strict=True):
        table[:, :, 1:] = values.reshape(L, L, C).transpose(2, 0, 1)
    configurations = tuple(
        StageConfiguration(
            _DEVICE, int(nodes), int(each), data_parallel=int(nodes * each), recompute=recompute, zero_level=zero
        )
        for nodes, each in submeshes
        for recompute, zero in _LABELS[:num_slots]
    )
    return Problem(
        layers=tuple(f"layer {i}" for i in range(L)),
        configurations=configurations,
        device_counts={_DEVICE: num_devices},
        costs=DenseCosts(tables[0], np.zeros((C, L, L + 1)), tables[1]),
        cut_bytes_L1=np.zeros(L + 1),
        link_latency_seconds_CC=np.zeros((C, C)),
        link_seconds_per_byte_CC=np.zeros((C, C)),
        schedule="1f1b",
        num_microbatches=num_microbatches,
        use_all_devices=True,
    )


def _slots(seconds: np.ndarray, in_flight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort along the last axis, fastest first; keep only those that hold more microbatches than every faster one."""
    order = np.lexsort((-in_flight, seconds), axis=-1)
    seconds = np.take_along_axis(seconds, order, axis=-1)
    in_flight = np.take_along_axis(in_flight, order, axis=-1)
    before = np.maximum.accumulate(in_flight, axis=-1)[..., :-1]
    kept = np.isfinite(seconds) & (in_flight > 0)
    kept[..., 1:] &= in_flight[..., 1:] > before
    seconds = np.where(kept, seconds, np.inf)
    in_flight = np.where(kept, in_flight, 0)
    num_slots = max(1, int(kept.sum(axis=-1).max()))
    front = np.argsort(~kept, axis=-1, kind="stable")[..., :num_slots]
    return np.take_along_axis(seconds, front, axis=-1), np.take_along_axis(in_flight, front, axis=-1)
