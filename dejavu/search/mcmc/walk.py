"""Compiled loops of the Metropolis walk over plans, and of the plans it starts from.

Suffixes, rows and columns as in `shared.stage_table` and `mcmc.moves`; a plan is the tuple (stage_S3, cost_S3,
used_D) and its number of stages. `table` is StageTable's (costs, links, kinds, rules).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.mcmc.fill import random_plan, refill, settle
from dejavu.search.mcmc.moves import (
    CONFIGURATION,
    FITS,
    LINK,
    PER_STEP,
    REFUSED,
    SECONDS,
    STOP,
    State,
    below,
    move,
    random,
)
from dejavu.search.shared.stage_table import DEVICES, TYPE, Arrays, Costs, Ints, Links, Rules, StageTable, stage_cost

Rows = tuple[Ints, Floats, Ints]

_SETTLE = 0.5  # share of new shapes whose touched stages take the best of their group, instead of any member
_REFILL = 0.5  # share of new shapes that are cut anew: old cuts rarely suit them
_SETTLE_ALL = 0.3  # share of those where every stage does
_TIGHTEST, _LOOSEST = 0.9, 1.1  # limits for cutting anew, in the bottleneck that there is now
_MOST_LOOKS = 4  # at configurations of one stage of a random plan: one look is the most random
_TIGHTER, _LOOSER = 0.9, 1.02  # of the limit on random plans: after one that was found, after one that was not


class Chain(NamedTuple):
    """A chain of the walk; all of it is written to.

    Attributes:
        here, here_4: where it stands: a plan, and its number of stages and value.
        best, best_4: the same of the best plan that it met.
        there: scratch.
        state: of the random numbers.
    """

    here: Rows
    here_4: Floats
    best: Rows
    best_4: Floats
    there: Rows
    state: State


class Cooling(NamedTuple):
    """From the temperature `hot` at the first to `cold` at the last of `num_steps`, geometric between.

    Temperatures are fractions of the current price.
    """

    num_steps: int
    hot: float
    cold: float


def rows_for(table: StageTable) -> Rows:
    room = table.most_stages + 1
    return np.zeros((room, 3), np.int64), np.zeros((room, 3)), np.zeros_like(table.kinds[1])


@njit(cache=True, nogil=True, error_model="numpy")
def _price(costs: Costs, links: Links, stage_S3: Ints, cost_S3: Floats, S: int, first: int, last: int) -> None:
    """Costs of the stages first to last, and of the links around them."""
    link_CC2, cut_bytes_L1 = links
    for s in range(first, last + 1):
        start = stage_S3[s - 1, STOP] if s > 0 else 0
        seconds, once, fits = stage_cost(costs, start, stage_S3[s, STOP], stage_S3[s, CONFIGURATION])
        cost_S3[s, SECONDS], cost_S3[s, PER_STEP], stage_S3[s, FITS] = seconds, once, fits
    for s in range(max(first - 1, 0), min(last + 1, S - 1)):
        c, after = stage_S3[s, CONFIGURATION], stage_S3[s + 1, CONFIGURATION]
        num_bytes = cut_bytes_L1[stage_S3[s, STOP]]
        cost_S3[s, LINK] = 2.0 * (link_CC2[c, after, 0] + link_CC2[c, after, 1] * num_bytes)


@njit(cache=True, nogil=True, error_model="numpy")
def _value(
    rules: Rules, count_D: Ints, stage_S3: Ints, cost_S3: Floats, used_D: Ints, S: int
) -> tuple[float, float, float]:
    """(step seconds, distance from feasible, busiest stage or link) of priced rows, summed as in `plans.price`.

    The distance is the share of microbatches that do not fit, summed over stages, and the share of devices that are
    idle where none may be; zero is feasible. Device counts are never exceeded.
    """
    need_SS, repeats, use_all_devices = rules
    total, links, busiest, distance = 0.0, 0.0, 0.0, 0.0
    for s in range(S):
        seconds = cost_S3[s, SECONDS]
        total += seconds
        busy = repeats * seconds if repeats > 0 else 0.0  # seconds may be infinite
        busiest = max(busiest, busy + cost_S3[s, PER_STEP])
        need = need_SS[S, s]
        if stage_S3[s, FITS] < need:
            distance += (need - stage_S3[s, FITS]) / need
        if s < S - 1:
            links += cost_S3[s, LINK]
            busiest = max(busiest, repeats * cost_S3[s, LINK])
    if use_all_devices:
        idle, have = 0, 0
        for d in range(len(used_D)):
            idle += count_D[d] - used_D[d]
            have += count_D[d]
        distance += idle / have
    return total + links + busiest, distance, busiest


@njit(cache=True, nogil=True, error_model="numpy")
def value(table: Arrays, plan: Rows, S: int) -> tuple[float, float, float]:
    """As `_value`, of a plan whose S stops and configurations are set; prices every stage and counts the devices."""
    costs, links, kinds, rules = table
    stage_S3, cost_S3, used_D = plan
    used_D[:] = 0
    for s in range(S):
        c = stage_S3[s, CONFIGURATION]
        used_D[kinds[0][c, TYPE]] += kinds[0][c, DEVICES]
    _price(costs, links, stage_S3, cost_S3, S, 0, S - 1)
    return _value(rules, kinds[1], stage_S3, cost_S3, used_D, S)


@njit(cache=True, nogil=True, error_model="numpy")
def copy(plan: Rows, other: Rows, S: int) -> None:
    """Write S stages of a plan over another."""
    stage_S3, cost_S3, used_D = plan
    to_stage_S3, to_cost_S3, to_used_D = other
    for s in range(S):
        for k in range(3):
            to_stage_S3[s, k] = stage_S3[s, k]
            to_cost_S3[s, k] = cost_S3[s, k]
    for d in range(len(used_D)):
        to_used_D[d] = used_D[d]


@njit(cache=True, nogil=True, error_model="numpy")
def _propose(table: Arrays, plan: Rows, S: int, busiest: float, state: State, touched_4: Ints) -> int:
    """Change a plan and price what changed; its new number of stages, or REFUSED."""
    costs, links, kinds, rules = table
    stage_S3, cost_S3, used_D = plan
    need_SS, repeats, _ = rules
    S = move(stage_S3, cost_S3, used_D, kinds, S, state, touched_4)
    if S == REFUSED:
        return REFUSED
    first, last, also = touched_4[0], touched_4[1], touched_4[2]
    if touched_4[3]:
        if random(state) < _SETTLE:
            settle(costs, need_SS, repeats, kinds, stage_S3, S, first, last)
            settle(costs, need_SS, repeats, kinds, stage_S3, S, also, also if also >= 0 else also - 1)
        if random(state) < _REFILL:
            limit = busiest * (_TIGHTEST + (_LOOSEST - _TIGHTEST) * random(state))
            if not refill(costs, need_SS, repeats, len(links[1]) - 1, stage_S3, S, limit, below(state, S)):
                return REFUSED
            first, last, also = 0, S - 1, -1
            if random(state) < _SETTLE_ALL:
                settle(costs, need_SS, repeats, kinds, stage_S3, S, first, last)
    _price(costs, links, stage_S3, cost_S3, S, first, last)
    if also >= 0:
        _price(costs, links, stage_S3, cost_S3, S, also, also)
    return S


@njit(cache=True, nogil=True, error_model="numpy")
def _accepts(price: float, distance: float, new: float, new_distance: float, temperature: float, state: State) -> bool:
    """Metropolis' rule among plans as far from feasible; otherwise the nearer one is taken."""
    if new_distance != distance:
        return new_distance < distance
    return new <= price or random(state) < np.exp((price - new) / (temperature * price))


