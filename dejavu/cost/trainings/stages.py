"""Feedback from trainings: measured stages correct the prices of their layers (déjà vu).

A stage's measured time over the sum of its layers' prices is a factor that its layers share. The part that chance
explains, given how much trainings of equal stages differ, is not believed (`believed`). How far a price follows the
rest depends on how certain each of the two was: a Gaussian update of the log of the factor, for each layer and pass. A
prediction moves almost all the way, a measurement of the layer alone about half. Disturbed trainings are used only
where prices are predictions: these err by more.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from dejavu.cost.estimates import TRAINED, CostTable, Estimate, EstimateGrid, is_prediction
from dejavu.cost.pass_overhead import pass_cost
from dejavu.cost.trainings.absurd import believable
from dejavu.cost.trainings.believed import LEAST_DEVIATION, NORMAL_90, believed, deviation_of, pooled_deviation
from dejavu.foundation.hashing import stable_hash
from dejavu.graphs.graph import Graph
from dejavu.plans import Stage
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.workload import OptimizerSettings


@dataclass(frozen=True)
class StageRecord:
    """The layers of a measured stage: signature -> how often. Kept in its row's column `extra`."""

    signatures: Mapping[str, int]
    optimizer: str

    @classmethod
    def of(cls, graph: Graph, stage: Stage, optimizer: OptimizerSettings) -> StageRecord:
        held = Counter(layer.signature for layer in graph.layers[stage.start : stage.stop])
        return cls(dict(sorted(held.items())), optimizer.kind)

    @classmethod
    def from_json(cls, text: str | None) -> StageRecord | None:
        """Parse it; None where the row is from a version that did not keep its layers."""
        found = json.loads(text or "{}")
        return cls(found["signatures"], found["optimizer"]) if "signatures" in found else None

    def to_json(self) -> str:
        return json.dumps({"signatures": dict(self.signatures), "optimizer": self.optimizer}, sort_keys=True)

    @property
    def subject(self) -> str:
        """The key of its rows in the cost database."""
        return stable_hash(self.to_json())


@dataclass(frozen=True)
class Correction:
    """How trainings changed the prices of one pass on one type of device: least and most, as factors."""

    device_type: str
    direction: str
    num_prices: int
    least: float
    most: float

    def __str__(self) -> str:
        return (
            f"{self.num_prices} {self.direction} costs on {self.device_type} corrected by earlier trainings: "
            f"{self.least - 1:+.1%} to {self.most - 1:+.1%}"
        )


def remember_stages(
    table: CostTable, graph: Graph, database: ProfileDatabase, optimizer: OptimizerSettings
) -> tuple[CostTable, tuple[Correction, ...]]:
    """Correct the table by trainings of these layers, on these devices and at this microbatch size.

    A stage whose row is absurd is skipped with a warning.
    """
    corrections: list[Correction] = []
    grids: dict[str, EstimateGrid] = {}
    for direction, grid in table.grids.items():
        columns = []
        for column, device_type in enumerate(table.device_types):
            before = {layer.signature: grid.at(row, column) for row, layer in enumerate(graph.layers)}
            after, beside = before, pass_cost(database, device_type).pass_seconds if direction != "optimizer" else 0.0
            for stage in _stages(database, graph, before, device_type, direction):
                if direction == "optimizer" and stage.record.optimizer != optimizer.kind:
                    continue
                if stage.newest.is_disturbed and not all(
                    is_prediction(before[s].source) for s in stage.record.signatures
                ):
                    continue
                after = after | _follow(stage, after, beside)
            columns.append([after[layer.signature] for layer in graph.layers])
            moved = [after[s].seconds / before[s].seconds for s in before if after[s] is not before[s]]
            if moved:
                count = sum(estimate.source == TRAINED for estimate in columns[-1])
                corrections.append(Correction(device_type, direction, count, min(moved), max(moved)))
        grids[direction] = EstimateGrid.of(list(zip(*columns, strict=True)))
    after_all = replace(table, forward=grids["forward"], backward=grids["backward"], optimizer=grids["optimizer"])
    return after_all, tuple(corrections)


class _TrainedStage(NamedTuple):
    """One stage, as trainings measured it.

    Attributes:
        seconds: their geometric mean.
        deviation: of its logarithm.
    """

    newest: Measurement
    record: StageRecord
    seconds: float
    deviation: float


def _stages(
    database: ProfileDatabase, graph: Graph, prices: Mapping[str, Estimate], device_type: str, direction: str
) -> list[_TrainedStage]:
    """Return every trained stage of these layers, the newest last.

    If a stage was ever trained undisturbed, only those times count; times that are impossible at these prices do not.
    """
    rows = database.history(kind="stage", device_type=device_type, dtype=graph.dtype, tensor_parallel=1)
    stages: list[tuple[StageRecord, list[Measurement]]] = []
    for same in rows:
        if (same[-1].microbatch_size, same[-1].direction) != (graph.microbatch_size, direction):
            continue
        record = StageRecord.from_json(same[-1].extra)
        if record is not None and record.signatures.keys() <= prices.keys():
            expected_seconds = sum(count * prices[one].seconds for one, count in record.signatures.items())
            if expected_seconds > 0 and (left := believable(same, expected_seconds)):
                stages.append((record, left))
    logs = [[math.log(row.seconds) for row in same] for _, same in stages]
    expected = [deviation_of(row.seconds, row.seconds_low, row.seconds_high) for _, same in stages for row in same]
    deviation = pooled_deviation(logs, fmean(expected)) if expected else LEAST_DEVIATION
    found = [
        _TrainedStage(same[-1], record, math.exp(fmean(of_same)), deviation / math.sqrt(len(same)))
        for (record, same), of_same in zip(stages, logs, strict=True)
    ]
    return sorted(found, key=lambda stage: stage.newest.measured_at)


def _follow(stage: _TrainedStage, prices: Mapping[str, Estimate], beside_seconds: float) -> dict[str, Estimate]:
    """Update the prices of one stage's layers by its measurement.

    Args:
        beside_seconds: the runtime's own overhead of a pass; how much of it is in the stage's time is unknown.
    """
    held = {signature: count * prices[signature].seconds for signature, count in stage.record.signatures.items()}
    predicted_seconds = sum(held.values())
    factor = stage.seconds / predicted_seconds
    factor /= min(max(factor, 1.0), 1 + beside_seconds / predicted_seconds)
    factor = math.exp(believed(math.log(factor), stage.deviation))
    return {
        signature: _updated(prices[signature], factor, stage.deviation**2, held[signature] / predicted_seconds)
        for signature in held
        if prices[signature].seconds > 0
    }


def _updated(price: Estimate, factor: float, measured_variance: float, share: float) -> Estimate:
    """Kalman-update one log time; of the variance only the part `share`, the layer's share of the stage, shrinks."""
    variance = deviation_of(price.seconds, price.low_seconds, price.high_seconds) ** 2
    gain = variance / (variance + measured_variance)
    left = share * (1 - gain) * variance + (1 - share) * variance
    seconds = price.seconds * factor**gain
    reach = math.exp(NORMAL_90 * math.sqrt(left))
    return Estimate(seconds, seconds / reach, seconds * reach, TRAINED)
