"""What trainings taught: measured stages correct the prices of the layers in them (déjà vu).

A stage's measured time over the sum of its layers' prices is a factor that its layers share. How far a price follows
that factor depends on how sure each of the two was: a Gaussian update of the log of the factor, for each layer and
pass. A prediction moves almost all the way, a measurement of the layer alone about half.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dejavu.cost._base import TRAINED, CostTable, Estimate, EstimateGrid
from dejavu.errors import DejavuError
from dejavu.graph import Graph
from dejavu.plan import Stage
from dejavu.profiles import Measurement, ProfileDatabase, stable_hash
from dejavu.workload import OptimizerSettings

NORMAL_90 = 1.645  # standard deviations on either side that hold 90 % of a normal distribution
LEAST_DEVIATION = 0.02  # of a logarithm: stage times of equal trainings differ by about 2 % on a quiet machine
ABSURD_FACTOR = 100.0  # a stage that far from the sum of its layers was measured on another machine, or not at all


class RememberedError(DejavuError):
    """A remembered stage that cannot be true; the message names the row."""


@dataclass(frozen=True)
class StageRecord:
    """Which layers a measured stage held: signature -> how often. Kept beside its row, in the column `extra`."""

    signatures: Mapping[str, int]
    optimizer: str

    @classmethod
    def of(cls, graph: Graph, stage: Stage, optimizer: OptimizerSettings) -> StageRecord:
        held = Counter(layer.signature for layer in graph.layers[stage.start : stage.stop])
        return cls(dict(sorted(held.items())), optimizer.kind)

    @classmethod
    def from_json(cls, text: str | None) -> StageRecord | None:
        """None where the row is from a version that did not keep its layers."""
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
    """How trainings moved the prices of one pass on one type of device: least and most, as factors."""

    device_type: str
    direction: str
    num_prices: int
    least: float
    most: float

    def __str__(self) -> str:
        return (
            f"{self.num_prices} {self.direction} prices on {self.device_type} follow what trainings measured: "
            f"{self.least - 1:+.1%} to {self.most - 1:+.1%}"
        )


def remember_stages(
    table: CostTable, graph: Graph, database: ProfileDatabase, optimizer: OptimizerSettings
) -> tuple[CostTable, tuple[Correction, ...]]:
    """The table as trainings of these layers, on these devices and at this microbatch size, correct it.

    Raises:
        RememberedError: a stage's row is absurd; it says which.
    """
    corrections: list[Correction] = []
    grids: dict[str, EstimateGrid] = {}
    for direction, grid in table.grids.items():
        columns = []
        for column, device_type in enumerate(table.device_types):
            before = {layer.signature: grid.at(row, column) for row, layer in enumerate(graph.layers)}
            after = before
            for row, record in _stages(database, graph, device_type, direction):
                known = direction != "optimizer" or record.optimizer == optimizer.kind
                if known and record.signatures.keys() <= before.keys():
                    after = after | _follow(row, record, after)
            columns.append([after[layer.signature] for layer in graph.layers])
            moved = [after[s].seconds / before[s].seconds for s in before if after[s] is not before[s]]
            if moved:
                count = sum(estimate.source == TRAINED for estimate in columns[-1])
                corrections.append(Correction(device_type, direction, count, min(moved), max(moved)))
        grids[direction] = EstimateGrid.of(list(zip(*columns, strict=True)))
    after_all = replace(table, forward=grids["forward"], backward=grids["backward"], optimizer=grids["optimizer"])
    return after_all, tuple(corrections)


def _stages(
    database: ProfileDatabase, graph: Graph, device_type: str, direction: str
) -> list[tuple[Measurement, StageRecord]]:
    rows = database.latest(
        kind="stage",
        device_type=device_type,
        dtype=graph.dtype,
        microbatch_size=graph.microbatch_size,
        direction=direction,
        tensor_parallel=1,
    )
    rows = sorted(rows, key=lambda row: row.measured_at)
    return [(row, record) for row in rows if (record := StageRecord.from_json(row.extra)) is not None]


def _follow(row: Measurement, record: StageRecord, prices: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The prices of one stage's layers after its measurement."""
    held = {signature: count * prices[signature].seconds for signature, count in record.signatures.items()}
    predicted_seconds = sum(held.values())
    if predicted_seconds <= 0:
        return {}
    factor = row.seconds / predicted_seconds
    if not 1 / ABSURD_FACTOR <= factor <= ABSURD_FACTOR:
        raise RememberedError(
            f"stage {row.name!r} ({row.direction}) on {row.device_type!r} was measured at {row.seconds:.3g} s on "
            f"{row.measured_at:%Y-%m-%d %H:%M}, but its layers cost {predicted_seconds:.3g} s; wanted a time within a "
            f"factor of {ABSURD_FACTOR:g}: measure its layers again with `dejavu profile --again`"
        )
    measured_variance = max(LEAST_DEVIATION, _deviation(row.seconds, row.seconds_low, row.seconds_high)) ** 2
    return {
        signature: _updated(prices[signature], factor, measured_variance, held[signature] / predicted_seconds)
        for signature in held
        if prices[signature].seconds > 0
    }


def _updated(price: Estimate, factor: float, measured_variance: float, share: float) -> Estimate:
    """Kalman's update of one log time. A layer that is only a `share` of the stage keeps that much of its own doubt."""
    variance = _deviation(price.seconds, price.low_seconds, price.high_seconds) ** 2
    variance = max(variance, LEAST_DEVIATION**2)
    gain = variance / (variance + measured_variance)
    left = share * (1 - gain) * variance + (1 - share) * variance
    seconds = price.seconds * factor**gain
    reach = math.exp(NORMAL_90 * math.sqrt(left))
    return Estimate(seconds, seconds / reach, seconds * reach, TRAINED)


def _deviation(seconds: float, low: float | None, high: float | None) -> float:
    """The standard deviation of the logarithm, from a 90 % interval."""
    if low is None or high is None or low <= 0 or seconds <= 0:
        return LEAST_DEVIATION
    return math.log(high / low) / (2 * NORMAL_90)
