"""The one price of a plan that cuts operators and devices.

With t_s the seconds of one microbatch on stage s, x_k those of its activations and their gradients over cut k, o_s the
all-reduce of stage s once a batch, and B microbatches, one global batch takes

    L = Σ t + Σ x + max over stages and cuts of ((B − 1) · t_s + o_s, (B − 1) · x_k)

as `plans.price` has it: a stage that is not the slowest hides its all-reduce under the others' work. In it

    t_s = C_s / r            C_s the stage's compute seconds, r its replicas: each takes its share of every microbatch
    o_s = 2 (r − 1)/r · W_s / b    a ring; b is NVLink's bandwidth inside a server, the network's where it leaves one
    x_k = 2 · A_k · rate     A_k crosses forward, its gradient backward; see `transfer_rates`
    bytes of a device = copies · W_s + in flight · H_s / r    H_s kept for backward; in flight: min(B, stages from s on)

There is no latency, no optimizer step and no loss of efficiency by small shares in it: the arrays say what a
device takes. Shape suffixes: P1 = P + 1 places before, between and after points; N = places of device cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.foundation.errors import InputError
from dejavu.operator_cuts.problem import CutPlan, CutProblem, Floats, Servers

ROUNDING = 1e-9  # relative: two ways to add up the same numbers


@dataclass(frozen=True)
class CutPrice:
    """What a plan costs, part by part, in its stages' order."""

    step_seconds: float
    stage_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    all_reduce_seconds: tuple[float, ...]
    device_bytes: tuple[float, ...]


class Sums(NamedTuple):
    """Sums over the points before each place, so that a stage's are a difference; and what crosses there."""

    seconds_P1: Floats
    weight_bytes_P1: Floats
    held_bytes_P1: Floats
    crossing_bytes_P1: Floats

    @classmethod
    def of(cls, problem: CutProblem) -> Sums:
        a = problem.arrays
        added = (a.compute_seconds_P, a.weight_bytes_P, a.held_bytes_P)
        seconds, weights, held = (np.concatenate(([0.0], np.cumsum(array))) for array in added)
        return cls(seconds, weights, held, np.concatenate(([0.0], a.crossing_bytes_P[:-1], [0.0])))


def price(problem: CutProblem, plan: CutPlan) -> CutPrice:
    """Price one plan; whether its stages fit into memory is `fits`.

    Raises:
        InputError: it is no plan of the problem's; the message says why.
    """
    check(problem, plan)
    sums, servers, B = Sums.of(problem), problem.servers, problem.num_microbatches
    points = (0, *plan.operator_cuts, len(problem.arrays))
    devices = (0, *plan.device_cuts, servers.num_devices)
    S = len(points) - 1
    stages, once, transfers, held = [], [], [], []
    for s in range(S):
        start, stop, first, after = points[s], points[s + 1], devices[s], devices[s + 1]
        weights = sums.weight_bytes_P1[stop] - sums.weight_bytes_P1[start]
        kept = sums.held_bytes_P1[stop] - sums.held_bytes_P1[start]
        stages.append(float(sums.seconds_P1[stop] - sums.seconds_P1[start]) / (after - first))
        once.append(float(weights * all_reduce_rate(servers, first, after)))
        held.append(float(problem.copies * weights + problem.in_flight(s, S) * kept / (after - first)))
        if s + 1 < S:
            rate = _transfer_rate(first, after, devices[s + 2], *_network(servers))
            transfers.append(float(sums.crossing_bytes_P1[stop] * rate))
    busiest = max(*((B - 1) * t + o for t, o in zip(stages, once, strict=True)), (B - 1) * max(transfers, default=0.0))
    return CutPrice(sum(stages) + sum(transfers) + busiest, tuple(stages), tuple(transfers), tuple(once), tuple(held))


def fits(problem: CutProblem, found: CutPrice) -> bool:
    """Return whether every stage fits into its devices' memory."""
    return max(found.device_bytes) <= problem.servers.memory_bytes * (1 + ROUNDING)


