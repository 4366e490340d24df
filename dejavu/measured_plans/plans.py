"""Plans that were trained, with what was measured of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.foundation.errors import InputError


@dataclass(frozen=True)
class Replica:
    """One of a stage's data-parallel replicas.

    Attributes:
        tensor_parallel: how many of its devices share each layer; the others, if any, stay idle.
    """

    device_type: str
    num_devices: int
    tensor_parallel: int


@dataclass(frozen=True)
class MeasuredStage:
    """Layers `start` to `stop` (not included), and its replicas: replica j sends to replica j of the next stage."""

    start: int
    stop: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan as it was trained.

    Attributes:
        num_microbatches: of one replica, of `microbatch_size` examples each.
        measured_seconds: one step; None where it was not measured.
        peer_seconds: what the source's own simulator answers; None where it says nothing.
        doubt: what the source says against the measurement.
    """

    id: str
    site: str
    model: str
    num_layers: int
    sequence_length: int
    microbatch_size: int
    num_microbatches: int
    stages: tuple[MeasuredStage, ...]
    measured_seconds: float | None = None
    peer_seconds: float | None = None
    doubt: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "sequence_length", "microbatch_size", "num_microbatches"):
            if getattr(self, name) < 1:
                raise InputError(f"plan {self.id}: {name} is {getattr(self, name)}; wanted 1 or more")
        at = 0
        for s, stage in enumerate(self.stages):
            if stage.start != at or stage.stop <= stage.start:
                problem = f"layer {stage.start} stands twice" if stage.start < at else f"layer {at} is in no stage"
                raise InputError(
                    f"plan {self.id}: stage {s} holds layers {stage.start} to {stage.stop - 1}, after layer {at - 1}: "
                    f"{problem}; wanted every layer once, in order"
                )
            at = stage.stop
            if not stage.replicas:
                raise InputError(f"plan {self.id}: stage {s} has no replica; wanted one or more")
            for replica in stage.replicas:
                if not 1 <= replica.tensor_parallel <= replica.num_devices:
                    raise InputError(
                        f"plan {self.id}: stage {s}: tensor_parallel is {replica.tensor_parallel} on "
                        f"{replica.num_devices} × {replica.device_type}; wanted 1 to {replica.num_devices}"
                    )
        if at != self.num_layers:
            raise InputError(
                f"plan {self.id}: its stages end at layer {at - 1}; wanted {self.num_layers - 1}, the last"
            )


@dataclass(frozen=True)
class BadPlan:
    """A line that is no plan: which, and what was found and wanted."""

    place: str
    problem: str


def read_plans(path: Path) -> list[MeasuredPlan | BadPlan]:
    """Read plans.jsonl: one plan a line; one bad line leaves the others as they are.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a string may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; wanted one plan a line, as JSON") from error
    found = [_plan_or_bad(f"line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise InputError(f"{path} has no plan; wanted one a line")
    return found


def _plan_or_bad(place: str, line: str) -> MeasuredPlan | BadPlan:
    try:
        return _plan(json.loads(line))
    except KeyError as error:
        return BadPlan(place, f"it has no {error}")
    except (InputError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return BadPlan(place, str(error))


def _plan(row: Mapping[str, Any]) -> MeasuredPlan:
    if not isinstance(row, dict):
        raise InputError(f"it is {json.dumps(row)[:80]}; wanted a plan, as an object with id, model and stages")
    return MeasuredPlan(
        id=str(row["id"]),
        site=str(row.get("site") or "unknown"),
        model=str(row["model"]),
        num_layers=_whole(row, "num_layers"),
        sequence_length=_whole(row, "sequence_length"),
        microbatch_size=_whole(row, "microbatch_size"),
        num_microbatches=_whole(row, "num_microbatches"),
        stages=tuple(map(_stage, row["stages"])),
        measured_seconds=_seconds(row, "measured_s"),
        peer_seconds=_seconds(row, "sailor_s"),
        doubt=row.get("doubt") or None,
    )


def _stage(row: Mapping[str, Any]) -> MeasuredStage:
    replicas: Sequence[Mapping[str, Any]] = row["replicas"]
    return MeasuredStage(
        _whole(row, "first_layer"),
        _whole(row, "last_layer") + 1,
        tuple(Replica(str(r["device_type"]), _whole(r, "num_devices"), _whole(r, "tensor_parallel")) for r in replicas),
    )


def _whole(row: Mapping[str, Any], name: str) -> int:
    value = row[name]
    number = math.nan if isinstance(value, bool) or value is None else float(value)
    if not (math.isfinite(number) and number == int(number)):
        raise InputError(f"{name} is {value!r}; wanted a whole number")
    return int(number)


def _seconds(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not 0.0 < float(value) < math.inf:
        raise InputError(f"{name} is {value}; wanted a finite number above 0, or null")
    return float(value)
