"""Transfers between classes of links, chain by chain: against all pairs; and that there are chains."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search.generated import operators
from dejavu.plans.stage_costs import Floats
from dejavu.search._base import Incumbent
from dejavu.search.coarse.levels.crossing import _TOGETHER, crossing, transferred, transfers
from dejavu.search.coarse.relaxed import Relaxed
from dejavu.search.coarse.windows import Links

KINDS = ("by lanes", "by lanes, one way dearer", "of a few values", "any", "alike")


def links(kind: str, seed: int) -> Links:
    rng = np.random.default_rng(seed)
    A = int(rng.integers(1, 14))
    if kind == "any":
        latency, per_byte = rng.random((A, A)), rng.random((A, A))
    elif kind == "alike":
        latency, per_byte = np.full((A, A), 0.3), np.full((A, A), 0.7)
    elif kind == "of a few values":  # where some, not all, classes lie in chains
        latency, per_byte = rng.integers(1, 3, (A, A)) / 4, rng.integers(1, 4, (A, A)) / 8
    else:
        of_type, lanes = rng.integers(0, 3, A), 2.0 ** rng.integers(0, 4, A)
        seconds = rng.random((3, 3))
        if kind == "by lanes":
            seconds = np.maximum(seconds, seconds.T)
        latency = seconds[np.ix_(of_type, of_type)]
        per_byte = latency / np.minimum(lanes[:, None], lanes[None, :])
    return Links(repeats=3.0, latency_AA=latency, per_byte_AA=per_byte, bytes_L1=rng.random(2 * _TOGETHER + 40))


def by_pairs(of: Links, is_after: bool, limit: float, cut: int, here_A: Floats) -> Floats:
    seconds_AA = 2.0 * (of.latency_AA + of.per_byte_AA * of.bytes_L1[cut])
    allowed_AA = np.where(of.repeats * seconds_AA <= limit, seconds_AA, np.inf)
    return (here_A[:, None] + (allowed_AA.T if is_after else allowed_AA)).min(axis=0)


@pytest.mark.parametrize("is_after", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_chain_by_chain_they_are_as_of_all_pairs(kind: str, is_after: bool) -> None:
    for seed in range(25):
        of = links(kind, seed)
        rng, (A, L1) = np.random.default_rng(100 + seed), (len(of.latency_AA), len(of.bytes_L1))
        found, here_AL1 = crossing(of, is_after), rng.random((A, L1))
        here_AL1[rng.random((A, L1)) < 0.2] = np.inf
        alive_L1, (low, high) = rng.random(L1) < 0.8, sorted(rng.integers(1, L1, 2).tolist())
        for limit in (np.inf, 4.0, 2.0, 0.0):
            to_AL1, to_A = np.full((A, L1), -1.0), np.empty(A)
            transfers(limit, found, alive_L1, low, high, here_AL1[:, low:], to_AL1)
            assert (to_AL1[:, :low] == -1.0).all()
            assert (to_AL1[:, high + 1 :] == -1.0).all()
            for cut in range(low, high + 1):
                expected_A = by_pairs(of, is_after, limit, cut, here_AL1[:, cut])
                transferred(limit, found, cut, here_AL1[:, cut].copy(), np.empty(A), to_A)
                assert to_A.tolist() == expected_A.tolist(), (seed, limit, cut)
                assert to_AL1[:, cut].tolist() == (expected_A if alive_L1[cut] else np.full(A, np.inf)).tolist()


def test_classes_of_one_type_of_device_are_one_chain() -> None:
    for seed in range(4):
        problem = operators(seed, num_operators=300, num_devices=64, num_types=3)
        relaxed = Relaxed(problem, Incumbent(problem, "test", 60.0))
        for is_after in (True, False):
            assert len(crossing(relaxed.links, is_after).begin_S) - 1 == 3
    for seed in range(20):
        assert len(crossing(links("alike", seed), True).begin_S) - 1 == 1
        assert len(crossing(links("by lanes", seed), True).begin_S) - 1 <= 3
