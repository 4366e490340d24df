"""Compiled loop over labels: partial plans with the devices that they use, pruned by bounds on what is to come.

A label is a way to run the layers after a cut. At each cut only labels are kept that no other beats in seconds,
devices of every type and stages at once, and whose best completion at the devices' prices stays below a cutoff
(Dumitrescu and Boland, Networks 42, 2003, for paths with resources).

Letters as in `exact.priced_stages`; M = labels, T = device types, K = sets of prices on devices. Devices of a label are
packed into one integer, a field for each type with a bit to spare above it, so that one subtraction compares all types.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.rules import Rules

DONE, TRUNCATED = 0, 1  # every label was looked at; or the beam or the work limit dropped some
_FIRST_SIZE = 1 << 16  # labels; room doubles where there are more

Ints = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Stages(NamedTuple):
    """The stages that a plan may have.

    Attributes:
        start_N, class_N, seconds_N, fits_N: where each starts, its link class, seconds and microbatches that fit.
        packed_N: its devices, packed as a label's.
        by_stop_N, first_by_stop_L2: the stages in order of their stops, and where each stop's begin.
    """

    start_N: Ints
    class_N: Ints
    seconds_N: Floats
    fits_N: Ints
    packed_N: Ints
    by_stop_N: Ints
    first_by_stop_L2: Ints


class Devices(NamedTuple):
    """What there is, and what it is worth.

    Attributes:
        count_T: devices of each type.
        bits: of one type's field.
        use_all: no device may stay idle.
        prices_KT: seconds for one device, under K sets of prices.
        upstream_KL1JA: the cheapest ways upstream of each cut under them; see `exact.priced_stages.upstream`.
    """

    count_T: Ints
    bits: int
    use_all: bool
    prices_KT: Floats
    upstream_KL1JA: Floats


class Effort(NamedTuple):
    """How far a search goes.

    Attributes:
        cutoff: only plans whose Σ is below are looked for, in seconds.
        beam: the most labels that are kept at a cut.
        max_work: comparisons and extensions, in all.
    """

    cutoff: float
    beam: int
    max_work: float


class _Labels(NamedTuple):
    """Label 0 is the empty plan after the last layer.

    Attributes:
        seconds_M, bound_M: Σ so far, and the least of a plan that ends in this label.
        packed_M, level_M, class_M: its devices, its stages as a level of `need_J`, the class of its first stage.
        parent_M, option_M: it is this stage before that label.
        next_M: another label at the same cut; −1: none.
    """

    seconds_M: Floats
    bound_M: Floats
    packed_M: Ints
    level_M: NDArray[np.int32]
    class_M: NDArray[np.int32]
    parent_M: NDArray[np.int32]
    option_M: NDArray[np.int32]
    next_M: NDArray[np.int32]


class _All(NamedTuple):
    """All devices that there are, and how devices are packed.

    Attributes:
        guard, field: the spare bits of all fields, and one field's bits.
        packed, use_all: all devices, and whether none may stay idle.
        spent_K: what they cost under each set of prices.
    """

    guard: np.int64
    field: np.int64
    packed: np.int64
    use_all: bool
    spent_K: Floats


class _Extensions(NamedTuple):
    """What a label becomes with one stage more before it: that stage, Σ, the bound and the devices."""

    option_N: NDArray[np.int32]
    seconds_N: Floats
    bound_N: Floats
    packed_N: Ints


@njit(cache=True, nogil=True)
def search(
    stages: Stages, rules: Rules, worse_L1AA: Floats, devices: Devices, effort: Effort
) -> tuple[Ints, float, int]:
    """The stages of the cheapest plan with Σ below the cutoff, its Σ, and whether it is proved to be the cheapest.

    Args:
        worse_L1AA: [cut, a, b] how much dearer a stage before the cut can find class a than class b after it.
    """
    L, last_level = len(rules.transfer_L1AA) - 1, len(rules.need_J) - 1
    every, size, M = _all(devices), _FIRST_SIZE, 1
    labels, found = _first_labels(size), _room_for_extensions(stages)
    head_L1 = np.full(L + 1, -1, np.int32)
    head_L1[L] = 0
    best, best_label = effort.cutoff, -1
    state, work = DONE, 0.0
    for cut in range(L, 0, -1):
        waiting = _by_bound(labels, head_L1[cut])
        if len(waiting) == 0:
            continue
        kept, is_complete, work = _undominated(labels, waiting, cut, worse_L1AA, every, effort, best, work)
        if not is_complete:
            state = TRUNCATED
        for m in kept:
            level = labels.level_M[m]
            label = labels.seconds_M[m], labels.packed_M[m], level, labels.class_M[m]
            num_found, looked, best, is_best = _extend(label, cut, best, stages, rules, devices, every, found)
            work += looked
            while size < M + num_found:
                size *= 2
                labels = _longer_labels(labels, size)
            _append(labels, M, m, min(level + 1, last_level), stages, found, num_found, head_L1)
            if is_best >= 0:
                best_label = M + is_best
            M += num_found
    return _follow(labels, best_label, L), best, state


@njit(cache=True, nogil=True)
def _extend(
    label: tuple[float, int, int, int],
    cut: int,
    best: float,
    stages: Stages,
    rules: Rules,
    devices: Devices,
    every: _All,
    found: _Extensions,
) -> tuple[int, int, float, int]:
    """Write the extensions of a label that are worth keeping; how many, how many bounds it took, and the best plan.

    All arrays are in local names: an array that is read out of a record in the loop is counted as one more reference
    each time, which takes several times as long.

    Args:
        label: its Σ, devices, level and class.
        best: Σ of the best plan.

    Returns:
        How many extensions and bounds; Σ of the best plan now, and which extension that is; −1: none of them.
    """
    label_seconds, label_packed, level, b = label
    start_N, class_N, seconds_N, fits_N, packed_N, by_stop_N, first_by_stop_L2 = stages
    limit, need_J, transfer_L1AA, link_busy_L1AA = rules
    _, bits, _, prices_KT, upstream_KL1JA = devices
    guard, field, have, use_all, spent_K = every
    found_option_N, found_seconds_N, found_bound_N, found_packed_N = found
    K, T = prices_KT.shape
    is_last, need = cut == len(transfer_L1AA) - 1, need_J[level]
    count, looked, is_best = 0, 0, -1
    for at in range(first_by_stop_L2[cut], first_by_stop_L2[cut + 1]):
        i = by_stop_N[at]
        # Memory grows with the stages after a stage, and the label says how many those are: this one does not fit.
        if fits_N[i] < need:
            continue
        a, start = class_N[i], start_N[i]
        total = label_seconds + seconds_N[i]
        if not is_last:
            if link_busy_L1AA[cut, a, b] > limit:
                continue
            total += transfer_L1AA[cut, a, b]
        # Stages before only add to Σ, and it is already that of a plan.
        if total >= best:
            continue
        # More devices of a type than there are borrow that field's spare bit; stages before only take more.
        packed = label_packed + packed_N[i]
        if (((have | guard) - packed) & guard) != guard:
            continue
        # The least Σ of a plan that ends so, by the best of the sets of prices: Σ and the price of its devices, less
        # the price of all that there are. No plan within the counts has less (Lagrangian relaxation, see
        # `exact.priced_stages`), so that nothing better is lost where this comes to the best plan's Σ.
        bound = total
        for k in range(K):
            priced = total + upstream_KL1JA[k, start, level, a] - spent_K[k]
            for t in range(T):
                priced += prices_KT[k, t] * ((packed >> (t * bits)) & field)
            bound = max(bound, priced)
        looked += 1
        if bound >= best or (start == 0 and use_all and packed != have):
            continue
        if start == 0:
            best, is_best = total, count
        found_option_N[count], found_seconds_N[count] = i, total
        found_bound_N[count], found_packed_N[count] = bound, packed
        count += 1
    return count, looked, best, is_best


@njit(cache=True, nogil=True)
def _append(
    labels: _Labels,
    first: int,
    parent: int,
    level: int,
    stages: Stages,
    found: _Extensions,
    num_found: int,
    head_L1: NDArray[np.int32],
) -> None:
    """Add a label's extensions, from row `first` on, to the lists of their cuts."""
    seconds_M, bound_M, packed_M, level_M, class_M, parent_M, option_M, next_M = labels
    start_N, class_N = stages.start_N, stages.class_N
    for n in range(num_found):
        m, i = first + n, found.option_N[n]
        seconds_M[m], bound_M[m], packed_M[m] = found.seconds_N[n], found.bound_N[n], found.packed_N[n]
        level_M[m], class_M[m], parent_M[m], option_M[m] = level, class_N[i], parent, i
        next_M[m], head_L1[start_N[i]] = head_L1[start_N[i]], m


