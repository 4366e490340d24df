"""Moves of the Metropolis walk from plan to plan, compiled.

A plan is the rows of stage_S3 and cost_S3, one for each of its S stages, and used_D, the devices taken of each type.
A move changes rows and returns the new number of stages, or REFUSED; it writes into touched_4 the first and the last
stage that it touched, one more or −1, and whether the plan has a new shape, that is, more than a cut was moved.
Suffixes as in `shared.stage_table`. Random numbers are xorshift's (Marsaglia, 2003), from a state of our own: numba's
generator is shared by threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.stage_table import DEVICES, TYPE, Ints, Kinds

State = NDArray[np.uint64]  # of the random numbers

# Columns of stage_S3: the cut where the stage stops, its configuration, microbatches that fit.
STOP, CONFIGURATION, FITS = range(3)
SECONDS, PER_STEP, LINK = range(3)  # columns of cost_S3: as in `plans.price`; the link after the stage
REFUSED = 0  # in place of the number of stages
_NEAR = 0.5  # share of cuts that move by one layer; the others move by any distance, as often by 1 to 2 as by 16 to 32
# Shares of the moves; what is left carries a stage elsewhere. Cuts and configurations are what most plans still need.
_SHIFT, _CHANGE, _SWAP, _SPLIT, _MERGE = 0.40, 0.30, 0.10, 0.08, 0.08


def random_state(*words: int) -> State:
    return np.random.SeedSequence(words).generate_state(1, np.uint64) | np.uint64(1)


@njit(cache=True, nogil=True, error_model="numpy")
def random(state: State) -> float:
    """Uniform in [0, 1)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    uniform: float = (x >> np.uint64(11)) * 2.0**-53
    return uniform


@njit(cache=True, nogil=True, error_model="numpy")
def below(state: State, n: int) -> int:
    return int(random(state) * n)


@njit(cache=True, nogil=True, error_model="numpy")
def draw(kinds: Kinds, state: State) -> int:
    """A configuration: every group with the same chance, then every member, so that no size is favoured."""
    _, _, member_C, first_G1, _ = kinds
    g = below(state, len(first_G1) - 1)
    c: int = member_C[first_G1[g] + below(state, first_G1[g + 1] - first_G1[g])]
    return c


@njit(cache=True, nogil=True, error_model="numpy")
def move(stage_S3: Ints, cost_S3: Floats, used_D: Ints, kinds: Kinds, S: int, state: State, touched_4: Ints) -> int:
    """A move of a random kind."""
    r = random(state)
    touched_4[3] = r >= _SHIFT
    if r < _SHIFT:
        return _shift_cut(stage_S3, S, state, touched_4)
    if r < _SHIFT + _CHANGE:
        return _change(stage_S3, used_D, kinds, S, state, touched_4)
    if r < _SHIFT + _CHANGE + _SWAP:
        return _swap(stage_S3, S, state, touched_4)
    if r < _SHIFT + _CHANGE + _SWAP + _SPLIT:
        return _split(stage_S3, cost_S3, used_D, kinds, S, state, touched_4)
    if r < _SHIFT + _CHANGE + _SWAP + _SPLIT + _MERGE:
        return _merge(stage_S3, cost_S3, used_D, kinds, S, state, touched_4)
    return _carry(stage_S3, S, state, touched_4)


@njit(cache=True, nogil=True, error_model="numpy")
def _start(stage_S3: Ints, s: int) -> int:
    return stage_S3[s - 1, STOP] if s > 0 else 0


@njit(cache=True, nogil=True, error_model="numpy")
def _touch(touched_4: Ints, first: int, last: int, also: int) -> None:
    touched_4[0], touched_4[1], touched_4[2] = first, last, also


@njit(cache=True, nogil=True, error_model="numpy")
def _reconfigure(stage_S3: Ints, used_D: Ints, kinds: Kinds, s: int, c: int) -> bool:
    """Give stage s another configuration; whether there are enough devices of its type."""
    kind_C2, count_D, _, _, _ = kinds
    old, kind = stage_S3[s, CONFIGURATION], kind_C2[c, TYPE]
    used_D[kind_C2[old, TYPE]] -= kind_C2[old, DEVICES]
    used_D[kind] += kind_C2[c, DEVICES]
    stage_S3[s, CONFIGURATION] = c
    enough: bool = used_D[kind] <= count_D[kind]
    return enough


@njit(cache=True, nogil=True, error_model="numpy")
def _shift_cut(stage_S3: Ints, S: int, state: State, touched_4: Ints) -> int:
    if S < 2:
        return REFUSED
    s = below(state, S - 1)
    low, cut, high = _start(stage_S3, s) + 1, stage_S3[s, STOP], stage_S3[s + 1, STOP] - 1
    distance = 1 if random(state) < _NEAR else int(max(high - low, 1) ** random(state))
    cut += distance if random(state) < 0.5 else -distance
    if cut < low or cut > high:
        return REFUSED
    stage_S3[s, STOP] = cut
    _touch(touched_4, s, s + 1, -1)
    return S


