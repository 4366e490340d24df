"""Why a problem has no plan, and what would do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dejavu.plan import Problem
from dejavu.stage_costs import AdditiveCosts, DenseCosts

_PRECISION = 1e-3  # of the least memory that is reported


def why_infeasible(problem: Problem, is_feasible: Callable[[Problem], bool], budget_seconds: float) -> str:
    """The sentence for a problem that was proved to have no plan; the least memory only as far as the budget goes."""
    counts = ", ".join(f"{count} × {name}" for name, count in problem.device_counts.items())
    if all(how.num_devices > problem.device_counts[how.device_type] for how in problem.configurations):
        return f"no plan fits: every stage configuration takes more devices than there are ({counts})"
    layer = _layer_in_no_stage(problem)
    if layer is not None:
        return f"no plan fits: layer {layer} ({problem.layers[layer]!r}) fits in no stage{_alone(problem, layer)}"
    few = _too_few_stages(problem, is_feasible, budget_seconds)
    roomy = replace(problem, costs=_with_all_memory(problem))
    if not is_feasible(roomy):
        rule = " with every device used" if problem.use_all_devices else ""
        few = few or _too_few_stages(roomy, is_feasible, budget_seconds)
        return f"no plan fits, whatever the memory: no stages cover the layers on {counts}{rule}{few}"
    least = _least_memory(problem, is_feasible, budget_seconds)
    would_do = f"; {least:,.0f} bytes on every device would do" if least is not None else ""
    together = f"no stages together fit their memory under {problem.schedule}{few}"
    return f"no plan fits: each layer does, but {together}{would_do}"


def _too_few_stages(problem: Problem, is_feasible: Callable[[Problem], bool], budget_seconds: float) -> str:
    """How many stages would do where `max_stages` is to blame, to the last one only as far as the budget goes."""
    if problem.max_stages is None or not is_feasible(replace(problem, max_stages=None)):
        return ""
    began = time.perf_counter()
    lo, hi = problem.max_stages, min(problem.num_layers, sum(problem.device_counts.values()))
    while hi - lo > 1 and time.perf_counter() - began < budget_seconds:
        middle = (lo + hi) // 2
        if is_feasible(replace(problem, max_stages=middle)):
            hi = middle
        else:
            lo = middle
    return f", at most {problem.max_stages} stages (max_stages; {hi} would do)"


def _layer_in_no_stage(problem: Problem) -> int | None:
    """A layer that every stage around it is too large for, with the fewest microbatches in flight of any position."""
    costs = problem.costs.dense()
    L = problem.num_layers
    least = min(problem.in_flight(s, n) for n in (1, L) for s in (0, n - 1))
    counts = problem.device_counts
    usable = np.array([how.num_devices <= counts[how.device_type] for how in problem.configurations])
    finite = np.logical_and(np.isfinite(costs.seconds_CLL1), np.isfinite(costs.once_seconds_CLL1))
    fits = np.logical_and(costs.max_in_flight_CLL1 >= least, finite)
    possible = np.logical_and(fits, usable[:, None, None]).any(axis=0)
    for layer in range(L):
        if not possible[: layer + 1, layer + 1 :].any():
            return layer
    return None


def _alone(problem: Problem, layer: int) -> str:
    """What the layer would need on its own, where that is known."""
    needs = []
    for c, how in enumerate(problem.configurations):
        if how.num_devices <= problem.device_counts[how.device_type]:
            needs.append((problem.costs.peak_bytes(layer, layer + 1, c, problem.in_flight(0, 1)), c))
    if not needs or not isinstance(problem.costs, AdditiveCosts):
        return ""
    need, c = min(needs)
    has = float(problem.costs.capacity_bytes_C[c])
    return f"; alone it needs at least {need:,.0f} bytes (on {problem.configurations[c]}, which has {has:,.0f})"


def _with_all_memory(problem: Problem) -> AdditiveCosts | DenseCosts:
    costs = problem.costs
    if isinstance(costs, AdditiveCosts):
        return replace(costs, capacity_bytes_C=np.full(len(costs.capacity_bytes_C), _enough_bytes(problem)))
    return replace(costs, max_in_flight_CLL1=np.full_like(costs.max_in_flight_CLL1, problem.num_microbatches))


def _enough_bytes(problem: Problem) -> float:
    """Memory with which any stage fits."""
    L, B, costs = problem.num_layers, problem.num_microbatches, problem.costs
    messages = 2 * float(costs.message_bytes_CL1.max()) if isinstance(costs, AdditiveCosts) else 0.0
    whole = max(costs.peak_bytes(0, L, c, B) for c in range(len(problem.configurations)))
    return 1.001 * (whole + messages) + 1.0


def _least_memory(problem: Problem, is_feasible: Callable[[Problem], bool], budget_seconds: float) -> float | None:
    """The least memory of every device with which a plan fits, to a thousandth and never below it."""
    costs = problem.costs
    if not isinstance(costs, AdditiveCosts):
        return None
    began = time.perf_counter()
    lo, hi = float(costs.capacity_bytes_C.min()), _enough_bytes(problem)
    while hi - lo > _PRECISION * hi and time.perf_counter() - began < budget_seconds:
        middle = 0.5 * (lo + hi)
        larger = replace(costs, capacity_bytes_C=np.maximum(costs.capacity_bytes_C, middle))
        if is_feasible(replace(problem, costs=larger)):
            hi = middle
        else:
            lo = middle
    return float(np.ceil(hi))