@njit(cache=True, nogil=True)
def _room_for_extensions(stages: Stages) -> _Extensions:
    most = 0
    for cut in range(len(stages.first_by_stop_L2) - 1):
        most = max(most, stages.first_by_stop_L2[cut + 1] - stages.first_by_stop_L2[cut])
    return _Extensions(np.empty(most, np.int32), np.empty(most), np.empty(most), np.empty(most, np.int64))


@njit(cache=True, nogil=True)
def _undominated(
    labels: _Labels,
    waiting: NDArray[np.int32],
    cut: int,
    worse_L1AA: Floats,
    every: _All,
    effort: Effort,
    best: float,
    work: float,
) -> tuple[NDArray[np.int32], bool, float]:
    """The labels at a cut that are worth extending, whether none but needless ones were dropped, and the work so far.

    Args:
        waiting: the cut's labels, the least bound first.
        worse_L1AA: as `search` has it.
        best: Σ of the best plan.
    """
    seconds_M, bound_M, packed_M, level_M, class_M, _, _, _ = labels
    guard, use_all = every.guard, every.use_all
    is_last = cut == len(worse_L1AA) - 1
    kept, num_kept = np.empty(len(waiting), np.int32), 0
    for m in waiting:
        if bound_M[m] >= best:  # a plan found since is as good as all that this label and those after it can become
            break
        dominated = False
        # A label is dropped for one with as few stages, no more devices of any type, and Σ that is no more even where
        # the stage before finds its class dearest: whatever completes the dropped one completes the other as cheaply.
        # Where no device may stay idle the devices have to be the same.
        for at in range(num_kept - 1, -1, -1):
            p = kept[at]
            same, smaller = packed_M[p] == packed_M[m], (((packed_M[m] | guard) - packed_M[p]) & guard) == guard
            if (same if use_all else smaller) and level_M[p] <= level_M[m]:
                extra = 0.0 if is_last else worse_L1AA[cut, class_M[p], class_M[m]]
                if seconds_M[p] + extra <= seconds_M[m]:
                    dominated = True
                    work += num_kept - at
                    break
        if dominated:
            continue
        work += num_kept
        if num_kept >= effort.beam or work > effort.max_work:
            return kept[:num_kept], False, work
        kept[num_kept] = m
        num_kept += 1
    return kept[:num_kept], True, work


