"""The problem's prices as prefix sums, for loops that look at every stage.

Shape suffixes: L = layers, L1 = L + 1 cut positions, C = configurations, T = device types, G = classes of
configurations whose messages cost the same, 5 = passes (forward, backward, its input and its weight part, once a step),
M = a message's parts (at the sender, on the wire, at the receiver), S = stages in the model's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.simulation._action_table import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PER_STEP, Integers

_MOST_FITTING = 25_000_000  # entries of the table of what fits; beyond it memory is ignored
_ROUNDING = 1e-9  # memory counts as this much larger: what just fits by another order of summing is not dropped
_UNKNOWN_CAP = 1e3  # times the slowest plan, where no plan is known


class BoundPrices(NamedTuple):
    """What stages and messages take; what a stage takes is a difference of two entries and what is there anyway.

    Attributes:
        sum_5CL1: the layers' seconds, summed from the first.
        pass_C: what every pass of a microbatch takes besides.
        per_step_C: what a stage does once a step besides.
        message_L1GGM: across a cut, from a class to a class, one way: its three parts. Where links are directed, also
            those of a message that goes back to the rank before; each stage has weights for the one or the other.
        class_C: of the configurations.
        use_CT, count_T: devices that a stage takes, and that there are, of each kind and of all kinds of a type.
    """

    sum_5CL1: Floats
    pass_C: Floats
    per_step_C: Floats
    message_L1GGM: Floats
    class_C: Integers
    use_CT: Integers
    count_T: Integers


class RankChoices(NamedTuple):
    """Which of the configurations ranks may have. Links of such a problem are those from a rank to the one after it.

    So a message that goes back to the rank before takes what one takes from there.

    Attributes:
        first_C, between_C, last_C: the pipeline's first rank, those between, its last.
        only_C: the rank of a plan that has no other.
    """

    first_C: NDArray[np.bool_]
    between_C: NDArray[np.bool_]
    last_C: NDArray[np.bool_]
    only_C: NDArray[np.bool_]

    def of(self, rank: int, num_ranks: int) -> NDArray[np.bool_]:
        if num_ranks == 1:
            return self.only_C
        return self.first_C if rank == 0 else self.last_C if rank == num_ranks - 1 else self.between_C


@dataclass(frozen=True, eq=False)
class BoundProblem:
    """The priced problem for the bound.

    Attributes:
        max_in_flight_CLL1: microbatches in flight that a stage has memory for; None where that is not looked at.
        choices: None: any rank may have any configuration.
    """

    priced: PricedProblem
    prices: BoundPrices
    max_in_flight_CLL1: NDArray[np.int32] | None
    choices: RankChoices | None = None

    @property
    def num_microbatches(self) -> int:
        return self.priced.problem.num_microbatches

    def message_seconds(self, stop_S: Integers, how_S: Integers, rank_S: Integers) -> list[float] | None:
        """Return what each message of a plan takes one way; None: what the problem says."""
        if self.choices is None:
            return None
        problem, found = self.priced.problem, []
        for s in range(len(rank_S) - 1):
            ends = (how_S[s + 1], how_S[s]) if rank_S[s + 1] == rank_S[s] - 1 else (how_S[s], how_S[s + 1])
            found.append(problem.transfer_seconds(int(stop_S[s]), *map(int, ends)) / 2)
        return found

    @property
    def most_ranks(self) -> int:
        """Pipeline ranks that a plan can have: each takes the fewest devices of its type, or of its kind."""
        problem, least = self.priced.problem, dict[str, int]()
        for one in problem.configurations:
            name = one.device_type if one.device_type in problem.device_counts else one.kind
            least[name] = min(least.get(name, one.num_devices), one.num_devices)
        ranks = sum(problem.device_counts[name] // taken for name, taken in least.items())
        return min(ranks, problem.most_stages, problem.num_microbatches)

    @cached_property
    def possible_CL(self) -> NDArray[np.bool_]:
        """Whether any stage of the configuration that holds the layer fits with one microbatch in flight."""
        L = self.priced.problem.num_layers
        if self.max_in_flight_CLL1 is None:
            return np.ones((len(self.prices.class_C), L), np.bool_)
        last_CL = ((self.max_in_flight_CLL1 > 0) * np.arange(L + 1)).max(axis=2)
        return np.maximum.accumulate(last_CL, axis=1) > np.arange(L)


def bound_problem(priced: PricedProblem, best_seconds: float, choices: RankChoices | None = None) -> BoundProblem:
    """The problem's prices.

    A layer's time above `best_seconds` counts as `best_seconds`: a plan with such a layer takes as long, so that the
    bound, which is never above `best_seconds`, holds for it as before. Times so large (or infinite, for what cannot
    run) would else drown the others in the sums.
    """
    problem = priced.problem
    C, L = len(problem.configurations), problem.num_layers
    seconds_5CL = np.zeros((5, C, L))
    seconds_5CL[FORWARD], seconds_5CL[BACKWARD] = priced.forward_seconds_CL, priced.backward_seconds_CL
    seconds_5CL[BACKWARD_INPUT] = priced.parts_seconds_CL2[:, :, 0]
    seconds_5CL[BACKWARD_WEIGHT] = priced.parts_seconds_CL2[:, :, 1]
    per_step_C = np.zeros(C)
    if isinstance(problem.costs, AdditiveCosts):
        seconds_5CL[PER_STEP], per_step_C = problem.costs.per_step_seconds_CL, problem.costs.per_step_latency_seconds_C
    np.nan_to_num(seconds_5CL, copy=False, nan=0.0, posinf=np.inf)
    finite = seconds_5CL[np.isfinite(seconds_5CL)]
    slowest = problem.num_microbatches * float(finite.max(initial=1.0)) * L
    cap = best_seconds if np.isfinite(best_seconds) else _UNKNOWN_CAP * slowest
    beside = [priced.pass_costs.get(configuration.device_type, PassCost()) for configuration in problem.configurations]
    class_C, message_L1GGM = _messages(priced, beside, is_directed=choices is not None)
    prices = BoundPrices(
        sum_5CL1=np.pad(np.cumsum(np.minimum(seconds_5CL, cap), axis=2), ((0, 0), (0, 0), (1, 0))),
        pass_C=np.array([cost.pass_seconds for cost in beside]),
        per_step_C=np.minimum(per_step_C, cap),
        message_L1GGM=message_L1GGM,
        class_C=class_C,
        use_CT=np.array([[one.uses(kind) for kind in problem.device_counts] for one in problem.configurations]),
        count_T=np.array(list(problem.device_counts.values())),
    )
    return BoundProblem(priced, prices, _max_in_flight(priced), choices)


def _messages(priced: PricedProblem, beside: list[PassCost], *, is_directed: bool) -> tuple[Integers, Floats]:
    """The configurations' classes, and what messages take between them: as `simulation.plans` prices them."""
    problem = priced.problem
    latency_CC, per_byte_CC = problem.link_latency_seconds_CC, problem.link_seconds_per_byte_CC
    per_byte = any(cost.message_seconds_per_byte > 0 for cost in beside)
    rows = [
        (
            *(configuration.device_type, configuration.data_parallel if per_byte else 1),
            *(links.tobytes() for table in (latency_CC, per_byte_CC) for links in (table[c], table[:, c])),
        )
        for c, configuration in enumerate(problem.configurations)
    ]
    number = {row: g for g, row in enumerate(dict.fromkeys(rows))}
    class_C = np.array([number[row] for row in rows])
    first_G = np.array([rows.index(row) for row in number])  # a configuration of each class
    replicas_G = np.array([problem.configurations[c].data_parallel for c in first_G])
    bytes_L1 = problem.cut_bytes_L1[:, None, None]
    part_bytes = bytes_L1 / np.maximum(replicas_G[:, None], replicas_G[None, :])
    fixed_G = np.array([beside[c].message_seconds for c in first_G])
    rate_G = np.array([beside[c].message_seconds_per_byte for c in first_G])
    sender = fixed_G[:, None] + rate_G[:, None] * part_bytes
    receiver = fixed_G[None, :] + rate_G[None, :] * part_bytes
    ends = np.ix_(first_G, first_G)
    latency_GG, per_byte_GG = latency_CC[ends], per_byte_CC[ends]
    parts = list[Floats]()
    for latency, per_byte in ((latency_GG, per_byte_GG), (latency_GG.T, per_byte_GG.T))[: 1 + is_directed]:
        parts += [sender, np.maximum(0.0, latency + per_byte * bytes_L1 - (sender + receiver)), receiver]
    return class_C, np.ascontiguousarray(np.stack(np.broadcast_arrays(*parts), axis=-1))


