"""Alpa's integer program (Zheng et al., OSDI 2022, section 4.2) by HiGHS: the referee."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError

TOLERANCE = 1e-6  # HiGHS's own: of a constraint, of a whole number and of the objective


@dataclass(frozen=True)
class IntegerProgram:
    """One variable for each node's option, and one for each pair of options of an edge.

    The pairs need not be whole: for whole options the sums over an edge's rows and columns leave one pair. What it
    proves is right to a millionth of the longest that an option takes.
    """

    budget_seconds: float = 600.0

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return the best choice that HiGHS finds in its budget, and what it proves.

        Raises:
            ShardingError: it finds none.
        """
        sizes = np.array([len(own) for own in problem.seconds])
        first = np.concatenate([[0], np.cumsum(sizes)])
        count = int(first[-1])
        price, rows, columns, values, wanted = (
            [*np.concatenate(problem.seconds)],
            list[int](),
            list[int](),
            list[float](),
            list[float](),
        )

        def add(members: np.ndarray | range, factor: float) -> None:
            rows.extend([len(wanted)] * len(members))
            columns.extend(map(int, members))
            values.extend([factor] * len(members))

        for node, size in enumerate(sizes):
            add(range(first[node], first[node] + size), 1.0)
            wanted.append(1.0)
        at = count
        for (a, b), table in problem.edges.items():
            pairs = at + np.arange(table.size).reshape(table.shape)
            price.extend(table.ravel())
            at += table.size
            for k in range(table.shape[0]):
                add(pairs[k], 1.0)
                add(range(first[a] + k, first[a] + k + 1), -1.0)
                wanted.append(0.0)
            for k in range(table.shape[1]):
                add(pairs[:, k], 1.0)
                add(range(first[b] + k, first[b] + k + 1), -1.0)
                wanted.append(0.0)
        costs = np.array(price)
        upper = np.isfinite(costs).astype(float)
        scale = float(costs[np.isfinite(costs)].max(initial=1e-30)) or 1.0
        constraints = [
            LinearConstraint(coo_array((values, (rows, columns)), shape=(len(wanted), at)).tocsr(), wanted, wanted)
        ]
        if problem.bytes and np.isfinite(problem.capacity_bytes):
            held = np.concatenate([*problem.bytes, np.zeros(at - count)])
            most = max(float(held.max()), problem.capacity_bytes) or 1.0
            constraints.append(LinearConstraint(held[None, :] / most, -np.inf, problem.capacity_bytes / most))
        found = milp(
            np.where(upper > 0, costs, 0.0) / scale,
            constraints=constraints,
            integrality=(np.arange(at) < count).astype(int),
            bounds=Bounds(0.0, upper),
            options={"time_limit": self.budget_seconds, "mip_rel_gap": 1e-9},
        )
        if found.x is None:
            raise ShardingError(f"HiGHS found no choice: {found.message}")
        chosen = tuple(int(found.x[first[node] : first[node + 1]].argmax()) for node in range(len(sizes)))
        bound = 0.0 if found.mip_dual_bound is None else float(found.mip_dual_bound) * (1 - TOLERANCE) - TOLERANCE
        return Answer(chosen, problem.price(chosen), max(0.0, bound * scale))
