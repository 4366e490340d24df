"""A problem as a few flat arrays for compiled loops: any stage's seconds and memory in a few reads, for any layers.

Few, because a compiled function pays for every array that it is handed; plain tuples of arrays, because numba's cache
on disk cannot be read any more when a class in a signature is renamed.
Shape suffixes: C = configurations, G = groups of them, L = layers, L1 = L + 1 cuts, S = stages, D = device types;
a last digit counts the columns named below. K = levels of the table of maxima, M = blocks of `_BLOCK` layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans import Plan, Problem, Stage
from dejavu.plans.stage_costs import SUMMED, UNBOUNDED, AdditiveCosts, DenseCosts, Floats

Ints = NDArray[np.int64]
# As the attributes of StageTable, and all of them; see there.
Costs = tuple[Floats, Floats, Floats, Floats]
Links = tuple[Floats, Floats]
Kinds = tuple[Ints, Ints, Ints, Ints, Ints]
Rules = tuple[Ints, int, bool]
Arrays = tuple[Costs, Links, Kinds, Rules]

_BLOCK = 16  # layers; a maximum over a span costs at most this many reads, and 3.2 numbers for each layer
_NEAR_WHOLE = 1e-9  # a quotient this near to a whole number, relative, is rounded down exactly, as Python does it
# Columns of sums_CL1N: of each of SUMMED the part on a grid and, _REST columns further, the rest; see `Sums`. NumPy's
# integers: for each of Python's, which numba takes as a type of its own, `_between` would be compiled again.
_SECONDS, _ONCE, _FIXED, _ACTIVE, _STEP = np.arange(5)
_REST = 5
_MESSAGE, _LATENCY, _ROOM, _BLOCKED = range(10, 14)
_HOST_ALWAYS, _HOST_EACH = range(14, 16)
_COLUMNS = 16  # two lines of cache
_LAYER, _TAIL, _HEAD = range(3)  # columns of scratch_CL3
TYPE, DEVICES = range(2)  # columns of kind_C2


@dataclass(frozen=True, eq=False)
class StageTable:
    """What `stage_cost` and the loops of the searches read.

    Attributes:
        costs: sums_CL1N (up to each cut the sums of `SUMMED` and how many layers cannot run; then bytes of messages
            at the cut, what does not depend on it, and sums of the parts of the node's memory), scratch_CL3 (temporary
            bytes of a layer, the largest from it to the end of its block, the largest from the block's beginning to
            it), span_CKM (the largest of 2**k blocks from a block on), dense_CLL13 (seconds, per-step seconds and
            microbatches that fit, of every stage). Of the two forms of costs the other's are empty.
        links: link_CC2 (latency, seconds for each byte) and cut_bytes_L1.
        kinds: kind_C2 (the type, how many devices a stage takes), count_D (how many there are), member_C, first_G1 (the
            configurations that the cluster has devices for, in groups of the same type and number of devices), group_C.
        rules: need_SS ([num_stages, stage] microbatches in flight), microbatches − 1, whether all devices must be used.
    """

    costs: Costs
    links: Links
    kinds: Kinds
    rules: Rules

    @property
    def most_stages(self) -> int:
        """For how many stages there are layers and devices; at least one."""
        return len(self.rules[0]) - 1

    @property
    def num_usable(self) -> int:
        """Configurations that the cluster has devices for."""
        return len(self.kinds[2])

    @classmethod
    def of(cls, problem: Problem, configurations: Iterable[int] | None = None) -> StageTable:
        """The table of a problem; made once, as that of thousands of layers takes a second and some hundred megabytes.

        Searches that run one after the other, and beside each other, ask for the same.

        Args:
            configurations: whose stages will be asked for; None: those of all.
        """
        made = _TABLES.get(problem)
        if made is None:
            rows = _Rows(problem.costs) if isinstance(problem.costs, AdditiveCosts) else None
            made = _TABLES[problem] = cls._made(problem, rows), rows
        table, rows = made
        if rows is not None:
            rows.write(range(len(problem.configurations)) if configurations is None else configurations)
        return table

    @classmethod
    def _made(cls, problem: Problem, rows: _Rows | None) -> StageTable:
        links = [problem.link_latency_seconds_CC, problem.link_seconds_per_byte_CC]
        nothing = np.zeros((1, 1, _COLUMNS)), np.zeros((1, 1, 3)), np.zeros((1, 1, 1))
        return cls(
            costs=(
                *(nothing if rows is None else rows.arrays),
                _dense(problem.costs.dense()) if rows is None else np.zeros((0, 1, 1, 3)),
            ),
            links=(
                np.stack(links, axis=2).astype(np.float64),
                np.ascontiguousarray(problem.cut_bytes_L1, dtype=np.float64),
            ),
            kinds=_kinds(problem),
            rules=(_needs(problem), problem.num_microbatches - 1, problem.use_all_devices),
        )


class _Rows:
    """Sums and maxima of one configuration after the other. Memory that is not written to is not taken."""

    def __init__(self, costs: AdditiveCosts) -> None:
        C, L = costs.seconds_CL.shape
        self._costs, self._is_written_C = costs, np.zeros(C, dtype=np.bool_)
        blocks = -(-L // _BLOCK)
        self._sums_CL1N = np.empty((C, L + 1, _COLUMNS))
        self._scratch_CMB3 = np.empty((C, blocks, _BLOCK, 3))
        self._span_CKM = np.empty((C, blocks.bit_length(), blocks))

    @property
    def arrays(self) -> tuple[Floats, Floats, Floats]:
        return self._sums_CL1N, self._scratch_CMB3.reshape(len(self._sums_CL1N), -1, 3), self._span_CKM

    def write(self, configurations: Iterable[int]) -> None:
        """Another thread may write the same at the same time."""
        for c in configurations:
            if not self._is_written_C[c]:
                self._write_sums(c)
                self._write_scratch(c)
                self._is_written_C[c] = True

    def _write_sums(self, c: int) -> None:
        costs, sums_L1N = self._costs, self._sums_CL1N[c]
        for column, name in enumerate(SUMMED):
            sums_L1N[:, column], sums_L1N[:, column + _REST] = costs.sums[name].row(c)
        sums_L1N[:, _BLOCKED], sums_L1N[:, _MESSAGE] = costs.blocked_CL1[c], costs.message_bytes_CL1[c]
        sums_L1N[:, _LATENCY], sums_L1N[:, _ROOM] = costs.per_step_latency_seconds_C[c], costs.room_bytes_C[c]
        sums_L1N[:, _HOST_ALWAYS], sums_L1N[:, _HOST_EACH] = costs.host_shares_2CL1[:, c]

    def _write_scratch(self, c: int) -> None:
        scratch_MB3, span_KM, bytes_L = self._scratch_CMB3[c], self._span_CKM[c], self._costs.temporary_bytes_CL[c]
        bytes_MB = np.zeros(scratch_MB3.shape[:2])
        bytes_MB.reshape(-1)[: len(bytes_L)] = bytes_L
        scratch_MB3[:, :, _LAYER] = bytes_MB
        np.maximum.accumulate(bytes_MB, axis=1, out=scratch_MB3[:, :, _HEAD])
        np.maximum.accumulate(bytes_MB[:, ::-1], axis=1, out=scratch_MB3[:, ::-1, _TAIL])
        span_KM[0] = bytes_MB.max(axis=1)
        for k in range(1, len(span_KM)):
            half = 2 ** (k - 1)
            span_KM[k] = span_KM[k - 1]
            np.maximum(span_KM[k - 1, :-half], span_KM[k - 1, half:], out=span_KM[k, :-half])


# While somebody holds the problem.
_TABLES: WeakKeyDictionary[Problem, tuple[StageTable, _Rows | None]] = WeakKeyDictionary()


def plan_of(problem: Problem, stops: Ints, configurations: Ints) -> Plan:
    """The plan whose stages stop there, under those configurations."""
    starts = [0, *(int(stop) for stop in stops[:-1])]
    stages = (
        Stage(start, int(stop), problem.configurations[c])
        for start, stop, c in zip(starts, stops, configurations, strict=True)
    )
    return Plan(tuple(stages), problem.schedule, problem.num_microbatches)


def _kinds(problem: Problem) -> Kinds:
    types, counts = list(problem.device_counts), list(problem.device_counts.values())
    kinds = [(types.index(configuration.kind), configuration.num_devices) for configuration in problem.configurations]
    usable = [c for c, (kind, taken) in enumerate(kinds) if taken <= counts[kind]]
    member = sorted(usable, key=lambda c: (kinds[c], c))
    first = [i for i, c in enumerate(member) if i == 0 or kinds[c] != kinds[member[i - 1]]] + [len(member)]
    group = np.zeros(len(kinds), dtype=np.int64)
    for g, (begin, end) in enumerate(pairwise(first)):
        group[member[begin:end]] = g
    kind_C2, count_D, member_C, first_G1 = (np.array(rows, dtype=np.int64) for rows in (kinds, counts, member, first))
    return kind_C2, count_D, member_C, first_G1, group


def _needs(problem: Problem) -> Ints:
    most = max(1, min(problem.most_stages, sum(problem.device_counts.values())))
    need_SS = np.zeros((most + 1, most + 1), dtype=np.int64)
    for num_stages in range(1, most + 1):
        need_SS[num_stages, :num_stages] = [problem.in_flight(s, num_stages) for s in range(num_stages)]
    return need_SS


def _dense(costs: DenseCosts) -> Floats:
    possible = np.isfinite(costs.seconds_CLL1) & np.isfinite(costs.per_step_seconds_CLL1)
    fits = np.where(possible, costs.max_in_flight_CLL1, 0)
    return np.stack((costs.seconds_CLL1, costs.per_step_seconds_CLL1, fits), axis=3).astype(np.float64)


@njit(cache=True, nogil=True, error_model="numpy")
def most_scratch(scratch_CL3: Floats, span_CKM: Floats, start: int, stop: int, c: int) -> float:
    """The largest temporary bytes of the layers `start` to `stop` (not included)."""
    first, last = start // _BLOCK, (stop - 1) // _BLOCK
    if first == last:
        most: float = 0.0
        for layer in range(start, stop):
            most = max(most, scratch_CL3[c, layer, _LAYER])
        return most
    most = max(scratch_CL3[c, start, _TAIL], scratch_CL3[c, stop - 1, _HEAD])
    between = last - first - 1
    if between > 0:
        k, width = 0, 1
        while 2 * width <= between:
            k += 1
            width *= 2
        most = max(most, span_CKM[c, k, first + 1], span_CKM[c, k, last - width])
    return most


@njit(cache=True, nogil=True, error_model="numpy")
def _between(sums_CL1N: Floats, start: int, stop: int, c: int, column: np.int64) -> float:
    """A sum over layers, as `Sums.between`."""
    grid: float = sums_CL1N[c, stop, column] - sums_CL1N[c, start, column]
    rest: float = sums_CL1N[c, stop, column + _REST] - sums_CL1N[c, start, column + _REST]
    return grid + rest


@njit(cache=True, nogil=True, error_model="numpy")
def _times(room: float, held: float) -> int:
    """How often what is held fits the room; float for float as the problem's costs say it."""
    if held <= 0 or room / held >= UNBOUNDED:
        return UNBOUNDED
    quotient = room / held
    whole = np.floor(quotient)
    if abs(quotient - np.floor(quotient + 0.5)) <= _NEAR_WHOLE * quotient:
        whole = room // held  # several times slower: the remainder is taken exactly
    return int(whole)


