"""What a careful person does by hand on mixed devices: each stage's work in proportion to its devices' speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np

from dejavu.plans import Answer, Problem
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search._base import Incumbent, Search
from dejavu.search.shared.rows import Row, cheapest, indices, rows_of_one_type, rows_of_several_types


@dataclass(frozen=True)
class Proportional(Search):
    """The best plan of equal meshes whose layers are cut in proportion to how fast each stage's devices are.

    The rows of stages are `uniform`'s, on any subset of the devices. A stage's speed is that of the whole model on its
    devices, the work of a layer its mean share of the model's time over the stages' devices, so that a stage twice as
    fast gets twice the work, as near as whole layers allow. It knows neither memory nor links; what does not fit is
    passed over. It proves nothing.
    """

    name: ClassVar[str] = "proportional"

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        rows = chain(rows_of_one_type(problem), rows_of_several_types(problem))
        shares = [_shares(problem, c) for c in range(len(problem.configurations))]
        return cheapest(
            problem,
            ((row, cuts) for row in rows if (cuts := proportional_cuts(problem, row, shares))),
            best,
            "stages in proportion to their devices' speed",
        )


Shares = tuple[float, Floats]  # seconds of the whole model under a configuration, and each layer's share of them


def _shares(problem: Problem, c: int) -> Shares:
    costs = problem.costs
    if isinstance(costs, AdditiveCosts):
        seconds_L = np.where(costs.can_run_CL[c], costs.seconds_CL[c], np.inf)
    else:
        seconds_L = np.array([costs.stage_seconds(k, k + 1, c) for k in range(problem.num_layers)])
    total = float(seconds_L.sum())
    even_L = np.full(problem.num_layers, 1.0 / problem.num_layers)
    return total, seconds_L / total if 0.0 < total < np.inf else even_L


def proportional_cuts(problem: Problem, row: Row, shares: Sequence[Shares] | None = None) -> list[int]:
    """The cuts nearest to the wanted shares of the work, each stage with a layer at least; none: not possible.

    Args:
        shares: of every configuration, where they are known already.
    """
    L, S = problem.num_layers, len(row)
    numbers = Counter(index := indices(problem, row))
    known = {c: shares[c] if shares else _shares(problem, c) for c in numbers}
    seconds_S = np.array([known[c][0] for c in index])
    if not np.isfinite(seconds_S).all():
        return []
    # Of stages that take nothing each is as fast as the others, and the rest have no share beside them.
    speed_S = 1.0 / seconds_S if seconds_S.all() else np.where(seconds_S > 0, 0.0, 1.0)
    wanted_S = np.cumsum(speed_S / speed_S.sum())[:-1]
    done_L = np.cumsum(sum(number / S * known[c][1] for c, number in numbers.items()))
    nearest_S = np.abs(done_L - wanted_S[:, None]).argmin(axis=1) + 1
    cuts = [0]
    for s, nearest in enumerate(nearest_S.tolist()):
        cuts.append(min(max(nearest, cuts[-1] + 1), L - (S - 1 - s)))
    return [*cuts, L]
