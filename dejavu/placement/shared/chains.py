"""Chains of operations."""

from __future__ import annotations

import numpy as np

from dejavu.placement.problem import Ints, PlacementProblem


def chains(problem: PlacementProblem) -> Ints:
    """Return the number of each operation's chain: runs in which each has one reader, and that reads of it alone."""
    arrays, N = problem.arrays, len(problem.operations)
    after: list[set[int]] = [set() for _ in range(N)]
    before: list[set[int]] = [set() for _ in range(N)]
    for t, n in enumerate(arrays.producer_T):
        for reader in arrays.reader_R[arrays.first_reader_T1[t] : arrays.first_reader_T1[t + 1]]:
            after[n].add(int(reader))
            before[reader].add(int(n))
    chain_N = np.arange(N, dtype=np.int64)
    for n in problem.topological_N:
        if len(before[n]) == 1 and len(after[next(iter(before[n]))]) == 1:
            chain_N[n] = chain_N[next(iter(before[n]))]
    return chain_N