@njit(cache=True, nogil=True, error_model="numpy")
def stage_cost(costs: Costs, start: int, stop: int, c: int) -> tuple[float, float, int]:
    """(seconds, per-step seconds, microbatches that fit) of a stage, float for float as the problem's costs say it."""
    sums_CL1N, scratch_CL3, span_CKM, dense_CLL13 = costs
    if len(dense_CLL13):
        return dense_CLL13[c, start, stop, 0], dense_CLL13[c, start, stop, 1], int(dense_CLL13[c, start, stop, 2])
    if sums_CL1N[c, stop, _BLOCKED] > sums_CL1N[c, start, _BLOCKED]:
        return np.inf, np.inf, 0
    seconds = _between(sums_CL1N, start, stop, c, _SECONDS)
    once = _between(sums_CL1N, start, stop, c, _ONCE) + sums_CL1N[c, start, _LATENCY]
    messages = sums_CL1N[c, start, _MESSAGE] + sums_CL1N[c, stop, _MESSAGE]
    free = sums_CL1N[c, start, _ROOM] - (_between(sums_CL1N, start, stop, c, _FIXED) + messages)
    room = free - most_scratch(scratch_CL3, span_CKM, start, stop, c)
    held = _between(sums_CL1N, start, stop, c, _ACTIVE)
    if room < 0 or free < _between(sums_CL1N, start, stop, c, _STEP):
        return seconds, once, 0
    host_always: float = sums_CL1N[c, stop, _HOST_ALWAYS] - sums_CL1N[c, start, _HOST_ALWAYS]
    host_each: float = sums_CL1N[c, stop, _HOST_EACH] - sums_CL1N[c, start, _HOST_EACH]
    if host_always > 1.0:
        return seconds, once, 0
    fits = _times(room, held)
    if host_each > 0:
        fits = min(fits, _times(1.0 - host_always, host_each))
    return seconds, once, fits
