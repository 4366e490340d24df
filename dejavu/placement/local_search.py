"""A walk over placements and orders from list scheduling's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.placement._base import Incumbent, Placer
from dejavu.placement.problem import Arrays, Floats, Ints, PlacementProblem
from dejavu.placement.shared.chains import chains
from dejavu.placement.shared.orders import by_rank, by_start, dispatch, fill_by_rank, upward_ranks
from dejavu.placement.shared.regions import of_region, regions
from dejavu.placement.shared.room import fits, roomy
from dejavu.placement.shared.timeline import State, empty_state, resume, run_in_order

_STEPS_PER_CALL = 20_000_000  # operations simulated between two looks at the clock: about a second
_MESSAGE_WEIGHTS = (1.0, 0.0, 4.0)  # of ranks: as HEFT has it, without messages, with dear ones


@dataclass(frozen=True)
class LocalSearch(Placer):
    """Moves single groups, whole chains and places in the order, from the best start by list scheduling.

    Starts: HEFT's rule with and without insertion under three weights of messages, everything on one device, where
    memory binds groups where there is room, and, where all meets again and again, the parts between, each searched
    alone. Then moves are accepted as in annealing: dearer ones with a probability that falls. A move puts a group, or a
    chain of operations that pass a tensor from one to the next, on another device, on that of a neighbour in the graph
    most often, or an operation elsewhere in the order. Every move is priced
    by the whole simulation. Proves nothing beyond the bound that all members have.

    Attributes:
        hot, cold: the temperature at the beginning and the end, in the best seconds over the number of operations: the
            fewer there are, the more of the seconds a move changes.
        most_steps: moves in all; the search ends when they are done.
        in_regions: of the budget, on parts of the graph that follow each other, one after another, before the whole.
    """

    name: ClassVar[str] = "local_search"
    hot: float = 1.0
    cold: float = 0.1
    most_steps: int = 2_000_000
    in_regions: float = 0.4

    def _place(self, problem: PlacementProblem, best: Incumbent, seed: int) -> None:
        starts = _starts(problem, best)
        if starts and not best.is_done and (joined := self._region_by_region(problem, best, seed)) is not None:
            starts.append(joined)
        if not starts or best.is_done:
            return
        draws = np.random.default_rng(seed)
        chain_N = chains(problem)
        arrays, rank_N = problem.arrays, upward_ranks(problem)
        states = empty_state(arrays), empty_state(arrays)
        device_G, order_N = min(starts, key=lambda start: start[0])[1:]
        best_G, best_N, seconds = device_G.copy(), order_N.copy(), best.seconds
        per_call = max(min(_STEPS_PER_CALL // (100 * len(order_N)), self.most_steps // 20), 1)
        began, done = best.remaining_seconds, 0
        while done < self.most_steps and best.remaining_seconds > 0 and not best.is_done:
            spent = max(done / self.most_steps, 1 - best.remaining_seconds / began)
            heat = self.hot * (self.cold / self.hot) ** min(spent, 1.0) / len(order_N)
            seconds, found = _walk(
                arrays,
                states,
                draws,
                chain_N,
                rank_N,
                (device_G, order_N, best_G, best_N),
                (seconds, best.seconds, heat * best.seconds),
                per_call,
            )
            if found < best.seconds:
                best.offer(best_G, best_N)
            done += per_call

    def _region_by_region(
        self, problem: PlacementProblem, best: Incumbent, seed: int
    ) -> tuple[float, Ints, Ints] | None:
        """Search each region alone, from the device on which the one before ends; offer all of them together.

        A move is then priced by a simulation of its region, and nothing else is disturbed.
        """
        parts, group_N = regions(problem), problem.group_N
        if len(parts) < 2 or sum(len(set(group_N[list(part)])) for part in parts) > problem.num_groups:
            return None  # a group of operations in two regions would have to agree
        device_G, order = np.full(problem.num_groups, -1, dtype=np.int64), list[int]()
        budget, entered, device = self.in_regions * best.remaining_seconds, -1, -1
        for part in parts:
            small = of_region(problem, part, entered, device)
            share = len(part) / len(group_N)
            alone = replace(self, in_regions=0.0, most_steps=max(1, int(self.in_regions * self.most_steps)))
            found = Incumbent(small, self.name, share * budget)
            alone._place(small, found, seed)
            if found.placement is None:
                return None
            skipped = len(small.operations) - len(part)
            for k, n in enumerate(part):
                device_G[group_N[n]] = found.placement.device_N[k + skipped]
            order += [part[k - skipped] for k in found.placement.order_N if k >= skipped]
            entered, device = part[-1], int(device_G[group_N[part[-1]]])
        if not fits(problem, device_G):
            return None
        order_N = np.array(order, dtype=np.int64)
        return best.offer(device_G, order_N), device_G, order_N


def _starts(problem: PlacementProblem, best: Incumbent) -> list[tuple[float, Ints, Ints]]:
    """Offer the placements to begin with."""
    arrays, state, found = problem.arrays, empty_state(problem.arrays), []
    G, D = problem.num_groups, problem.num_devices
    packed = roomy(problem)

    def take(device_G: Ints, order_N: Ints) -> None:
        found.append((best.offer(device_G, order_N), device_G.copy(), order_N.copy()))

    for weight in _MESSAGE_WEIGHTS:
        rank_N = upward_ranks(problem, weight)
        order_N = by_rank(problem, rank_N)
        for inserts in (True, False):
            device_G = np.full(G, -1, dtype=np.int64)
            if np.isfinite(fill_by_rank(arrays, state, rank_N, order_N, device_G, np.zeros(D), inserts)):
                take(device_G, by_start(problem, state.start_N))
    for device_G in [np.full(G, d, dtype=np.int64) for d in range(D)] + ([packed] if packed is not None else []):
        if fits(problem, device_G):
            order_N = np.empty(len(problem.operations), dtype=np.int64)
            dispatch(arrays, state, device_G, upward_ranks(problem), order_N)
            take(device_G, order_N)
    return found


@njit(cache=True, nogil=True)
def _walk(
    arrays: Arrays,
    states: tuple[State, State],
    draws: np.random.Generator,
    chain_N: Ints,
    rank_N: Floats,
    placements: tuple[Ints, Ints, Ints, Ints],
    seconds_3: tuple[float, float, float],
    steps: int,
) -> tuple[float, float]:
    """Walk so many moves; return the price here and the best price, and write both placements.

    Args:
        placements: devices and order here, devices and order of the best.
        seconds_3: here, of the best, and the temperature.
    """
    device_G, order_N, best_G, best_N = placements
    here, best, heat = seconds_3
    D = arrays.seconds_ND.shape[1]
    try_G, try_N, at_N = device_G.copy(), order_N.copy(), np.empty_like(order_N)
    at_N[order_N] = np.arange(len(order_N))
    done, state = states
    run_in_order(arrays, done, device_G, order_N, np.inf)
    for _ in range(steps):
        kind = draws.random()
        if kind < 0.5 and D > 1:
            first = _moved(arrays, draws, chain_N, kind < 0.15, (device_G, at_N), try_G)
        elif kind < 0.9995 or D == 1:
            first = _reordered(arrays, draws, order_N, try_N)
        else:
            dispatch(arrays, state, device_G, rank_N, try_N)
            first = 0
        if first == len(order_N) or not _fit(arrays, try_G):
            try_G[:], try_N[:] = device_G, order_N
            continue
        limit = here - heat * np.log(1.0 - draws.random())  # dearer by more is not accepted, whatever it is
        resume(arrays, done, order_N, at_N, first, state)
        found = run_in_order(arrays, state, try_G, try_N, limit, first)
        if found == np.inf:
            try_G[:], try_N[:] = device_G, order_N
            continue
        here, done, state = found, state, done
        device_G[:], order_N[:] = try_G, try_N
        at_N[order_N] = np.arange(len(order_N))
        if here < best:
            best = here
            best_G[:], best_N[:] = device_G, order_N
    return here, best


@njit(cache=True, nogil=True)
def _fit(arrays: Arrays, device_G: Ints) -> bool:
    """Whether memory is enough."""
    held_D = np.zeros(len(arrays.memory_D))
    for g in range(len(device_G)):
        held_D[device_G[g]] += arrays.memory_G[g]
    return bool((held_D <= arrays.memory_D).all())


@njit(cache=True, nogil=True)
def _moved(
    arrays: Arrays, draws: np.random.Generator, chain_N: Ints, whole: bool, here: tuple[Ints, Ints], try_G: Ints
) -> int:
    """Put an operation's group, or its whole chain, on another device; return the first position that changed.

    Args:
        here: the devices, and the position of each operation.
    """
    device_G, at_N = here
    N, D = arrays.seconds_ND.shape
    n = draws.integers(0, N)
    d = draws.integers(0, D)
    if draws.random() < 0.6:
        # where an operation is that passes something on to this one, or gets something from it
        reads = arrays.first_input_N1[n + 1] - arrays.first_input_N1[n]
        writes = arrays.first_output_N1[n + 1] - arrays.first_output_N1[n]
        pick = draws.integers(0, reads + writes) if reads + writes > 0 else -1
        if 0 <= pick < reads:
            d = device_G[arrays.group_N[arrays.producer_T[arrays.input_I[arrays.first_input_N1[n] + pick]]]]
        elif pick >= reads:
            t = arrays.output_O[arrays.first_output_N1[n] + pick - reads]
            first, stop = arrays.first_reader_T1[t], arrays.first_reader_T1[t + 1]
            if stop > first:
                d = device_G[arrays.group_N[arrays.reader_R[draws.integers(first, stop)]]]
    for m in range(N):
        if (m == n or (whole and chain_N[m] == chain_N[n])) and arrays.seconds_ND[m, d] < np.inf:
            try_G[arrays.group_N[m]] = d
    first = int(N)
    for m in range(N):
        g = arrays.group_N[m]
        if try_G[g] != device_G[g]:
            first = min(first, int(at_N[m]))
    return first


@njit(cache=True, nogil=True)
def _reordered(arrays: Arrays, draws: np.random.Generator, order_N: Ints, try_N: Ints) -> int:
    """Move an operation in the order, as far as what it reads and who reads it let it; return the first position."""
    N = len(order_N)
    at = draws.integers(0, N)
    n = order_N[at]
    first, last = at, at
    while first > 0 and not _reads(arrays, n, order_N[first - 1]):
        first -= 1
    while last < N - 1 and not _reads(arrays, order_N[last + 1], n):
        last += 1
    to = draws.integers(first, last + 1)
    step = 1 if to > at else -1
    for k in range(at, to, step):
        try_N[k] = order_N[k + step]
    try_N[to] = n
    return min(int(at), int(to)) if to != at else N


@njit(cache=True, nogil=True)
def _reads(arrays: Arrays, reader: int, producer: int) -> bool:
    for i in range(arrays.first_input_N1[reader], arrays.first_input_N1[reader + 1]):
        if arrays.producer_T[arrays.input_I[i]] == producer:
            return True
    return False