def _max_in_flight(priced: PricedProblem) -> NDArray[np.int32] | None:
    costs = priced.problem.costs
    if costs.num_configurations * costs.num_layers**2 > _MOST_FITTING:
        return None
    if not isinstance(costs, AdditiveCosts):
        return np.minimum(costs.max_in_flight_CLL1, 2**31 - 1).astype(np.int32)
    return _fitting(_memory(costs))


class Memory(NamedTuple):
    """What a stage needs on each of its devices, as sums over layers; see `AdditiveCosts`."""

    fixed_CL1: Floats
    activation_CL1: Floats
    step_CL1: Floats
    temporary_CL: Floats
    message_CL1: Floats
    capacity_C: Floats


def _memory(costs: AdditiveCosts) -> Memory:
    return Memory(
        _sums(costs.fixed_bytes_CL),
        _sums(costs.activation_bytes_CL),
        _sums(costs.step_bytes_CL),
        np.ascontiguousarray(costs.temporary_bytes_CL),
        np.ascontiguousarray(costs.message_bytes_CL1),
        costs.capacity_bytes_C * (1.0 + _ROUNDING),
    )


def memory_shares(priced: PricedProblem, in_flight_S: Integers) -> NDArray[np.float32]:
    """[s, c, start, stop] a part of a device's memory that stage s takes; those of two stages of a rank add up.

    Of what passes need only the larger is needed, so at least half of both. Empty where the problem does not say so.

    Args:
        in_flight_S: microbatches that the stages of a rank hold at one time.
    """
    costs = priced.problem.costs
    if not isinstance(costs, AdditiveCosts):
        return np.empty((0, 0, 0, 0), np.float32)
    return _shares(_memory(costs), in_flight_S.astype(np.float64))


