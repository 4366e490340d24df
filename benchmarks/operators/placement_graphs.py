"""Graphs to place, of several shapes; messages take so many times what operations take, on average.

Every graph is drawn from a seed. Seconds and bytes are drawn with a factor of up to 4 between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dejavu.placement import Devices, Operation, PlacementProblem, Tensor

Readers = list[list[int]]  # of each operation, later ones

MEAN_SECONDS = 1e-3
BYTES_PER_SECOND = 10e9


def layered(num: int, draws: np.random.Generator) -> Readers:
    """Layers of about √num operations; each reads of one to three of the layer before."""
    width = max(2, round(math.sqrt(num)))
    readers: Readers = [[] for _ in range(num)]
    for n in range(width, num):
        start = (n // width - 1) * width
        for p in draws.choice(width, size=min(int(draws.integers(1, 4)), width), replace=False):
            readers[start + int(p)].append(n)
    return readers


def two_towers(num: int, draws: np.random.Generator) -> Readers:
    """Two chains with residual connections that meet in the last operation."""
    readers: Readers = [[] for _ in range(num)]
    half = (num - 1) // 2
    for first, stop in ((0, half), (half, num - 1)):
        for n in range(first, stop - 1):
            readers[n].append(n + 1)
            if (n - first) % 3 == 0 and n + 3 < stop:
                readers[n].append(n + 3)
        readers[stop - 1].append(num - 1)
    return readers


def mixture(num: int, draws: np.random.Generator) -> Readers:
    """Blocks of a router, eight experts of two operations, and the sum, which also reads the block's input."""
    block = 18
    readers: Readers = [[] for _ in range(num)]
    last = 0
    n = 1
    while n + block <= num:
        router, end = n, n + block - 1
        readers[last] += [router, end]
        for expert in range(8):
            first = router + 1 + 2 * expert
            readers[router].append(first)
            readers[first].append(first + 1)
            readers[first + 1].append(end)
        last, n = end, n + block
    for rest in range(n, num):
        readers[last].append(rest)
        last = rest
    return readers


def series_parallel(num: int, draws: np.random.Generator) -> Readers:
    """From one edge, edges are doubled or cut in two until there are enough operations."""
    edges = [(0, 1)]
    at = [0.0, 1.0]  # places in the order
    while len(at) < num:
        k = int(draws.integers(len(edges)))
        a, b = edges[k]
        at.append(0.5 * (at[a] + at[b]))
        middle = len(at) - 1
        if draws.random() < 0.5:
            edges[k] = (a, middle)
        else:
            edges.append((a, middle))
        edges.append((middle, b))
    rank = {n: position for position, n in enumerate(sorted(range(num), key=lambda n: (at[n], n != 0, n)))}
    readers: Readers = [[] for _ in range(num)]
    for a, b in dict.fromkeys(edges):
        readers[rank[a]].append(rank[b])
    return readers


def skipping_chain(num: int, draws: np.random.Generator) -> Readers:
    """A chain in which some operations are also read much later, as in a U-net: halves mirror each other."""
    readers: Readers = [[n + 1] if n + 1 < num else [] for n in range(num)]
    for n in range(0, num // 2 - 1, 4):
        readers[n].append(num - 1 - n)
    return readers


SHAPES: dict[str, Callable[[int, np.random.Generator], Readers]] = {
    "layered": layered,
    "two towers": two_towers,
    "mixture": mixture,
    "series-parallel": series_parallel,
    "chain with skips": skipping_chain,
}


def generated(
    shape: str,
    num: int,
    num_devices: int,
    *,
    message_ratio: float,
    seed: int,
    speeds: tuple[float, ...] = (),
    memory_share: float = math.inf,
) -> PlacementProblem:
    """Draw a problem.

    Args:
        message_ratio: mean message over mean operation, in seconds.
        speeds: of the devices, over the first's; empty: all alike.
        memory_share: each device's memory, over what all operations keep.
    """
    draws = np.random.default_rng([seed, num, list(SHAPES).index(shape)])
    readers = SHAPES[shape](num, draws)
    seconds_N = MEAN_SECONDS * draws.uniform(0.4, 1.6, num)
    bytes_N = message_ratio * MEAN_SECONDS * BYTES_PER_SECOND * draws.uniform(0.4, 1.6, num)
    speed_D = np.array(speeds or (1.0,) * num_devices)
    memory_N = draws.uniform(0.4, 1.6, num) * 1e6
    names = [f"n{n}" for n in range(num)]
    operations = tuple(
        Operation(names[n], tuple((seconds_N[n] / speed_D).tolist()), float(memory_N[n])) for n in range(num)
    )
    tensors = tuple(
        Tensor(names[n], tuple(names[r] for r in readers[n]), float(bytes_N[n])) for n in range(num) if readers[n]
    )
    memory = memory_share * float(memory_N.sum())
    return PlacementProblem(
        operations, tensors, Devices.alike(num_devices, memory_bytes=memory, bytes_per_second=BYTES_PER_SECOND)
    )
