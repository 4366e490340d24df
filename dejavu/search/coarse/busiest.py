"""How low the bottleneck of any plan can be: all devices together have to take all layers.

Shape suffixes as in `coarse.relaxed`; T = device types.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from dejavu.search.coarse.relaxed import ROUNDING, Relaxed

_MOST_ROUNDS = 40
_PRECISION = 1e-3  # of what is found


def least_bottleneck_seconds(relaxed: Relaxed) -> float:
    """No plan that is cheaper than the best one has a bottleneck that is less, in seconds for all microbatches.

    A stage keeps its devices busy for no longer than the bottleneck. So where devices have prices that come to one for
    all there are, the bottleneck is no less than all layers cost, each where it costs the least: the price of a
    configuration's devices times the seconds that the layer keeps them busy. Kelley's cutting planes find the prices
    at which that is the most. Cuts, memory and whole numbers of devices are not looked at.
    """
    types = relaxed.devices.num_types
    use_CT, count_T = relaxed.devices.use_CR[:, :types].astype(float), relaxed.devices.count_R[:types].astype(float)
    has_T, place_L = count_T > 0, np.arange(relaxed.costs.end_CL.shape[1])
    runs_CL = (relaxed.costs.end_CL > place_L) & (use_CT[:, ~has_T] == 0).all(axis=1)[:, None]
    use_CT, count_T = use_CT[:, has_T], count_T[has_T]
    busy_CL = np.where(runs_CL, np.diff(relaxed.costs.busy_CL1, axis=1), 0.0)
    price_T = 1.0 / (len(count_T) * count_T)
    planes, best = [], 0.0
    for _ in range(_MOST_ROUNDS):
        cheapest_L = np.where(runs_CL, (use_CT @ price_T)[:, None] * busy_CL, np.inf).argmin(axis=0)
        busy_L = busy_CL[cheapest_L, place_L]
        plane_T = busy_L @ use_CT[cheapest_L]
        best = max(best, float(plane_T @ price_T))
        planes.append(plane_T)
        found = linprog(
            [*np.zeros(len(count_T)), -1.0],
            A_ub=np.column_stack([-np.array(planes), np.ones(len(planes))]),
            b_ub=np.zeros(len(planes)),
            A_eq=[[*count_T, 0.0]],
            b_eq=[1.0],
        )
        if found.x is None or -found.fun <= best * (1 + _PRECISION):
            break
        price_T = found.x[:-1]
    return best * (1 - ROUNDING)
