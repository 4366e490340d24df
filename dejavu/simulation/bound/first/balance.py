"""A bound that looks at no cut: the model's work spread over the devices as evenly as fractions of layers could be.

Each rank does B times its layers' passes and what it does once. Let devices and ranks have prices, such that all ranks
together pay at most 1: the busiest rank takes at least Σ over ranks of what it pays · its work, and each layer is on
some rank. For any such prices that is a bound; many are tried for all numbers of ranks at once.
Letters: C = configurations, L = layers, T = device types, D = directions of prices, P = numbers of ranks.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PER_STEP
from dejavu.simulation.bound._prefix_sums import BoundProblem

_DIRECTIONS = 256  # of prices


def balance_seconds(problem: BoundProblem, most_ranks: int) -> Floats:
    """A bound for every schedule with 1, 2, … `most_ranks` ranks; each microbatch counts with the cheaper backward."""
    prices, B = problem.prices, problem.num_microbatches
    sum_5CL1 = prices.sum_5CL1
    seconds_5CL = sum_5CL1[:, :, 1:] - sum_5CL1[:, :, :-1]
    split_CL = seconds_5CL[BACKWARD_INPUT] + seconds_5CL[BACKWARD_WEIGHT]
    # Where a stage is the first, or the schedule does not split, a backward pass is whole.
    backward_CL = np.minimum(seconds_5CL[BACKWARD], split_CL)
    work_CL = B * (seconds_5CL[FORWARD] + backward_CL) + seconds_5CL[PER_STEP]
    possible_CL = problem.possible_CL
    work_CL[~possible_CL] = np.inf
    direction_DT1 = _directions(len(prices.count_T))
    worth_D = _worth(work_CL, direction_DT1[:, :-1] @ prices.use_CT.T + direction_DT1[:, -1:])
    ranks_P = np.arange(1, most_ranks + 1)
    paid_DP = (direction_DT1[:, :-1] @ prices.count_T)[:, None] + direction_DT1[:, -1:] * ranks_P
    most_P: Floats = (worth_D[:, None] / paid_DP).max(axis=0)
    least_pass: float = prices.pass_C[possible_CL.any(axis=1)].min(initial=np.inf)
    return most_P + 2 * B * least_pass


def _directions(num_types: int) -> Floats:
    """Prices for a device of each type and for a rank, up to a factor: seeded draws over orders of magnitude."""
    drawn = np.exp(np.random.default_rng(0).uniform(-4.0, 4.0, (_DIRECTIONS, num_types + 1)))
    drawn[: _DIRECTIONS // 4, -1] = 0.0  # ranks for nothing
    drawn[_DIRECTIONS // 4, :-1], drawn[_DIRECTIONS // 4, -1] = 0.0, 1.0  # devices for nothing
    return drawn


@njit(cache=True, nogil=True)
def _worth(work_CL: Floats, pays_DC: Floats) -> Floats:
    """Σ over layers of the least that a rank would pay for it."""
    (D, C), L = pays_DC.shape, work_CL.shape[1]
    worth_D = np.zeros(D)
    for d in range(D):
        for layer in range(L):
            least = np.inf
            for c in range(C):
                least = min(least, pays_DC[d, c] * work_CL[c, layer])
            worth_D[d] += least
    return worth_D
