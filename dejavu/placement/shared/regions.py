"""Parts of a graph that follow each other: nothing passes an operation in which all that is before it meets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dejavu.placement.problem import PlacementProblem, Tensor

_FEWEST = 8  # operations of a region: shorter ones are joined


def regions(problem: PlacementProblem) -> list[tuple[int, ...]]:
    """Return the operations in topological order, cut after each that no tensor passes, so many at least together."""
    order, index = problem.topological_N, problem.index_of
    at = {n: k for k, n in enumerate(order)}
    last = np.arange(len(order))  # where the last reader of anything up to here is
    for tensor in problem.tensors:
        source = at[index[tensor.producer]]
        last[source] = max([last[source], *(at[index[reader]] for reader in tensor.readers)])
    reach, found, first = 0, list[tuple[int, ...]](), 0
    for k in range(len(order)):
        if k == len(order) - 1 or (k > 0 and reach <= k and k + 1 - first >= _FEWEST):
            found.append(order[first : k + 1])
            first = k + 1
        reach = max(reach, int(last[k]))
    return found


def of_region(problem: PlacementProblem, region: tuple[int, ...], entered: int, device: int) -> PlacementProblem:
    """Return the problem of one region; what the region before ends with is on this device, and takes no more time.

    Args:
        entered: that operation, which is the first one of the problem; -1: there is none.
    """
    inside = {problem.operations[n].name for n in region}
    operations = [problem.operations[n] for n in region]
    if entered >= 0:
        seconds = tuple(0.0 if d == device else np.inf for d in range(problem.num_devices))
        operations.insert(0, replace(problem.operations[entered], seconds=seconds, memory_bytes=0.0, group=""))
    makers = {operation.name for operation in operations}
    tensors = [
        Tensor(one.producer, readers, one.size_bytes)
        for one in problem.tensors
        if one.producer in makers and (readers := tuple(name for name in one.readers if name in inside))
    ]
    return PlacementProblem(tuple(operations), tuple(tensors), problem.devices)