@njit(cache=True, nogil=True)
def _by_bound(labels: _Labels, head: int) -> NDArray[np.int32]:
    """The labels of a list, the least bound first."""
    next_M, bound_M = labels.next_M, labels.bound_M
    count, m = 0, head
    while m >= 0:
        count += 1
        m = next_M[m]
    here, bounds = np.empty(count, np.int32), np.empty(count)
    n, m = 0, head
    while m >= 0:
        here[n], bounds[n] = m, bound_M[m]
        n += 1
        m = next_M[m]
    return here[np.argsort(bounds, kind="mergesort")]


@njit(cache=True, nogil=True)
def _all(devices: Devices) -> _All:
    count_T, bits, use_all, prices_KT, _ = devices
    guard, packed, spent_K = np.int64(0), np.int64(0), np.zeros(len(prices_KT))
    for t in range(len(count_T)):
        guard |= np.int64(1) << (t * bits + bits - 1)
        packed |= np.int64(count_T[t]) << (t * bits)
    for k in range(len(prices_KT)):
        for t in range(len(count_T)):
            spent_K[k] += prices_KT[k, t] * count_T[t]
    return _All(guard, (np.int64(1) << (bits - 1)) - 1, packed, use_all, spent_K)


@njit(cache=True, nogil=True)
def _first_labels(size: int) -> _Labels:
    labels = _Labels(
        np.empty(size), np.empty(size), np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32),
        np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32),
    )  # fmt: skip
    labels.seconds_M[0], labels.bound_M[0], labels.packed_M[0], labels.level_M[0], labels.class_M[0] = 0.0, 0.0, 0, 0, 0
    labels.parent_M[0], labels.option_M[0], labels.next_M[0] = -1, -1, -1
    return labels


@njit(cache=True, nogil=True)
def _longer_labels(labels: _Labels, size: int) -> _Labels:
    return _Labels(
        _longer(labels.seconds_M, size), _longer(labels.bound_M, size), _longer(labels.packed_M, size),
        _longer(labels.level_M, size), _longer(labels.class_M, size), _longer(labels.parent_M, size),
        _longer(labels.option_M, size), _longer(labels.next_M, size),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _longer(table: NDArray[_Scalar], size: int) -> NDArray[_Scalar]:
    longer = np.empty(size, table.dtype)
    longer[: len(table)] = table
    return longer


@njit(cache=True, nogil=True)
def _follow(labels: _Labels, label: int, num_layers: int) -> Ints:
    """The stages of a label in order; none where there is no label (−1)."""
    chosen = np.empty(num_layers, np.int64)
    count, m = 0, label
    while m > 0:
        chosen[count] = labels.option_M[m]
        count += 1
        m = labels.parent_M[m]
    return chosen[:count]