def _sums(rows_CL: Floats) -> Floats:
    return np.ascontiguousarray(np.pad(np.cumsum(rows_CL, axis=1), ((0, 0), (1, 0))))


@njit(cache=True, nogil=True)
def _fitting(memory: Memory) -> NDArray[np.int32]:
    """How many microbatches in flight every stage has room for; as `AdditiveCosts.max_in_flight`."""
    fixed_CL1, activation_CL1, step_CL1, temporary_CL, message_CL1, capacity_C = memory
    C, L = temporary_CL.shape
    most_CLL1 = np.zeros((C, L, L + 1), np.int32)
    for c in range(C):
        for start in range(L):
            temporary = 0.0
            for stop in range(start + 1, L + 1):
                temporary = max(temporary, temporary_CL[c, stop - 1])
                free = capacity_C[c] - (fixed_CL1[c, stop] - fixed_CL1[c, start])
                free -= message_CL1[c, start] + message_CL1[c, stop]
                room, held = free - temporary, activation_CL1[c, stop] - activation_CL1[c, start]
                if room < 0.0 or free < step_CL1[c, stop] - step_CL1[c, start]:
                    continue
                most_CLL1[c, start, stop] = 2**31 - 1 if held <= 0.0 else np.int32(min(room / held, 2.0**31 - 1))
    return most_CLL1


@njit(cache=True, nogil=True)
def _shares(memory: Memory, in_flight_S: Floats) -> NDArray[np.float32]:
    """Rounded down: what just fits is not dropped."""
    fixed_CL1, activation_CL1, _, temporary_CL, message_CL1, capacity_C = memory
    S, (C, L) = len(in_flight_S), temporary_CL.shape
    share_SCLL1 = np.zeros((S, C, L, L + 1), np.float32)
    for s in range(S):
        for c in range(C):
            for start in range(L):
                temporary = 0.0
                for stop in range(start + 1, L + 1):
                    temporary = max(temporary, temporary_CL[c, stop - 1])
                    working = temporary / 2.0 + in_flight_S[s] * (activation_CL1[c, stop] - activation_CL1[c, start])
                    fixed = fixed_CL1[c, stop] - fixed_CL1[c, start] + message_CL1[c, start] + message_CL1[c, stop]
                    share = (fixed + working) / capacity_C[c] if capacity_C[c] > 0.0 else 2.0
                    share_SCLL1[s, c, start, stop] = np.float32(share * (1.0 - 1e-6))
    return share_SCLL1