@njit(cache=True, nogil=True, error_model="numpy")
def _change(stage_S3: Ints, used_D: Ints, kinds: Kinds, S: int, state: State, touched_4: Ints) -> int:
    """Another configuration for a stage; where its devices lack, another for a second stage as well."""
    s, c = below(state, S), draw(kinds, state)
    _touch(touched_4, s, s, -1)
    if not _reconfigure(stage_S3, used_D, kinds, s, c):
        if S < 2:
            return REFUSED
        other = below(state, S - 1)
        other += other >= s
        enough = _reconfigure(stage_S3, used_D, kinds, other, draw(kinds, state))
        kind = kinds[0][c, TYPE]
        if not enough or used_D[kind] > kinds[1][kind]:
            return REFUSED
        _touch(touched_4, s, s, other)
    return S


@njit(cache=True, nogil=True, error_model="numpy")
def _swap(stage_S3: Ints, S: int, state: State, touched_4: Ints) -> int:
    """Two stages exchange their configurations, and half of the time their numbers of layers too."""
    if S < 2:
        return REFUSED
    i = below(state, S - 1)
    j = i + 1 if random(state) < 0.5 else i + 1 + below(state, S - 1 - i)
    stage_S3[i, CONFIGURATION], stage_S3[j, CONFIGURATION] = stage_S3[j, CONFIGURATION], stage_S3[i, CONFIGURATION]
    _touch(touched_4, i, i, j)
    if random(state) < 0.5:
        longer = stage_S3[j, STOP] - stage_S3[j - 1, STOP] - (stage_S3[i, STOP] - _start(stage_S3, i))
        for s in range(i, j):
            stage_S3[s, STOP] += longer
        _touch(touched_4, i, j, -1)
    return S


@njit(cache=True, nogil=True, error_model="numpy")
def _split(stage_S3: Ints, cost_S3: Floats, used_D: Ints, kinds: Kinds, S: int, state: State, touched_4: Ints) -> int:
    """One stage becomes two: one of any configuration, the other of the old or of any."""
    s = below(state, S)
    start, length = _start(stage_S3, s), stage_S3[s, STOP] - _start(stage_S3, s)
    if len(stage_S3) <= S + 1 or length < 2:
        return REFUSED
    for row in range(S, s, -1):
        for k in range(3):
            stage_S3[row, k], cost_S3[row, k] = stage_S3[row - 1, k], cost_S3[row - 1, k]
    stage_S3[s, STOP] = start + 1 + below(state, length - 1)
    c, r = draw(kinds, state), random(state)
    kind = kinds[0][c, TYPE]
    used_D[kind] += kinds[0][c, DEVICES]
    new, kept = (s, s + 1) if r < 0.5 else (s + 1, s)
    stage_S3[new, CONFIGURATION] = c
    enough = True
    if 0.25 <= r < 0.75:
        enough = _reconfigure(stage_S3, used_D, kinds, kept, draw(kinds, state))
    if not enough or used_D[kind] > kinds[1][kind]:
        return REFUSED
    _touch(touched_4, s, s + 1, -1)
    return S + 1


@njit(cache=True, nogil=True, error_model="numpy")
def _merge(stage_S3: Ints, cost_S3: Floats, used_D: Ints, kinds: Kinds, S: int, state: State, touched_4: Ints) -> int:
    """Two neighbours become one, of the first's configuration, the second's, or any."""
    if S < 2:
        return REFUSED
    s, r = below(state, S - 1), random(state)
    c = stage_S3[s, CONFIGURATION]
    used_D[kinds[0][c, TYPE]] -= kinds[0][c, DEVICES]
    for row in range(s, S - 1):
        for k in range(3):
            stage_S3[row, k], cost_S3[row, k] = stage_S3[row + 1, k], cost_S3[row + 1, k]
    if r >= 0.5:
        c = draw(kinds, state)
    if r >= 0.25 and not _reconfigure(stage_S3, used_D, kinds, s, c):
        return REFUSED
    _touch(touched_4, s, s, -1)
    return S - 1


@njit(cache=True, nogil=True, error_model="numpy")
def _carry(stage_S3: Ints, S: int, state: State, touched_4: Ints) -> int:
    """A stage with its number of layers goes to another place in the order."""
    if S < 3:
        return REFUSED
    i, j = below(state, S), below(state, S - 1)
    j += j >= i
    first = min(i, j)
    c, length, before = stage_S3[i, CONFIGURATION], stage_S3[i, STOP] - _start(stage_S3, i), _start(stage_S3, first)
    end = stage_S3[max(i, j), STOP]
    for s in range(i, j):
        stage_S3[s, CONFIGURATION], stage_S3[s, STOP] = stage_S3[s + 1, CONFIGURATION], stage_S3[s + 1, STOP] - length
    for s in range(i, j, -1):
        stage_S3[s, CONFIGURATION], stage_S3[s, STOP] = stage_S3[s - 1, CONFIGURATION], stage_S3[s - 1, STOP] + length
    stage_S3[j, CONFIGURATION], stage_S3[j, STOP] = c, (before + length if j == first else end)
    _touch(touched_4, first, max(i, j), -1)
    return S
