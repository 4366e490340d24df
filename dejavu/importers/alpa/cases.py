"""Planner problems in Alpa's dense form, as `.npz` files.

`compute_cost[start, stop_inclusive, submesh, config]` seconds for one microbatch (inf: not possible),
`max_n_succ_stages` (same shape, or one number where memory does not bind), `submesh_choices[S, 2]` (nodes, devices on
each), `num_devices`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.importers.cells import whole
from dejavu.plans import Problem, StageConfiguration
from dejavu.plans.stage_costs import DenseCosts

_WANTED = "a planner problem in Alpa's form"
_NAMES = ("compute_cost", "max_n_succ_stages", "submesh_choices", "num_devices")
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
    arrays = _arrays(path)
    _check(path, arrays)
    seconds = arrays["compute_cost"].astype(np.float64)
    successors = np.broadcast_to(arrays["max_n_succ_stages"].astype(np.int64), seconds.shape)
    submeshes, num_devices = arrays["submesh_choices"], int(arrays["num_devices"])
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


def _arrays(path: str | Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: np.asarray(data[name]) for name in _NAMES if name in data.files}
    except Exception as error:  # damaged bytes raise what numpy, zipfile and zlib happen to raise
        raise InputError(f"{path} is no whole .npz file ({type(error).__name__}); wanted {_WANTED}") from error
    missing = sorted(set(_NAMES) - set(arrays))
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}; wanted {_WANTED}")
    return arrays


def _check(path: str | Path, arrays: dict[str, np.ndarray]) -> None:
    """Check that all are numbers, of shapes that go together. Raises InputError where they are not."""
    for name, array in arrays.items():
        if array.dtype.kind not in "iuf":
            raise InputError(f"{path}: {name} is of {array.dtype}; wanted numbers")
    shape = arrays["compute_cost"].shape
    if len(shape) != 4 or shape[0] != shape[1] or 0 in shape:
        wanted = "(start, stop, submesh, config): as many starts as stops, and each 1 or more"
        raise InputError(f"{path}: compute_cost has the shape {shape}; wanted {wanted}")
    if arrays["max_n_succ_stages"].ndim:
        _check_shape(path, arrays, "max_n_succ_stages", shape)
    _check_shape(path, arrays, "submesh_choices", (shape[2], 2))
    _check_shape(path, arrays, "num_devices", ())
    for name in ("submesh_choices", "num_devices"):
        for value in arrays[name].ravel().tolist():
            try:
                whole(name, value)
            except ValueError as error:
                raise InputError(f"{path}: {error}") from error


def _check_shape(path: str | Path, arrays: dict[str, np.ndarray], name: str, wanted: tuple[int, ...]) -> None:
    found = arrays[name].shape
    if found != wanted:
        raise InputError(f"{path}: {name} has the shape {found}; wanted {wanted}")


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
