"""Cutting as a game: from the first point on, each move cuts operators and devices once more.

Letters: P = points, N = allowed device cuts, A = P · N moves, of which move `n · P + p` cuts before point p and before
the device of allowed cut n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dejavu.operator_cuts._base import Best
from dejavu.operator_cuts.problem import CutPlan, CutProblem, Floats

Bools = NDArray[np.bool_]
NUM_SCALES = 3  # numbers of a state that compare communication, weights and memory with computing


class Game:
    """One problem. Every position of a game is a whole plan, and the last move gets the reward of the best of them.

    That is 1 / L in units of the L that computing alone would take, nothing where no plan fits its memory. (Rewarded
    move by move, with a discount of 0.6, the agent learned to cut well once and badly after that.)

    Args:
        discount: the learner's; a game that ends early is worth as little as if it went on, or short ones would win.
    """

    def __init__(self, problem: CutProblem, best: Best, discount: float = 1.0) -> None:
        self.problem, self.best, self._discount = problem, best, discount
        self.cuts = problem.device_cuts or ()
        self._arrays = _features(problem)
        computing, devices = float(problem.arrays.compute_seconds_P.sum()), problem.servers.num_devices
        self._least_seconds = problem.num_microbatches * computing / devices or 1.0
        self.plan, self._reward = CutPlan(), 0.0

    @property
    def num_moves(self) -> int:
        return len(self.problem.arrays) * len(self.cuts)

    def begin(self) -> Floats:
        self.plan, self._reward = CutPlan(), 0.0
        return self.state

    @property
    def state(self) -> Floats:
        """Return the arrays, and where they are cut already: each cut's place says how many devices come before it."""
        marks_P = np.zeros(len(self.problem.arrays))
        for point, device in zip(self.plan.operator_cuts, self.plan.device_cuts, strict=True):
            marks_P[point] = device / self.problem.servers.num_devices
        return np.concatenate((self._arrays, marks_P)).astype(np.float32)

    @property
    def allowed_A(self) -> Bools:
        """Return the moves that cut after the last cut, none where there are as many stages as allowed."""
        point, device = (cuts[-1] if cuts else 0 for cuts in (self.plan.operator_cuts, self.plan.device_cuts))
        if len(self.plan.device_cuts) + 1 >= self.problem.most_stages:
            return np.zeros(self.num_moves, bool)
        points_P = np.arange(len(self.problem.arrays)) > point
        return ((np.array(self.cuts)[:, None] > device) & points_P).ravel()

    def move(self, action: int) -> float:
        """Cut, and return the move's reward."""
        n, point = divmod(action, len(self.problem.arrays))
        self.plan = CutPlan((*self.plan.operator_cuts, point), (*self.plan.device_cuts, self.cuts[n]))
        step_seconds = self.best.offer(self.plan)
        self._reward = max(self._reward, self._least_seconds / step_seconds if step_seconds else 1.0)
        if self.allowed_A.any():
            return 0.0
        return self._reward * self._discount ** (self.problem.most_stages - 1 - len(self.plan.device_cuts))


def num_features(num_points: int) -> int:
    """Return the length of a state."""
    return 4 * num_points + NUM_SCALES


def _features(problem: CutProblem) -> Floats:
    """Return the three arrays, each in its own unit (compute and weights as sums from the left), and the units."""
    arrays, servers = problem.arrays, problem.servers
    parts: list[Floats] = []
    for array, summed in (
        (arrays.compute_seconds_P, True),
        (arrays.weight_bytes_P, True),
        (arrays.crossing_bytes_P, False),
    ):
        unit = float(array.sum() if summed else array.max()) or 1.0
        parts.append((np.cumsum(array) if summed else array) / unit)
    computing = float(arrays.compute_seconds_P.sum()) / servers.num_devices or 1.0
    weights = float(arrays.weight_bytes_P.sum())
    scales = (
        weights / servers.between_bytes_per_second / computing,
        float(arrays.crossing_bytes_P.mean()) / servers.between_bytes_per_second / computing,
        min(problem.copies * weights / servers.memory_bytes, 1e3),
    )
    return np.concatenate((*parts, np.log1p(scales)))