def check(problem: CutProblem, plan: CutPlan) -> None:
    """Validate that a plan has rising cuts, as many of operators as of devices, and only allowed ones."""
    operators, devices = plan.operator_cuts, plan.device_cuts
    if len(operators) != len(devices):
        raise InputError(f"plan: found {len(operators)} operator cuts and {len(devices)} device cuts; wanted as many")
    if len(operators) + 1 > problem.most_stages:
        raise InputError(f"plan: found {len(operators) + 1} stages; wanted at most {problem.most_stages}")
    inside = all(0 < cut < len(problem.arrays) for cut in operators)
    if not inside or any(b <= a for a, b in pairwise(operators)):
        raise InputError(
            f"plan: found operator cuts {list(operators)}; wanted whole numbers from 1 to "
            f"{len(problem.arrays) - 1}, rising"
        )
    allowed = set(problem.device_cuts or ())
    if not allowed.issuperset(devices) or any(b <= a for a, b in pairwise(devices)):
        raise InputError(f"plan: found device cuts {list(devices)}; wanted some of {sorted(allowed)}, rising")


def all_reduce_rate(servers: Servers, first: int, after: int) -> float:
    """Return the seconds for each byte of weights that replicas on devices `first` to `after` − 1 reduce in a ring."""
    replicas = after - first
    if replicas == 1:
        return 0.0
    spans = first // servers.devices_each != (after - 1) // servers.devices_each
    slowest = (
        min(servers.between_bytes_per_second, servers.inside_bytes_per_second)
        if spans
        else (servers.inside_bytes_per_second)
    )
    return 2.0 * (replicas - 1) / replicas / slowest


def all_reduce_rates(problem: CutProblem) -> Floats:
    """Return `all_reduce_rate` of every run of devices between two places: (N, N), 0 where there is none."""
    at_N = problem.positions_N.tolist()
    return np.array([[all_reduce_rate(problem.servers, a, b) if a < b else 0.0 for b in at_N] for a in at_N])


def transfer_rates(problem: CutProblem) -> Floats:
    """Return the seconds for each byte that crosses from devices of one stage to those of the next: (N, N, N).

    Replica i of r has rows i/r to (i + 1)/r of a microbatch, so a byte goes where its row is computed next. What
    leaves or enters a server shares its network card; each device has its own link inside. Both ways: the gradient
    goes back over the same links.
    """
    return _transfer_rates(problem.positions_N, *_network(problem.servers))


def _network(servers: Servers) -> tuple[int, float, float]:
    return servers.devices_each, servers.inside_bytes_per_second, servers.between_bytes_per_second


@njit(cache=True)
def _transfer_rate(a: int, b: int, c: int, each: int, inside: float, between: float) -> float:
    """Return the rate from devices a to b − 1 to devices b to c − 1."""
    sending, receiving = b - a, c - b
    network = 0.0
    for server in range(a // each, (c - 1) // each + 1):
        begin, end = server * each, (server + 1) * each
        from_row = (min(max(begin, a), b) - a) / sending
        to_row = (min(max(end, a), b) - a) / sending
        from_next = (min(max(begin, b), c) - b) / receiving
        to_next = (min(max(end, b), c) - b) / receiving
        stays = max(0.0, min(to_row, to_next) - max(from_row, from_next))
        network = max(network, to_row - from_row - stays, to_next - from_next - stays)
    return 2.0 * max(network / between, max(1.0 / sending, 1.0 / receiving) / inside)


@njit(cache=True)
def _transfer_rates(at_N: NDArray[np.int64], each: int, inside: float, between: float) -> Floats:
    N = len(at_N)
    rates_NNN = np.zeros((N, N, N))
    for a in range(N):
        for b in range(a + 1, N):
            for c in range(b + 1, N):
                rates_NNN[a, b, c] = _transfer_rate(at_N[a], at_N[b], at_N[c], each, inside, between)
    return rates_NNN
