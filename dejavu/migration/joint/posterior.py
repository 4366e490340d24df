"""What a training has measured of its own prices: a posterior over factors on them, updated by every report of a rank.

The logarithm of a pass's true seconds over its price is a sum: of the device type's factor for this direction, of the
layer's own, and of the device's. A stage's seconds are the sum of its layers', so a measured one says something about
all three; which of them is right is settled by the plans that run, as layers move between devices.

Shape suffixes: L = layers, Z = factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dejavu.migration.changes import Seat
from dejavu.migration.problem_now import RunningProblem
from dejavu.plans import Stage
from dejavu.plans.priced_problem import PassCost
from dejavu.plans.stage_costs import AdditiveCosts, Floats

# Standard deviations of logarithms before anything was measured.
TYPE_DEVIATION = 1.0  # prices may come from another machine
LAYER_DEVIATION = 0.3  # predictions of layers differ from what they take by so much (docs/figures.md)
SEAT_DEVIATION = 0.3  # devices of a type are alike, unless one is throttled
REPORT_DEVIATION = 0.1  # of one step's median pass, beside other work on the machine
DRIFT_DEVIATION = 0.02  # of a device, from report to report: one that becomes slower is seen within ten
MOST_DEVIATIONS = 3.0  # that a report counts for: a step that was interrupted for long says no more than that
SAME = 1.1  # devices whose factors are closer than this are of one kind for the searches
DIRECTIONS = 2  # forward, backward


class Posterior:
    """A normal distribution over the logarithms of all factors; a Kalman filter, linear in each report.

    Layers whose prices are equal under every configuration have one factor: they are the same kind of layer.
    """

    def __init__(self, running: RunningProblem) -> None:
        priced = running.priced
        self._running = running
        rows = np.concatenate([priced.forward_seconds_CL, priced.backward_seconds_CL])
        _, kind_L = np.unique(rows, axis=1, return_inverse=True)
        self._kind_L = kind_L.reshape(-1)
        self._kinds = int(self._kind_L.max()) + 1
        self._types = {name: t for t, name in enumerate(running.cluster.device_counts)}
        self._type_of = {(one.host, one.index): one.type_name for one in running.cluster.devices()}
        shared = len(self._types) * DIRECTIONS
        first_seat = shared * (1 + self._kinds)
        self._seat_at = {seat: first_seat + k for k, seat in enumerate(self._type_of)}
        self._mean_Z = np.zeros(first_seat + len(self._seat_at))
        variance_Z = np.full(len(self._mean_Z), SEAT_DEVIATION**2)
        variance_Z[:shared], variance_Z[shared:first_seat] = TYPE_DEVIATION**2, LAYER_DEVIATION**2
        self._covariance_ZZ = np.diag(variance_Z)
        self._seen: set[Seat] = set()

    def drift(self) -> None:
        """Let every measured device have changed a little; called once for each round of reports."""
        at = [self._seat_at[seat] for seat in self._seen]
        self._covariance_ZZ[at, at] += DRIFT_DEVIATION**2

    def see(self, stage: Stage, direction: int, seat: Seat, seconds: float) -> None:
        """Take in what one microbatch took through a stage on a device.

        Args:
            stage: its configuration's device type is the device's own, as the cluster's file calls it.
            direction: 0 forward, 1 backward.
        """
        if not math.isfinite(seconds) or seconds <= 0:
            return
        self._seen.add(seat)
        priced, span = self._running.priced, slice(stage.start, stage.stop)
        c = priced.problem.index(stage.configuration)
        prices_L = (priced.forward_seconds_CL, priced.backward_seconds_CL)[direction][c, span]
        type_name = stage.configuration.device_type
        held_L = prices_L * np.exp(self._layer_logs(type_name, direction)[span])
        predicted = float(held_L.sum()) * math.exp(self._mean_Z[self._seat_at[seat]])
        if not predicted > 0:
            return
        beside = priced.pass_costs.get(type_name, PassCost()).pass_seconds
        row_Z = np.zeros(len(self._mean_Z))
        row_Z[self._shared(type_name, direction)] = row_Z[self._seat_at[seat]] = 1.0
        np.add.at(row_Z, self._own(type_name, direction)[self._kind_L[span]], held_L / held_L.sum())
        self._update(row_Z, _misfit(seconds, predicted, beside))

    def _update(self, row_Z: Floats, misfit: float) -> None:
        gain_Z = self._covariance_ZZ @ row_Z
        variance = float(row_Z @ gain_Z) + REPORT_DEVIATION**2
        reach = MOST_DEVIATIONS * math.sqrt(variance)
        self._mean_Z += gain_Z * (min(max(misfit, -reach), reach) / variance)
        self._covariance_ZZ -= np.outer(gain_Z, gain_Z / variance)

    def _shared(self, type_name: str, direction: int) -> int:
        return self._types[type_name] * DIRECTIONS + direction

    def _own(self, type_name: str, direction: int) -> np.ndarray:
        """Return where the factors of the kinds of layers are."""
        before = len(self._types) * DIRECTIONS + self._shared(type_name, direction) * self._kinds
        return before + np.arange(self._kinds)

    def _layer_logs(self, type_name: str, direction: int) -> Floats:
        """Return each layer's logarithm on a usual device of this type; L."""
        own_K = self._mean_Z[self._own(type_name, direction)]
        found: Floats = self._mean_Z[self._shared(type_name, direction)] + own_K[self._kind_L]
        return found

    def _usual(self, type_name: str) -> float:
        """Return the mean logarithm of the measured devices of a type."""
        logs = [self._mean_Z[self._seat_at[seat]] for seat in self._seen if self._type_of[seat] == type_name]
        return float(np.mean(logs)) if logs else 0.0

    @property
    def slowness(self) -> Mapping[Seat, float]:
        """Return how many times as long a device takes as the usual one of its type, where that is not about as long.

        In two digits, so that a device does not become another kind with every report.
        """
        found = {}
        for seat in sorted(self._seen):
            log = self._mean_Z[self._seat_at[seat]] - self._usual(self._type_of[seat])
            if abs(log) > math.log(SAME):
                found[seat] = float(f"{math.exp(log):.2g}")
        return found

    @property
    def factors(self) -> tuple[float, float]:
        """Return the least and the most of the factors on a layer's price, on usual devices of measured types."""
        types = {self._type_of[seat] for seat in self._seen} or set(self._types)
        logs = [self._layer_logs(name, way) + self._usual(name) for name in types for way in range(DIRECTIONS)]
        return math.exp(np.min(logs)), math.exp(np.max(logs))

    def corrected(self) -> RunningProblem:
        """Return the running problem with the prices of passes as they are believed now, on usual devices."""
        before = self._running.priced
        problem = before.problem
        assert isinstance(problem.costs, AdditiveCosts), "a workload's problem has additive costs"
        tables = []
        for direction, table_CL in enumerate((before.forward_seconds_CL, before.backward_seconds_CL)):
            logs_CL = [
                self._layer_logs(one.device_type, direction) + self._usual(one.device_type)
                for one in problem.configurations
            ]
            tables.append(table_CL * np.exp(logs_CL))
        costs = replace(problem.costs, seconds_CL=tables[0] + tables[1])
        priced = replace(
            before,
            problem=replace(problem, costs=costs),
            forward_seconds_CL=tables[0],
            backward_seconds_CL=tables[1],
        )
        return replace(self._running, priced=priced)


def _misfit(measured: float, predicted: float, beside: float) -> float:
    """Return the logarithm of what was measured over what was predicted.

    How much of the runtime's own overhead of a pass is inside a measured one is unknown: what it may explain counts as
    nothing (so in `dejavu.cost.trainings.stages`).
    """
    if measured <= predicted:
        return math.log(measured / predicted)
    return math.log(max(1.0, measured / (predicted + beside)))
