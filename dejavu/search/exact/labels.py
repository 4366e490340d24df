"""Compiled loop over labels: partial plans with the devices that they use, pruned by bounds on what is to come.

A label is a way to run the layers behind a cut. At each cut only labels are kept that no other beats in seconds,
devices of every type and stages at once, and whose best completion at the devices' prices stays below a cutoff
(Dumitrescu and Boland, Networks 42, 2003, for paths with resources).

Letters as in `_priced`; M = labels. Devices of a label are packed into one integer, a field for each type with a bit to
spare above it, so that one subtraction compares all types.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit

DONE, TRUNCATED = 0, 1  # every label was looked at; or the beam or the work limit dropped some


@njit(cache=True, nogil=True)
def search(
    limit, cutoff, beam, max_work,
    start_N, by_stop_N, first_by_stop_L2, class_N, seconds_N, fits_N, packed_N,
    need_J, transfer_L1AA, link_busy_L1AA, worse_L1AA,
    before_KL1JA, prices_KT, count_T, bits, exact_use,
):  # fmt: skip
    """The options of the cheapest plan with Σ below the cutoff, and whether it is proved to be the cheapest.

    Args:
        beam: the most labels that are kept at a cut. max_work: comparisons and extensions, in all.
        worse_L1AA: [cut, a, b] how much dearer a stage before the cut can find class a than class b behind it.
        before_KL1JA, prices_KT: K sets of prices, and the cheapest ways before each cut under them.
        count_T: devices of each type; bits: of one type's field.
    """
    L, J = len(transfer_L1AA) - 1, len(need_J)
    K, T = prices_KT.shape
    size = 1 << 16
    seconds_M, bound_M = np.empty(size), np.empty(size)
    packed_M = np.empty(size, np.int64)
    level_M, class_M = np.empty(size, np.int32), np.empty(size, np.int32)
    parent_M, option_M, next_M = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32)
    head_L1 = np.full(L + 1, -1, np.int32)
    guard, field, have = np.int64(0), (np.int64(1) << (bits - 1)) - 1, np.int64(0)
    for t in range(T):
        guard |= np.int64(1) << (t * bits + bits - 1)
        have |= np.int64(count_T[t]) << (t * bits)
    spent_K = np.zeros(K)
    for k in range(K):
        for t in range(T):
            spent_K[k] += prices_KT[k, t] * count_T[t]
    M = 1
    seconds_M[0], bound_M[0], packed_M[0], level_M[0], class_M[0] = 0.0, 0.0, 0, 0, 0
    parent_M[0], option_M[0], next_M[0] = -1, -1, -1
    head_L1[L] = 0
    best, best_label = cutoff, -1
    state, work = DONE, 0.0
    for cut in range(L, 0, -1):
        count = 0
        m = head_L1[cut]
        while m >= 0:
            count += 1
            m = next_M[m]
        if count == 0:
            continue
        here, keys = np.empty(count, np.int32), np.empty(count)
        n, m = 0, head_L1[cut]
        while m >= 0:
            here[n], keys[n] = m, bound_M[m]
            n += 1
            m = next_M[m]
        order = np.argsort(keys, kind="mergesort")
        kept, num_kept = np.empty(count, np.int32), 0
        for n in order:
            m = here[n]
            if bound_M[m] >= best:
                break
            dominated = False
            for at in range(num_kept - 1, -1, -1):
                p = kept[at]
                if exact_use:
                    smaller = packed_M[p] == packed_M[m]
                else:
                    smaller = (((packed_M[m] | guard) - packed_M[p]) & guard) == guard
                if smaller and level_M[p] <= level_M[m]:
                    extra = 0.0 if cut == L else worse_L1AA[cut, class_M[p], class_M[m]]
                    if seconds_M[p] + extra <= seconds_M[m]:
                        dominated = True
                        work += num_kept - at
                        break
            if dominated:
                continue
            work += num_kept
            if num_kept >= beam or work > max_work:
                state = TRUNCATED
                break
            kept[num_kept] = m
            num_kept += 1
        for at in range(num_kept):
            m = kept[at]
            j = level_M[m]
            k_level = min(j + 1, J - 1)
            for where in range(first_by_stop_L2[cut], first_by_stop_L2[cut + 1]):
                i = by_stop_N[where]
                if fits_N[i] < need_J[j]:
                    continue
                a, start = class_N[i], start_N[i]
                total = seconds_M[m] + seconds_N[i]
                if cut < L:
                    if link_busy_L1AA[cut, a, class_M[m]] > limit:
                        continue
                    total += transfer_L1AA[cut, a, class_M[m]]
                if total >= best:
                    continue
                packed = packed_M[m] + packed_N[i]
                if (((have | guard) - packed) & guard) != guard:
                    continue
                bound = total
                for k in range(K):
                    priced = total + before_KL1JA[k, start, j, a] - spent_K[k]
                    for t in range(T):
                        priced += prices_KT[k, t] * ((packed >> (t * bits)) & field)
                    bound = max(bound, priced)
                work += 1
                if bound >= best:
                    continue
                if start == 0:
                    if exact_use and packed != have:
                        continue
                    best = total
                if size == M:
                    size *= 2
                    seconds_M, bound_M = _longer(seconds_M, size), _longer(bound_M, size)
                    packed_M, level_M, class_M = _longer(packed_M, size), _longer(level_M, size), _longer(class_M, size)
                    parent_M, option_M = _longer(parent_M, size), _longer(option_M, size)
                    next_M = _longer(next_M, size)
                seconds_M[M], bound_M[M], packed_M[M], level_M[M], class_M[M] = total, bound, packed, k_level, a
                parent_M[M], option_M[M], next_M[M] = m, i, head_L1[start]
                head_L1[start] = M
                if start == 0:
                    best_label = M
                M += 1
    chosen = np.empty(L, np.int64)
    count, m = 0, best_label
    while m > 0:
        chosen[count] = option_M[m]
        count += 1
        m = parent_M[m]
    return chosen[:count], best, state


@njit(cache=True, nogil=True)
def _longer(table, size):
    longer = np.empty(size, table.dtype)
    longer[: len(table)] = table
    return longer