@njit(cache=True, nogil=True, error_model="numpy")
def walk(table: Arrays, chain: Chain, cooling: Cooling, first_step: int, last_step: int) -> int:
    """Steps first_step to last_step of a chain; how many plans it priced."""
    here, here_4, best, best_4, there, state = chain
    num_steps, hot, cold = cooling
    rules, count_D = table[3], table[2][1]
    touched_4 = np.zeros(4, np.int64)
    S, price, distance, busiest = int(here_4[0]), here_4[1], here_4[2], here_4[3]
    standing, candidates = here, 0
    for step in range(first_step, last_step):
        copy(standing, there, S)
        new_S = _propose(table, there, S, busiest, state, touched_4)
        if new_S == REFUSED:
            continue
        candidates += 1
        new, new_distance, new_busiest = _value(rules, count_D, there[0], there[1], there[2], new_S)
        temperature = hot * (cold / hot) ** (step / num_steps)
        if not _accepts(price, distance, new, new_distance, temperature, state):
            continue
        standing, there = there, standing
        S, price, distance, busiest = new_S, new, new_distance, new_busiest
        if distance < best_4[2] or (distance == best_4[2] and price < best_4[1]):
            copy(standing, best, S)
            best_4[0], best_4[1], best_4[2], best_4[3] = S, price, distance, busiest
    if standing[0] is not here[0]:
        copy(standing, here, S)
    here_4[0], here_4[1], here_4[2], here_4[3] = S, price, distance, busiest
    return candidates


@njit(cache=True, nogil=True, error_model="numpy")
def random_plans(table: Arrays, there: Rows, best: Rows, best_4: Floats, state: State, num_tries: int) -> None:
    """Random plans, each found under a tighter limit on the bottleneck than the one before; `best` as in `walk`."""
    limit = np.inf
    for _ in range(num_tries):
        full, looks = 2.0 * random(state), 1 + below(state, _MOST_LOOKS)
        S = random_plan(table, there, state, limit, full, looks)
        if S == REFUSED:
            limit *= _LOOSER
            continue
        price, distance, busiest = value(table, there, S)
        if distance < best_4[2] or (distance == best_4[2] and price < best_4[1]):
            copy(there, best, S)
            best_4[0], best_4[1], best_4[2], best_4[3] = S, price, distance, busiest
        limit = min(limit, _TIGHTER * busiest)
